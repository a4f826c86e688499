"""Collectives of programs on CUDA devices, one process each: the way that NCCL goes, with gloo in
its place and a stub of the driver's library."""

import contextlib
import os

import numpy as np
import pytest

from test.device import ranks
from test.device.test_process_group import cases
from torch_hlo import metrics
from torch_hlo.tools.devices import run_on_devices

if not hasattr(os, "fork"):
    pytest.skip("needs fork", allow_module_level=True)


def compute_all(rank: int) -> list[np.ndarray]:
    from test.device.stub_cuda import StubCuda
    from torch_hlo.device import dlpack
    from torch_hlo.device.cuda import cuda_driver, cuda_memory, nccl

    class HostTensors(nccl.Tensors):
        """The stub's memory is the host's; gloo knows no streams, so what is enqueued has to have
        happened."""

        def __init__(self, driver) -> None:
            super().__init__(driver)
            self.place = dlpack.CPU, 0

        @contextlib.contextmanager
        def stream(self):
            self.driver.synchronize()
            yield

    pool = cuda_memory.CudaPool(cuda_driver.Cuda(0, StubCuda()))
    cuda_memory.pool_of = lambda number: pool
    nccl.BACKEND, nccl.Tensors = "gloo", HostTensors
    return [
        np.stack(run_on_devices(module, inputs, 4)[0][0]) for module, inputs in cases()
    ], metrics.counter_value("HostCollective")


def test_collectives_of_four_processes():
    want = [np.stack(run_on_devices(module, inputs, 4)[0][0]) for module, inputs in cases()]
    for outcome in ranks.run(4, compute_all, limit=200, DEVICE="cuda", CACHE=""):
        assert outcome.error == ""
        got, host = outcome.value
        for g, w, (module, _) in zip(got, want, cases(), strict=True):
            if w.dtype.kind in "fc":  # sums are in another order
                np.testing.assert_allclose(
                    g,
                    w,
                    rtol=1e-2 if "bf16" in str(module.entry.params[0].shape) else 1e-5,
                    atol=1e-4,
                    err_msg=str(module.entry.root),
                )
            else:
                np.testing.assert_array_equal(g, w, err_msg=str(module.entry.root))
        assert 0 < host < len(got) / 2  # u16 and computations
