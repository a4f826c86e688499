"""aten ops -> HLO, one file per family. Importing the package fills `core.registry.LOWERINGS`.

In: recorded graphs of functional aten ops (core/graph.py). Out: an HLO module. The rooms have one
direction, each imports from those before it: core, pointwise, reduction, shape, random, linalg,
nn, spmd (core alone), fx (graphs of torch.compile, imported by those who have any)."""

# ruff: noqa: F401

from torch_hlo.lowering.linalg import distance, fft, lapack_ops, linalg, matmul, quantized
from torch_hlo.lowering.nn import (
    attention,
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
from torch_hlo.lowering.pointwise import (
    activation,
    bessel,
    binary,
    pointwise,
    prims,
    quantize,
    special,
)
from torch_hlo.lowering.random import distributions
from torch_hlo.lowering.reduction import reduce
from torch_hlo.lowering.shape import (
    create,
    cumulative,
    index,
    padding,
    sort,
    unfold,
    view,
)
from torch_hlo.lowering.spmd import collective, sharding
