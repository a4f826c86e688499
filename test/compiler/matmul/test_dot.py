"""dot against the evaluator: layouts, dimension numbers, element types, odd and symbolic sizes."""

from dataclasses import replace

import numpy as np
import pytest

from test.compiler.steps import check, module_of
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.llvm.target import host
from torch_hlo.compiler.matmul import blocking
from torch_hlo.compiler.matmul.dot import SOURCES
from torch_hlo.compiler.matmul.dot_amx import on_amx
from torch_hlo.compiler.matmul.dot_plan import plan_of
from torch_hlo.compiler.matmul.product import product
from torch_hlo.compiler.matmul.tile import product_tile
from torch_hlo.device.cpu import loader
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.shape import Shape

SIZES = [
    (1, 1, 1),
    (5, 7, 3),
    (1, 100, 37),
    (3, 65, 130),
    (8, 33, 16),
    (17, 1, 100),
    (70, 90, 400),
    (2, 2, 1000),
    (15, 600, 20),
    (90, 5, 131),
    (20, 300, 1024),
]


def values(rng, dims, dtype):
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0 if np.dtype(dtype).kind == "u" else -9, 9, dims).astype(dtype)
    if np.dtype(dtype).kind == "c":
        return (rng.standard_normal(dims) + 1j * rng.standard_normal(dims)).astype(dtype)
    return rng.standard_normal(dims).astype(dtype)


@pytest.mark.parametrize("m,n,k", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_matrices(m, n, k, dtype):
    rng = np.random.default_rng(m * n)
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            a = values(rng, (k, m) if transpose_a else (m, k), dtype)
            b = values(rng, (n, k) if transpose_b else (k, n), dtype)
            check(
                lambda x, y, ta=transpose_a, tb=transpose_b: build.dot(x, y, (1 - ta,), (int(tb),)),
                a,
                b,
            )


@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        "uint8",
        "int16",
        "int64",
        "uint64",
        "float16",
        "complex64",
        "complex128",
        "bool",
    ],
)
def test_element_types(dtype):
    rng = np.random.default_rng(0)
    a, b = (
        values(rng, d, "uint8" if dtype == "bool" else dtype).astype(dtype)
        for d in ((2, 9, 33), (2, 33, 19))
    )
    check(lambda x, y: build.dot(x, y, (2,), (1,), (0,), (0,)), a, b)


@pytest.mark.parametrize(
    "types",
    [
        ("bf16", "bf16", None),
        ("bf16", "f32", "f32"),
        ("bf16", "bf16", "f32"),
        ("f8e4m3fn", "f8e4m3fn", "f32"),
        ("s8", "s8", "s32"),
        ("s4", "s4", None),
        ("f32", "f64", "f64"),
        ("f8e5m2", "f8e5m2", None),
    ],
)
@pytest.mark.parametrize("m,n,k", [(9, 19, 33), (64, 96, 64), (1, 70, 130), (40, 33, 700)])
def test_mixed_types(types, m, n, k):
    rng = np.random.default_rng(0)
    kind = {
        "f8e4m3fn": "float32",
        "bf16": "float32",
        "f32": "float32",
        "f64": "float64",
        "s8": "int8",
        "u8": "uint8",
        "s4": "int8",
        "f8e5m2": "float32",
    }
    a, b = values(rng, (m, k), kind[types[0]]), values(rng, (k, n), kind[types[1]])
    if types[0] == "s4":
        a, b = a.clip(-8, 7), b.clip(-8, 7)
    check(lambda x, y: build.dot(x, y, (1,), (0,), dtype=types[2]), a, b, dtypes=types[:2])


