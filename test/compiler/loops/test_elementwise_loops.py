"""Elementwise kernels: what they ask memory for ahead of time, parts that lie side by side."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from test.compiler.compiled import check, module
from test.support import hlo
from torch_hlo.compiler.codegen import kernel_values, program
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.llvm import target
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.instruction import Instruction, Module
from torch_hlo.hlo.ir.shape import Shape, numpy_dtype


def sums(n: int) -> Module:
    return hlo(f"""HloModule sums
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
ENTRY main {{
  x = f32[{n}] parameter(0)
  y = f32[{n}] parameter(1)
  m = f32[{n}] multiply(x, y)
  z = f32[] constant(0)
  s = f32[] reduce(y, z), dimensions={{0}}, to_apply=add
  ROOT r = (f32[{n}], f32[]) tuple(m, s)
}}
""")


def prefetches(module: Module) -> int:
    found: list[str] = []
    compile_module(module, dump=lambda name, value: found.append(value) if name == "llvm" else None)
    return "\n".join(found).count("call void @llvm.prefetch")


def test_operands_that_no_cache_holds_are_asked_for_ahead() -> None:
    assert prefetches(sums(1 << 24)) > 0


def test_operands_that_a_cache_holds_are_not() -> None:
    assert prefetches(sums(1 << 20)) == 0


@pytest.mark.parametrize("n", [7, 1000, 5003])
def test_what_lies_behind_the_last_element_is_never_read(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "COLD_BYTES", 0)
    monkeypatch.setattr(kernel_values, "STREAMED_BYTES", 0)
    rng = np.random.default_rng(0)
    check(
        sums(n),
        [rng.random(n, np.float32), rng.random(n, np.float32)],
        rtol=1e-5,
        optimize=True,
    )


@pytest.mark.parametrize(
    ("dims", "axis"),
    [((1000, 1), 1), ((33, 5, 2), 2), ((70, 1, 3), 1), ((7, 1), 1), ((40, 100), 1)],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "s64", "c64"])
def test_parts_side_by_side(dims: tuple[int, ...], axis: int, dtype: str) -> None:
    """What torch.stack(…, -1) makes of computed parts."""
    x, y = (build.parameter(i, Shape(dtype, dims)) for i in (0, 1))
    parts = [build.add(x, y), build.multiply(x, y), build.subtract(y, x)]
    rng = np.random.default_rng(0)
    inputs = [
        rng.integers(-4, 5, dims).astype(numpy_dtype(dtype) if dtype != "bf16" else np.float32)
        for _ in range(2)
    ]
    check(
        module([x, y], build.concatenate(parts, axis)),
        inputs,
        rtol=1e-2 if dtype == "bf16" else 1e-6,
        optimize=True,
    )


def test_scalars_do_not_narrow_vectors() -> None:
    """A slice at a computed place of f32 is read in whole vectors, though the place is an s64."""
    m = hlo("""HloModule at
ENTRY main {
  x = f32[64,256] parameter(0)
  i = s64[] parameter(1)
  z = s64[] constant(0)
  s = f32[1,256] dynamic-slice(x, i, z), dynamic_slice_sizes={1,256}
  ROOT t = f32[1,256] tanh(s)
}
""")
    found: list[str] = []
    compile_module(m, dump=lambda name, value: found.append(value) if name == "llvm" else None)
    assert f"load <{target.host().lanes(32)} x float>" in "\n".join(found)
    check(
        m,
        [np.random.default_rng(0).random((64, 256), np.float32), np.int64(5)],
        rtol=1e-5,
        optimize=True,
    )


def tanh_chain(n: int) -> Module:
    x = y = build.parameter(0, Shape("f32", (n,)))
    for _ in range(3):
        y = build.subtract(build.tanh(build.add(x, y)), build.logistic(y))
    return module([x], y)


@pytest.mark.parametrize("n", [1024, 1031, 5003])
def test_two_vectors_of_a_long_expression_alternate(n: int) -> None:
    """A processor with few instructions in flight would wait for each of one."""
    m, found = tanh_chain(n), []
    check(m, [np.linspace(-1, 1, n, dtype=np.float32)], 1e-5, 1e-5, optimize=True)
    compile_module(
        m,
        replace(target.host(), features="", vector_bytes=32),
        dump=lambda name, value: found.append(value) if name == "llvm" else None,
    )
    assert "<16 x float>" in "\n".join(found)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_padding_beside_values_that_are_rounded(dtype):
    """LLVM moved the choice between them behind the rounding, where it has no constants of bf16."""
    m = hlo(f"""HloModule padded
