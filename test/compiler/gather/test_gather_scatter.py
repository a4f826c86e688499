"""gather and scatter: clamping and dropping, batching dimensions, windows, combiners, index
types."""

import numpy as np
import pytest

from test.compiler import compiled
from test.compiler.steps import check
from test.support import hlo
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.llvm import target
from torch_hlo.hlo.ir import Module, build

ROWS = dict(
    update_window_dims=(1,),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0,),
    index_vector_dim=1,
)


def llvm(m: Module) -> str:
    found: list[str] = []
    wide = target.platform_target("x86_64-linux-gnu", "x86-64-v4")
    compile_module(
        m, wide, dump=lambda name, value: found.append(value) if name == "llvm" else None
    )
    return found[0]


def test_rows_of_windows_that_follow_each_other() -> None:
    """One loop runs over all of them, in whole vectors."""
    m = hlo("""HloModule rows
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY main {
  x = f32[50,4,8] parameter(0)
  i = s64[60,1] parameter(1)
  u = f32[60,4,8] parameter(2)
  ROOT y = f32[50,4,8] scatter(x, i, u), update_window_dims={1,2}, inserted_window_dims={0},
    scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add
}
""")
    assert "masked" not in llvm(m)
    rng = np.random.default_rng(0)
    x, i, u = (p.dims for p in m.entry.params)
    given = [rng.random(x, np.float32), rng.integers(-1, 51, i), rng.random(u, np.float32)]
    compiled.check(m, given, optimize=True)


WINDOWS = {
    "frames": ("f32[900]", 100, 3),
    "the last ones are clamped": ("f32[390]", 100, 3),
    "the first ones are clamped": ("f32[900]", -7, 3),
    "backwards": ("f32[900]", 300, -3),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_indices_that_are_positions(name: str) -> None:
    """Elements of windows lie at addresses, unless some are clamped."""
    given, first, step = WINDOWS[name]
    m = hlo(f"""HloModule windows
ENTRY main {{
  x = {given} parameter(0)
  w = s64[100,32] iota(), iota_dimension=0
  step = s64[] constant({step})
  steps = s64[100,32] broadcast(step), dimensions={{}}
  k = s64[100,32] iota(), iota_dimension=1
  first = s64[] constant({first})
  from = s64[100,32] broadcast(first), dimensions={{}}
  a = s64[100,32] multiply(w, steps)
  b = s64[100,32] add(a, k)
  i = s64[100,32] add(from, b)
  ROOT y = f32[100,32] gather(x, i), offset_dims={{}}, collapsed_slice_dims={{0}},
    start_index_map={{0}}, index_vector_dim=2, slice_sizes={{1}}
}}
""")
    assert ("masked.gather" in llvm(m)) == ("clamped" in name)
    (x,) = m.entry.params
    compiled.check(m, [np.arange(x.size, dtype=np.float32)], optimize=True)


@pytest.mark.parametrize("combiner", ["add", "second", "maximum"])
@pytest.mark.parametrize("kind", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("width", [1, 3, 70, 300])
def test_scatter_rows(combiner, kind, width):
    rng = np.random.default_rng(0)
    index = rng.integers(0, 55, (33, 1)).astype(kind)
    if kind != "uint8":
        index[3] = -1
    x, u = (
        rng.standard_normal((50, width)).astype("float32"),
        rng.standard_normal((33, width)).astype("float32"),
    )
    check(lambda x, i, u: build.scatter(x, i, u, combiner, **ROWS), x, index, u)
    check(
        lambda x, i, u: build.scatter(x, i, u, combiner, **ROWS),
        x,
        index,
        u,
        symbolic={(0, 0): "s0", (1, 0): "s1", (2, 0): "s1", (0, 1): "s2", (2, 1): "s2"},
    )


@pytest.mark.parametrize("dtype", ["bf16", "f16", "s32", "f64", "c64"])
def test_scatter_types(dtype):
    rng = np.random.default_rng(0)
    index = rng.integers(-1, 9, (12, 1)).astype("int32")
    kind = {
        "bf16": "float32",
        "f16": "float16",
        "s32": "int32",
        "f64": "float64",
        "c64": "complex64",
    }[dtype]
    x, u = (rng.integers(-4, 5, d).astype(kind) for d in ((9, 40), (12, 40)))
    check(
        lambda x, i, u: build.scatter(x, i, u, "add", **ROWS),
        x,
        index,
        u,
        dtypes=[dtype, "s32", dtype],
    )


def test_scatter_elements_by_pairs():
    rng = np.random.default_rng(0)
    index = rng.integers(-1, 6, (4, 5, 2)).astype("int64")
    dims = dict(
        inserted_window_dims=(0, 1),
        scatter_dims_to_operand_dims=(1, 0),
        index_vector_dim=2,
    )
    x = rng.standard_normal((5, 6)).astype("float32")
    check(
        lambda x, i, u: build.scatter(x, i, u, "add", update_window_dims=(), **dims),
        x,
        index,
        rng.standard_normal((4, 5)).astype("float32"),
    )


def test_scatter_windows():
    rng = np.random.default_rng(0)
    index = rng.integers(-1, 8, (4, 1)).astype("int32")
    for width in (7, 64):
        dims = dict(
            update_window_dims=(1, 2),
            scatter_dims_to_operand_dims=(0,),
            index_vector_dim=1,
        )
        x, u = (
            rng.standard_normal((9, 70)).astype("float32"),
            rng.standard_normal((4, 3, width)).astype("float32"),
        )
        check(lambda x, i, u, d=dims: build.scatter(x, i, u, "second", **d), x, index, u)


def test_scatter_batched():
    rng = np.random.default_rng(0)
    index = rng.integers(-1, 8, (3, 4, 1)).astype("int64")
    dims = dict(
        update_window_dims=(),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        index_vector_dim=2,
        input_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    x, u = (
        rng.standard_normal((3, 7)).astype("float32"),
        rng.standard_normal((3, 4)).astype("float32"),
    )
    check(lambda x, i, u: build.scatter(x, i, u, "add", **dims), x, index, u)


def test_scatter_nothing():
    check(
        lambda x, i, u: build.scatter(x, i, u, "add", **ROWS),
        np.ones((5, 4), "float32"),
        np.zeros((0, 1), "int32"),
        np.ones((0, 4), "float32"),
    )


@pytest.mark.parametrize("kind", ["int32", "int64", "uint8", "uint64"])
def test_gather_rows(kind):
    rng = np.random.default_rng(0)
    index = rng.integers(0, 60, (4, 5)).astype(kind)
    if kind == "int32":
        index[1, 1] = -7
    dims = dict(
        offset_dims=(2,),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        index_vector_dim=2,
        slice_sizes=(1, 33),
    )
    check(
        lambda x, i: build.gather(x, i, **dims),
        rng.standard_normal((50, 33)).astype("float32"),
        index,
    )


def test_gather_windows_and_batching():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 9, 8)).astype("float32")
    index = rng.integers(-2, 12, (3, 4, 2)).astype("int32")
    dims = dict(
        offset_dims=(2, 3),
        start_index_map=(2, 1),
        index_vector_dim=2,
        slice_sizes=(1, 4, 3),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    check(lambda x, i: build.gather(x, i, **dims), x, index)
    index = rng.integers(-2, 12, (2, 5)).astype("int32")
    dims = dict(
        offset_dims=(0, 2),
        collapsed_slice_dims=(1,),
        start_index_map=(1, 0),
        index_vector_dim=0,
        slice_sizes=(2, 1, 8),
    )
    check(lambda x, i: build.gather(x, i, **dims), x, index)
