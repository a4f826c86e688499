"""The thread pool, loading, stored executables and host calls."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from array import array

import llvmlite.binding as llvm
import numpy as np
import pytest

from torch_hlo import config
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.llvm import system
from torch_hlo.compiler.llvm.machine_code import machine_code
from torch_hlo.compiler.llvm.target import host
from torch_hlo.device import buffer
from torch_hlo.device.buffer import Arenas, map_pages, populate
from torch_hlo.device.cpu import loader, workers
from torch_hlo.device.cpu.engine import engine
from torch_hlo.device.cpu.workers import WORKERS
from torch_hlo.hlo.ir.instruction import Computation, Module
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.shape import Shape

N = 1 << 18


def add_one(n: int = N) -> Executable:
    x = instr("parameter", (), Shape("f32", (n,)), index=0)
    y = instr("add", (x, instr("exponential", (x,))))
    return compile_module(Module("add_one", Computation("main", (x,), y)), optimize=False)


def address(a: np.ndarray) -> int:
    return a.ctypes.data


def call(program: loader.Program, x: np.ndarray) -> np.ndarray:
    y = np.zeros_like(x)
    program.call([address(x)], [address(y)])
    return y


@pytest.fixture(autouse=True)
def four_threads():
    with config.override(THREADS=4):
        yield


def test_results_do_not_depend_on_threads():
    program, x = loader.load(add_one()), np.linspace(-3, 3, N, dtype=np.float32)
    expected = call(program, x)
    np.testing.assert_allclose(expected, x + np.exp(x), rtol=1e-6, atol=1e-6)
    for n in (1, 2, 3, 7):
        with config.override(THREADS=n):
            assert call(program, x).tobytes() == expected.tobytes()


def test_many_regions():
    """Every range runs exactly once, region after region, with workers asleep and awake."""
    program, x = loader.load(add_one()), np.linspace(-3, 3, N, dtype=np.float32)
    expected = call(program, x)
    for i in range(300):
        assert np.array_equal(call(program, x), expected)
        if i % 100 == 0:
            threading.Event().wait(0.01)  # long enough for workers to fall asleep


def test_concurrent_callers():
    program, x = loader.load(add_one()), np.linspace(-3, 3, N, dtype=np.float32)
    expected, wrong = call(program, x), []

    def work() -> None:
        for _ in range(50):
            if not np.array_equal(call(program, x), expected):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(6)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork():
    program, x = loader.load(add_one()), np.linspace(-3, 3, N, dtype=np.float32)
    expected = call(program, x)
    child = os.fork()
    if child == 0:
        good = all(np.array_equal(call(program, x), expected) for _ in range(20))
        os._exit(0 if good and WORKERS.started == 3 else 1)
    for _ in range(20):
        assert np.array_equal(call(program, x), expected)
    assert os.waitpid(child, 0)[1] == 0


def native(name: str, *kinds):
    WORKERS.load()
    return ctypes.CFUNCTYPE(*kinds)(llvm.address_of_symbol(name))


def test_who_waits_for_a_program_helps():
    """A thread that waits until the stream has run a program takes ranges of its loops, as a worker
    does."""
    parallel = native(
        "torch_hlo_parallel",
        None,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
    )
    wait = native("torch_hlo_pool_help", None, ctypes.c_void_p, ctypes.c_int64)
    record, who = array("Q", [1]), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    def ranges(_, low: int, high: int) -> None:
        time.sleep(0.02)
        who.append((threading.get_ident(), low, high))

    def program() -> None:
        time.sleep(0.05)
        WORKERS.ensure(2)
        parallel(ctypes.cast(ranges, ctypes.c_void_p).value, None, 64, 1, 10**9)
        record[0] = 2

    stream = threading.Thread(target=program)
    stream.start()
    while stream.is_alive():
        wait(record.buffer_info()[0], 2)
    stream.join()
    assert sorted(i for _, low, high in who for i in range(low, high)) == list(range(64))
    assert threading.get_ident() in {thread for thread, _, _ in who}
    WORKERS.ensure(1)
    start = time.perf_counter()
    wait(array("Q", [1]).buffer_info()[0], 2)  # one thread is enough: nothing to do
    assert time.perf_counter() - start < 5.0


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="threads know their processor on Linux only",
)
def test_a_thread_that_shares_a_processor_moves_away():
    text = (
        system.PROCESSORS
        + "define i32 @moved() {\n  call void @move_away()\n  %n = call i32 @processor()\n  ret i32"
        " %n\n}\n"
    )
    loaded = engine([machine_code(text, host(), level=0)[0]], host())
    moved = ctypes.CFUNCTYPE(ctypes.c_int)(loaded.get_function_address("moved"))
    allowed = os.sched_getaffinity(0)
    try:
        for n in sorted(allowed):
            os.sched_setaffinity(0, {n})
            assert moved() == n  # it may go nowhere else
            os.sched_setaffinity(0, allowed)
            assert moved() in allowed and os.sched_getaffinity(0) == allowed
        if len(allowed) > 1:
            here = ctypes.CDLL(None).sched_getcpu
            assert any(here() != moved() for _ in range(20))
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.fixture
def team():
    """Three threads of PyTorch's OpenMP library, where it has one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    with config.override(THREADS=0):
        program = loader.load(add_one())
        if not WORKERS.has_team:
            pytest.skip("PyTorch's threads are not OpenMP's here")
        WORKERS.alone_until = 0.0
        yield program
    torch.set_num_threads(before)