ENTRY main {{
  x = {dtype}[1,1,15] parameter(0)
  z = {dtype}[] constant(0)
  ROOT p = {dtype}[1,1,18] pad(x, z), padding=0_0x0_0x1_2
}}
""")
    check(m, [np.arange(15).reshape(1, 1, 15).astype(numpy_dtype(dtype))], optimize=True)


def llvm(m: Module) -> str:
    found: list[str] = []
    wide = target.platform_target("x86_64-linux-gnu", "x86-64-v4")
    compile_module(
        m, wide, dump=lambda name, value: found.append(value) if name == "llvm" else None
    )
    return "\n".join(found)


def apart(text: str) -> list[str]:
    """Accesses element by element, the masked ones at the ends of loops left out."""
    calls = [line for line in text.split("\n") if re.search(r"masked\.(gather|scatter)", line)]
    return [line for line in calls if "splat (i1 true)" in line]


TURNS = {
    "stacked": ("f32[640,1]", "f32[640,3]", "concatenate(x, x, x), dimensions={1}"),
    "rows to columns": ("f32[50,7,48]", "f32[50,48,7]", "transpose(x), dimensions={0,2,1}"),
    "pixels": ("bf16[4,3,64,32]", "bf16[4,64,32,3]", "transpose(x), dimensions={0,2,3,1}"),
    "columns": ("f32[640,8]", "f32[640,1]", "slice(x), slice={[0:640],[3:4]}"),
    "the last ones": ("f32[641,5]", "f32[640,1]", "slice(x), slice={[1:641],[4:5]}"),
    "odd lines": ("f32[33,57]", "f32[33,29]", "slice(x), slice={[0:33],[0:57:2]}"),
}


RUNS = {
    "patches": ("f32[2,3,9,4,9,4]", "f32[2,9,9,3,4,4]", "transpose(x), dimensions={0,2,4,1,3,5}"),
    "odd patches": (
        "bf16[2,3,5,7,5,7]",
        "bf16[2,5,5,3,7,7]",
        "transpose(x), dimensions={0,2,4,1,3,5}",
    ),
    "heads": ("f32[2,33,5,12]", "f32[2,5,33,12]", "transpose(x), dimensions={0,2,1,3}"),
    "pairs": ("s64[50,30,2]", "s64[30,50,2]", "transpose(x), dimensions={1,0,2}"),
    "a few of each row": ("f32[5,90,3]", "f32[5,88,3]", "slice(x), slice={[0:5],[1:89],[0:3]}"),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_a_few_elements(name: str) -> None:
    """They are moved in vectors as wide as they are, however short loops around them are."""
    given, made, expression = RUNS[name]
    m = hlo(f"""HloModule runs
ENTRY main {{
  x = {given} parameter(0)
  ROOT y = {made} {expression}
}}
""")
    assert not re.search(r"masked\.(gather|scatter)", llvm(m))
    (x,) = m.entry.params
    numbers = np.arange(x.size).reshape(x.dims) % 200
    check(m, [numbers.astype(numpy_dtype(x.dtype))], rtol=0, optimize=True)


@pytest.mark.parametrize("name", TURNS)
def test_elements_that_lie_in_turns(name: str) -> None:
    """They are loaded and stored in whole vectors."""
    given, made, expression = TURNS[name]
    m = hlo(f"""HloModule turns
ENTRY main {{
  x = {given} parameter(0)
  ROOT y = {made} {expression}
}}
""")
    assert not apart(llvm(m))
    (x,) = m.entry.params
    numbers = np.arange(x.size, dtype=np.float32).reshape(x.dims) % 200
    check(m, [numbers], rtol=0, optimize=True)


def test_groups_of_columns_are_turned_in_tiles() -> None:
    """What all channels of a group share does not cut the channels."""
    m = hlo("""HloModule groups
ENTRY main {
  x = f32[2,32,16,5] parameter(0)
  g = f32[2,4] parameter(1)
  a = f32[2,4,640] broadcast(g), dimensions={0,1}
  b = f32[2,32,16,5] reshape(a)
  c = f32[2,32,16,5] multiply(x, b)
  ROOT y = f32[2,16,5,32] transpose(c), dimensions={0,2,3,1}
}
""")
    assert not apart(llvm(m))
    rng = np.random.default_rng(0)
    inputs = [rng.random(p.dims, np.float32) for p in m.entry.params]
    check(m, inputs, optimize=True)


@pytest.mark.parametrize("rows", [1, 66, 68])
def test_distances(rows: int) -> None:
    """Vectors that lie in turns serve several rows."""
    x, y = (build.parameter(i, Shape("f32", (n, 8))) for i, n in ((0, rows), (1, 37)))
    dims = (rows, 37, 8)
    d = build.subtract(build.broadcast(x, dims, (0, 2)), build.broadcast(y, dims, (1, 2)))
    s = build.reduce(build.multiply(d, d), build.constant(0.0, "f32"), (2,), "add")
    rng = np.random.default_rng(0)
    inputs = [rng.random(p.dims, np.float32) for p in (x, y)]
    check(module([x, y], build.exponential(build.negate(s))), inputs, rtol=1e-5, optimize=True)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rounded_values_that_lie_in_turns(dtype):
    """LLVM moved bf16 instead of their bits, and has no instructions for that."""
    m = hlo(f"""HloModule rounded
