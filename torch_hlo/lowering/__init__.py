"""aten ops -> HLO, one file per family. Importing the package fills `LOWERINGS`."""
from __future__ import annotations

from torch_hlo.lowering import (  # noqa: F401
    activation,
    attention,
    binary,
    conv,
    create,
    cumulative,
    index,
    loss,
    matmul,
    norm,
    optim,
    pointwise,
    pool,
    random,
    reduce,
    softmax,
    sort,
    view,
)
