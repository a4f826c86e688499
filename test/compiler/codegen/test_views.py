"""Opcodes that move elements, alone and fused, static and symbolic, against the evaluator."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler.compiled import check, module, parameter, run
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.numeric import round_to
from torch_hlo.hlo.ir.shape import Shape

CASES = {
    "broadcast": ("broadcast", [(7,)], (3, 7, 5), {"dimensions": (1,)}),
    "broadcast scalar": ("broadcast", [()], (37,), {"dimensions": ()}),
    "broadcast empty": ("broadcast", [(0,)], (3, 0, 5), {"dimensions": (1,)}),
    "transpose": ("transpose", [(3, 70, 33)], None, {"dimensions": (2, 0, 1)}),
    "transpose heads": (
        "transpose",
        [(8, 16, 4, 64)],
        None,
        {"dimensions": (0, 2, 1, 3)},
    ),
    "transpose tiles": ("transpose", [(50, 35)], None, {"dimensions": (1, 0)}),
    "reshape": ("reshape", [(6, 35)], (5, 42), {}),
    "slice": ("slice", [(10, 90)], None, {"slice": ((1, 9, 2), (3, 80, 1))}),
    "slice strided": ("slice", [(10, 90)], None, {"slice": ((1, 9, 1), (3, 80, 3))}),
    "slice second": ("slice", [(10, 90)], None, {"slice": ((1, 9, 1), (1, 90, 2))}),
    "slice fourth": ("slice", [(3, 300)], None, {"slice": ((0, 3, 1), (3, 300, 4))}),
    "reverse": ("reverse", [(4, 77)], None, {"dimensions": (0, 1)}),
    "concatenate": (
        "concatenate",
        [(4, 7), (4, 40), (4, 1)],
        None,
        {"dimensions": (1,)},
    ),
    "concatenate rows": (
        "concatenate",
        [(4, 7), (0, 7), (2, 7)],
        None,
        {"dimensions": (0,)},
    ),
    "pad": ("pad", [(5, 30), ()], None, {"padding": ((1, 2, 0), (3, -2, 0))}),
    "pad interior": ("pad", [(5, 30), ()], None, {"padding": ((0, 0, 1), (-1, 4, 2))}),
    "pad empty": ("pad", [(0, 3), ()], None, {"padding": ((1, 2, 0), (3, 2, 0))}),
}
rng = np.random.default_rng(0)


def values(dtype: str, dims) -> np.ndarray:
    v = rng.standard_normal(dims) * 20
    return v > 0 if dtype == "pred" else round_to(v + 1j if dtype.startswith("c") else v, dtype)


@pytest.mark.parametrize("dtype", ["f32", "s8", "pred", "c64", "bf16", "s64", "f8e5m2"])
@pytest.mark.parametrize("case", CASES)
def test_moves(case, dtype):
    op, shapes, out, attrs = CASES[case]
    params = [parameter(i, dtype, *s) for i, s in enumerate(shapes)]
    x = instr(op, tuple(params), Shape(dtype, out) if out is not None else None, **attrs)
    y = instr("or" if dtype == "pred" else "add", (x, x))
    inputs = [values(dtype, s) for s in shapes]
    for optimize in (False, True):
        check(module(params, x, y), inputs, 0, optimize=optimize)


@pytest.mark.parametrize("starts", [(2, 5), (-3, 100), (8, 31)])
def test_dynamic_slices_clamp(starts):
    x, u, i, j = (
        parameter(0, "f32", 9, 50),
        parameter(1, "f32", 2, 17),
        parameter(2, "s32"),
        parameter(3, "s32"),
    )
    cut = instr("dynamic-slice", (x, i, j), dynamic_slice_sizes=(3, 20))
    put = instr("dynamic-update-slice", (x, u, i, j))
    inputs = [values("f32", (9, 50)), values("f32", (2, 17)), *map(np.int32, starts)]
    for optimize in (False, True):
        check(module([x, u, i, j], cut, put), inputs, 0, optimize=optimize)
        check(module([x, u, i, j], put, aliases=((0, 0),)), inputs, 0, optimize=optimize)


def test_iota():
    roots = [
        instr("iota", (), Shape(t, (3, 5, 40)), iota_dimension=d)
        for d in range(3)
        for t in ("f32", "s64", "bf16", "c64", "u8", "f64")
    ]
    check(module([], *roots), [], 0)


def test_swapped_and_returned_parameters():
    """Aliased outputs that are each other's parameters, and a parameter returned twice."""
    a, b = parameter(0, "f32", 100), parameter(1, "f32", 100)
    inputs = [values("f32", (100,)), values("f32", (100,))]
    check(module([a, b], b, a, aliases=((0, 0), (1, 1))), inputs, 0)
    check(module([a, b], a, a, instr("add", (a, b))), inputs, 0)