DIMENSIONS = [
    ((2, 3, 10, 8), (2, 3, 12, 8), (3,), (3,), (0, 1), (0, 1)),
    ((2, 10, 3, 8), (2, 12, 3, 8), (3,), (3,), (0, 2), (0, 2)),  # attention without transposes
    ((2, 3, 4, 5), (4, 5, 6), (2, 3), (0, 1), (), ()),
    ((2, 3, 4, 5), (5, 4, 6), (2, 3), (1, 0), (), ()),
    ((4, 40, 50), (50, 7), (2,), (0,), (), ()),
    ((4, 50, 40), (50, 7), (1,), (0,), (), ()),
    ((4, 50, 6), (50, 7), (1,), (0,), (), ()),
    ((40, 4, 50), (4, 50, 7), (2,), (1,), (1,), (0,)),
    ((3, 4, 5), (5, 3, 6, 2), (2, 0), (0, 1), (), ()),
    ((5,), (5,), (0,), (0,), (), ()),
    ((5,), (7,), (), (), (), ()),
    ((), (7,), (), (), (), ()),
    ((3, 4), (5,), (), (), (), ()),
    ((6, 5), (6, 5), (1,), (1,), (0,), (0,)),
    ((4, 5), (5, 2, 3), (1,), (0,), (), ()),
    ((4, 5), (2, 5, 3), (1,), (1,), (), ()),
]  # fmt: skip


@pytest.mark.parametrize("case", DIMENSIONS)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_dimension_numbers(case, dtype):
    rng = np.random.default_rng(0)
    left, right, *numbers = case
    check(
        lambda x, y: build.dot(x, y, *numbers),
        values(rng, left, dtype),
        values(rng, right, dtype),
    )


@pytest.mark.parametrize("m,n,k", [(0, 4, 5), (4, 0, 5), (4, 5, 0)])
def test_empty(m, n, k):
    check(
        lambda x, y: build.dot(x, y, (1,), (0,)),
        np.ones((m, k), "float32"),
        np.ones((k, n), "float32"),
    )


@pytest.mark.parametrize(
    "m,n,k",
    [(5, 70, 9), (33, 40, 500), (1, 1, 1), (0, 3, 2), (3, 4, 0), (100, 700, 30)],
)
def test_symbolic_sizes(m, n, k):
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal((3, m, k)).astype("float32"),
        rng.standard_normal((3, k, n)).astype("float32"),
    )
    sizes = {(0, 1): "s0", (0, 2): "s1", (1, 1): "s1", (1, 2): "s2"}
    check(lambda x, y: build.dot(x, y, (2,), (1,), (0,), (0,)), a, b, symbolic=sizes)
    check(
        lambda x, y: build.dot(x, y, (2,), (2,), (0,), (0,)),
        a,
        b.swapaxes(1, 2).copy(),
        symbolic={(0, 1): "s0", (0, 2): "s1", (1, 2): "s1", (1, 1): "s2"},
    )


def test_nan_and_infinity_stay_in_their_row():
    a = np.ones((20, 40), "float32")
    a[3, 5], a[7, 0] = np.nan, np.inf
    check(lambda x, y: build.dot(x, y, (1,), (0,)), a, np.ones((40, 35), "float32"))


@pytest.mark.parametrize(
    "m,n,k",
    [
        (9, 1, 16),
        (33, 70, 31),
        (64, 64, 64),
        (100, 33, 4200),
        (31, 600, 130),
        (70, 200, 830),
        (96, 170, 800),
    ],
)
@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_bf16_layouts(m, n, k, out, batch):
    """On machines with AMX these run on tiles, with one block of K or several."""
    rng = np.random.default_rng(0)
    lead = tuple(range(len(batch)))
    r = len(batch)
    for transpose_a in (0, 1):
        for transpose_b in (0, 1):
            a = rng.standard_normal((*batch, *((k, m) if transpose_a else (m, k)))).astype(
                "float32"
            )
            b = rng.standard_normal((*batch, *((n, k) if transpose_b else (k, n)))).astype(
                "float32"
            )
            check(
                lambda x, y, ta=transpose_a, tb=transpose_b: build.dot(
                    x, y, (r + 1 - ta,), (r + tb,), lead, lead, out
                ),
                a,
                b,
                dtypes=["bf16", "bf16"],
                rtol=1e-2 if out == "bf16" else 1e-4,
            )


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize(
    "m,n,k,batch",
    [
        (33, 70, 63, ()),
        (64, 64, 128, (3,)),
        (50, 600, 1100, ()),
        (31, 33, 4200, (2,)),
        (20, 130, 9000, ()),
    ],
)
def test_byte_layouts(kind, m, n, k, batch):
    """On machines with AMX these run on tiles: one block of K or several, a K that no group of four
    divides."""
    rng = np.random.default_rng(0)
    lead, r = tuple(range(len(batch))), len(batch)
    for transpose_a, transpose_b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        a, b = (
            rng.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, (*batch, *dims)).astype(kind)
            for dims in (
                (k, m) if transpose_a else (m, k),
                (n, k) if transpose_b else (k, n),
            )
        )
        check(
            lambda x, y, ta=transpose_a, tb=transpose_b: build.dot(
                x,
                y,
                (r + 1 - ta,),
                (r + tb,),
                lead,
                lead,
                f"{kind[0].replace('i', 's')}32",
            ),
            a,
            b,
        )


