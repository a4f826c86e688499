"""The CUDA runtime against a stub of the driver's library: arguments, memory, graphs, and what happens when something is wrong."""
import threading

import numpy as np
import pytest

from test.device.stub_cuda import StubCuda
from torch_hlo.device import cuda, gpu, runtime
from torch_hlo.device.cuda import Cuda, CudaProgram, LaunchError
from torch_hlo.device.gpu import DevicePool, DriverError
from torch_hlo.hlo.parse import parse_module
from torch_hlo.hlo.shape import Shape

TEXT = """HloModule t, entry_computation_layout={(f32[100,30]{1,0},f32[30]{0})->f32[100,30]{1,0}}
ENTRY main {
  x = f32[100,30] parameter(0)
  y = f32[30] parameter(1)
  b = f32[100,30] broadcast(y), dimensions={1}
  ROOT a = f32[100,30] add(x, b)
}
"""


@pytest.fixture
def stub(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HLO_CACHE", "")
    return StubCuda()


def memory_type(pool: DevicePool):
    class Memory(gpu.DeviceMemory):
        __slots__ = ()

    Memory.pool = staticmethod(lambda: pool)
    return Memory


class Run:
    """A program and buffers for it."""

    def __init__(self, stub: StubCuda, text: str = TEXT) -> None:
        self.stub, self.pool = stub, DevicePool(Cuda(0, stub))
        self.memory = memory_type(self.pool)
        self.module = parse_module(text)
        self.program = gpu.compile_program(self.pool, self.module, None, CudaProgram)

    def buffer(self, shape: Shape, data: np.ndarray | None = None) -> runtime.Buffer:
        made = runtime.Buffer(shape, self.memory(shape.nbytes))
        if data is not None:
            made.bytes[:] = data.view(np.uint8).reshape(-1)
        return made

    def __call__(self, *buffers: runtime.Buffer) -> runtime.Buffer:
        result = self.buffer(self.module.entry.root.shape)
        self.program.run(buffers, [result])
        return result


def inputs(run: Run) -> list[runtime.Buffer]:
    return [run.buffer(p.shape, np.arange(p.shape.size, dtype=np.float32)) for p in run.module.entry.params]


def test_a_launch_gets_sizes_and_addresses(stub):
    run = Run(stub)
    x, y = inputs(run)
    result = run(x, y)
    (name, grid, threads, words), = stub.launches
    kernel, = run.program.executable.kernels
    assert name == kernel.name and threads == kernel.threads
    items = words[0]
    assert grid == -(-items // threads) and items in (3000, 750)  # a thread per element, or per four
    assert words[1:] == [x.memory.device_address, y.memory.device_address, result.memory.device_address]


def test_contents_travel_only_when_needed(stub):
    run = Run(stub)
    x, y = inputs(run)
    run(x, y)
    copies = [c for c in stub.calls if "Htod" in c or "HtoD" in c]
    run(x, y)
    assert [c for c in stub.calls if "HtoD" in c] == copies  # still on the device
    x.bytes[:4] = 7  # the host looked at it and may have written
    run(x, y)
    assert len([c for c in stub.calls if "HtoD" in c]) == len(copies) + 1


def test_second_run_is_a_graph_and_moved_buffers_update_it(stub):
    run = Run(stub)
    x, y = inputs(run)
    result = run.buffer(run.module.entry.root.shape)
    for _ in range(4):
        run.program.run([x, y], [result])
    assert stub.calls.count("cuLaunchKernel") == 2  # at once, and while capturing
    assert stub.calls.count("cuGraphInstantiateWithFlags") == 1 and stub.calls.count("cuGraphLaunch") == 3
    assert len(stub.launches) == 4 and len({tuple(w[3]) for w in stub.launches}) == 1
    other = run.buffer(x.shape, np.zeros(x.shape.size, np.float32))
    run.program.run([other, y], [result])
    assert stub.calls.count("cuGraphExecUpdate_v2") == 1 and stub.calls.count("cuGraphInstantiateWithFlags") == 1
    assert stub.launches[-1][3][1] == other.memory.device_address


def test_memory_freed_while_capturing_is_freed_afterwards(stub):
    driver = Cuda(0, stub)
    address = driver.allocate(100)
    with driver.captured():
        driver.free(address)  # as the garbage collector may, at any time
        assert address in stub.blocks
    assert address not in stub.blocks


def test_other_threads_wait_for_a_capture(stub):
    driver = Cuda(0, stub)
    found = []
    thread = threading.Thread(target=lambda: found.append(driver.allocate(100)))
    with driver.captured():
        thread.start()
        thread.join(0.2)
        assert not found
    thread.join(10)
    assert found[0] in stub.blocks


def test_loops_ask_the_device(stub):
    """A while loop's condition is fetched; the stub's kernels do nothing, so its memory says when to stop."""
    run = Run(stub, """HloModule w, entry_computation_layout={(s32[])->s32[]}
body { s = s32[] parameter(0)
 o = s32[] constant(1)
 ROOT n = s32[] add(s, o) }
cond { s = s32[] parameter(0)
 l = s32[] constant(10)
 ROOT c = pred[] compare(s, l), direction=LT }
ENTRY main { x = s32[] parameter(0)
 ROOT w = s32[] while(x), condition=cond, body=body }
""")
    assert run.program.executable.fetches
    stub.fail["cuMemcpyDtoHAsync_v2"] = 700  # a failing read ends the loop instead of repeating it for ever
    with pytest.raises(DriverError, match="illegal memory access"):
        run(run.buffer(Shape("s32", ()), np.zeros(1, np.int32)))
    assert "cuGraphLaunch" not in stub.calls


def test_out_of_memory_leaves_arrays_usable(stub):
    run = Run(stub)
    x, y = inputs(run)
    stub.memory = sum(b.size for b in stub.blocks.values()) + 100
    with pytest.raises(MemoryError, match=r"Stub: \d+ bytes: out of memory .*MiB are free"):
        run(x, y)
    stub.memory = 1 << 30
    np.testing.assert_array_equal(x.bytes.view(np.float32), np.arange(3000))
    result = run.buffer(run.module.entry.root.shape)
    stub.fail["cuMemAllocAsync"] = 2
    with pytest.raises(MemoryError, match=r"no device memory for 0.0 MiB of working arrays .*TORCH_HLO_DUMP writes the buffer report"):
        run.program.run([x, y], [result])
    del stub.fail["cuMemAllocAsync"]
    run(x, y)


def test_a_failed_launch_names_the_instruction(stub):
    run = Run(stub)
    stub.fail["cuLaunchKernel"] = 700
    with pytest.raises(LaunchError, match=r"kernel k0_\w+ of fusion f32\[100,30\].*illegal memory access"):
        run(*inputs(run))


def test_a_failure_while_running_names_the_last_kernel(stub):
    run = Run(stub)
    result = run(*inputs(run))
    stub.fail["cuStreamSynchronize"] = 700
    with pytest.raises(LaunchError, match=r"illegal memory access.*last kernel started was k0_\w+ of fusion"):
        result.bytes  # noqa: B018


@pytest.mark.parametrize(("make", "message"), [
    (lambda: StubCuda(version=11040), r"supports CUDA 11\.4; 12\.0 or later is needed: update it"),
    (lambda: StubCuda(devices=0), "the driver sees 0 devices"),
    (lambda: StubCuda(capability=(7, 5)), r"compute capability 7\.5 is not supported"),
])  # fmt: skip
def test_machines_that_cannot(make, message):
    with pytest.raises(DriverError, match=message):
        Cuda(0, make())


def test_no_driver():
    with pytest.raises(DriverError, match="no NVIDIA driver on this machine.*choose another TORCH_HLO_DEVICE"):
        Cuda(0, "libcuda_that_is_not_there.so")


def test_wrong_architecture(stub):
    stub.fail["cuModuleLoadDataEx"] = 218
    with pytest.raises(DriverError, match="Stub does not take code for nvptx:sm_90a"):
        Run(stub)


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_86"), ((9, 0), "sm_90a"), ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((12, 1), "sm_120")])
def test_the_target_follows_the_device(capability, name):
    assert Cuda(0, StubCuda(capability=capability)).target.cpu == name


def test_every_function_is_declared():
    """The stub implements exactly what the runtime calls."""
    assert all(hasattr(StubCuda, f"_{name}") for name in cuda._FUNCTIONS)
