"""The CUDA runtime against a stub of the driver's library: arguments, memory, graphs, and what
happens when something is wrong."""

import functools
import threading

import numpy as np
import pytest
import torch
from torch import nn

import torch_hlo
from test.device.stub_cuda import StubCuda
from torch_hlo import config
from torch_hlo.device import programs
from torch_hlo.device.cuda import cuda_driver, cuda_memory, cuda_program
from torch_hlo.device.cuda.cuda_driver import Cuda, LaunchError
from torch_hlo.device.cuda.cuda_memory import CudaMemory, CudaPool
from torch_hlo.device.cuda.cuda_program import CudaProgram
from torch_hlo.device.gpu import gpu
from torch_hlo.device.gpu.driver import DriverError
from torch_hlo.device.memory import Buffer
from torch_hlo.dynamo import recording
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.lazy.run.launch import RunInPlace

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


class Run:
    """A program and buffers for it."""

    def __init__(self, stub: StubCuda, text: str = TEXT) -> None:
        self.stub, self.pool = stub, CudaPool(Cuda(0, stub))
        self.memory = functools.partial(CudaMemory, pool=self.pool)
        self.module = parse_module(text)
        self.program = gpu.compile_program(self.pool, self.module, None, CudaProgram)

    def buffer(self, shape: Shape, data: np.ndarray | None = None) -> Buffer:
        made = Buffer(shape, self.memory(shape.nbytes))
        if data is not None:
            made.bytes[:] = data.view(np.uint8).reshape(-1)
        return made

    def __call__(self, *buffers: Buffer) -> Buffer:
        result = self.buffer(self.module.entry.root.shape)
        self.program.run(buffers, [result])
        return result

    def finish(self) -> None:
        """The stub works when somebody waits."""
        self.pool.driver.synchronize()


def inputs(run: Run) -> list[Buffer]:
    return [
        run.buffer(p.shape, np.arange(p.shape.size, dtype=np.float32))
        for p in run.module.entry.params
    ]


SUM = np.arange(3000, dtype=np.float32).reshape(100, 30) + np.arange(30, dtype=np.float32)


def values(buffer: Buffer) -> np.ndarray:
    return buffer.bytes.view(np.float32).reshape(buffer.shape.dims)