def test_bf16_dimensions_that_do_not_merge():
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal((3, 20, 4, 40)).astype("float32"),
        rng.standard_normal((3, 4, 40, 30)).astype("float32"),
    )
    check(
        lambda x, y: build.dot(x, y, (0, 3), (0, 2), (2,), (1,)),
        a,
        b,
        dtypes=["bf16", "bf16"],
    )


@pytest.mark.parametrize("k", [8192, 8195, 9001])
@pytest.mark.parametrize(("m", "n"), [(24, 120), (33, 100)])
def test_long_sums(m, n, k):
    """Sums that are cut into pieces, with and without a rest, all layouts."""
    rng = np.random.default_rng(0)
    for transpose_a, transpose_b in ((0, 0), (1, 0), (0, 1)):
        a = values(rng, (k, m) if transpose_a else (m, k), "float32")
        b = values(rng, (n, k) if transpose_b else (k, n), "float32")
        check(
            lambda x, y, ta=transpose_a, tb=transpose_b: build.dot(x, y, (1 - ta,), (tb,)),
            a,
            b,
            rtol=1e-3,
        )


SMALL = [
    (4, 4, 4),
    (7, 9, 11),
    (8, 8, 8),
    (16, 16, 16),
    (24, 33, 31),
    (32, 32, 32),
    (5, 64, 64),
    (16, 64, 64),
    (2, 40, 24),
]


@pytest.mark.parametrize("m,n,k", SMALL)
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_small_batched(m, n, k, dtype):
    """Operands are read where they are, whatever their layout; bf16 ones on tiles from a K of 16
    on."""
    rng = np.random.default_rng(0)
    for ta, tb in ((0, 0), (0, 1), (1, 0), (1, 1)):
        a, b = (
            rng.standard_normal((5, *dims)).astype("float64" if dtype == "f64" else "float32")
            for dims in ((k, m) if ta else (m, k), (n, k) if tb else (k, n))
        )
        check(
            lambda x, y, ta=ta, tb=tb: build.dot(x, y, (2 - ta,), (1 + tb,), (0,), (0,)),
            a,
            b,
            dtypes=[dtype, dtype],
            rtol=1e-2 if dtype == "bf16" else 1e-4,
        )


def _planned(dtype: str, a: tuple, b: tuple, contract: tuple):
    batch = ((0,), (0,)) if len(a) == 3 else ()
    x = module_of(
        lambda x, y: build.dot(x, y, *contract, *batch),
        [Shape(dtype, a), Shape(dtype, b)],
    ).entry.root
    t = product_tile({"f32": "float", "f64": "double", "bf16": "float"}[dtype], 64)
    return x, plan_of(product(x), t, tuple(SOURCES[dtype, t.kind] for _ in range(2)))


