"""Elementwise ops on the values where implementations differ: nan, infinities, signed zeros, ties,
negative operands, all dtypes."""

from __future__ import annotations

import math

import pytest
import torch

from .support import Lifted, aten, check

EDGES = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.5, 3.0, -3.0, 7.25, -7.25, 20.5, -20.5, 88.0,
    -88.0, 100.0, 1e-6, -1e-6, 1e-20, 3.4e38, math.inf, -math.inf, math.nan,
]  # fmt: skip
UNARY = [
    "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "sin", "cos", "tan",
    "tanh", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "sigmoid", "erf",
    "erfc", "erfinv", "floor", "ceil", "trunc", "round", "frac", "neg", "abs", "sign", "sgn",
    "signbit", "square", "reciprocal", "isnan", "isinf", "isfinite", "isposinf", "isneginf",
    "logical_not", "relu", "silu", "mish", "hardswish", "hardsigmoid", "softplus", "gelu", "elu",
    "leaky_relu", "softshrink", "hardshrink", "hardtanh", "angle", "deg2rad", "rad2deg",
    "nan_to_num", "positive",
]  # fmt: skip
BINARY = [
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "fmax", "fmin",
    "fmod.Tensor", "remainder.Tensor", "floor_divide", "atan2", "copysign.Tensor", "hypot",
    "eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor", "logical_and",
    "logical_or", "logical_xor", "xlogy.Tensor", "logaddexp", "logaddexp2", "heaviside",
    "nextafter", "pow.Tensor_Tensor",
]  # fmt: skip
# Of huge arguments PyTorch's vector code has its own idea: the sine depends on how the argument was
# reduced, gelu(inf) is nan.
BOUNDED = {"sin", "cos", "tan", "gelu", "fmod.Tensor", "remainder.Tensor"}
INTEGERS = [-128, -7, -3, -2, -1, 0, 1, 2, 3, 5, 7, 127]


def overload(name: str):
    packet, _, variant = name.partition(".")
    return getattr(getattr(aten, packet), variant or "default")


