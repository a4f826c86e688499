"""Products of quantized matrices beside PyTorch on the CPU, in each of the ways to run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

import torch_hlo
from torch_hlo import config
from torch_hlo.pytorch.version import VERSION

new = pytest.mark.skipif(VERSION < (2, 13), reason="PyTorch has no such product on the CPU")
WAYS = {
    "recorded": lambda fn: fn,
    "compiled": lambda fn: torch.compile(fn, backend="hlo"),
    "captured": torch_hlo.compile,
}
M, N, K = 24, 40, 96


def randn(*dims, dtype=torch.float32, seed=0):
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(fn, args, way="recorded", want=None, **tolerance):
    """`fn` on hlo tensors beside `fn` on the CPU, or what it should be; three calls, of which the
    last is launched."""
    want = fn(*args) if want is None else want
    run = WAYS[way](fn)
    given = [a.to("hlo") for a in args]
    for _ in range(3):
        got = run(*given)
    assert got.device.type == "hlo" and got.dtype == want.dtype
    torch.testing.assert_close(got.cpu().float(), want.float(), **tolerance)


def f8_matrices(left=torch.float8_e4m3fn, right=torch.float8_e4m3fn):
    return randn(M, K).to(left), randn(N, K, seed=1).to(right)


ONE = torch.tensor(0.5), torch.tensor(0.25)
ROWS = torch.rand(M, 1) + 0.1, torch.rand(1, N) + 0.1


@pytest.fixture(autouse=True)
def no_fallback():
    with config.override(FALLBACK="error"):
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "scales", [pytest.param(ONE, id="one"), pytest.param(ROWS, id="rows", marks=new)]
)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_scaled_mm(way, scales, out):
    def fn(a, w, s, t, bias):
        return torch._scaled_mm(a, w.t(), s, t, bias=bias, out_dtype=out)

    check(fn, (*f8_matrices(), *scales, randn(N, dtype=out)), way, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("types", [("e5m2", "e5m2"), ("e4m3fn", "e5m2"), ("e5m2", "e4m3fn")])
def test_scaled_mm_of_other_types(types):
    def fn(a, w, s, t):
        return torch._scaled_mm(a, w.t(), s, t, out_dtype=torch.float32, use_fast_accum=True)

    matrices = f8_matrices(*(getattr(torch, f"float8_{t}") for t in types))
    check(fn, (*matrices, *ONE), rtol=1e-4, atol=1e-4)


def test_scaled_mm_gives_the_type_of_the_operand():
    a, w = f8_matrices()
    check(lambda a, w, s, t: torch._scaled_mm(a, w.t(), s, t), (a, w, *ONE), rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("out", [torch.float8_e4m3fn, torch.float32])
def test_scaled_mm_with_a_scale_of_the_result(out):
    def fn(a, w, s, t, r):
        return torch._scaled_mm(a, w.t(), s, t, scale_result=r, out_dtype=out)

    check(fn, (*f8_matrices(), *ONE, torch.tensor(4.0)), rtol=0.13, atol=1e-3)


@new
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["TensorWise", "RowWise"])
def test_scaled_mm_by_recipe(way, recipe):
    kind = getattr(ScalingType, recipe)

    def fn(a, w, s, t):
        return F.scaled_mm(a, w.t(), s, kind, t, kind, output_dtype=torch.bfloat16)

    scales = ONE if recipe == "TensorWise" else ROWS
    check(fn, (*f8_matrices(), *scales), way, rtol=1e-2, atol=1e-2)


def of_blocks(kind, rows, k):
    """(scales as PyTorch takes them, the factor of each number) for blocks of a matrix."""
    draw = torch.Generator().manual_seed(rows)
    if kind == "BlockWise1x32":  # in tiles of 128 x 4
        tall, wide = -(-rows // 128) * 128, -(-k // 128) * 4
        scales = 2.0 ** torch.randint(-3, 3, (tall, wide), generator=draw)
        tiles = scales.view(tall // 128, 4, 32, wide // 4, 4).permute(0, 3, 2, 1, 4)
        factors = scales[:rows, : k // 32].repeat_interleave(32, 1)
        return tiles.reshape(-1).to(torch.float8_e8m0fnu), factors
    if kind == "BlockWise1x128":
        scales = torch.rand(k // 128, rows, generator=draw).t()
        return scales, scales.repeat_interleave(128, 1)
    scales = torch.rand(rows // 128, -(-k // 512) * 4, generator=draw).t()
    factors = scales[: k // 128].t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return scales, factors


LINES, SQUARES = "BlockWise1x128", "BlockWise128x128"
RECIPES = {
    "lines": (LINES, LINES, 48, 32),
    "lines and squares": (LINES, SQUARES, 48, 256),
    "squares and lines": (SQUARES, LINES, 128, 32),
    "mx": ("BlockWise1x32", "BlockWise1x32", 144, 48),
}


@new
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RECIPES)
def test_scaled_mm_by_blocks(name, way):
    """PyTorch has these products on GPUs; the factors say what they are."""
    left, right, m, n = RECIPES[name]
    k = 384
    a, w = randn(m, k).to(torch.float8_e4m3fn), randn(n, k, seed=1).to(torch.float8_e4m3fn)
    (s, by), (t, other) = of_blocks(left, m, k), of_blocks(right, n, k)
    kinds = [getattr(ScalingType, kind) for kind in (left, right)]
    order = SwizzleType.SWIZZLE_32_4_4 if name == "mx" else SwizzleType.NO_SWIZZLE

    def fn(a, w, s, t):
        options = {"swizzle_a": order, "swizzle_b": order, "output_dtype": torch.float32}
        return F.scaled_mm(a, w.t(), s, kinds[0], t, kinds[1], **options)

    run = WAYS[way](fn)
    for _ in range(3):
        got = run(*(v.to("hlo") for v in (a, w, s, t)))
    want = (a.float() * by) @ (w.float() * other).t()
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


WRONG = {
    "sizes": lambda a, w, s, t: torch._scaled_mm(a, w[:, :64].t(), s, t),
    "rows": lambda a, w, s, t: torch._scaled_mm(a, w.t(), ROWS[0].to(a.device)[:3], t),
    "type": lambda a, w, s, t: torch._scaled_mm(a.float(), w.t(), s, t),
    "bias": lambda a, w, s, t: torch._scaled_mm(a, w.t(), s, t, bias=torch.ones(3).to(a.device)),
    "recipe": lambda a, w, s, t: F.scaled_mm(
        a, w.t(), s, ScalingType.BlockWise1x128, t, ScalingType.BlockWise1x128
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_scaled_mm_refuses_what_the_cpu_refuses(name):
    args = (*f8_matrices(), *ONE)
    on_device = [a.to("hlo") for a in args]
    with pytest.raises(NotImplementedError, match=r"aten._scaled_mm\w*.default \("):
        WRONG[name](*on_device)
    with pytest.raises(Exception) as expected:
        WRONG[name](*args)
    with config.override(FALLBACK="allow"), pytest.raises(type(expected.value)) as got:
        WRONG[name](*on_device)
    assert str(got.value)[:40] == str(expected.value)[:40]


@pytest.mark.parametrize("way", WAYS)
def test_int_mm(way):
    a = torch.randint(-128, 128, (M, K), dtype=torch.int8)
    w = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    # PyTorch's own saturates on processors without VNNI
    want = a.int() @ w.t().int()
    check(lambda a, w: torch._int_mm(a, w.t()), (a, w), way, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_casts_to_f8_and_back(dtype):
    f8 = getattr(torch, f"float8_{dtype}")
    x = torch.cat([randn(1000) * 100, randn(1000) * 1e-3, torch.tensor([0.0, -0.0, 448, 1e9])])
    check(lambda x: x.to(f8).float(), (x,), rtol=0, atol=0, equal_nan=True)
    check(lambda x: x.bfloat16().to(f8).bfloat16(), (x,), rtol=0, atol=0, equal_nan=True)


def packed(n, k, seed=0):
    w = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(seed))
    return w.to(torch.int32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_bytes(way, m, dtype):
    w = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    args = randn(m, K, dtype=dtype), w, (torch.rand(N) / 64).to(dtype)
    check(torch._weight_int8pack_mm, args, way, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("n", [16, 32, 64, 80, 128, 144])
def test_packing_four_bits(n):
    check(lambda w: torch._convert_weight_to_int4pack_for_cpu(w, 1), (packed(n, 64),))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("n, k, group", [(144, 128, 32), (64, 256, 128)])
def test_weights_of_four_bits(way, m, n, k, group):
    weight = torch._convert_weight_to_int4pack_for_cpu(packed(n, k), 1)
    scales = torch.rand(k // group, n, 2).bfloat16() / 16

    def fn(x, w, s):
        return torch._weight_int4pack_mm_for_cpu(x, w, group, s)

    check(fn, (randn(m, k, dtype=torch.bfloat16), weight, scales), way, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_packed_and_multiplied_on_the_device(dtype):
    def fn(x, w, s):
        weight = torch._convert_weight_to_int4pack_for_cpu(w, 1)
        return torch._weight_int4pack_mm_for_cpu(x, weight, 32, s)

    args = randn(2, 96, dtype=dtype), packed(48, 96), torch.rand(3, 48, 2).to(dtype) / 16
    check(fn, args, rtol=1e-2, atol=1e-2)


def test_four_bits_that_do_not_fit():
    x, weight = randn(1, 64).bfloat16(), torch.zeros(48, 32, dtype=torch.uint8)
    wrong = [(16, 4), (32, 3), (128, 1)]
    for group, groups in wrong:
        args = [a.to("hlo") for a in (x, weight, torch.ones(groups, 48, 2).bfloat16())]
        with pytest.raises(NotImplementedError, match="_weight_int4pack_mm_for_cpu.*bf16"):
            torch._weight_int4pack_mm_for_cpu(*args[:2], group, args[2])
    with pytest.raises(NotImplementedError, match=r"_convert_weight_to_int4pack_for_cpu.*s32\[17"):
        torch._convert_weight_to_int4pack_for_cpu(packed(17, 64).to("hlo"), 1)
