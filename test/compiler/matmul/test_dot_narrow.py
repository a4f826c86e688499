"""dot_narrow: products of vectors with matrices of narrow numbers read those as they are."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler.compiled import run
from test.support import HloTestCase, hlo
from torch_hlo.compiler.matmul.dot_narrow import dot_narrow
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build as h, numpy_dtype
from torch_hlo.hlo.ir.shape import Shape

N, K = 48, 128


def p(index, dtype, *dims):
    return h.parameter(index, Shape(dtype, dims))


def nibbles():
    code = h.convert(p(1, "u8", N, K), "s32")
    return h.convert(h.and_(code, h.full_like(code, 15)), "f32")


TAKEN = {
    "s8": lambda: h.dot(p(0, "f32", K), h.convert(p(1, "s8", N, K), "f32"), (0,), (1,)),
    "columns": lambda: h.dot(p(0, "f32", K), h.convert(p(1, "s8", K, N), "f32"), (0,), (0,)),
    "on the left": lambda: h.dot(h.convert(p(1, "s8", N, K), "f32"), p(0, "f32", K), (1,), (0,)),
    "bf16": lambda: h.dot(
        p(0, "bf16", K), h.convert(p(1, "s8", N, K), "bf16"), (0,), (1,), dtype="f32"
    ),
    "f8": lambda: h.dot(p(0, "f8e4m3fn", K), p(1, "f8e5m2", N, K), (0,), (1,), dtype="f32"),
    "bytes": lambda: h.dot(p(0, "s8", K), p(1, "s8", N, K), (0,), (1,), dtype="s32"),
    "nibbles": lambda: h.dot(p(0, "f32", K), nibbles(), (0,), (1,)),
    "groups": lambda: h.dot(
        p(0, "f32", 4, 32), h.convert(p(1, "s8", N, 4, 32), "f32"), (1,), (2,), (0,), (1,)
    ),
}
FEW = {
    "columns": lambda: h.dot(p(0, "f32", 40, 3), p(1, "f32", 3, 21), (1,), (0,)),
    "rows of both": lambda: h.dot(p(0, "bf16", 40, 4), p(1, "bf16", 21, 4), (1,), (1,)),
    "small matrices": lambda: h.dot(
        p(0, "f32", 50, 3, 5), p(1, "f32", 50, 5, 2), (2,), (1,), (0,), (0,)
    ),
    "turned": lambda: h.dot(p(0, "f32", 3, 50, 2), p(1, "f32", 2, 3, 50), (0,), (1,), (1,), (2,)),
    "integers": lambda: h.dot(p(0, "s32", 50, 2), p(1, "s32", 2, 2), (1,), (0,)),
}
KEPT = {
    "two rows": lambda: h.dot(p(0, "f32", 2, K), h.convert(p(1, "s8", N, K), "f32"), (1,), (1,)),
    "bf16 weights": lambda: h.dot(p(0, "f32", K), h.convert(p(1, "bf16", N, K), "f32"), (0,), (1,)),
    "made of floats": lambda: h.dot(
        p(0, "f32", K),
        h.convert(h.convert(p(1, "f32", N, K), "s8"), "f32"),
        (0,),
        (1,),
    ),
    "small": lambda: h.dot(p(0, "f32", 16), h.convert(p(1, "s8", 8, 16), "f32"), (0,), (1,)),
    "many terms": lambda: h.dot(p(0, "f32", 9, 5), p(1, "f32", 5, 7), (1,), (0,)),
}


class DotNarrow(HloTestCase):
    def test_few_terms(self):
        for name, make in FEW.items():
            with self.subTest(name):
                m = self.program(make())
                found = self.check(dot_narrow, m)
                assert "dot" not in [x.op for x in found.entry.instructions()]
                x, y = (o.shape for o in m.entry.params)
                rng = np.random.default_rng(0)
                given = [rng.integers(-4, 5, s.dims).astype(numpy_dtype(s.dtype)) for s in (x, y)]
                (a,), (b,) = evaluate(m, given), run(m, given, optimize=True)
                np.testing.assert_array_equal(a, b)

    def test_taken(self):
        for name, make in TAKEN.items():
            with self.subTest(name):
                m = self.check(dot_narrow, self.program(make()))
                assert "dot" not in [x.op for x in m.entry.instructions()]

    def test_kept(self):
        for name, make in KEPT.items():
            with self.subTest(name):
                self.assertKept(dot_narrow, make())


WIDE = ("f32", "bf16", "s32")


@pytest.mark.parametrize("name", TAKEN)
def test_no_wide_copy_of_the_matrix_is_written(name):
    m = HloTestCase().program(TAKEN[name]())
    best = optimize(m)
    for x in best.entry.instructions():
        for part in x.shape.elements or (x.shape,):
            assert part.dtype not in WIDE or part.size < N * K, (name, str(x))
    rng = np.random.default_rng(0)
    given = [
        rng.integers(-100, 100, q.shape.dims)
        if q.shape.kind in "su"
        else rng.normal(size=q.shape.dims)
        for q in m.entry.params
    ]
    given = [h_values(v, q.shape.dtype) for v, q in zip(given, m.entry.params)]
    want = evaluate(m, given)
    np.testing.assert_allclose(run(m, given, optimize=True)[0], want[0], rtol=1e-4, atol=1e-3)


def h_values(v, dtype):
    from torch_hlo.hlo.ir.numeric import round_to

    return round_to(v, dtype)


def test_a_scaled_product_is_one_kernel():
    m = hlo("""
HloModule decode

ENTRY main {
  x = bf16[1,128] parameter(0)
  w = s8[48,128] parameter(1)
  s = bf16[48] parameter(2)
  c = bf16[48,128] convert(w)
  d = f32[1,48] dot(x, c), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  f = f32[48] convert(s)
  b = f32[1,48] broadcast(f), dimensions={1}
  p = f32[1,48] multiply(d, b)
  ROOT r = bf16[1,48] convert(p)
}
""")
    steps = [x for x in optimize(m).entry.instructions() if x.op == "fusion"]
    assert len(steps) == 1
    body = [x.op for x in steps[0]["calls"].instructions()]
    assert "reduce" in body and "dot" not in body
