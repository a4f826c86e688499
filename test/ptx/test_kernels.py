"""Kernels beside products on NVIDIA GPUs, executed by the PTX evaluator: attention, transposes,
sorts, scans, scatters, reductions; and how they touch memory."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from benchmarks import check_gpu
from test.compiler.attention.attention_programs import inputs_of, program
from test.compiler.steps import module_of
from test.ptx import memory
from torch_hlo import config
from torch_hlo.compiler.attention import gpu_attention_mma
from torch_hlo.compiler.attention.attention import attention as attention_pass
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.convolution.conv_layout import for_matrix_units
from torch_hlo.compiler.gpu.target import gpu_target
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.device import runtime
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.dim import substitute, symbol
from torch_hlo.hlo.ir.instruction import Module, outputs
from torch_hlo.hlo.ir.numeric import decode, encode
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.window import WindowDim
from torch_hlo.hlo.text.parser import parse_module

rng = np.random.default_rng(0)


def run(module: Module, inputs, device: str = "test.ptx.driver:sm_80") -> list[np.ndarray]:
    """The results on the evaluator; symbolic sizes are those of the inputs."""
    with config.override(DEVICE=device, CACHE=""):
        program = runtime.compile_program(module)
        params = module.entry.params
        sizes = {name: np.shape(inputs[i])[d] for name, i, d in module.symbols}
        given = [
            runtime.from_bytes(Shape(p.shape.dtype, np.shape(v)), encode(v, p.shape.dtype))
            for p, v in zip(params, inputs, strict=True)
        ]
        results = [
            runtime.allocate(
                Shape(x.shape.dtype, tuple(substitute(d, sizes) for d in x.shape.dims))
            )
            for x in outputs(module)
        ]
        program.run(given, results)
        return [decode(b.bytes.tobytes(), b.shape.dtype, b.shape.dims) for b in results]


def check(fn, *arrays, dtypes=(), tolerance: float = 0.0, symbolic: bool = False) -> None:
    """`fn` on the evaluator of PTX and on that of HLO. `dtypes`: of the arrays, where not NumPy's;
    `symbolic`: all sizes of the first array."""
    names = [
        (
            dtypes[i]
            if i < len(dtypes)
            else {"f": "f", "i": "s", "u": "u"}[a.dtype.kind] + str(8 * a.dtype.itemsize)
        )
        for i, a in enumerate(arrays)
    ]
    arrays = [decode(encode(a, n), n, a.shape) for a, n in zip(arrays, names, strict=True)]
    shapes, symbols = (
        [Shape(n, a.shape) for n, a in zip(names, arrays, strict=True)],
        (),
    )
    if symbolic:
        symbols = tuple((f"n{d}", 0, d) for d in range(arrays[0].ndim))
        of = {n: symbol(name) for (name, _, _), n in zip(symbols, arrays[0].shape, strict=True)}
        shapes = [Shape(s.dtype, tuple(of.get(n, n) for n in s.dims)) for s in shapes]
    module = module_of(fn, shapes, symbols)
    with np.errstate(all="ignore"):
        expected = evaluate(module, arrays)
    for e, f in zip(expected, run(module, arrays), strict=True):
        if tolerance:
            np.testing.assert_allclose(
                f,
                e,
                rtol=tolerance,
                atol=tolerance * max(1.0, float(np.abs(e).max(initial=0))),
            )
        else:
            np.testing.assert_array_equal(f, e)


# -- attention
# ---------------------------------------------------------------------------------------------------------------
# (kind, (batch, heads, rows, columns, size, width), mask, type, heads of q per head of k)
ATTENTION = [
    ("forward", (1, 2, 70, 100, 24, 40), "none", "bf16", 1),
    ("forward", (1, 2, 100, 70, 16, 64), "causal", "f16", 1),
    ("forward", (2, 4, 16, 70, 32, 16), "f32", "bf16", 2),
    ("forward", (1, 1, 70, 40, 8, 12), "causal", "f32", 1),
    ("backward", (1, 1, 70, 80, 24, 40), "causal", "bf16", 1),
    *(
        pytest.param(*c, marks=pytest.mark.slow)
        for c in (
            ("forward", (1, 1, 20, 70, 144, 16), "pred", "bf16", 1),
            ("forward", (1, 1, 16, 16, 16, 264), "none", "bf16", 1),
            ("forward", (1, 1, 20, 80, 7, 5), "row", "bf16", 1),
            ("backward", (1, 2, 20, 70, 16, 136), "pred", "f16", 1),
            ("backward", (1, 1, 20, 20, 8, 12), "f32", "f32", 1),
        )
    ),
]


@pytest.mark.parametrize(("kind", "sizes", "mask", "dtype", "group"), ATTENTION, ids=str)
def test_attention(kind, sizes, mask, dtype, group):
    m = program(kind, sizes, mask, dtype, group)
    assert any(x.op == "fusion" for x in attention_pass.run(m).entry.instructions())
    inputs = inputs_of(m)
    if kind == "backward":
        inputs[5] = np.abs(inputs[5]) + 3  # a log-sum-exp that keeps the weights below one
    with np.errstate(all="ignore"):
        expected = evaluate(m, inputs)
    tolerance = {"f32": 1e-5, "bf16": 2e-2, "f16": 4e-3}[dtype]
    for e, f in zip(expected, run(m, inputs), strict=True):
        np.testing.assert_allclose(
            f, e, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(e).max()))
        )


def test_attention_of_symbolic_sizes():
    b, s, t = (symbol(f"s{i}") for i in range(3))
    m = program("forward", (b, 2, s, t, 16, 24), "causal", "bf16")
    for batch, rows, columns in ((1, 70, 16), (2, 17, 90)):
        inputs = inputs_of(m, s0=batch, s1=rows, s2=columns)
        for e, f in zip(evaluate(m, inputs), run(m, inputs), strict=True):
            np.testing.assert_allclose(f, e, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_no_array_of_scores(kind, dtype):
    scores = 4 * 1024 * 1024 * 4
    assert (
        compile_module(
            program(kind, (1, 4, 1024, 1024, 32, 32), "causal", dtype),
            gpu_target("nvptx:sm_90"),
        ).arena
        < scores / 4
    )


# -- moving
# ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "bf16", "s8", "f64", "pred", "c64"])
@pytest.mark.parametrize(
    ("dims", "order"),
    [
        ((64, 128), (1, 0)),
        ((70, 33), (1, 0)),
        ((3, 40, 72), (0, 2, 1)),
        ((33, 2, 40), (2, 1, 0)),
    ],
    ids=str,
)
def test_transposes(dtype, dims, order):
    check(
        lambda x: build.transpose(x, order),
        rng.integers(0, 2 if dtype == "pred" else 100, dims).astype("float32"),
        dtypes=[dtype],
    )


def test_fusions_that_read_across():
    def fn(x, y, z):
        turned = build.transpose(build.add(x, z), (1, 0))
        return build.multiply(turned, y), build.negate(turned)

    check(
        fn,
        *(rng.standard_normal(d).astype("float32") for d in ((40, 66), (66, 40), (40, 66))),
        tolerance=1e-6,
    )


# -- order
# -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dims", "axis"),
    [
        ((5,), 0),
        ((3, 100), 1),
        ((100, 3), 0),
        ((1500,), 0),
        ((2, 1100), 1),
        ((1030, 2), 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("direction", ["LT", "GT"])
def test_sorts_are_stable(dims, axis, direction):
    keys = rng.integers(-3, 4, dims).astype("float32")
    keys.flat[0], keys.flat[-1] = np.nan, -0.0
    check(
        lambda x, y: build.sort((x, y), axis, direction),
        keys,
        np.arange(keys.size, dtype="int32").reshape(dims),
    )


@pytest.mark.parametrize("dtype", ["s64", "u8", "f64", "bf16", "pred", "f16"])
def test_keys_of_sorts(dtype):
    check(
        lambda x: build.sort((x,), 0, "GT"),
        rng.integers(0, 2 if dtype == "pred" else 200, (300,)).astype("float32"),
        dtypes=[dtype],
    )


@pytest.mark.parametrize("n", [40, 1200])
def test_comparator_of_two_arrays(n):
    def before(a, b, c, d):
        return build.or_(
            build.compare(a, b, "LT"),
            build.and_(build.compare(a, b, "EQ"), build.compare(c, d, "GT")),
        )

    order = build.computation(before, [Shape("s32")] * 2 + [Shape("f32")] * 2)
    check(
        lambda x, y: build.sort((x, y), 0, order),
        rng.integers(0, 5, n).astype("int32"),
        rng.standard_normal(n).astype("float32"),
    )


@pytest.mark.parametrize("n", [9, 2100])
def test_sort_of_symbolic_length(n):
    check(
        lambda x: build.sort((x,), 1, "LT"),
        rng.standard_normal((2, n)).astype("float32"),
        symbolic=True,
    )


# -- folds
# -------------------------------------------------------------------------------------------------------------------
def scanned(fold: str, backward: bool = False):
    def fn(x):
        n = x.shape.dims[-1]
        low, high = (0, n - 1) if backward else (n - 1, 0)
        window = [WindowDim(1)] * (x.shape.rank - 1) + [WindowDim(n, pad_low=low, pad_high=high)]
        start = {"add": 0, "multiply": 1, "maximum": -np.inf}[fold]
        return build.reduce_window(x, build.full(start, x.shape.dtype, ()), tuple(window), fold)

    return fn


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dims", [(2, 65), (3, 1028), (2, 5001)], ids=str)
def test_scans(dims, backward):
    check(
        scanned("add", backward),
        rng.standard_normal(dims).astype("float32"),
        tolerance=2e-5,
    )
    check(scanned("maximum", backward), rng.standard_normal(dims).astype("float32"))


def test_scans_of_other_types():
    check(scanned("add"), rng.integers(-9, 9, (2, 3000)))
    check(scanned("add"), rng.standard_normal((2, 300)), dtypes=["bf16"], tolerance=1e-2)
    check(scanned("multiply"), 1 + rng.standard_normal((2, 200)) / 50, tolerance=1e-12)
    check(
        scanned("add"),
        rng.standard_normal((2, 3000)).astype("float32"),
        tolerance=2e-5,
        symbolic=True,
    )


def scattered(fold: str | None):
    """Rows of y added to (or put over, or …) those of x that the indices name."""

    def fn(x, i, y):
        element = Shape(x.shape.dtype)
        apply = build.computation(
            (lambda a, b: b) if fold is None else lambda a, b: getattr(build, fold)(a, b),
            [element] * 2,
        )
        return build.scatter(
            x,
            build.reshape(i, (*i.shape.dims, 1)),
            y,
            apply,
            update_window_dims=tuple(range(1, x.shape.rank)),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
            index_vector_dim=1,
        )

    return fn


@pytest.mark.parametrize("fold", ["add", "maximum", "subtract", None])
@pytest.mark.parametrize(("rows", "n", "width"), [(3, 200, 8), (50, 100, 5), (7, 300, 0)], ids=str)
def test_scatters(rows, n, width, fold):
    inner = (width,) if width else ()
    where = rng.integers(-1, rows + 1, n).astype("int32")  # some are outside
    check(
        scattered(fold),
        *(v.astype("float32") for v in (rng.standard_normal((rows, *inner)),)),
        where,
        rng.standard_normal((n, *inner)).astype("float32"),
        tolerance=2e-5,
    )


def test_scatters_of_narrow_types():
    check(
        scattered("add"),
        np.zeros((4, 16), "float32"),
        rng.integers(0, 4, 100).astype("int64"),
        rng.integers(-2, 3, (100, 16)).astype("float32"),
        dtypes=["bf16", "s64", "bf16"],
    )


@pytest.mark.parametrize(
    ("dims", "over"),
    [
        ((40, 1024), (0,)),
        ((2, 64, 96), (1,)),
        ((2, 20000), (1,)),
        ((4, 8, 2500), (0, 2)),
        ((60000,), (0,)),
        ((600, 40), (0,)),
    ],
    ids=str,
)
def test_reductions(dims, over):
    x = rng.standard_normal(dims).astype("float32")
    check(
        lambda x: build.reduce(x, build.full(0, "f32", ()), over, "add"),
        x,
        tolerance=2e-5,
    )
    check(lambda x: build.reduce(x, build.full(-np.inf, "f32", ()), over, "maximum"), x)


# -- convolution on matrix units
# ---------------------------------------------------------------------------------------------
# (type, input, kernel, result, window); labels are those of conv_layout.for_matrix_units
CONVOLUTIONS = [
    ("bf16", (2, 9, 9, 8), (24, 3, 3, 8), (2, 9, 9, 24), "size=3x3 pad=1_1x1_1"),
    (
        "bf16",
        (2, 9, 9, 16),
        (8, 3, 3, 16),
        (2, 5, 5, 8),
        "size=3x3 stride=2x2 pad=1_1x1_1",
    ),
    (
        "f16",
        (1, 6, 7, 64),
        (40, 3, 3, 64),
        (1, 13, 15, 40),
        "size=3x3 pad=2_2x2_2 lhs_dilate=2x2 rhs_reversal=1x1",
    ),
    ("bf16", (1, 8, 8, 128), (16, 3, 3, 128), (1, 4, 4, 16), "size=3x3 rhs_dilate=2x2"),
    ("bf16", (3, 40, 8), (8, 5, 8), (3, 36, 8), "size=5"),
]
KERNEL_GRADIENTS = [
    ("bf16", (2, 9, 9, 8), (2, 9, 9, 24), (24, 3, 3, 8), "size=9x9 pad=1_1x1_1"),
    (
        "f16",
        (3, 9, 9, 16),
        (3, 5, 5, 8),
        (8, 3, 3, 16),
        "size=5x5 pad=1_1x1_1 rhs_dilate=2x2",
    ),
    (
        "bf16",
        (1, 12, 12, 72),
        (1, 12, 12, 64),
        (64, 3, 3, 72),
        "size=12x12 pad=1_1x1_1",
    ),
]


@pytest.mark.parametrize("device", ["test.ptx.driver:sm_80", "test.ptx.driver:sm_90a"])
@pytest.mark.parametrize(
    ("dtype", "x", "k", "out", "window", "labels"),
    [
        *(pytest.param(*c, "b{0}f_o{0}i->b{0}f", id=f"forward {c[4]}") for c in CONVOLUTIONS),
        *(pytest.param(*c, "f{0}b_i{0}o->f{0}b", id=f"gradient {c[4]}") for c in KERNEL_GRADIENTS),
    ],
)
def test_convolutions(device, dtype, x, k, out, window, labels):
    sides = [",".join(map(str, d)) for d in (x, k, out)]
    labels = labels.format("01"[: len(x) - 2])
    module = parse_module(f"""HloModule c
