"""The CPU back end: what the disk cache saves, and what happens when a cached program cannot be
used."""

import os
import re
import subprocess
import sys

import pytest
import torch

import torch_hlo
from torch_hlo import config, metrics
from torch_hlo.compiler import cache
from torch_hlo.device import buffer, memory, programs, runtime
from torch_hlo.device.cpu import native
from torch_hlo.device.memory import Pool
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.text.parser import parse_module

TEXT = """HloModule m

ENTRY main {
  x = f32[4] parameter(0)
  y = f32[4] parameter(1)
  s = f32[4] add(x, y)
  ROOT r = (f32[4]) tuple(s)
}
"""
F4 = Shape("f32", (4,))


@pytest.fixture(autouse=True)
def on_cpu(tmp_path, monkeypatch):
    # these tests run while somebody edits the compiler
    monkeypatch.setattr(config, "STARTED", float("inf"))
    with config.override(DEVICE="cpu", CACHE=str(tmp_path / "cache")):
        metrics.clear_all()
        yield tmp_path / "cache"


def run(program) -> list[float]:
    x, y = (
        runtime.from_bytes(F4, torch.tensor(v, dtype=torch.float32).numpy().tobytes())
        for v in ([1, 2, 3, 4], [10, 20, 30, 40])
    )
    out = runtime.allocate(F4)
    program.run([x, y], [out])
    return torch.frombuffer(bytearray(out.bytes.tobytes()), dtype=torch.float32).tolist()


def test_second_compile_comes_from_disk(on_cpu, monkeypatch):
    module = parse_module(TEXT)
    assert run(native.compile_program(module)) == [11, 22, 33, 44]
    assert len(list(on_cpu.glob("*.bin"))) == 1

    def never(*args, **kwargs):
        raise AssertionError("compiled again")

    monkeypatch.setattr(programs, "compile_module", never)
    assert run(native.compile_program(module)) == [11, 22, 33, 44]
    assert metrics.counter_value("DiskCacheHit") == 1


def test_programs_are_cut_for_torchs_threads_and_run_on_any_number(on_cpu):
    product = (
        "ENTRY main { %a = f32[512,256] parameter(0)\n %b = f32[256,512] parameter(1)\n ROOT %c ="
        " f32[512,512] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0} }"
    )
    module = parse_module("HloModule product\n" + product)
    a, b = (
        torch.arange(256 * 512).reshape(s).remainder(7).float() for s in ((512, 256), (256, 512))
    )
    made, items, before = [], [], torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            texts = []
            native.compile_program(
                module,
                lambda stage, value, texts=texts: texts.append(value) if stage == "llvm" else None,
            )
            items.append(
                re.findall(
                    r"@torch_hlo_parallel\(.*i64 (\d+), i64 \d+, i64 \d+\)",
                    "".join(texts),
                )
            )
            made.append(native.compile_program(module))
            assert made[-1].from_disk and len(list(on_cpu.glob("*.bin"))) == n // 2 + 1
        assert items[0] != items[1]
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            for program in made:
                inputs = [
                    runtime.from_bytes(p.shape, v.numpy().tobytes())
                    for p, v in zip(module.entry.params, (a, b), strict=True)
                ]
                out = runtime.allocate(module.entry.root.shape)
                program.run(inputs, [out])
                assert torch.equal(
                    torch.frombuffer(bytearray(out.bytes.tobytes()), dtype=torch.float32).view(
                        512, 512
                    ),
                    a @ b,
                )
    finally:
        torch.set_num_threads(before)


def test_the_compilers_thread_hears_of_torchs_threads(on_cpu, monkeypatch):
    cores, before = [], torch.get_num_threads()
    compile_module = programs.compile_module
    monkeypatch.setattr(
        programs,
        "compile_module",
        lambda module, target, **kwargs: (
            cores.append(target.cores),
            compile_module(module, target, **kwargs),
        )[1],
    )
    try:
        for n in (1, 3, 2, 1):
            torch.set_num_threads(n)
            y = torch.ones(4321).to("hlo") + 0.5
            torch_hlo.sync()
            assert y.cpu().sum() == 4321 * 1.5
    finally:
        torch.set_num_threads(before)
    assert cores == [1, 3, 2]  # the first of them is still there


@pytest.mark.parametrize("data", [b"", b"garbage", b"torch_hlo executable\0" + bytes(200)])
def test_an_entry_that_is_no_program_is_replaced(on_cpu, data):
    module = parse_module(TEXT)
    native.compile_program(module)
    (path,) = on_cpu.glob("*.bin")
    cache.store(path.stem, data)
    assert run(native.compile_program(module)) == [11, 22, 33, 44]
    assert cache.load(path.stem) != data


def test_flags_and_text_are_part_of_the_key(on_cpu):
    native.compile_program(parse_module(TEXT))
    native.compile_program(parse_module(TEXT.replace("add", "subtract")))
    with config.override(DISABLE="fold"):
        native.compile_program(parse_module(TEXT))
    assert len(list(on_cpu.glob("*.bin"))) == 3


