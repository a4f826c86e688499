"""aten ops -> HLO, one file per family. Importing the package fills `LOWERINGS`."""
from __future__ import annotations

from torch_hlo.lowering import (  # noqa: F401
    activation,
    attention,
    bessel,
    binary,
    conv,
    create,
    cumulative,
    fft,
    index,
    loss,
    matmul,
    norm,
    optim,
    padding,
    pointwise,
    pool,
    random,
    reduce,
    rnn,
    softmax,
    sort,
    special,
    upsample,
    view,
)
