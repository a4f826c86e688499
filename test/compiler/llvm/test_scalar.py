"""Every pointwise opcode on every element type it takes, against the evaluator; every conversion;
accuracy of the functions."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from test.compiler.compiled import check, module, parameter, run
from test.ptx.test_kernels import run as run_ptx
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.numeric import round_to
from torch_hlo.hlo.ir.opcodes import OPCODES
from torch_hlo.hlo.ir.shape import DTYPES, Shape, numpy_dtype
from torch_hlo.hlo.stablehlo import parse_stablehlo, stablehlo_text
from torch_hlo.hlo.text.parser import parse_module

N = 77  # whole vectors and a tail, for every vector width
CASES = [(name, row.kinds, row.arity) for name, row in OPCODES.items() if row.kinds]
EXACT = {
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs", "sqrt", "floor",
    "ceil", "sign", "round-nearest-afz", "round-nearest-even",
}  # fmt: skip
RTOL = {
    "f64": 2e-14,
    "f32": 5e-7,
    "c64": 3e-6,
    "c128": 1e-11,
    "bf16": 2**-7,
    "f16": 2**-10,
}


def sample(dtype: str, seed: int) -> np.ndarray:
    """Ordinary values and the special ones of the type."""
    rng, row = np.random.default_rng(seed), DTYPES[dtype]
    if row.kind == "p":
        return rng.integers(0, 2, N).astype(bool)
    if row.kind in "su":
        low, high = (
            (-(1 << row.bits - 1), (1 << row.bits - 1) - 1)
            if row.kind == "s"
            else (0, (1 << row.bits) - 1)
        )
        values = rng.integers(max(low, -20), min(high, 20) + 1, N).astype(object)
        values[:6] = [0, 1, low, high, min(high, 3), max(low, -1)]
        return np.array(list(values), numpy_dtype(dtype))
    if row.kind == "c":
        return (2 * rng.standard_normal(N) + 2j * rng.standard_normal(N)).astype(numpy_dtype(dtype))
    values = rng.standard_normal(N) * rng.choice([0.1, 1, 5, 50], N)
    values[:8] = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5]
    rng.shuffle(values)
    return round_to(values, dtype)


@pytest.mark.parametrize("op,kinds,arity", CASES, ids=[c[0] for c in CASES])
def test_opcode(op, kinds, arity):
    dtypes = [d for d in DTYPES if DTYPES[d].kind in kinds]
    if op == "next-after":  # refused: their codes have no sign, or no order
        dtypes = [d for d in dtypes if d not in ("f4e2m1fn", "f8e8m0fnu")]
    params, roots, inputs = [], [], []
    for d in dtypes:
        mine = [parameter(len(params) + i, d, N) for i in range(arity)]
        inputs += [sample(d, len(params) + i) for i in range(arity)]
        params += mine
        roots.append(instr(op, tuple(mine)))
    m = module(params, *roots)
    with np.errstate(all="ignore"):
        expected = evaluate(m, inputs)
    for dtype, e, f in zip(dtypes, expected, run(m, inputs), strict=True):
        if f.dtype.kind not in "fc":
            np.testing.assert_array_equal(f, e, err_msg=dtype)
        else:
            exact = op in EXACT and DTYPES[dtype].kind == "f"
            np.testing.assert_allclose(
                f,
                e,
                rtol=0 if exact else RTOL.get(dtype, 0.13),
                atol=1e-30,
                err_msg=dtype,
            )


@pytest.mark.parametrize("source", [d for d in DTYPES if d != "token"])
def test_convert(source):
    rng, row = np.random.default_rng(0), DTYPES[source]
    values = rng.standard_normal(N) * rng.choice([1, 100, 1e6, 1e20], N)
    values[:8] = [0, -0.0, 1.5, 2.5, np.nan, np.inf, -np.inf, -1]
    if row.kind in "psu":
        values = sample(source, 0)
    with np.errstate(all="ignore"):
        values = round_to(values, source)
    x = parameter(0, source, N)
    check(
        module(
            [x],
            *[instr("convert", (x,), Shape(d, (N,))) for d in DTYPES if d != "token"],
        ),
        [values],
        1e-7,
    )


def test_compare_select_clamp_and_friends():
    a, b, p = parameter(0, "f32", N), parameter(1, "f32", N), parameter(2, "pred", N)
    roots = [instr("compare", (a, b), direction=d) for d in ("EQ", "NE", "LT", "LE", "GT", "GE")]
    roots += [instr("compare", (a, b), direction=d, type="TOTALORDER") for d in ("EQ", "LT", "GE")]
    roots += [
        instr("select", (p, a, b)),
        instr("clamp", (b, a, a)),
        instr("complex", (a, b)),
    ]
    roots += [
        instr("reduce-precision", (a,), exponent_bits=e, mantissa_bits=m)
        for e, m in ((5, 10), (8, 7), (4, 3), (5, 23))
    ]
    check(
        module([a, b, p], *roots),
        [sample("f32", 0), sample("f32", 1), sample("pred", 2)],
        0,
    )


ULP = {
    "exponential": (-87, 88, 1.1), "log": (1e-30, 1e4, 1.0), "tanh": (-10, 10, 6.0),
    "erf": (-5, 5, 6.0), "logistic": (-80, 80, 2.5), "sine": (-1e4, 1e4, 2.0),
    "cosine": (-1e4, 1e4, 2.0), "exponential-minus-one": (-20, 88, 1.5),
    "log-plus-one": (-0.99, 100, 1.6), "sinh": (-88, 88, 2.0), "cosh": (-88, 88, 2.0),
    "asinh": (-1e4, 1e4, 3.0), "acosh": (1, 1e4, 3.0), "atanh": (-0.999, 0.999, 3.0),
    "tan": (-1e3, 1e3, 2.5), "asin": (-1, 1, 2.5), "acos": (-1, 1, 2.5),
}  # fmt: skip


@pytest.mark.parametrize("op", ULP)
def test_single_precision_error(op):
    low, high, allowed = ULP[op]
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(low, high, 50000), rng.uniform(max(low, -1), min(high, 1), 50000)]
    ).astype(np.float32)
    single, double = parameter(0, "f32", len(x)), parameter(0, "f64", len(x))
    (found,), (expected,) = (
        run(module([single], instr(op, (single,))), [x]),
        evaluate(module([double], instr(op, (double,))), [x.astype(float)]),
    )
    error = np.abs(found - expected) / np.spacing(np.abs(expected).astype(np.float32))
    normal = np.abs(expected) > 1.2e-38
    assert error[normal].max() <= allowed


def test_double_precision_error_of_erf():
    x = np.concatenate(
        [
            np.linspace(-7, 7, 4001),
            np.logspace(-320, 0, 300),
            [0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, np.nextafter(0.5, 1), 1e300],
        ]
    )
    (found,) = run(
        module([parameter(0, "f64", len(x))], instr("erf", (parameter(0, "f64", len(x)),))),
        [x],
    )
    expected = np.array([math.erf(v) for v in x])
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.signbit(found[:-5]), np.signbit(expected[:-5]))
    assert (
        np.nanmax(np.abs(found - expected) / np.spacing(np.maximum(np.abs(expected), 1e-300))) <= 2
    )


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_remainder_is_exact(dtype):
    """Also where the quotient rounds up to a whole number, is longer than a mantissa, or an operand
    is special."""
    rng, n = np.random.default_rng(0), 20000
    with np.errstate(all="ignore"):
        a = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(numpy_dtype(dtype))
        b = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(numpy_dtype(dtype))
        a[: n // 4] = np.nextafter(b[: n // 4] * rng.integers(1, 9, n // 4).astype(a.dtype), 0)
        special = np.array([0, -0.0, 1e-42, -3, 7e30, np.inf, -np.inf, np.nan], a.dtype)
        a[-64:], b[-64:] = np.repeat(special, 8), np.tile(special, 8)
        x, y = parameter(0, dtype, n), parameter(1, dtype, n)
        (found,) = run(module([x, y], instr("remainder", (x, y))), [a, b])
        expected = np.fmod(a, b)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(
        np.signbit(found),
        np.signbit(expected) & ~np.isnan(found) | np.signbit(found) & np.isnan(found),
    )


ODD = (
    "tanh sinh asinh asin tan sine erf exponential-minus-one log-plus-one sqrt cbrt negate sign"
    " floor ceil round-nearest-even".split()
)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
def test_sign_of_zero(dtype):
    """An odd function of -0 is -0: atan2 and division tell the zeros apart."""
    x = parameter(0, dtype, 40)
    values = np.array([0.0, -0.0] * 20, numpy_dtype(dtype))
    m = module([x], *[instr(op, (x,)) for op in ODD])
    for op, found in zip(ODD, run(m, [values]), strict=True):
        expected = np.signbit(values.astype(float)) != (op == "negate")
        np.testing.assert_array_equal(np.signbit(found.astype(float)), expected, err_msg=op)


@pytest.mark.parametrize("dtype", ["c64", "c128"])
def test_complex_cuts(dtype):
    """Either side of a cut is told by the sign of a zero."""
    parts = (0.0, -0.0, 1.0, -1.0, 3.0, -3.0)
    values = np.array([complex(a, b) for a in parts for b in parts], numpy_dtype(dtype))
    x = parameter(0, dtype, len(values))
    with np.errstate(all="ignore"):
        check(
            module(
                [x],
                *[instr(op, (x,)) for op in "acos acosh asin asinh atanh log sqrt".split()],
            ),
            [values],
            1e-6,
        )


@pytest.mark.parametrize("op, last", [("tanh", 9.1), ("erf", 3.95)])
def test_odd_quotients_end_at_one(op, last):
    """Floats around where the quotient is cut off, to the last bit."""
    around = np.float32(last) + np.arange(-4096, 4096) * np.spacing(np.float32(last))
    x = np.concatenate([around, [np.inf, np.nan, 1e-40, 0.0]]).astype(np.float32)
    x = np.concatenate([x, -x])
    p = parameter(0, "f32", len(x))
    (found,) = run(module([p], instr(op, (p,))), [x])
    beyond = np.abs(x) >= np.float32(last)
    np.testing.assert_array_equal(found[beyond], np.sign(x[beyond]))
    assert np.nanmax(np.abs(found)) == 1
    np.testing.assert_array_equal(np.isnan(found), np.isnan(x))
    np.testing.assert_array_equal(np.signbit(found[x == 0]), np.signbit(x[x == 0]))


LONG = np.longdouble
DOUBLE = {
    "exponential": (np.exp, -700, 709, 1.5), "exponential-minus-one": (np.expm1, -50, 709.7, 1.5),
    "log": (np.log, 1e-5, 1e5, 1.5), "log-plus-one": (np.log1p, -1, 100, 2),
    "sinh": (np.sinh, -710, 710, 2.5), "cosh": (np.cosh, -710, 710, 2),
    "tanh": (np.tanh, -20, 20, 2), "asin": (np.arcsin, -1, 1, 2.5), "acos": (np.arccos, -1, 1, 2),
}  # fmt: skip


@pytest.mark.parametrize("op", DOUBLE)
def test_double_precision_error(op):
    """In ulp, of large and of small operands, and at the ends."""
    exact, low, high, allowed = DOUBLE[op]
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(low, high, 20000),
            rng.uniform(max(low, -1.5), min(high, 1.5), 20000),
            [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-310, low, high],
        ]
    )
    (found,) = run(
        module([parameter(0, "f64", len(x))], instr(op, (parameter(0, "f64", len(x)),))),
        [x],
    )
    with np.errstate(all="ignore"):
        expected = exact(x.astype(LONG))
        error = np.abs(found - expected) / np.spacing(np.abs(expected.astype(float)))
    finite = np.isfinite(expected.astype(float))
    np.testing.assert_array_equal(
        np.where(finite, 0, found), np.where(finite, 0, expected.astype(float))
    )
    assert error[finite & (np.abs(expected) > 1e-307)].max() <= allowed


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_arctangent(dtype):
    """atan is atan2 of 1; no quotient overflows on the way."""
    huge = 3e38 if dtype == "f32" else 1e308
    x = np.concatenate(
        [
            np.random.default_rng(0).standard_normal(5000) * 3,
            [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-310, huge, 2.414, 0.66],
        ]
    ).astype(numpy_dtype(dtype))
    p = parameter(0, dtype, len(x))
    (found,) = run(module([p], instr("atan2", (p, build.full_like(p, 1)))), [x])
    np.testing.assert_array_max_ulp(
        np.where(np.isnan(x), 0, found),
        np.where(np.isnan(x), 0, np.arctan(x.astype(float))).astype(x.dtype),
        2.5,
    )
    np.testing.assert_array_equal(np.signbit(found[:-5]), np.signbit(x[:-5]))


@pytest.mark.parametrize("dtype, allowed", [("f32", 6), ("f64", 4)])
def test_complementary_error_function_and_inverse(dtype, allowed):
    rng, kind = np.random.default_rng(0), numpy_dtype(dtype)
    last = 9 if dtype == "f32" else 26
    x = np.concatenate(
        [
            rng.uniform(-6, last, 2000),
            rng.uniform(-1, 1, 1000),
            [0.0, -0.0, 0.5, -0.5, np.inf, -np.inf, np.nan, 1e-40, 30.0],
        ]
    ).astype(kind)
    (found,) = run(
        module([parameter(0, dtype, len(x))], instr("erfc", (parameter(0, dtype, len(x)),))),
        [x],
    )
    expected = np.array([math.erfc(v) for v in x.astype(float)])
    np.testing.assert_array_max_ulp(
        np.where(np.isnan(x), 0, found),
        np.where(np.isnan(x), 0, expected).astype(kind),
        allowed,
    )
    assert np.isnan(found[np.isnan(x)]).all()
    near = 1 - 10.0 ** rng.uniform(-15 if dtype == "f64" else -6, -1, 500)
    x = np.concatenate(
        [
            rng.uniform(-1, 1, 2000),
            near,
            -near,
            [0.0, -0.0, 1.0, -1.0, 1.5, -2.0, np.nan, np.inf, 1e-300],
        ]
    ).astype(kind)
    (found,) = run(
        module(
            [parameter(0, dtype, len(x))],
            instr("erf-inv", (parameter(0, dtype, len(x)),)),
        ),
        [x],
    )
    (expected,) = evaluate(
        module(
            [parameter(0, "f64", len(x))],
            instr("erf-inv", (parameter(0, "f64", len(x)),)),
        ),
        [x.astype(float)],
    )
    np.testing.assert_allclose(
        found, expected.astype(kind), rtol=4 * np.finfo(kind).eps, equal_nan=True
    )


def test_powers_of_doubles_are_exact_where_they_can_be():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            10.0 ** rng.uniform(-300, 300, 4000),
            rng.integers(1, 1000, 4000),
            rng.uniform(0.5, 2, 4000),
        ]
    )
    y = np.concatenate(
        [
            rng.uniform(-1, 1, 4000),
            rng.integers(-5, 6, 4000),
            rng.uniform(-600, 600, 4000),
        ]
    )
    special = np.array(
        [
            0.0,
            -0.0,
            1,
            -1,
            0.5,
            -2.5,
            3,
            -3,
            np.inf,
            -np.inf,
            np.nan,
            5e-324,
            1e308,
            1e17,
        ]
    )
    x, y = (
        np.concatenate([x, np.repeat(special, len(special))]),
        np.concatenate([y, np.tile(special, len(special))]),
    )
    a, b = parameter(0, "f64", len(x)), parameter(1, "f64", len(x))
    (found,) = run(module([a, b], instr("power", (a, b))), [x, y])
    with np.errstate(all="ignore"):
        wide = np.power(x.astype(LONG), y.astype(LONG))
        expected = wide.astype(float)
        error = np.abs(found - wide) / np.spacing(np.abs(expected))
    normal = np.isfinite(expected) & (np.abs(expected) > 1e-307)
    np.testing.assert_array_equal(np.where(normal, 0, found), np.where(normal, 0, expected))
    assert error[normal].max() <= 0.8
    np.testing.assert_array_equal(
        np.signbit(found[~np.isnan(expected)]),
        np.signbit(expected[~np.isnan(expected)]),
    )


@pytest.mark.parametrize("near", [8191.9, 1e5, 1e13])
def test_circular_functions_of_large_floats(near):
    """Up to a bound in floats, then in doubles, then by libm, all lanes of a vector as the largest
    wants it."""
    x = np.array([near, 0.5, -near, 3.0, 8192.0, 1e-30, 0.0, -0.0] * 4, np.float32)
    p = parameter(0, "f32", len(x))
    for op, exact in (("sine", np.sin), ("cosine", np.cos), ("tan", np.tan)):
        (found,) = run(module([p], instr(op, (p,))), [x])
        np.testing.assert_allclose(found, exact(x.astype(float)), rtol=3e-7)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "f8e4m3fn", "f8e5m2fnuz"])
def test_next_after_is_exact(dtype):
    """Every step lands on the neighbouring value: nothing lies between, and stepping back returns.
    Against PyTorch where it has the type."""
    edges = [0.0, -0.0, 1.0, -1.0, 0.1, -240.0, np.inf, -np.inf, np.nan]
    if dtype in ("f64", "f32"):
        info = np.finfo(numpy_dtype(dtype))
        edges += [info.max, -info.max, info.tiny, info.smallest_subnormal]
    a, b = (v.ravel() for v in np.meshgrid(round_to(edges, dtype), round_to(edges, dtype)))
    x, y = parameter(0, dtype, a.size), parameter(1, dtype, a.size)
    m = module([x, y], instr("next-after", (x, y)))
    (found,), (on_gpu,), (expected,) = run(m, [a, b]), run_ptx(m, [a, b]), evaluate(m, [a, b])
    for got in (found, on_gpu):
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[got == 0]))
    if dtype in ("f64", "f32", "bf16"):
        there = getattr(torch, DTYPES[dtype].torch)
        given = torch.nextafter(torch.tensor(a).to(there), torch.tensor(b).to(there))
        np.testing.assert_array_equal(found, given.to(torch.float64).numpy())
    moved = np.isfinite(a) & np.isfinite(found) & (a != b)
    (back,) = evaluate(m, [found, a])
    np.testing.assert_array_equal(back[moved], a[moved])


def test_next_after_is_chlo_next_after():
    text = """module @m {
  func.func public @main(%0: tensor<4xf32>, %1: tensor<4xf32>) -> tensor<4xf32> {
    %2 = chlo.broadcast_next_after %0, %1 : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    return %2 : tensor<4xf32>
  }
}"""
    read = parse_stablehlo(text)
    assert read.entry.root is build.next_after(*read.entry.params)
    assert "chlo.next_after" in stablehlo_text(read)
    assert parse_stablehlo(stablehlo_text(read)).entry.root is read.entry.root


def bf16_program(excess: bool, f):
    """f(a, b) of two arrays, which need not be rounded within with `excess`; and values of them."""
    rng = np.random.default_rng(0)
    a, b = parameter(0, "bf16", 17, 59), parameter(1, "bf16", 17, 59)
    values = [round_to(rng.uniform(0.1, 9, (17, 59)), "bf16") for _ in "ab"]
    m = dataclasses.replace(module([a, b], f(a, b)), excess_precision=excess)
    assert parse_module(str(m)).excess_precision == excess
    return m, values


def test_excess_precision_leaves_out_roundings():
    """Of what is not stored: a chain is off by the last rounding alone, and by more without."""

    def chain(a, b, multiply, tanh, add):
        for _ in range(4):
            a = add(tanh(multiply(a, b)), a)
        return a

    errors = []
    for excess in (True, False):
        m, values = bf16_program(
            excess,
            lambda a, b: chain(
                a, b,
                lambda x, y: instr("multiply", (x, y)),
                lambda x: instr("tanh", (x,)),
                lambda x, y: instr("add", (x, y)),
            ),
        )  # fmt: skip
        (found,) = run(m, values, optimize=True)
        exact = chain(*(v.astype(float) for v in values), np.multiply, np.tanh, np.add)
        errors.append((np.abs(found - exact) / exact).max())
    assert errors[0] < 2.0**-8 < errors[1]


def test_comparisons_see_what_is_rounded():
    """One in each row equals the largest, also where neither was stored."""

    def largest(a, b):
        x = instr("add", (instr("multiply", (a, b)), a))
        top = build.reduce(x, build.constant(-np.inf, "bf16"), (1,), "maximum")
        return build.compare(x, build.broadcast(top, x.shape.dims, (0,)), "EQ")

    for excess in (True, False):
        (found,) = run(*bf16_program(excess, largest), optimize=True)
        assert found.any(1).all()


def test_steps_of_functions_are_where_rounded_values_have_them():
    def rounded(a, b):
        return instr("floor", (instr("multiply", (a, b)),))

    found, expected = (run(*bf16_program(e, rounded), optimize=True)[0] for e in (True, False))
    np.testing.assert_array_equal(found, expected)