ENTRY main {{
  x = {dtype}[{sides[0]}] parameter(0)
  k = {dtype}[{sides[1]}] parameter(1)
  ROOT r = f32[{sides[2]}] convolution(x, k), window={{{window}}}, dim_labels={labels}
}}""")
    target = gpu_target(device.replace("test.ptx.driver", "nvptx"))
    assert any(
        "conv_" in kernel.name and "16k16" in kernel.name or "16r16" in kernel.name
        for kernel in compile_module(module, target).kernels
    )
    inputs = random_inputs(module, seed=1)
    (expected,) = evaluate(module, inputs)
    np.testing.assert_allclose(
        run(module, inputs, device)[0],
        expected,
        rtol=1e-4,
        atol=1e-5 * np.abs(expected).max(),
    )


@pytest.mark.parametrize(("channels", "features", "groups"), [(16, 16, 16), (6, 12, 6), (8, 24, 2)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "s32"])
def test_convolutions_in_groups(channels, features, groups, dtype):
    window = (WindowDim(3, pad_low=1, pad_high=1), WindowDim(3, 2, 1, 1))
    check(
        lambda x, k: build.convolution(x, k, window, "bf01_oi01->bf01", feature_group_count=groups),
        rng.integers(-3, 4, (2, channels, 6, 7)).astype("float32"),
        rng.integers(-3, 4, (features, channels // groups, 3, 3)).astype("float32"),
        dtypes=[dtype] * 2,
    )


def test_layouts_for_matrix_units():
    """Training a convolution: forward, both gradients; f32 stays as it is, features that are no
    multiple of 16 bytes get zeros."""

    def labels(dtype: str, channels: int) -> list[str]:
        module = parse_module(f"""HloModule c
