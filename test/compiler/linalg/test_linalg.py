"""cholesky and triangular-solve, real and complex, batched; LU and QR."""

import re
from dataclasses import replace

import numpy as np
import pytest

from test.compiler.steps import check, module_of
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.llvm.target import host
from torch_hlo.device.cpu import loader
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.instruction import Computation
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.lowering.linalg.linalg import linalg_qr, lu_factor


def matrices(dtype, batch, n):
    rng = np.random.default_rng(n)
    a = rng.standard_normal((batch, n, n))
    return (
        a + 1j * rng.standard_normal((batch, n, n)) if np.dtype(dtype).kind == "c" else a
    ).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("batch,n", [(1, 1), (3, 5), (1, 40)])
@pytest.mark.parametrize("lower", [True, False])
def test_cholesky(dtype, batch, n, lower):
    a = matrices(dtype, batch, n)
    a = (a @ np.conj(np.swapaxes(a, -1, -2)) + n * np.eye(n)).astype(dtype)
    check(lambda x: build.cholesky(x, lower), a, rtol=1e-4)
    check(lambda x: build.cholesky(x, lower), -a)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("transpose", ["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"])
def test_triangular_solve(dtype, left, lower, unit, transpose):
    n = 7
    a = matrices(dtype, 3, n) / n if unit else matrices(dtype, 3, n) + 2 * n * np.eye(n)
    b = matrices(dtype, 3, 9)[:, :n, :] if left else matrices(dtype, 3, 9)[:, :, :n]
    check(
        lambda x, y: build.triangular_solve(
            x, y, left_side=left, lower=lower, unit_diagonal=unit, transpose_a=transpose
        ),
        a.astype(dtype),
        b,
        rtol=1e-3,
    )


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("n,columns", [(21, 37), (50, 1), (33, 70)])
def test_blocks_that_are_not_whole(lower, n, columns):
    """One triangle is read alone, whatever the other holds."""
    a = matrices("float64", 2, n)
    a = a @ np.swapaxes(a, -1, -2) + n * np.eye(n)
    a[
        np.broadcast_to(
            np.triu(np.ones((n, n)), 1) if lower else np.tril(np.ones((n, n)), -1),
            a.shape,
        )
        > 0
    ] = np.nan
    check(lambda x: build.cholesky(x, lower), a)
    b = np.random.default_rng(0).standard_normal((2, n, columns))
    for transpose in ("NO_TRANSPOSE", "TRANSPOSE"):
        check(
            lambda x, y, t=transpose: build.triangular_solve(
                x, y, lower=lower, unit_diagonal=False, transpose_a=t
            ),
            a,
            b,
        )


def qr(a):
    return [r for r in linalg_qr(a, "complete" if a.shape.dims[-2] == 9 else "reduced")]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "dims", [(3, 5), (2, 5, 3), (16, 16), (40, 33), (33, 50), (9, 4), (1, 1), (70, 1)]
)
@pytest.mark.parametrize("factors", [qr, lambda a: [r.x for r in lu_factor(a)]], ids=["qr", "lu"])
def test_factors_are_what_the_loops_say(factors, dims, dtype):
    a = np.random.default_rng(1).standard_normal(dims).astype(dtype)
    check(factors, a, optimize=True, rtol=2e-4 if dtype == "float32" else 1e-11)


def test_qr_of_columns_that_are_done():
    """Zeros below the diagonal are left as they are, with R's sign."""
    check(qr, np.triu(np.arange(-8.0, 17.0).reshape(5, 5)), optimize=True)
    check(qr, np.zeros((4, 3)), optimize=True)


@pytest.mark.skipif(not host().has("avx2"), reason="needs a machine with AVX2 at least")
@pytest.mark.parametrize("vector_bytes", [16, 32])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_lesser_machines(vector_bytes, dtype):
    features = ",".join(
        f"-{f[1:]}" if f[1:].startswith(("amx", "avx512", "avx10")) else f
        for f in host().features.split(",")
    )
    target = replace(host(), features=features, cpu="haswell", vector_bytes=vector_bytes)
    n = 37
    a = matrices("float32" if dtype == "f32" else "float64", 1, n)
    a = a @ np.swapaxes(a, -1, -2) + n * np.eye(n, dtype=a.dtype)
    module = module_of(
        lambda x: [
            build.cholesky(x, True),
            build.triangular_solve(x, x),
            *linalg_qr(x),
        ],
        [Shape(dtype, a.shape)],
    )
    program = loader.load(compile_module(module, target), target)
    factor, solution, q, r = (np.zeros_like(a) for _ in range(4))
    program.call([a.ctypes.data], [x.ctypes.data for x in (factor, solution, q, r)])
    close = {"rtol": 1e-4, "atol": 1e-3} if dtype == "f32" else {"rtol": 1e-10, "atol": 1e-10}
    for found, expected in (
        (factor @ np.swapaxes(factor, -1, -2), a),
        (np.tril(a) @ solution, a),
        (q @ r, a),
        (q @ np.swapaxes(q, -1, -2), np.eye(n)[None]),
    ):
        np.testing.assert_allclose(found, expected, **close)


def test_empty():
    check(lambda x: build.cholesky(x, True), np.ones((0, 3, 3), "float32"))
    check(
        lambda x, y: build.triangular_solve(x, y),
        np.ones((2, 3, 3), "float32"),
        np.ones((2, 3, 0), "float32"),
    )


def test_a_step_made_of_several_does_not_repeat_what_comes_before():
    """A right-sided solve is emitted as transposes around a left-sided one; the loop that computes
    its operand runs once."""
    seen = {}

    def program(a, b):
        return build.triangular_solve(a, looped(b), left_side=False, lower=True)

    module = module_of(program, [Shape("f32", (3, 3)), Shape("f32", (4, 3))])
    compile_module(module, dump=lambda name, value: seen.setdefault(name, []).append(str(value)))
    assert len(re.findall(r"define void @condition", "".join(seen["llvm"]))) == 1
    a, b = (
        matrices("float32", 1, 3)[0] + 6 * np.eye(3, dtype="float32"),
        matrices("float32", 1, 4)[0][:, :3],
    )
    check(program, a, b, rtol=1e-4)


def looped(x):
    """x doubled three times, by a loop."""
    start = build.tuple_(build.constant(0, "s64"), x)
    state = build.parameter(0, start.shape)
    count, value = (build.get_tuple_element(state, i) for i in range(2))
    one, three = build.constant(1, "s64"), build.constant(3, "s64")
    condition = Computation("condition", (state,), build.compare(count, three, "LT"))
    body = Computation(
        "body", (state,), build.tuple_(build.add(count, one), build.add(value, value))
    )
    return build.get_tuple_element(build.while_(condition, body, start), 1)
