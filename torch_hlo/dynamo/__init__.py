"""`torch.compile(model, backend="hlo")`: Dynamo's graphs through the same lowering and compiler as
the lazy device.

Found by PyTorch through the entry point `torch_dynamo_backends`, so torch_hlo need not be imported
first.

In: FX graphs, and example inputs. Out: a function that runs their programs. Imports lazy/,
lowering/, pytorch/, device/ and hlo/.
"""

from __future__ import annotations

from torch_hlo.dynamo.backend import OPTIONS, hlo

__all__ = ["OPTIONS", "hlo"]