def test_a_team_of_pytorchs_threads(team):
    """Between its own parallel loops, and called by several threads at a time; no worker of ours is
    made or woken."""
    import torch

    x, t = np.linspace(-3, 3, N, dtype=np.float32), torch.ones(1 << 18)
    expected, wrong, workers = np.exp(x) + x, [], WORKERS.started

    def work() -> None:
        for _ in range(40):
            if (
                not np.allclose(call(team, x), expected, rtol=1e-6, atol=1e-6)
                or t.mul(2).sum() != 2 << 18
            ):
                wrong.append(1)

    work()
    callers = [threading.Thread(target=work) for _ in range(4)]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    assert not wrong
    # unless a neighbour has kept the team from running
    assert WORKERS.started == workers or WORKERS.pause > workers._PAUSE


def test_a_team_that_stalls_is_left_alone(team, monkeypatch):
    calls = []

    def stall(entry: int, block: int, threads: int) -> int:
        calls.append(threads)
        return 10**8 if threads else 0

    monkeypatch.setattr(WORKERS, "functions", WORKERS.functions._replace(call=stall))
    monkeypatch.setattr(WORKERS, "pause", 10.0)
    x = np.zeros(N, np.float32)
    for _ in range(3):
        call(team, x)
    assert calls == [3, 0, 0]
    WORKERS.alone_until = 0.0  # later
    call(team, x)
    monkeypatch.setattr(team, "callback", object())  # one that calls Python
    call(team, x)
    assert calls[3:] == [3, 0]
    calls.pop()
    assert calls[-1] == 3 and WORKERS.pause == workers._LONGEST_PAUSE
    WORKERS.alone_until = 0.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_no_team(team):
    x = np.linspace(-3, 3, N, dtype=np.float32)
    expected = call(team, x)
    child = os.fork()
    if child == 0:
        good = all(np.array_equal(call(team, x), expected) for _ in range(20))
        os._exit(0 if good and WORKERS.started == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(call(team, x), expected)


def test_executable_round_trip_and_damage():
    executable = add_one(64)
    data = executable.to_bytes()
    assert Executable.from_bytes(data) == executable
    for broken in (
        b"",
        data[:-1],
        data[:100],
        data[:200] + b"\0" + data[201:],
        b"x" + data[1:],
    ):
        with pytest.raises(ValueError):
            Executable.from_bytes(broken)


def test_executable_for_another_machine():
    executable = add_one(64)
    other = Executable(
        **{n: getattr(executable, n) if n != "target" else "vax" for n in Executable.__slots__}
    )
    with pytest.raises(ValueError, match="vax"):
        loader.load(other)


def test_wrong_number_of_arguments():
    program = loader.load(add_one(64))
    with pytest.raises(ValueError, match="takes 1 inputs"):
        program.call([], [0])


def test_memory_error_names_the_bytes():
    with pytest.raises(MemoryError, match=str(1 << 50)):
        map_pages(1 << 50)


def _resident(block: np.ndarray) -> int:
    """Pages of a block that are in memory (mincore)."""
    low = -(-block.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (block.ctypes.data + len(block) - low) // mmap.PAGESIZE
    state = (ctypes.c_ubyte * pages)()
    assert (
        ctypes.CDLL(None).mincore(
            ctypes.c_void_p(low), ctypes.c_size_t(pages * mmap.PAGESIZE), state
        )
        == 0
    )
    return sum(b & 1 for b in state)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="pages are asked for on Linux only"
)
def test_pages_are_there_before_they_are_written(monkeypatch):
    monkeypatch.setattr(buffer, "COMPILER", 0)
    monkeypatch.setattr(buffer, "_AT_ONCE", 3 << 20)
    block, small = map_pages(9 << 20), map_pages(5000)
    block[5] = 7
    before = _resident(block)
    populate([block, small])
    for thread in threading.enumerate():
        if thread.name == "torch_hlo-pages":
            thread.join(60)
    assert _resident(block) == (9 << 20) // mmap.PAGESIZE > before
    assert block[5] == 7 and block.sum() == 7


def test_pages_are_aligned_and_arenas_reused():
    for n in (1, 1000, 3 << 20):
        a = map_pages(n)
        assert a.nbytes == n and address(a) % 64 == 0
        a[:] = 1
    arenas = Arenas()
    a = arenas.borrow(1000)
    arenas.give_back(a)
    assert arenas.borrow(500) is a


def test_host_call_and_its_exceptions():
    from torch_hlo.compiler.codegen.registry import CPU, HOST_CALLS, host_call

    @host_call("test-double")
    def double(outputs, inputs, factor):
        if inputs[0][0] < 0:
            raise ArithmeticError("negative")
        outputs[0][...] = inputs[0] * factor

    def step(program, x):
        program.host_call(
            "test-double",
            [(program.place(x), x.shape)],
            [(program.place(x.operands[0]), x.operands[0].shape)],
            factor=2,
        )

    CPU["test-double"] = step
    try:
        x = instr("parameter", (), Shape("f32", (5,)), index=0)
        y = instr("test-double", (x,), Shape("f32", (5,)))
        program = loader.load(
            Executable.from_bytes(
                compile_module(
                    Module("host", Computation("main", (x,), instr("add", (y, y)))),
                    optimize=False,
                ).to_bytes()
            )
        )
        v = np.arange(5, dtype=np.float32)
        np.testing.assert_array_equal(call(program, v), 4 * v)
        with pytest.raises(ArithmeticError, match="negative"):
            call(program, v - 1)
        np.testing.assert_array_equal(call(program, v), 4 * v)
    finally:
        del CPU["test-double"], HOST_CALLS["test-double"]
