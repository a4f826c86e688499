"""The "hlo" tensor: operations are recorded, cut into steps, compiled, run. Rooms in the order of a
step: record, ops, run, capture; install.py puts the device together.

In: operations that PyTorch dispatches to the device. Out: tensors, whose values are there when they
are read. Imports pytorch/, lowering/, device/, compiler/ and hlo/.
"""

import torch  # noqa: F401  first: where JAX's plugin came before it, that puts the device together
