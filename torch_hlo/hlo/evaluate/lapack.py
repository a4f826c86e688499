"""LAPACK routines that JAX calls by name (`lapack_sgeqrf_ffi`), on stacks of matrices, in NumPy
or by the LAPACK of SciPy.

`ROUTINES[name](config, *arrays) -> arrays`: `name` without prefix, type letter and suffix; `config`
  holds the call's options as
integers (characters by code: uplo = 76 is "L"). Results are in double precision, conventions
(signs, packed factors, pivots counted from 1) are LAPACK's. potrf and trsm have opcodes of their
own, see tools/adopt.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .interpreter import Array

Config = dict[str, int]
Results = tuple[Any, ...]  # arrays, and scalars such as LAPACK's info
ROUTINES: dict[str, Callable[..., Results]] = {}
_NAME = re.compile(r"(?:lapack_[sdcz])?(\w+?)(?:_ffi)?")
_OPTION = re.compile(r"(\w+)\s*=\s*(-?\d+|true)")


def routine(target: str) -> str | None:
    """`geqrf` for "lapack_sgeqrf_ffi"; None for a target that is no known LAPACK call."""
    match = _NAME.fullmatch(target)
    name = match and _SAME.get(match[1], match[1])
    return name if name in ROUTINES or name in ("potrf", "trsm") else None


_SAME = {
    "ungqr": "orgqr",
    "unmqr": "ormqr",
    "heevd": "syevd",
    "hetrd": "sytrd",
    "gesvd": "gesdd",
}


def options(text: str | None) -> Config:
    """`{mode = 65 : ui8, left = true}` -> {"mode": 65, "left": 1}."""
    return {
        name: 1 if value == "true" else int(value) for name, value in _OPTION.findall(text or "")
    }


def call(target: str, config: str | None, arrays: Sequence[Array]) -> Results:
    """Results of a call, in double precision."""
    wide = [
        a.astype(np.result_type(a.dtype, np.float64)) if a.dtype.kind in "fc" else a for a in arrays
    ]
    with np.errstate(all="ignore"):
        return ROUTINES[routine(target) or target](options(config), *wide)


def _lapack(fn: Callable[..., Any]) -> Callable[..., Any]:
    ROUTINES[fn.__name__.strip("_")] = fn
    return fn


def _stacked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of single matrices, applied to each of a stack; not a number when it fails to
    converge."""

    def of_stack(config: Config, a: Array, *rest: Array) -> Results:
        batch = a.shape[:-2]
        lead = len(batch)
        rows = [fn(config, a[i], *(r[i] for r in rest)) for i in np.ndindex(batch)]
        if not rows:
            one = fn(
                config,
                np.eye(*a.shape[-2:], dtype=a.dtype),
                *(np.ones(r.shape[lead:], r.dtype) for r in rest),
            )
            return tuple(np.zeros((*batch, *np.shape(v)), np.asarray(v).dtype) for v in one)
        return tuple(
            np.reshape(np.stack(column), (*batch, *np.shape(column[0]))) for column in zip(*rows)
        )

    of_stack.__name__ = fn.__name__
    return of_stack


def _letter(a: Array) -> str:
    return "z" if a.dtype.kind == "c" else "d"


def _scipy(name: str, *arguments: Any, **options: Any) -> Results:
    """A routine of the LAPACK that SciPy brings, and JAX SciPy."""
    try:
        from scipy.linalg import lapack
    except ImportError:
        raise ImportError(f"LAPACK's {name} is SciPy's: pip install scipy") from None
    return tuple(getattr(lapack, name)(*arguments, **options))


# QR


@_lapack
@_stacked
def _geqrf(config: Config, a: Array) -> Results:
    packed, tau = np.linalg.qr(a, mode="raw")
    return packed.T, tau


@_lapack
@_stacked
def _orgqr(config: Config, packed: Array, tau: Array) -> Results:
    """The first columns of the product of the reflectors below the diagonal."""
    m, n = packed.shape
    q = np.eye(m, n, dtype=packed.dtype)
    for k in reversed(range(len(tau))):
        v = np.concatenate([np.ones(1, packed.dtype), packed[k + 1 :, k]])
        q[k:] -= tau[k] * np.outer(v, np.conj(v) @ q[k:])
    return (q,)


@_lapack
@_stacked
def _ormqr(config: Config, packed: Array, tau: Array, c: Array) -> Results:
    """The whole product of the reflectors, or its adjoint, times `c`."""
    columns = packed[:, : len(tau)]
    (q,) = _orgqr(config, np.pad(columns, ((0, 0), (0, len(packed) - len(tau)))), tau)
    if config.get("transpose"):
        q = np.conj(q).T
    return (q @ c if config.get("left") else c @ q,)


@_lapack
@_stacked
def _geqp3(config: Config, a: Array, fixed: Array) -> Results:
    """QR with column pivoting; columns with a nonzero entry in `fixed` go first, in order."""
    order = np.argsort(fixed == 0, kind="stable")
    k = int(np.count_nonzero(fixed))
    packed, tau = _geqrf(config, a[:, order[:k]])
    (rest,) = _ormqr({"left": 1, "transpose": 1}, packed, tau, a[:, order[k:]])
    if rest[k:].size:
        low, moved, others, *_ = _scipy(f"{_letter(a)}geqp3", rest[k:])
        rest = rest[:, moved - 1]
        tau = np.concatenate([tau, others])
        rest[k:], order[k:] = low, order[k:][moved - 1]
    return np.hstack([packed, rest]), (order + 1).astype(np.int32), tau


# LU and tridiagonal systems