def test_plans_of_small_products():
    """What short sums, few rows and narrow matrices are computed with where registers have 64
    bytes."""
    _, short = _planned("f32", (9, 8, 8), (9, 8, 8), ((2,), (2,)))
    assert short.kernel == "tiles", (
        "sums of 8 would be added up across the lanes of a vector one by one"
    )
    assert _planned("f32", (8, 768), (3072, 768), ((1,), (1,)))[1].kernel == "rows"
    assert _planned("f32", (9, 32, 32), (9, 32, 32), ((1,), (1,)))[1].form_a == "lanes", (
        "a small left operand is not copied"
    )
    assert _planned("f32", (768, 512), (768, 768), ((0,), (0,)))[1].form_a == "copy"
    assert not _planned("f32", (512, 16), (16, 768), ((1,), (0,)))[1].fetch, (
        "16 rows of B are in the cache after the first tile"
    )
    assert _planned("f32", (512, 768), (768, 768), ((1,), (0,)))[1].fetch
    _, narrow = _planned("f64", (9, 32, 32), (9, 32, 32), ((2,), (1,)))
    assert narrow.vectors == 4 and narrow.even, "three vectors would compute 48 columns for 32"
    assert _planned("f32", (16, 256), (256, 1024), ((1,), (0,)))[1].vectors > 1, (
        "a vector wide, a step loads more than it multiplies"
    )


def test_tile_shapes_fit_the_registers():
    for vector_bytes, registers in ((64, 32), (32, 16), (16, 16)):
        for kind in ("float", "double"):
            t = product_tile(kind, vector_bytes)
            for m, n, k in (
                (1, 1, 1),
                (1, 64, 64),
                (14, 500, 3),
                (16, 1024, 256),
                (100, 100, 100),
                (512, 768, 768),
                (33, 17, 65),
            ):
                for form in ("rows", "copy", "transpose"):
                    heights, vectors = blocking.tile_shape(t, m, n, k, form)
                    assert heights[0] <= t.lanes and heights[0] * vectors + vectors < registers
                    assert sum(heights[:1]) * -(-m // heights[0]) >= m


def test_tiny_bf16_products_are_not_for_tiles():
    target = replace(host(), features=host().features + ",+amx-bf16")
    for size, on_tiles in ((16, False), (32, True)):
        x, _ = _planned("bf16", (9, size, size), (9, size, size), ((2,), (1,)))
        assert on_amx(x, target, product(x)) is on_tiles


@pytest.mark.skipif(not host().has("avx2"), reason="needs an x86-64 machine")
@pytest.mark.parametrize("shapes", [((6, 50), (50, 33)), ((64, 256), (256, 64))])
def test_pairs_of_bf16_are_multiplied_where_there_are_no_tiles(shapes):
    """Values: test_bf16_layouts, on a machine that has the instruction."""
    features = [f for f in host().features.split(",") if not f[1:].startswith(("amx", "avx512"))]
    vectors = "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16"
    features = ",".join([*features, vectors])
    target = replace(host(), features=features, cpu="cooperlake", vector_bytes=64)
    module = module_of(
        lambda x, y: build.convert(build.dot(x, y, (1,), (0,)), "f32"),
        [Shape("bf16", dims) for dims in shapes],
    )
    texts: list[str] = []
    compile_module(module, target, dump=lambda name, text: texts.append(f"{name} {text}"))
    assert any(text.startswith("asm") and "vdpbf16ps" in text for text in texts)


@pytest.mark.skipif(not host().has("avx2"), reason="needs a machine with AVX2 at least")
@pytest.mark.parametrize("m,n,k", [(3, 130, 300), (8, 100, 300), (30, 40, 1024), (100, 300, 500)])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_matrices_on_avx2(m, n, k, dtype):
    """Registers of 32 bytes: tiles of 6 rows (4 of f64)."""
    features = ",".join(
        f"-{f[1:]}" if f[1:].startswith(("amx", "avx512", "avx10")) else f
        for f in host().features.split(",")
    )
    target = replace(host(), features=features, cpu="haswell", vector_bytes=32)
    module = module_of(
        lambda x, y: build.dot(x, y, (1,), (0,)),
        [Shape(dtype, (m, k)), Shape(dtype, (k, n))],
    )
    program = loader.load(compile_module(module, target, optimize=False), target)
    rng = np.random.default_rng(m)
    a, b = (
        rng.standard_normal(dims).astype({"f32": np.float32, "f64": np.float64}[dtype])
        for dims in ((m, k), (k, n))
    )
    out = np.zeros((m, n), a.dtype)
    program.call([a.ctypes.data, b.ctypes.data], [out.ctypes.data])
    np.testing.assert_allclose(out, a @ b, atol=k * np.finfo(a.dtype).eps * 4)
