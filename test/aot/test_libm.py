"""The library's own libm against exact values, with and without a fused multiply-add."""

from __future__ import annotations

import ctypes
import math
import random
from dataclasses import replace
from fractions import Fraction

import llvmlite.binding as llvm
import numpy as np
import pytest

from torch_hlo.compiler.llvm import libm
from torch_hlo.compiler.llvm.machine_code import prelude
from torch_hlo.compiler.llvm.target import host

D, F = ctypes.c_double, ctypes.c_float


@pytest.fixture(scope="module", params=["fma", "no fma"])
def functions(request):
    """name -> the compiled function, as C would call it."""
    target = (
        host()
        if request.param == "fma"
        else replace(host(), features=host().features.replace("+fma,", "-fma,"))
    )
    text = prelude(target) + "\n".join(define(target) for define in libm.ROUTINES.values()).replace(
        "define internal", "define"
    )
    if request.param == "no fma":
        text = text.replace("@llvm.fma.", "@llvm.fmuladd.")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), target.machine())
    engine.finalize_object()

    def get(name, count=1):
        kind = F if name.endswith("f") else D
        return ctypes.CFUNCTYPE(kind, *[kind] * count)(engine.get_function_address(name))

    get.engine = engine
    return get


def same(a, b):
    return a == b and math.copysign(1, a) == math.copysign(1, b) or math.isnan(a) and math.isnan(b)


def ulps(got, want):
    return 0.0 if same(got, want) else abs(got - want) / math.ulp(want)


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_circular_functions_of_any_size(functions, name):
    f, want, rng = functions(name), getattr(math, name), random.Random(0)
    for _ in range(3000):
        x = rng.choice(
            (
                rng.uniform(-10, 10),
                rng.uniform(-1e6, 1e6),
                math.ldexp(rng.uniform(-1, 1), rng.randrange(-30, 1025)),
            )
        )
        assert ulps(f(x), want(x)) < 4, x
    assert all(math.isnan(f(x)) for x in (math.inf, -math.inf, math.nan))
    assert same(functions("sin")(-0.0), -0.0) and same(functions("tan")(-0.0), -0.0)
    # The double that is nearest to a multiple of pi/2: all but 61 bits of the product cancel.
    hard = 6381956970095103.0 * 2.0**797
    assert functions("cos")(hard) == pytest.approx(-4.6871659242546277e-19, rel=1e-14)
    assert functions("sinf")(1e30) == pytest.approx(math.sin(np.float32(1e30)), rel=1e-6)


def test_pow(functions):
    f, rng = functions("pow", 2), random.Random(0)
    for _ in range(4000):
        x = rng.choice(
            (
                rng.uniform(0, 3),
                math.ldexp(rng.uniform(0.5, 1), rng.randrange(-1073, 1024)),
                rng.uniform(0.9, 1.1),
            )
        )
        y = rng.choice(
            (
                rng.uniform(-3, 3),
                rng.uniform(-300, 300),
                math.ldexp(rng.uniform(-1, 1), rng.randrange(-20, 20)),
                float(rng.randrange(-9, 9)),
            )
        )
        try:
            want = math.pow(x, y)
        except OverflowError:
            want = math.inf
        assert ulps(f(x, y), want) < 2.5, (x, y)
    special = (
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        -2.0,
        0.5,
        -0.5,
        3.0,
        -3.0,
        math.inf,
        -math.inf,
        math.nan,
        1e308,
        -1e308,
        5e-324,
        1e17,
        -1e17,
    )
    for x in special:
        for y in special:
            try:
                want = math.pow(x, y)
            except (ValueError, OverflowError):  # where C gives nan or an infinity
                with np.errstate(all="ignore"):
                    want = float(np.power(np.float64(x), np.float64(y)))
            assert ulps(f(x, y), want) < 2.5, (x, y, f(x, y), want)


def test_fmod_is_exact(functions):
    f, rng = functions("fmod", 2), random.Random(0)
    for _ in range(3000):
        x, y = (math.ldexp(rng.uniform(-1, 1), rng.randrange(-1074, 1024)) for _ in range(2))
        y = rng.choice((y, x * rng.uniform(0.01, 1))) or 1.0
        assert same(f(x, y), math.fmod(x, y)), (x, y)
    for x, y in ((1.0, 0.0), (math.inf, 1.0), (math.nan, 1.0), (1.0, math.nan)):
        assert math.isnan(f(x, y))
    assert same(f(-0.0, 2.0), -0.0) and f(3.0, math.inf) == 3.0
    assert functions("fmodf", 2)(1e30, 7.0) == math.fmod(float(np.float32(1e30)), 7.0)


def test_rounding_and_extremes(functions):
    r = functions("round")
    for x in (
        0.5,
        -0.5,
        0.49999999999999994,
        1.5,
        2.5,
        -0.2,
        4503599627370497.0,
        math.inf,
        -0.0,
    ):
        want = (
            x
            if math.isinf(x)
            else math.copysign(float(math.floor(abs(Fraction(x)) + Fraction(1, 2))), x)
        )
        assert same(r(x), want), x
    high, low = functions("fmax", 2), functions("fmin", 2)
    assert (high(1.0, 2.0), low(1.0, 2.0), high(math.nan, 2.0), low(1.0, math.nan)) == (
        2.0,
        1.0,
        2.0,
        1.0,
    )