def pairs(values, dtype):
    x = torch.tensor(values, dtype=dtype)
    return (
        x[:, None].expand(len(values), len(values)).contiguous(),
        x[None, :].expand(len(values), len(values)).contiguous(),
    )


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unary_edges(name, dtype):
    values = [v for v in EDGES if not (name in BOUNDED and abs(v) > 1e3)]
    check(overload(name), torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("name", BINARY)
def test_binary_edges(name):
    x, y = pairs(
        [v for v in EDGES if not (name in BOUNDED and 1e3 < abs(v) < math.inf)],
        torch.float32,
    )
    check(overload(name), x, y)


@pytest.mark.parametrize(
    "name",
    [
        "add.Tensor",
        "sub.Tensor",
        "mul.Tensor",
        "div.Tensor",
        "maximum",
        "lt.Tensor",
        "pow.Tensor_Tensor",
        "bitwise_and.Tensor",
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integers(name, dtype):
    x, y = pairs([abs(v) if dtype == torch.uint8 else v for v in INTEGERS], dtype)
    if name.startswith("pow"):
        y = y.clamp(0, 9)
    check(overload(name), x, y)


@pytest.mark.parametrize(
    "name", ["floor_divide", "remainder.Tensor", "fmod.Tensor", "div.Tensor_mode"]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integer_division(name, dtype):
    x, y = pairs([abs(v) if dtype == torch.uint8 else v for v in INTEGERS], dtype)
    y = torch.where(y == 0, 3, y)
    for kwargs in (
        [{"rounding_mode": "floor"}, {"rounding_mode": "trunc"}]
        if name == "div.Tensor_mode"
        else [{}]
    ):
        check(overload(name), x, y, **kwargs)


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
def test_float_division_modes(mode):
    x, y = pairs(EDGES, torch.float32)
    check(aten.div.Tensor_mode, x, y, rounding_mode=mode)


@pytest.mark.parametrize(
    "name",
    [
        "add.Tensor",
        "mul.Tensor",
        "logical_and",
        "bitwise_xor.Tensor",
        "eq.Tensor",
        "maximum",
    ],
)
def test_bool(name):
    x, y = pairs([False, True], torch.bool)
    check(overload(name), x, y)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5, 4, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_powers(exponent, dtype):
    check(
        aten.pow.Tensor_Scalar,
        torch.tensor([0.0, 0.5, 1.0, 1.7, -2.0, 3.0, 9.0, math.inf, math.nan], dtype=dtype),
        exponent,
    )


@pytest.mark.parametrize("base", [torch.int32, torch.int64, torch.uint8])
def test_integer_powers(base):
    x = (
        torch.tensor([-3, -1, 0, 1, 2, 7, 10]).abs().to(base)
        if base is torch.uint8
        else torch.tensor([-3, -1, 0, 1, 2, 7, 10], dtype=base)
    )
    for exponent in (0, 1, 2, 3, 5, 9):
        check(aten.pow.Tensor_Scalar, x, exponent)
    check(aten.pow.Tensor_Scalar, x, 1.5)
    check(aten.pow.Scalar, 2, x)


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(3, dtype=torch.int32), 2.5),
        (torch.ones(3, dtype=torch.bfloat16), torch.tensor(2.5)),
        (torch.ones(3), 2),
        (torch.ones(3, dtype=torch.int8), torch.ones((), dtype=torch.int64)),
        (torch.ones(3, dtype=torch.bool), 2),
        (torch.ones(3, dtype=torch.bool), True),
        (torch.ones((), dtype=torch.float64), torch.ones(3)),
        (torch.ones(3, dtype=torch.uint8), -1),
        (torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.bfloat16)),
        (torch.ones(3), 1 + 2j),
        (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.float16)),
        (torch.ones(2, 1), torch.ones(3)),
    ],
)
@pytest.mark.parametrize("name", ["add.Tensor", "mul.Tensor", "div.Tensor", "eq.Tensor"])
def test_promotion(name, args):
    if name == "eq.Tensor" and not isinstance(args[1], torch.Tensor):
        name = "eq.Scalar"
    check(overload(name), *args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_lifted_scalars(dtype):
    """Floats that enter the program as inputs behave as Python numbers."""
    x = torch.arange(-4, 4).to(dtype)
    for op in (
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.sub.Tensor,
        aten.rsub.Scalar,
        aten.gt.Scalar,
        aten.where.ScalarOther,
    ):
        args = (x, Lifted(0.7)) if op is not aten.where.ScalarOther else (x > 0, x, Lifted(0.7))
        check(op, *args)
    if dtype.is_floating_point:
        check(aten.clamp.default, x, Lifted(-1.5), Lifted(2.5))
        check(aten.threshold.default, x, Lifted(0.1), Lifted(20.0))
        check(aten.addcmul.default, x, x, x, value=Lifted(0.3))
        check(aten.leaky_relu.default, x, Lifted(0.2))
        check(aten.elu.default, x, Lifted(1.3), Lifted(0.9), Lifted(1.1))
        check(aten.lerp.Scalar, x, x * 2, Lifted(0.25))
        check(
            aten.addmm.default,
            torch.ones(3, dtype=dtype),
            x.reshape(2, 4),
            x.reshape(4, 2) @ torch.ones(2, 3, dtype=dtype),
            beta=Lifted(0.5),
            alpha=2,
        )


def test_casts():
    for source in (
        torch.float32,
        torch.int64,
        torch.bool,
        torch.bfloat16,
        torch.complex64,
        torch.uint8,
    ):
        x = torch.tensor([-1.7, 0.0, 0.3, 1.0, 100.9]).to(source)
        for target in (
            torch.float32,
            torch.float16,
            torch.int8,
            torch.uint8,
            torch.int32,
            torch.int64,
            torch.bool,
            torch.complex64,
            torch.float64,
        ):
            if not (source.is_complex and not target.is_complex):
                check(aten._to_copy.default, x, dtype=target)


@pytest.mark.parametrize("name", ["clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor"])
def test_clamp_tensors(name):
    x, bound = (
        torch.tensor([-2.0, 0.5, 3.0, math.nan]),
        torch.tensor([0.0, math.nan, 1.0, 1.0]),
    )
    check(overload(name), x, *((bound, bound + 1) if name == "clamp.Tensor" else (bound,)))
    if name == "clamp.Tensor":
        check(overload(name), x, None, bound)
        check(overload(name), x, bound, None)


@pytest.mark.parametrize(
    "name", ["acos", "acosh", "asin", "asinh", "atan", "atanh", "log", "sqrt", "angle"]
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_cuts_and_poles(name, dtype):
    parts = (0.0, -0.0, 1.0, -1.0, 3.0, -3.0)
    values = torch.tensor([complex(a, b) for a in parts for b in parts], dtype=dtype)
    check(overload(name), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_nan_to_num(dtype):
    parts = (1.5, float("nan"), float("inf"), -float("inf"))
    x = torch.tensor([complex(a, b) for a in parts for b in parts])
    x = (x if dtype.is_complex else x.real).to(dtype)
    for numbers in ((), (2.0,), (float("inf"), 3.0), (1.0, 2.0, -4.0)):
        check(torch.ops.aten.nan_to_num.default, x, *numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logarithms_and_powers_to_bases_2_and_10(dtype):
    """Powers of the base come out exact; subnormal numbers have logarithms, and are results."""
    least = torch.finfo(dtype).tiny
    x = torch.tensor(
        [
            1.0,
            2,
            8,
            1024,
            0.125,
            10,
            1000,
            1e10,
            0,
            float("inf"),
            -1,
            float("nan"),
            least,
            least / 8,
            3.7,
            0.3,
        ],
        dtype=dtype,
    )
    for fn in (torch.log2, torch.log10):
        torch.testing.assert_close(
            fn(x.to("hlo")).cpu(),
            fn(x),
            rtol=4 * torch.finfo(dtype).eps,
            atol=0,
            equal_nan=True,
        )
    assert torch.equal(torch.log2(x[:5].to("hlo")).cpu(), torch.log2(x[:5]))
    bias = 127 if dtype == torch.float32 else 1023
    y = torch.tensor(
        [
            0,
            1,
            -1,
            10,
            0.5,
            bias,
            bias + 0.9,
            bias + 1,
            1e30,
            -1e30,
            1 - bias,
            -bias - 10.0,
            -bias - 9.5,
            float("inf"),
            -float("inf"),
            float("nan"),
        ],
        dtype=dtype,
    )
    torch.testing.assert_close(
        torch.exp2(y.to("hlo")).cpu(),
        torch.exp2(y),
        rtol=4 * torch.finfo(dtype).eps,
        atol=0,
        equal_nan=True,
    )
