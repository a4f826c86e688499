"""GPU kernels executed: grids, groups, barriers and shared memory on an OpenCL device, which may be
a CPU (package intel-opencl-rt)."""

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks import check_gpu
from torch_hlo import config
from torch_hlo.compiler.compile import compile_module
from torch_hlo.device.gpu import opencl
from torch_hlo.device.gpu.driver import DriverError
from torch_hlo.hlo.text.parser import parse_module

# TORCH_HLO_DEVICE=opencl:PATH names a library that is not where they are looked for.
DEVICE = config.get("DEVICE") if config.get("DEVICE").startswith("opencl") else "opencl"


def _available() -> str:
    try:
        opencl.pool_of(DEVICE.partition(":")[2])
    except DriverError as error:
        return str(error)
    return ""


MISSING = _available()
needs_device = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@needs_device
@pytest.mark.parametrize("name", check_gpu.PROGRAMS)
def test_family_of_kernels(name):
    with config.override(DEVICE=DEVICE, CACHE=""):
        check_gpu.check(name)


@needs_device
@pytest.mark.parametrize(
    "name",
    ["elementwise", "row sum", "column sum", "softmax", "wide softmax", "sum f64"],
)
def test_vectors_of_16_bytes(name, monkeypatch):
    """The forms that other GPUs get: several elements per thread."""
    driver = opencl.pool_of(DEVICE.partition(":")[2]).driver
    monkeypatch.setattr(driver, "target", dataclasses.replace(driver.target, vector_bytes=16))
    with config.override(DEVICE=DEVICE, CACHE=""):
        check_gpu.check(name)


@needs_device
def test_results_do_not_depend_on_chance():
    module = check_gpu.program("wide softmax")
    x = np.random.default_rng(0).standard_normal((3, 20000)).astype(np.float32)
    with config.override(DEVICE=DEVICE, CACHE=""):
        first = check_gpu.run(module, [x])[0].tobytes()
        assert all(check_gpu.run(module, [x])[0].tobytes() == first for _ in range(3))


@needs_device
def test_loops_and_branches_read_the_device():
    module = parse_module("""HloModule w
body { s = (s32[], f32[4]) parameter(0)
 i = s32[] get-tuple-element(s), index=0
 x = f32[4] get-tuple-element(s), index=1
 o = s32[] constant(1)
 n = s32[] add(i, o)
 y = f32[4] add(x, x)
 ROOT t = (s32[], f32[4]) tuple(n, y) }
cond { s = (s32[], f32[4]) parameter(0)
 i = s32[] get-tuple-element(s), index=0
 l = s32[] constant(5)
 ROOT c = pred[] compare(i, l), direction=LT }
ENTRY main { i = s32[] parameter(0)
 x = f32[4] parameter(1)
 t = (s32[], f32[4]) tuple(i, x)
 w = (s32[], f32[4]) while(t), condition=cond, body=body
 ROOT r = f32[4] get-tuple-element(w), index=1 }
""")
    x = np.arange(4, dtype=np.float32)
    with config.override(DEVICE=DEVICE, CACHE=""):
        np.testing.assert_array_equal(check_gpu.run(module, [np.int32(0), x])[0], 32 * x)


@needs_device
@pytest.mark.parametrize("model", ["transformer", "cnn"])
@pytest.mark.slow
def test_training(model):
    with config.override(DEVICE=DEVICE, CACHE=""):
        assert "losses agree" in check_gpu.training(model)


@needs_device
def test_host_calls():
    with config.override(DEVICE=DEVICE, CACHE=""):
        x = torch.randn(8)
        torch.testing.assert_close(torch.fft.rfft(x.to("hlo")).cpu(), torch.fft.rfft(x))


def test_no_library():
    with pytest.raises(
        DriverError,
        match=r"no usable OpenCL device.*not_there.so.*pip install intel-opencl-rt",
    ):
        opencl.OpenCL("/not_there.so")


def test_kernels_of_another_device_are_refused():
    from test.device.stub_cuda import StubCuda
    from torch_hlo.compiler.gpu.target import gpu_target
    from torch_hlo.device.cuda.cuda_driver import Cuda
    from torch_hlo.device.gpu.device_memory import DevicePool
    from torch_hlo.device.gpu.gpu import GpuProgram

    executable = compile_module(check_gpu.program("row sum"), gpu_target("spirv64"))
    with pytest.raises(ValueError, match="was compiled for spirv64.*the device is nvptx:sm_90a"):
        GpuProgram(executable, DevicePool(Cuda(0, StubCuda())))