ENTRY main {{
  x = {dtype}[252,3] parameter(0)
  first = {dtype}[252,1] slice(x), slice={{[0:252], [0:1]}}
  last = {dtype}[252,1] slice(x), slice={{[0:252], [2:3]}}
  two = {dtype}[] constant(2)
  twos = {dtype}[252,1] broadcast(two), dimensions={{}}
  twice = {dtype}[252,1] multiply(last, twos)
  less = {dtype}[252,1] subtract(first, twos)
  three = {dtype}[252,3] concatenate(first, twice, less), dimensions={{1}}
  numbers = {dtype}[3] iota(), iota_dimension=0
  a = {dtype}[252,3,3] broadcast(three), dimensions={{0,1}}
  b = {dtype}[252,3,3] broadcast(numbers), dimensions={{2}}
  product = {dtype}[252,3,3] multiply(a, b)
  ROOT r = ({dtype}[252,3], {dtype}[252,3,3]) tuple(three, product)
}}
""")
    check(m, [(np.arange(756) % 64).reshape(252, 3).astype(numpy_dtype(dtype))], optimize=True)


def uneven(dims: tuple[int, ...], axis: int) -> Module:
    """Shifted along `axis`, with a border of constants around it."""
    x = build.parameter(0, Shape("f32", dims))

    def part(low: int, high: int) -> Instruction:
        starts = [low if d == axis else 0 for d in range(len(dims))]
        limits = [high if d == axis else n for d, n in enumerate(dims)]
        return build.slice_(x, starts, limits)

    n = dims[axis]
    parts = [part(n - 3, n), build.negate(x), build.reverse(part(0, n - 3), (axis,))]
    joined = build.concatenate(parts, axis)
    padding = [(2, 1, 0)] * len(dims)
    return module([x], build.pad(joined, build.constant(7.0, "f32"), padding))


@pytest.mark.parametrize(
    "dims, axis", [((5000,), 0), ((9, 40), 1), ((9, 40, 4), 1), ((2, 40000), 1)]
)
def test_loops_are_cut_between_pieces(dims: tuple[int, ...], axis: int) -> None:
    m = uneven(dims, axis)
    assert " select <" not in llvm(m)
    check(m, [np.random.default_rng(0).random(dims, np.float32)], optimize=True)


def test_nothing_is_read_beside_a_guarded_array() -> None:
    """Vectors that repeat, and tiles, would begin before the array or end behind it."""
    x = build.parameter(0, Shape("f32", (8, 1)))
    two = build.concatenate([x, build.broadcast(build.reshape(x, (8,)), (8, 3), (0,))], 1)
    short = build.pad(two, build.constant(0.0, "f32"), [(1, 2, 0), (0, 0, 0)])
    assert "load <4 x float>" not in llvm(module([x], short))
    y = build.parameter(0, Shape("f32", (129, 9, 17)))
    longer = build.concatenate([y, build.slice_(y, (0, 0, 0), (129, 9, 1))], 2)
    assert "load <16 x float>" not in llvm(module([y], build.transpose(longer, (2, 1, 0))))


def test_rows_of_other_pieces_are_not_reached() -> None:
    """Vectors that are masked out where there is no memory take long: where a loop is not cut
    between pieces, their address is one that can be read."""
    x = build.parameter(0, Shape("f32", (12, 32)))
    shifted = build.concatenate(
        [build.slice_(x, (5, 0), (12, 32)), build.slice_(x, (0, 0), (5, 32))], 0
    )
    parted = build.transpose(build.reshape(shifted, (3, 4, 32)), (1, 0, 2))
    m = module([x], parted)
    text = llvm(m)
    assert text.count("@llvm.masked.load") == len(re.findall(r"select i1 .*@torch_hlo_zeros", text))
    assert "@llvm.masked.load" in text
    check(m, [np.random.default_rng(0).random((12, 32), np.float32)], optimize=True)
