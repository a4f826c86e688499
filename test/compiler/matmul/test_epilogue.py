"""Products with what is computed from them, in one kernel: all engines, layouts and types, against
the evaluator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from test.compiler.compiled import check, module, parameter, run
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.fusion.fusion import fusion
from torch_hlo.compiler.llvm.target import host
from torch_hlo.device.cpu import loader
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.instruction import Instruction, Module
from torch_hlo.hlo.ir.numeric import decode, encode


def row(x: Instruction, like: Instruction) -> Instruction:
    """A vector along the last dimension of `like`."""
    return b.broadcast(x, like.shape.dims, (like.shape.rank - 1,))


def inputs_of(m: Module, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal(p.shape.dims).astype(
            {"f64": "float64", "f16": "float16"}.get(p.shape.dtype, "float32")
        )
        for p in m.entry.params
    ]


def check_fused(m: Module, rtol: float = 2e-4, atol: float = 2e-4, kinds=("output",)) -> None:
    """The program is one kernel of kind output, and computes what the evaluator computes."""
    f = fusion(m)
    assert tuple(x["kind"] for x in f.entry.instructions() if x.op == "fusion") == kinds
    check(f, inputs_of(m), rtol, atol)


def layer(x, w, bias, rest, contract=(0,)):
    """tanh(x w + bias) * rest, and x w + bias."""
    d = b.dot(x, w, (x.shape.rank - 1,), contract)
    h = b.add(d, row(bias, d))
    return b.multiply(b.tanh(h), rest), h


# One block of K and several; one tile and many; few rows (gemv by rows and by columns, B read in
# place); tails everywhere.
SIZES = [
    (64, 48, 32),
    (17, 33, 5),
    (100, 600, 70),
    (70, 90, 900),
    (200, 530, 400),
    (1, 300, 200),
    (3, 77, 130),
    (4, 200, 64),
    (12, 40, 500),
    (130, 1, 9),
    (600, 17, 384),
    (150, 5, 131),
]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("turned", [0, 1])
def test_f32(m, n, k, turned):
    x, w, bias, rest = (
        parameter(i, "f32", *dims)
        for i, dims in enumerate([(m, k), (n, k) if turned else (k, n), (n,), (m, n)])
    )
    check_fused(module([x, w, bias, rest], *layer(x, w, bias, rest, (turned,))))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 300, 200), (4, 70, 131), (8, 33, 64), (30, 70, 64)])
@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("kind", ["s8", "u8"])
def test_weights_of_bytes(m, n, k, turned, kind):
    """Few rows read the bytes themselves; for many they become floats first."""
    x, w, scale = (
        parameter(0, "f32", m, k),
        parameter(1, kind, *((n, k) if turned else (k, n))),
        parameter(2, "f32", n),
    )
    d = b.dot(x, b.convert(w, "f32"), (1,), (turned,))
    program = module([x, w, scale], b.multiply(d, row(scale, d)))
    rng = np.random.default_rng(0)
    values = [
        rng.standard_normal((m, k)).astype("float32"),
        rng.integers(0, 100, w.shape.dims).astype({"s8": "int8", "u8": "uint8"}[kind]),
        rng.standard_normal(n).astype("float32"),
    ]
    fused = fusion(program)
    assert [
        y.operands[1].shape.dtype
        for y in fused.entry.instructions()
        if y.op == "fusion" and y["kind"] == "output"
    ] == [kind if m <= 8 else "f32"]
    check(fused, values, 1e-4, 1e-2)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (33, 64, 40),
        (64, 96, 256),
        (100, 70, 300),
        (5, 40, 64),
        (40, 1000, 130),
        (300, 33, 4200),
    ],
)
@pytest.mark.parametrize("turned", [0, 1])
def test_bf16(m, n, k, turned):
    """On machines with AMX these run on tiles. The product is rounded to bf16 before anything is
    computed from it."""
    x, w, bias, rest = (
        parameter(i, "bf16", *dims)
        for i, dims in enumerate([(m, k), (n, k) if turned else (k, n), (n,), (m, n)])
    )
    check_fused(
        module([x, w, bias, rest], *layer(x, w, bias, rest, (turned,))),
        rtol=3e-2,
        atol=6e-2,
    )


@pytest.mark.parametrize("dtype", ["f64", "f16"])
def test_other_types(dtype):
    x, w, bias, rest = (
        parameter(i, dtype, *dims) for i, dims in enumerate([(40, 50), (50, 37), (37,), (40, 37)])
    )
    check_fused(
        module([x, w, bias, rest], *layer(x, w, bias, rest)),
        *((1e-12, 1e-12) if dtype == "f64" else (1e-2, 1e-2)),
    )


def test_results_of_another_type_and_mixed_operands():
    """A result narrower than the accumulators cannot hold them."""
    x, w, rest = (
        parameter(0, "f32", 100, 800),
        parameter(1, "f32", 800, 60),
        parameter(2, "bf16", 100, 60),
    )
    d = b.dot(x, w, (1,), (0,))
    check_fused(
        module([x, w, rest], b.convert(b.add(d, b.convert(rest, "f32")), "bf16")),
        rtol=2e-2,
        atol=1e-1,
    )
    x = parameter(0, "bf16", 100, 800)
    check_fused(
        module(
            [x, w, rest],
            b.multiply(b.dot(x, w, (1,), (0,), dtype="f32"), b.convert(rest, "f32")),
        ),
        rtol=1e-3,
        atol=1e-2,
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("k", [32, 500])
def test_batches(dtype, k):
    """Scores with a scale and a mask that all heads share."""
    q, p = parameter(0, dtype, 3, 5, 40, k), parameter(1, dtype, 3, 5, 36, k)
    mask = parameter(2, dtype, 3, 40, 36)
    d = b.dot(q, p, (3,), (3,), (0, 1), (0, 1))
    s = b.add(b.multiply(d, b.full_like(d, 0.125)), b.broadcast(mask, d.shape.dims, (0, 2, 3)))
    check_fused(module([q, p, mask], s), *((3e-2, 5e-2) if dtype == "bf16" else (1e-4, 1e-4)))


def test_reshaped_results_and_operands():
    """What is read and written has other dimensions than the product, but the same order of
    elements."""
    x, w = parameter(0, "f32", 24, 50), parameter(1, "f32", 50, 64)
    head, rest = parameter(2, "f32", 4, 16), parameter(3, "f32", 6, 4, 64)
    d = b.dot(x, w, (1,), (0,))
    a = b.add(b.reshape(d, (24, 4, 16)), b.broadcast(head, (24, 4, 16), (1, 2)))
    c = b.add(b.reshape(a, (6, 4, 64)), rest)
    check_fused(module([x, w, head, rest], c, b.negate(a)))


def test_values_that_do_not_go_along_rows_are_a_loop_of_their_own():
    x, w = parameter(0, "f32", 24, 50), parameter(1, "f32", 50, 64)
    other = parameter(2, "f32", 64, 24)
    d = b.dot(x, w, (1,), (0,))
    turned = b.broadcast(other, (24, 64), (1, 0))
    check(
        fusion(module([x, w, other], b.add(b.tanh(d), turned))),
        inputs_of(module([x, w, other], d)),
        2e-5,
        2e-5,
    )


def test_a_result_over_an_operand():
    """w - 0.1 * gradient in w's memory: the sums may not go there."""
    for k in (64, 900):
        x, g, w = (
            parameter(0, "f32", k, 40),
            parameter(1, "f32", k, 70),
            parameter(2, "f32", 40, 70),
        )
        d = b.dot(x, g, (0,), (0,))
        m = module(
            [x, g, w],
            b.subtract(w, b.multiply(d, b.full_like(d, 0.1))),
            aliases=((0, 2),),
        )
        f = fusion(m)
        inputs = inputs_of(m)
        (found,), (expected,) = run(f, inputs), evaluate(m, inputs)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("k", [0, 5, 500])