ENTRY main {{
  x = {dtype}[2,{channels},9,9] parameter(0)
  k = {dtype}[16,{channels},3,3] parameter(1)
  g = {dtype}[2,16,9,9] parameter(2)
  y = {dtype}[2,16,9,9] convolution(x, k), window={{size=3x3 pad=1_1x1_1}}, dim_labels=bf01_oi01->bf01
  dx = {dtype}[2,{channels},9,9] convolution(g, k), window={{size=3x3 pad=1_1x1_1 rhs_reversal=1x1}}, dim_labels=bf01_io01->bf01
  dk = {dtype}[16,{channels},3,3] convolution(x, g), window={{size=9x9 pad=1_1x1_1}}, dim_labels=fb01_io01->fb01
  ROOT t = ({dtype}[2,16,9,9], {dtype}[2,{channels},9,9], {dtype}[16,{channels},3,3]) tuple(y, dx, dk)
}}""")
        result = for_matrix_units(frozenset(("bf16",))).run(module)
        for e, f in zip(
            *(evaluate(m, random_inputs(module)) for m in (module, result)), strict=True
        ):
            np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5)
        return [x["dim_labels"] for x in result.entry.instructions() if x.op == "convolution"]

    assert labels("bf16", 8) == [
        "b01f_o01i->b01f",
        "b01f_o01i->b01f",
        "f01b_i01o->f01b",
    ]
    assert labels("bf16", 3) == labels("bf16", 8)
    assert labels("f32", 8) == ["bf01_oi01->bf01", "bf01_io01->bf01", "fb01_io01->fb01"]


# -- banks and sectors
# -------------------------------------------------------------------------------------------------------
def touched(name: str) -> tuple[dict[str, float], float]:
    """({load, store: most accesses of a bank that one instruction of a warp takes, over the least
    for its bytes}, bytes of the sectors of global memory over the bytes asked for) of a program of
    check_gpu."""
    worst, sectors, wanted = {"load": 1.0, "store": 1.0}, 0, 0

    def banks(kind: str, frame, address, nbytes: int) -> None:
        together = 32 if nbytes <= 4 else 128 // nbytes
        for threads, at in warps(frame, address):
            for part in range(32 // together):
                of_part = threads % 32 // together == part
                words = {int(a) // 4 + w for a in at[of_part] for w in range(max(1, nbytes // 4))}
                counts = np.bincount([w % 32 for w in words], minlength=1)
                worst[kind] = max(worst[kind], float(counts.max(initial=1)))

    def warps(frame, address):
        address = np.broadcast_to(address, frame.threads.shape)
        for warp in np.unique(frame.threads // 32)[:4]:
            chosen = frame.threads // 32 == warp
            yield frame.threads[chosen], address[chosen]

    def load_shared(self, frame, address, size, count, lanes=None):
        banks("load", frame, address, size * count)
        return of_shared[0](self, frame, address, size, count, lanes)

    def store_shared(self, frame, address, values, size, lanes=None):
        banks("store", frame, address, size * len(values))
        return of_shared[1](self, frame, address, values, size, lanes)

    def count(frame, address, nbytes: int) -> None:
        nonlocal sectors, wanted
        for _, at in warps(frame, address):
            sectors += 32 * len(
                {(int(a) + b) // 32 for a in at for b in range(0, nbytes, min(nbytes, 4))}
            )
            wanted += nbytes * len(np.unique(at))

    def load_global(self, frame, address, size, n, **how):
        count(frame, address, size * n)
        return of_global[0](self, frame, address, size, n, **how)

    def store_global(self, frame, address, values, size, **how):
        count(frame, address, size * len(values))
        return of_global[1](self, frame, address, values, size, **how)

    of_shared, of_global = (
        (memory.Shared.load, memory.Shared.store),
        (memory.GlobalMemory.load, memory.GlobalMemory.store),
    )
    with (
        mock.patch.object(memory.Shared, "load", load_shared),
        mock.patch.object(memory.Shared, "store", store_shared),
        mock.patch.object(memory.GlobalMemory, "load", load_global),
        mock.patch.object(memory.GlobalMemory, "store", store_global),
        config.override(DEVICE="test.ptx.driver:sm_80", CACHE=""),
    ):
        check_gpu.check(name)
    return worst, sectors / max(wanted, 1)


@pytest.mark.parametrize(
    ("name", "load", "store"),
    [
        ("transpose", 1, 1),
        ("batched transpose", 1, 1),
        ("fused transpose", 1, 1),
        ("wide softmax", 1, 1),
        ("sort", 2, 2),
        ("long scan", 1, 1),
        ("attention", 1, 4),
    ],
)
def test_banks(name, load, store):
    worst, _ = touched(name)
    assert (worst["load"], worst["store"]) == (load, store)


def test_sectors():
    """Transposes ask for no byte of memory that they do not need, on either side."""
    assert touched("transpose")[1] == 1
    # rows of 70 elements share sectors with their neighbours
    assert touched("fused transpose")[1] < 1.2


@pytest.mark.parametrize("width", range(16, 257, 16))
def test_rows_of_fragments_are_in_different_banks(width):
    """ldmatrix reads eight rows of 16 bytes at a time."""
    assert len({r * gpu_attention_mma.Tile(0, 64, width).pitch // 16 % 8 for r in range(8)}) == 8
