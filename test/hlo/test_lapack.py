"""LAPACK routines in NumPy: each factorization gives its matrix back, and follows LAPACK's
conventions."""

import numpy as np
import pytest

from torch_hlo.hlo.evaluate import lapack
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.text.parser import parse_module

RNG = np.random.default_rng(0)


def matrix(*dims: int, dtype: str = "d") -> np.ndarray:
    value = RNG.standard_normal(dims)
    return value + 1j * RNG.standard_normal(dims) if dtype == "D" else value


@pytest.mark.parametrize("dtype", "dD")
@pytest.mark.parametrize("dims", [(4, 4), (5, 3), (3, 5), (2, 4, 3)])
def test_qr(dims, dtype):
    a = matrix(*dims, dtype=dtype)
    packed, tau = lapack.call("lapack_dgeqrf_ffi", None, [a])
    k = min(dims[-2:])
    (q,) = lapack.call(
        "lapack_zungqr_ffi" if dtype == "D" else "lapack_dorgqr_ffi",
        None,
        [packed[..., :k], tau],
    )
    np.testing.assert_allclose(q @ np.triu(packed)[..., :k, :], a, atol=1e-12)
    np.testing.assert_allclose(
        np.conj(np.swapaxes(q, -1, -2)) @ q,
        np.broadcast_to(np.eye(k), (*dims[:-2], k, k)),
        atol=1e-12,
    )


@pytest.mark.parametrize("dtype", "dD")
@pytest.mark.parametrize("dims", [(5, 3), (3, 5), (2, 4, 3)])
def test_product_with_the_reflectors(dims, dtype):
    packed, tau = lapack.call("lapack_dgeqrf_ffi", None, [a := matrix(*dims, dtype=dtype)])
    r = lapack.call("lapack_zunmqr_ffi", "{left = true, transpose = true}", [packed, tau, a])[0]
    np.testing.assert_allclose(r, np.triu(packed), atol=1e-12)
    whole = np.broadcast_to(np.eye(dims[-2]), (*dims[:-2], dims[-2], dims[-2]))
    (q,) = lapack.call("lapack_dormqr_ffi", "{left = false}", [packed, tau, whole])
    np.testing.assert_allclose(q @ r, a, atol=1e-12)


@pytest.mark.parametrize("dims", [(4, 4), (5, 3), (3, 5)])
def test_lu(dims):
    a = matrix(*dims)
    packed, pivots, info = lapack.call("lapack_dgetrf_ffi", None, [a])
    rows = np.arange(dims[0])
    for k, p in enumerate(pivots):
        rows[[k, p - 1]] = rows[[p - 1, k]]
    k = min(dims)
    np.testing.assert_allclose(
        (np.tril(packed[:, :k], -1) + np.eye(dims[0], k)) @ np.triu(packed[:k]),
        a[rows],
        atol=1e-12,
    )
    assert info == 0 and lapack.call("lapack_dgetrf_ffi", None, [np.zeros((2, 2))])[2] == 1


@pytest.mark.parametrize("dtype", "dD")
@pytest.mark.parametrize("uplo", "LU")
def test_tridiagonal_has_the_same_eigenvalues(uplo, dtype):
    a = matrix(5, 5, dtype=dtype)
    a = a + np.conj(a).T
    _, d, e, tau, _ = lapack.call("lapack_dsytrd_ffi", f"{{uplo = {ord(uplo)} : ui8}}", [a])
    np.testing.assert_allclose(
        np.linalg.eigvalsh(np.diag(d) + np.diag(e, -1) + np.diag(e, 1)),
        np.linalg.eigvalsh(a),
        atol=1e-12,
    )
    assert tau.shape == (4,)


def test_hessenberg_schur_and_pivoted_qr():
    a = matrix(5, 5)
    packed, tau, _ = lapack.call("lapack_dgehrd_ffi", "{high = 5 : i32, low = 1 : i32}", [a])
    assert np.allclose(
        np.sort_complex(np.linalg.eigvals(np.triu(packed, -1))),
        np.sort_complex(np.linalg.eigvals(a)),
    )
    t, q, *_ = lapack.call("lapack_dgees_ffi", "{mode = 86 : ui8, sort = 78 : ui8}", [a])
    np.testing.assert_allclose(q @ t @ q.T, a, atol=1e-10)
    packed, order, tau = lapack.call("lapack_dgeqp3_ffi", None, [a, np.zeros(5, np.int32)])
    (q,) = lapack.call("lapack_dorgqr_ffi", None, [packed, tau])
    np.testing.assert_allclose(q @ np.triu(packed), a[:, order - 1], atol=1e-12)
    assert (np.diff(np.abs(np.diagonal(packed))) <= 1e-12).all()