@_lapack
@_stacked
def _getrf(config: Config, a: Array) -> Results:
    """Packed L and U, the row swapped with each row, and the first zero pivot (0: none)."""
    packed, pivots, info = _scipy(f"{_letter(a)}getrf", a)
    return packed, pivots + 1, np.int32(info)


@_lapack
def _gtsv(
    config: Config,
    low: Array,
    diagonal: Array,
    high: Array,
    b: Array,
) -> Results:
    """Solve tridiagonal systems. JAX reads the solution alone; the factors come back as they were
    given."""
    n = diagonal.shape[-1]
    full = np.zeros((*diagonal.shape, n), b.dtype)
    at = np.arange(n)
    full[..., at, at] = diagonal
    full[..., at[1:], at[:-1]] = low[..., -(n - 1) :] if n > 1 else 0
    full[..., at[:-1], at[1:]] = high[..., : n - 1]
    info = np.zeros(b.shape[:-2], np.int32)
    try:
        return low, diagonal, high, np.linalg.solve(full, b), info
    except np.linalg.LinAlgError:
        return low, diagonal, high, np.full_like(b, np.nan), info + 1


@_lapack
def _tridiagonal_solve_perturbed(
    config: Config, low: Array, diagonal: Array, high: Array, b: Array
) -> Results:
    """Where one of the matrices is singular, their diagonals move by a rounding error."""
    solved, info = _gtsv(config, low, diagonal, high, b)[-2:]
    if info.any():
        size = np.abs([low, diagonal, high]).max((0, -1))[..., None]
        moved = diagonal + np.maximum(size, 1) * np.finfo(float).eps
        solved = _gtsv(config, low, moved, high, b)[-2]
    return (solved,)


# Eigenvalues and singular values


def _failed(*shapes_and_types: tuple[tuple[int, ...], Any]) -> Results:
    return (*(np.full(s, np.nan, t) for s, t in shapes_and_types), np.int32(1))


@_lapack
@_stacked
def _syevd(config: Config, a: Array) -> Results:
    side: Any = chr(config.get("uplo", ord("L")))
    if chr(config.get("mode", ord("V"))) == "N":
        return a, np.linalg.eigvalsh(a, side), np.int32(0)
    try:
        values, vectors = np.linalg.eigh(a, side)
    except np.linalg.LinAlgError:
        return _failed((a.shape, a.dtype), (a.shape[:1], np.float64))
    return vectors, values, np.int32(0)


@_lapack
@_stacked
def _gesdd(config: Config, a: Array) -> Results:
    m, n = a.shape
    mode = chr(config.get("mode", ord("S")))
    k = min(m, n)
    wide = mode == "A"
    try:
        if mode == "N":  # vectors that nobody reads, as large as the caller has room for
            none = np.zeros((1, 1), a.dtype)
            return a, np.linalg.svd(a, compute_uv=False), none, none, np.int32(0)
        u, values, v = np.linalg.svd(a, full_matrices=wide)
    except np.linalg.LinAlgError:
        left, right = ((m, m), (n, n)) if wide else ((m, k), (k, n))
        both = ((left, a.dtype), (right, a.dtype))
        return _failed((a.shape, a.dtype), ((k,), np.float64), *both)
    return a, values, u, v, np.int32(0)


def _paired(vectors: Array, imaginary: Array) -> Array:
    """Complex eigenvectors of a real matrix: LAPACK gives those of a pair as real and imaginary
    part."""
    found: Array = vectors.astype(np.complex128)
    first = np.flatnonzero(imaginary > 0)
    found[:, first] += 1j * vectors[:, first + 1]
    found[:, first + 1] = np.conj(found[:, first])
    return found


@_lapack
@_stacked
def _geev(config: Config, a: Array) -> Results:
    """Eigenvalues (of real matrices as two arrays), left and right eigenvectors where asked for."""
    sides = [chr(config.get(f"compute_{side}", ord("V"))) == "V" for side in ("left", "right")]
    *values, left, right, info = _scipy(f"{_letter(a)}geev", a, *sides)
    if info:
        values = [np.full_like(v, np.nan) for v in values]
    pairs = values[1] if len(values) == 2 else np.zeros(0)
    vectors = [
        _paired(v, pairs) if wanted else np.zeros(a.shape, np.complex128)
        for v, wanted in zip((left, right), sides)
    ]
    return (*values, *vectors, np.int32(info))


@_lapack
@_stacked
def _gehrd(config: Config, a: Array) -> Results:
    """Hessenberg form, with the reflectors packed below it."""
    low = config.get("low", 1) - 1
    high = config.get("high", len(a)) - 1
    return _scipy(f"{_letter(a)}gehrd", a, low, high)


@_lapack
@_stacked
def _sytrd(config: Config, a: Array) -> Results:
    """Tridiagonal form of a Hermitian matrix: packed reflectors, diagonal, off-diagonal,
    factors."""
    name = "zhetrd" if a.dtype.kind == "c" else "dsytrd"
    return _scipy(name, a, lower=int(chr(config.get("uplo", ord("L"))) == "L"))


@_lapack
@_stacked
def _gees(config: Config, a: Array) -> Results:
    """Schur form and vectors, and the eigenvalues (of real matrices as two arrays)."""
    t, _, *w, q, _, info = _scipy(f"{_letter(a)}gees", lambda *value: False, a)
    return (t, q, *w, np.int32(0), np.int32(info))


@_lapack
def _cpu_csr_sparse_dense(
    config: Config, data: Array, starts: Array, columns: Array, dense: Array
) -> Results:
    """A matrix of sparse rows times a dense array; no LAPACK, but JAX calls it so."""
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    parts = data[: len(rows)] * dense[columns[: len(rows)]].T
    product = np.zeros((len(starts) - 1, *dense.shape[1:]), parts.dtype)
    np.add.at(product, rows, parts.T)
    return (product,)
