"""The host call of `fft`: PyTorch's library gives what NumPy gives."""

import numpy as np
import pytest
import torch  # noqa: F401  (in the process, so that its library is taken)

from torch_hlo.compiler.codegen.registry import HOST_CALLS
from torch_hlo.device.cpu.torch_fft import fft

CASES = [
    ("FFT", np.complex64, (3, 8), [8], (3, 8)),
    ("FFT", np.complex128, (2, 6, 5), [6, 5], (2, 6, 5)),
    ("IFFT", np.complex64, (4, 7), [None], (4, 7)), ("RFFT", np.float32, (2, 9), [9], (2, 5)),
    ("RFFT", np.float64, (2, 4, 6), [4, 6], (2, 4, 4)),
    ("IRFFT", np.complex64, (3, 5), [8], (3, 8)), ("IRFFT", np.complex64, (3, 5), [9], (3, 9)),
]  # fmt: skip


@pytest.mark.parametrize("kind, dtype, dims, lengths, result", CASES)
def test_as_numpy(kind, dtype, dims, lengths, result):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(dims).astype(dtype)
    if np.iscomplexobj(x):
        x = (x + 1j * rng.standard_normal(dims)).astype(dtype)
    kinds = {
        "IRFFT": np.zeros((), dtype).real.dtype,
        "RFFT": np.result_type(dtype, np.complex64),
    }
    ours, reference = (np.empty(result, kinds.get(kind, dtype)) for _ in range(2))
    fft([ours], [x], kind, lengths)
    HOST_CALLS["fft"]([reference], [x], kind=kind, lengths=lengths)
    np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)
