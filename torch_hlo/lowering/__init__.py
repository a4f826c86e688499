"""aten ops -> HLO, one file per family. Importing the package fills `core.registry.LOWERINGS`.

In: recorded graphs of functional aten ops (core/graph.py). Out: an HLO module. The rooms have one
direction, each imports from those before it: core, pointwise, reduction, shape, random, linalg,
nn, spmd (core alone), fx (graphs of torch.compile, imported by those who have any)."""

# ruff: noqa: F401

from .linalg import distance, fft, lapack_ops, linalg, matmul, quantized
from .nn import (
    attention_ops,
    attention_weights,
    bag,
    conv,
    grid,
    loss,
    norm,
    optim,
    pooling,
    rnn,
    softmax,
    upsample,
)
from .pointwise import (
    activation,
    bessel,
    binary,
    pointwise,
    prims,
    quantize,
    special,
)
from .random import distributions
from .reduction import reduce
from .shape import (
    create,
    cumulative,
    index,
    padding,
    sort,
    unfold,
    view,
)
from .spmd import collective, sharding