@pytest.mark.parametrize("fixed", [[0, 1, 0, 1, 0], [1] * 5, [0, 0, 1, 0, 0]])
@pytest.mark.parametrize("dims", [(5, 5), (3, 5), (7, 5)])
def test_pivoted_qr_with_columns_that_go_first(dims, fixed):
    a, k = matrix(*dims), min(dims)
    packed, order, tau = lapack.call("lapack_dgeqp3_ffi", None, [a, np.array(fixed, np.int32)])
    (q,) = lapack.call("lapack_dorgqr_ffi", None, [packed[:, :k], tau])
    np.testing.assert_allclose(q @ np.triu(packed)[:k], a[:, order - 1], atol=1e-12)
    first = np.flatnonzero(fixed)
    np.testing.assert_array_equal(order[: len(first)] - 1, first)
    assert sorted(order) == [1, 2, 3, 4, 5]


def test_empty_stack_and_unknown_routine():
    values = lapack.call(
        "lapack_dsyevd_ffi", "{mode = 86 : ui8, uplo = 76 : ui8}", [np.zeros((0, 3, 3))]
    )
    assert [v.shape for v in values] == [(0, 3, 3), (0, 3), (0,)]
    assert lapack.routine("lapack_dgbsv_ffi") is None and lapack.routine("cudnn$conv") is None


def test_in_a_program():
    text = """HloModule m
ENTRY e {
  a = f32[3,3] parameter(0)
  s = (f32[3,3], f32[3], s32[]) custom-call(a), custom_call_target="lapack_ssyevd_ffi",
      backend_config={mode = 86 : ui8, uplo = 76 : ui8}
  ROOT w = f32[3] get-tuple-element(s), index=1
}"""
    a = matrix(3, 3).astype("f")
    np.testing.assert_allclose(
        evaluate(parse_module(text), [a])[0], np.linalg.eigvalsh(a), rtol=1e-5
    )


def test_a_singular_tridiagonal_matrix_is_perturbed():
    """Its solution is near the null space: here of [[1, 1], [1, 1]], in a stack with a regular
    one."""
    ones = np.ones((2, 2))
    (x,) = lapack.call(
        "tridiagonal_solve_perturbed_ffi",
        None,
        [ones, np.array([[1.0, 1], [2, 2]]), ones, np.array([[[1.0], [0]], [[3], [3]]])],
    )
    assert abs(x[0, :, 0]).min() > 1e10
    np.testing.assert_allclose(x[0, 0], -x[0, 1], rtol=1e-6)
    np.testing.assert_allclose(x[1], 1, rtol=1e-12)


@pytest.mark.parametrize("dtype", "dD")
def test_schur_form_of_a_matrix_without_enough_eigenvectors(dtype):
    pytest.importorskip("scipy")
    q = np.linalg.qr(matrix(6, 6, dtype=dtype))[0]
    a = q @ (np.diag(np.ones(5), 1) + 2 * np.eye(6)) @ np.conj(q).T
    t, v, *_ = lapack.call("lapack_dgees_ffi", "{mode = 86 : ui8}", [a])
    np.testing.assert_allclose(v @ t @ np.conj(v).T, a, atol=1e-12)


@pytest.mark.parametrize("dims", [(5, 3), (3, 5)])
def test_singular_values_alone_have_room_for_any_vectors(dims):
    m, n = dims
    k = min(dims)
    text = f"""HloModule m
ENTRY e {{
  a = f32[{m},{n}] parameter(0)
  s = (f32[{m},{n}], f32[{k}], f32[{m},{k}], f32[{k},{n}], s32[]) custom-call(a),
      custom_call_target="lapack_sgesdd_ffi", backend_config={{mode = 78 : ui8}}
  ROOT w = f32[{k}] get-tuple-element(s), index=1
}}"""
    a = matrix(*dims).astype("f")
    want = np.linalg.svd(a, compute_uv=False)
    np.testing.assert_allclose(evaluate(parse_module(text), [a])[0], want, rtol=1e-5)


@pytest.mark.parametrize("more", [(), (2,)])
def test_sparse_rows(more):
    data, starts, columns = np.arange(1.0, 5), np.array([0, 1, 3, 3]), np.array([0, 1, 2, 9])
    dense = RNG.standard_normal((4, *more))
    (found,) = lapack.call("cpu_csr_sparse_dense_ffi", None, [data, starts, columns, dense])
    np.testing.assert_allclose(found, [dense[0], 2 * dense[1] + 3 * dense[2], 0 * dense[0]])