def test_a_launch_gets_sizes_and_addresses(stub):
    run = Run(stub)
    x, y = inputs(run)
    result = run(x, y)
    run.finish()
    ((name, grid, threads, words),) = stub.launches
    (kernel,) = run.program.executable.kernels
    assert name == kernel.name and threads == kernel.threads
    items = words[0]
    # a thread per element, or per four
    assert grid == -(-items // threads) and items in (3000, 750)
    assert words[1:] == [
        x.memory.device_address,
        y.memory.device_address,
        result.memory.device_address,
    ]
    np.testing.assert_array_equal(values(result), SUM)


def test_contents_travel_only_when_needed(stub):
    run = Run(stub)
    x, y = inputs(run)
    run(x, y)
    copies = stub.calls.count("cuMemcpyHtoDAsync_v2")
    run(x, y)
    assert stub.calls.count("cuMemcpyHtoDAsync_v2") == copies  # still on the device
    x.memory.readers += 1
    np.testing.assert_array_equal(x.bytes[:8].view(np.float32), [0, 1])
    x.memory.readers -= 1
    run(x, y)
    assert stub.calls.count("cuMemcpyHtoDAsync_v2") == copies  # somebody has read it
    x.bytes.view(np.float32)[:] = 7  # the host looked at it and may have written
    result = run(x, y)
    assert stub.calls.count("cuMemcpyHtoDAsync_v2") == copies + 1
    np.testing.assert_array_equal(
        values(result), np.broadcast_to(7 + np.arange(30, dtype=np.float32), (100, 30))
    )


def test_addresses_that_come_again_have_a_graph(stub, monkeypatch):
    monkeypatch.setattr(cuda_program._Moved, "MOST", 0)
    run = Run(stub)
    x, y = inputs(run)
    result = run.buffer(run.module.entry.root.shape)
    for _ in range(4):
        run.program.run([x, y], [result])
    assert stub.calls.count("cuLaunchKernel") == 2  # at once, and while capturing
    assert (
        stub.calls.count("cuGraphInstantiateWithFlags") == 1
        and stub.calls.count("cuGraphLaunch") == 3
    )
    run.finish()
    assert len(stub.launches) == 4 and len({tuple(w[3]) for w in stub.launches}) == 1
    others = [
        run.buffer(x.shape, np.full(x.shape.size, k, np.float32))
        for k in range(cuda_program.GRAPHS)
    ]
    for k, other in enumerate(others):
        for _ in range(2):
            run.program.run([other, y], [result])
            run.finish()
            assert stub.launches[-1][3][1] == other.memory.device_address
            np.testing.assert_array_equal(values(result)[0], k + np.arange(30))
    assert (
        stub.calls.count("cuGraphExecUpdate_v2") == 1
        and stub.calls.count("cuGraphInstantiateWithFlags") == cuda_program.GRAPHS
    )
    captures, launches = (
        stub.calls.count("cuStreamBeginCapture_v2"),
        stub.calls.count("cuLaunchKernel"),
    )
    for other in others * 2:  # in turns, as batches come
        run.program.run([other, y], [result])
    assert (
        stub.calls.count("cuStreamBeginCapture_v2") == captures
        and stub.calls.count("cuLaunchKernel") == launches
    )


def test_addresses_that_never_come_again_are_launched(stub, monkeypatch):
    monkeypatch.setattr(cuda_program._Moved, "MOST", 0)
    run = Run(stub)
    _, y = inputs(run)
    kept = []
    for k in range(6):
        kept.append(run.buffer(Shape("f32", (100, 30)), np.full(3000, k, np.float32)))
        np.testing.assert_array_equal(values(run(kept[-1], y))[0], k + np.arange(30))
    assert "cuStreamBeginCapture_v2" not in stub.calls


def test_small_arrays_that_always_move_do_not_cost_the_graph(stub):
    run = Run(stub)
    _, y = inputs(run)
    kept = []
    for k in range(10):
        x = run.buffer(Shape("f32", (100, 30)), np.full(3000, k, np.float32))
        kept += [x, run(x, y)]
    assert (
        stub.calls.count("cuGraphLaunch") >= 4
        and stub.calls.count("cuGraphInstantiateWithFlags") == 1
    )
    for k, result in enumerate(kept[1::2]):
        np.testing.assert_array_equal(values(result)[0], k + np.arange(30))


def test_training_on_the_whole_path(stub, monkeypatch):
    """Recording, background execution, uploads, graphs, kernels: losses as on the CPU. Work happens
    as late as its order allows."""
    pool = CudaPool(Cuda(0, stub))
    monkeypatch.setattr(cuda_memory, "pool_of", lambda number: pool)

    def losses(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        found = []
        for _ in range(7):
            x, y = torch.randn(4, 8).to(device), torch.randint(0, 4, (4,)).to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if device == "hlo":
                torch_hlo.mark_step()
            found.append(loss.detach())
        return [x.item() for x in found]

    with config.override(DEVICE="cuda"):
        found = losses("hlo")
        torch_hlo.sync()
        assert (
            torch.hlo.mem_get_info()[1] == stub.memory
            and torch.hlo.get_device_properties().total_memory == stub.memory
        )
    np.testing.assert_allclose(found, losses("cpu"), rtol=1e-4)
    assert not stub.problems


def test_captured_steps_are_launched_without_being_recorded_again(stub, monkeypatch):
    pool = CudaPool(Cuda(0, stub))
    monkeypatch.setattr(cuda_memory, "pool_of", lambda number: pool)
    recorded = []
    monkeypatch.setattr(recording.Recording, "_append", lambda *_: recorded.append(1))
    weight = torch.ones(4, 4)

    @torch_hlo.compile
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w.mul_(0.5)
        return (w @ x).sum()

    with config.override(DEVICE="cuda"):
        there = weight.to("hlo")
        found = [step(there, torch.full((4, 4), float(n)).to("hlo")) for n in range(8)]
        assert [x.item() for x in found] == [64.0 * n / 2 ** (n + 1) for n in range(8)]
    assert not recorded and not stub.problems


def test_captured_steps_that_fail_change_nothing(stub, monkeypatch):
    """Two steps under way that update in place, of which the first fails."""
    pool = CudaPool(Cuda(0, stub))
    monkeypatch.setattr(cuda_memory, "pool_of", lambda number: pool)
    run, failing, both = CudaProgram.run, [], threading.Event()

    def fails(self: CudaProgram, *buffers: list[Buffer]) -> None:
        if failing:
            both.wait(10)
            failing.clear()
            raise DriverError("planted")
        run(self, *buffers)

    monkeypatch.setattr(CudaProgram, "run", fails)
    in_place, made = [], RunInPlace.__init__
    monkeypatch.setattr(RunInPlace, "__init__", lambda *args: in_place.append(1) or made(*args))

    @torch_hlo.compile
    def step(w: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        w.mul_(0.5)
        kept.add_(w.sum(0))
        return w.sum()

    with config.override(DEVICE="cuda"):
        w, kept = torch.full((4, 4), 2.0**6).to("hlo"), torch.zeros(4).to("hlo")
        for n in range(5):
            assert step(w, kept).item() == 16 * 2.0 ** (5 - n)
        assert len(in_place) >= 2
        before = kept.tolist()
        failing.append(True)
        first, second = step(w, kept), step(w, kept)
        both.set()
        with pytest.raises(DriverError, match="planted"):
            torch_hlo.sync()
        assert w.tolist() == [[2.0] * 4] * 4 and kept.tolist() == before
        for result in first, second:
            with pytest.raises(RuntimeError, match="never|after its memory"):
                result.item()
        assert step(w, kept).item() == 16 and w.tolist() == [[1.0] * 4] * 4
        assert kept.tolist() == [x + 4 for x in before]


def test_captured_training_is_a_graph(stub, monkeypatch):
    """Gradients take the memory of those before, so that addresses come again."""
    pool = CudaPool(Cuda(0, stub))
    monkeypatch.setattr(cuda_memory, "pool_of", lambda number: pool)

    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

        @torch_hlo.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = step if device == "hlo" else step.__wrapped__
        return [run(torch.randn(4, 8).to(device)).item() for _ in range(9)]

    with config.override(DEVICE="cuda"):
        found = losses("hlo")
    np.testing.assert_allclose(found, losses("cpu"), rtol=1e-4)
    assert stub.calls.count("cuGraphLaunch") >= 3 and not stub.problems


BRANCHES = """HloModule b
ENTRY main {
  x = f32[64,40] parameter(0)
  y = f32[90,40] parameter(1)
  w = f32[40,24] parameter(2)
  a = f32[64,24] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  b = f32[90,24] dot(y, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT d = f32[64,90] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""


def test_independent_steps_are_branches_of_the_graph(stub):
    """The stub runs a graph in the latest order that its edges allow, on memory whose old contents
    are garbage."""
    run = Run(stub, BRANCHES)
    rng = np.random.default_rng(0)
    data = [rng.standard_normal(p.shape.dims).astype(np.float32) for p in run.module.entry.params]
    given = [run.buffer(p.shape, d) for p, d in zip(run.module.entry.params, data, strict=True)]
    expected = evaluate(run.module, data)[0]
    for _ in range(3):
        np.testing.assert_allclose(values(run(*given)), expected, rtol=2e-5, atol=1e-3)
    nodes = next(iter(stub.graphs.values()))
    assert len([n for n in nodes if not n.before]) == 2, (
        "the first two products do not depend on each other"
    )
    assert any(len(n.before) == 2 for n in nodes)


def test_an_upload_does_not_wait_for_programs_that_do_not_use_its_block(stub):
    run = Run(stub)
    x, y = inputs(run)
    run(x, y)
    run.finish()
    block = x.memory.device_address
    del x
    z = run.buffer(Shape("f32", (100, 30)), np.ones(3000, np.float32))
    result = run(z, y)  # under way: z has another block, or that of x with nobody using it
    driver = run.pool.driver
    before = stub.done[driver.main.value]
    w = run.buffer(Shape("f32", (100, 30)), np.ones(3000, np.float32))
    w.memory.device_address  # noqa: B018
    stub._advance(driver.uploads.value)
    assert stub.done[driver.main.value] == before or w.memory.device_address != block
    np.testing.assert_array_equal(values(result)[0], 1 + np.arange(30))


def test_page_locked_memory_is_not_reused_while_it_is_read(stub):
    run = Run(stub)
    y = run.buffer(Shape("f32", (30,)), np.zeros(30, np.float32))
    results = []
    for k in range(4):  # nothing has been executed when the next batch is written
        x = run.buffer(Shape("f32", (100, 30)), np.full(3000, k, np.float32))
        results.append(run(x, y))
    for k, result in enumerate(results):
        np.testing.assert_array_equal(values(result), np.full((100, 30), k))
    assert len(stub.pinned) > 4 and len(run.pool.driver._sending) > 0
    run(x, y)
    x.bytes[:4] = 0
    x.memory.device_address  # noqa: B018 - what has been read by now is given back
    assert len(run.pool.driver._sending) == 1


def test_programs_run_on_the_stream_and_memory_of_others(stub):
    run = Run(stub)
    x, y, out = (np.arange(n, dtype=np.float32) for n in (3000, 30, 3000))
    for a in (x, y, out):
        stub.own(a.ctypes.data, a.nbytes)
    before = [len(stub.queues[s]) for s in (0, run.pool.driver.main.value)]
    for _ in range(3):
        out[:] = 0
        run.program.launch((x.ctypes.data, y.ctypes.data, out.ctypes.data), 0, 0)
        assert not out.any()
        stub._advance(0)
        np.testing.assert_array_equal(out.reshape(100, 30), SUM)
    assert [len(stub.queues[s]) for s in (0, run.pool.driver.main.value)] == [
        before[0] + 3,
        before[1],
    ]


def test_steps_are_timed_by_events(stub, monkeypatch):
    with config.override(PROFILE="wall"):
        run = Run(stub, BRANCHES)
    monkeypatch.setattr(programs, "PROFILED", programs.Profiled())
    for _ in range(2):
        run(
            *[
                run.buffer(p.shape, np.ones(p.shape.size, np.float32))
                for p in run.module.entry.params
            ]
        )
    steps, counts = run.program.profile.steps, run.program.counts()
    assert len(steps) == len(counts) > 2 and all(
        calls == 2 and total >= 2 * best > 0 for calls, total, best in counts
    )
    assert sum(s.matrix_flops for s in steps) == 2 * 24 * (64 * 40 + 90 * 40 + 64 * 90)
    assert "cuGraphLaunch" not in stub.calls


def test_memory_freed_while_capturing_is_freed_afterwards(stub):
    driver = Cuda(0, stub)
    address = driver.allocate(100)
    with driver.captured():
        driver.free(address)  # as the garbage collector may, at any time
        assert "cuMemFreeAsync" not in stub.calls
    driver.synchronize()
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
    """A while loop's condition is fetched; the stub's kernels do nothing, so its memory says when
    to stop."""
    run = Run(
        stub,
        """HloModule w, entry_computation_layout={(s32[])->s32[]}
body { s = s32[] parameter(0)
 o = s32[] constant(1)
 ROOT n = s32[] add(s, o) }
cond { s = s32[] parameter(0)
 l = s32[] constant(10)
 ROOT c = pred[] compare(s, l), direction=LT }
ENTRY main { x = s32[] parameter(0)
 ROOT w = s32[] while(x), condition=cond, body=body }
""",
    )
    assert run.program.executable.fetches
    # a failing read ends the loop instead of repeating it for ever
    stub.fail["cuMemcpyDtoHAsync_v2"] = 700
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
    np.testing.assert_array_equal(values(run(x, y)), SUM)


def test_out_of_memory_names_the_largest_buffers(stub):
    run = Run(stub, BRANCHES)
    given = [
        run.buffer(p.shape, np.ones(p.shape.size, np.float32)) for p in run.module.entry.params
    ]
    result = run.buffer(run.module.entry.root.shape)
    stub.memory = sum(b.size for b in stub.blocks.values())
    with pytest.raises(
        MemoryError,
        match=(
            r"no device memory for 0.0 MiB of working arrays (?s:.)*largest buffers:\n +0.0 MiB "
            r" \w+(?s:.)*TORCH_HLO_DUMP writes"
        ),
    ):
        run.program.run(given, [result])
    stub.memory = 1 << 30
    run.program.run(given, [result])
    assert (values(result) > 0).all()


def test_memory_kept_for_reuse_is_given_back_before_giving_up(stub):
    run = Run(stub)
    run.buffer(Shape("f32", (100, 30))).memory.written()  # and freed: the pool keeps the block
    stub.memory = sum(b.size for b in stub.blocks.values()) + 1000
    assert run.pool.cached
    big = run.buffer(Shape("f32", (3200,)), np.arange(3200, dtype=np.float32))
    assert not run.pool.cached and "cuMemPoolTrimTo" in stub.calls
    np.testing.assert_array_equal(values(big), np.arange(3200))


def test_a_failed_launch_names_the_instruction(stub):
    run = Run(stub)
    stub.fail["cuLaunchKernel"] = 700
    with pytest.raises(
        LaunchError,
        match=r"kernel k0_\w+ of fusion f32\[100,30\].*illegal memory access",
    ):
        run(*inputs(run))


def test_launches_after_a_failed_one_do_not_happen(stub):
    run = Run(stub, BRANCHES)
    given = [
        run.buffer(p.shape, np.ones(p.shape.size, np.float32)) for p in run.module.entry.params
    ]
    stub.fail["cuLaunchKernel"] = 1
    with pytest.raises(LaunchError, match="kernel k0_"):
        run(*given)
    assert stub.calls.count("cuLaunchKernel") == 1
    del stub.fail["cuLaunchKernel"]
    assert (values(run(*given)) == 40 * 40 * 24).all()


def test_a_failure_while_running_names_the_last_kernel(stub):
    run = Run(stub)
    result = run(*inputs(run))
    stub.fail["cuStreamSynchronize"] = 700
    with pytest.raises(
        LaunchError,
        match=r"illegal memory access.*last kernel started was k0_\w+ of fusion",
    ):
        result.bytes  # noqa: B018


def test_a_fault_inside_a_kernel_is_found_when_somebody_waits(stub):
    """The launch gives no error; the context is lost, as on a device, and the message says so."""
    run = Run(stub)
    x, y = inputs(run)
    run.program.launch(
        (8, y.memory.device_address, x.memory.device_address),
        0,
        run.pool.driver.main.value,
    )
    with pytest.raises(
        LaunchError,
        match=(
            r"illegal memory access.*start the process anew; the last kernel started was k0_\w+ of"
            r" fusion"
        ),
    ):
        run.finish()
    assert "8" in stub.problems[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: StubCuda(version=11040),
            r"supports CUDA 11\.4; 12\.4 or later is needed: update it",
        ),
        (lambda: StubCuda(devices=0), "the driver sees 0 devices"),
        (
            lambda: StubCuda(capability=(7, 5)),
            r"compute capability 7\.5 is not supported",
        ),
    ],
)
def test_machines_that_cannot(make, message):
    with pytest.raises(DriverError, match=message):
        Cuda(0, make())


def test_no_driver():
    with pytest.raises(
        DriverError,
        match="no NVIDIA driver on this machine.*choose another TORCH_HLO_DEVICE",
    ):
        Cuda(0, "libcuda_that_is_not_there.so")


def test_wrong_architecture(stub):
    stub.fail["cuModuleLoadDataEx"] = 218
    with pytest.raises(DriverError, match="Stub does not take code for nvptx:sm_90a"):
        Run(stub)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
    ],
)
def test_the_target_follows_the_device(capability, name):
    assert Cuda(0, StubCuda(capability=capability)).target.cpu == name


def test_every_function_is_declared():
    """The stub implements exactly what the runtime calls."""
    assert all(hasattr(StubCuda, f"_{name}") for name in cuda_driver._FUNCTIONS)