def test_observing_compiles_anew(on_cpu):
    module = parse_module(TEXT)
    native.compile_program(module)
    stages = []
    native.compile_program(module, lambda stage, value: stages.append(stage))
    assert {"llvm", "asm", "buffers"} <= set(stages)


def test_off_and_on_across_processes(tmp_path):
    code = """
import torch, torch_hlo
from torch_hlo import metrics
print((torch.arange(4.0).to("hlo") + 1).tolist(), metrics.counter_value("DiskCacheHit"))
"""

    def go(directory: str) -> str:
        env = {**os.environ, "TORCH_HLO_DEVICE": "cpu", "TORCH_HLO_CACHE": directory}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert go("") == "[1.0, 2.0, 3.0, 4.0] None"
    assert go(str(tmp_path / "d")) == "[1.0, 2.0, 3.0, 4.0] None"
    assert go(str(tmp_path / "d")) == "[1.0, 2.0, 3.0, 4.0] 1"


# ---- memory


def test_blocks_are_reused():
    before = runtime.memory_stats()
    a = runtime.allocate(Shape("f32", (1000,)))
    assert runtime.memory_stats()["blocks"] == before["blocks"] + 1
    assert a.memory.address % 64 == 0
    address = a.memory.address
    del a
    assert runtime.memory_stats()["blocks"] == before["blocks"]
    assert runtime.allocate(Shape("f32", (1000,))).memory.address == address


def test_make_room_gives_back_what_fits():
    pool = Pool()
    blocks = [pool.take(n << 20) for n in (2, 4, 8)]
    for block in blocks:
        pool.give(*block)
    assert pool.cached == 14 << 20
    assert pool.make_room(7 << 20) == 6 << 20  # 2 and 4; 8 is more than what is wanted
    assert pool.cached == 8 << 20
    block = pool.take(8 << 20)
    pool.give(*block)
    assert pool.cached == 8 << 20 and pool.make_room(1 << 20) == 0
    blocks = pool.take(4 << 20), pool.take(2 << 20)
    pool.give(*blocks[0])
    assert pool.make_room(4 << 20) == 4 << 20
    pool.give(*blocks[1])  # not kept: others need the memory now
    assert pool.cached == 8 << 20


def test_impossible_sizes_are_memory_errors():
    with pytest.raises(MemoryError, match=r"f32\[1099511627776\].*Free tensors"):
        runtime.allocate(Shape("f32", (1 << 40,)))


def test_size_classes_waste_little():
    for n in (0, 1, 63, 64, 65, 1000, 4097, 1 << 20, (1 << 20) + 1, 123456789):
        size = memory.size_class(n)
        assert size >= max(n, 1) and size % 64 == 0
        assert size <= max(n * 9 // 8 + 64, 64)


def test_empty_cache_and_peak():
    a = runtime.allocate(Shape("u8", (1 << 20,)))
    assert runtime.memory_stats()["peak_bytes"] >= 1 << 20
    del a
    runtime.empty_cache()
    assert runtime.memory_stats()["cached_bytes"] == 0
    runtime.reset_peak()
    assert runtime.memory_stats()["peak_bytes"] == runtime.memory_stats()["bytes"]


def test_pool_gives_back_on_memory_pressure(monkeypatch):
    runtime.empty_cache()
    a = runtime.allocate(Shape("u8", (1 << 16,)))
    del a
    calls = []
    original = memory.map_pages

    def failing(nbytes):
        calls.append(nbytes)
        if len(calls) == 1:
            raise MemoryError
        return original(nbytes)

    monkeypatch.setattr(memory, "map_pages", failing)
    b = runtime.allocate(Shape("u8", (3 << 16,)))
    assert len(calls) == 2 and runtime.memory_stats()["cached_bytes"] == 0 and b.nbytes == 3 << 16


def flags_of(address: int) -> set[str]:
    """VmFlags of the mapping at an address."""
    inside = False
    for line in open("/proc/self/smaps"):
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            low, _, high = word.partition("-")
            inside = int(low, 16) <= address < int(high, 16)
        elif inside and word == "VmFlags:":
            return set(line.split()[1:])
    return set()


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"),
    reason="a kernel without transparent huge pages",
)
def test_blocks_have_small_pages_once_a_huge_one_was_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer._Huge, "slow", False)
    took = 0.0001
    monkeypatch.setattr(buffer, "_seconds_of_first", lambda address: took)
    blocks = [buffer.map_pages(buffer._Huge.ASKED)]
    assert "hg" in flags_of(blocks[0].ctypes.data)
    took = 0.004
    blocks.append(buffer.map_pages(buffer._Huge.ASKED))
    took = 0.0001
    blocks.append(buffer.map_pages(3 * buffer.HUGE + 12345))
    for block in blocks[1:]:
        assert "nh" in flags_of(block.ctypes.data) and not block.any()


def test_the_first_page_is_there_and_empty() -> None:
    block = buffer.map_pages(2 * buffer.HUGE)
    assert 0 <= buffer._seconds_of_first(block.ctypes.data) < 1 and not block.any()