@pytest.mark.parametrize("n", [1, 2, 17, 300])
def test_symbolic_sizes(n):
    s = symbol("s0")
    x, b = parameter(0, "f32", s, 33), parameter(1, "f32", 33)
    y = instr("add", (x, instr("broadcast", (b,), Shape("f32", (s, 33)), dimensions=(1,))))
    t = instr("transpose", (y,), dimensions=(1, 0))
    flat = instr("reshape", (t,), Shape("f32", (33 * s,)))
    joined = instr("concatenate", (x, y), dimensions=(0,))
    m = module([x, b], y, t, instr("exponential", (flat,)), joined, symbols=(("s0", 0, 0),))
    v, w = values("f32", (n, 33)) / 20, values("f32", (33,)) / 20
    for optimize in (False, True):
        found = run(m, [v, w], optimize)
        for f, e in zip(
            found,
            (
                v + w,
                (v + w).T,
                np.exp((v + w).T.reshape(-1)),
                np.concatenate([v, v + w]),
            ),
            strict=True,
        ):
            np.testing.assert_allclose(f, e, rtol=1e-6)


def test_fused_transposes_in_tiles():
    x, y = parameter(0, "f32", 40, 70), parameter(1, "f32", 70, 40)
    z = instr("multiply", (instr("transpose", (x,), dimensions=(1, 0)), y))
    check(
        module([x, y], z),
        [values("f32", (40, 70)), values("f32", (70, 40))],
        0,
        optimize=True,
    )
    check(
        module([x, y], z, aliases=((0, 1),)),
        [values("f32", (40, 70)), values("f32", (70, 40))],
        0,
        optimize=True,
    )


def test_equal_layers_are_written_once():
    from torch_hlo.compiler.compile import emit
    from torch_hlo.compiler.llvm.target import host

    x, w = parameter(0, "f32", 64, 64), parameter(1, "f32", 64, 64)
    y = x
    for _ in range(20):
        y = instr("tanh", (instr("add", (y, w)),))
    program, _ = emit(module([x, w], y), host())
    assert len([n for n in program.functions if n.startswith("loop_")]) <= 4


@pytest.mark.parametrize("n", [1, 3, 7, 38])
def test_sizes_are_rounded_down_as_in_python(n):
    s = symbol("s0")
    x, one = parameter(0, "f32", s), parameter(1, "f32")
    up, rest = -(-s // 5), (2 - s) % 5 + 1
    m = module(
        [x, one],
        *(instr("broadcast", (one,), Shape("f32", (size,)), dimensions=()) for size in (up, rest)),
        symbols=(("s0", 0, 0),),
    )
    found = run(m, [np.zeros(n, np.float32), np.float32(1)])
    assert [f.tolist() for f in found] == [
        [1.0] * -(-n // 5),
        [1.0] * ((2 - n) % 5 + 1),
    ]


@pytest.mark.parametrize("dims", [(64, 96), (40, 70), (3, 40, 35), (2, 5, 16, 33)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_costly_values_of_transposed_arrays_in_tiles(dims, dtype):
    """The body is written once, in a loop over a tile's rows, which finds transposed blocks on the
    stack: two arrays, one of them read a second time from elsewhere."""
    turn = (0, *range(2, len(dims)), 1) if len(dims) > 2 else (1, 0)
    x, w = parameter(0, dtype, *dims), parameter(1, dtype, *dims)
    y = instr("transpose", (instr("logistic", (instr("tanh", (x,)),)),), dimensions=turn)
    moved = instr("reverse", (instr("transpose", (x,), dimensions=turn),), dimensions=(0,))
    z = instr("transpose", (instr("tanh", (w,)),), dimensions=turn)
    inputs = [round_to(values("f32", dims) / 50, dtype), round_to(values("f32", dims), dtype)]
    for root in (y, instr("multiply", (y, z)), instr("add", (y, instr("sine", (moved,))))):
        rtol = 1e-5 if dtype == "f32" else 2e-2
        check(module([x, w], root), inputs, rtol, rtol, optimize=True)