def test_symbolic_sizes(k):
    rows, depth = symbol("rows"), symbol("depth")
    x, w, bias, rest = (
        parameter(0, "f32", rows, depth),
        parameter(1, "f32", depth, 70),
        parameter(2, "f32", 70),
        parameter(3, "f32", rows, 70),
    )
    m = module(
        [x, w, bias, rest],
        *layer(x, w, bias, rest),
        symbols=(("rows", 0, 0), ("depth", 0, 1)),
    )
    f = fusion(m)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(s).astype("float32") for s in ((45, k), (k, 70), (70,), (45, 70))]
    for found, expected in zip(run(f, inputs), evaluate(m, inputs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_long_sums_and_odd_forms_keep_their_kernels():
    """A product that is cut along K, and one whose operand is transposed first: then a loop."""
    x, w = parameter(0, "f32", 9000, 20), parameter(1, "f32", 9000, 150)
    m = module(
        [x, w],
        b.tanh(b.multiply(b.dot(x, w, (0,), (0,)), b.full((0.01), "f32", (20, 150)))),
    )
    check(fusion(m), inputs_of(m), 1e-3, 1e-3)
    x, w = parameter(0, "f32", 3, 20, 4, 40), parameter(1, "f32", 3, 4, 40, 30)
    m = module([x, w], b.tanh(b.dot(x, w, (0, 3), (0, 2), (2,), (1,))))
    check(fusion(m), inputs_of(m), 1e-4, 1e-4)


def _without(*features: str) -> str:
    return ",".join(
        f"-{f[1:]}" if f[1:].startswith(features) else f for f in host().features.split(",")
    )


@pytest.mark.skipif(not host().has("avx2"), reason="needs a machine with AVX2 at least")
@pytest.mark.parametrize("machine", ["no tiles", "no bf16", "avx2"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_lesser_machines(machine, dtype):
    """The same products for processors without AMX, without AVX512-BF16, and without AVX-512."""
    target = {
        "no tiles": replace(host(), features=_without("amx")),
        "no bf16": replace(host(), features=_without("amx", "avx512bf16", "avx512fp16")),
        "avx2": replace(
            host(),
            features=_without("amx", "avx512", "avx10"),
            cpu="haswell",
            vector_bytes=32,
        ),
    }[machine]
    for m, n, k in ((40, 70, 500), (2, 300, 64)):
        params = [
            parameter(i, dtype, *dims) for i, dims in enumerate([(m, k), (n, k), (n,), (m, n)])
        ]
        made = fusion(module(params, layer(*params, (1,))[0]))
        program = loader.load(compile_module(made, target, optimize=False), target)
        inputs = [np.frombuffer(encode(x, dtype), np.uint8).copy() for x in inputs_of(made)]
        out = np.zeros(m * n * (4 if dtype == "f32" else 2), np.uint8)
        program.call([x.ctypes.data for x in inputs], [out.ctypes.data])
        tolerance = 2e-4 if dtype == "f32" else 6e-2
        np.testing.assert_allclose(
            decode(out.tobytes(), dtype, (m, n)),
            evaluate(made, inputs_of(made))[0],
            rtol=tolerance,
            atol=tolerance,
        )


def test_products_share_an_engine_whatever_becomes_of_their_sums() -> None:
    x, y, w, bias = (
        parameter(i, "f32", *dims) for i, dims in enumerate([(64, 32), (64, 32), (32, 48), (48,)])
    )
    first, second = (b.dot(v, w, (1,), (0,)) for v in (x, y))
    m = module(
        [x, y, w, bias],
        b.tanh(b.add(first, row(bias, first))),
        b.exponential(b.subtract(second, row(bias, second))),
    )
    check_fused(m, kinds=("output", "output"))
    texts: list[str] = []
    compile_module(
        fusion(m),
        None,
        False,
        lambda name, text: texts.append(str(text)) if name == "llvm" else None,
    )
    code = "\n".join(texts)
    assert code.count("define void @epilogue_") == 2
    assert code.count("define void @dot_gemm_") == 1
