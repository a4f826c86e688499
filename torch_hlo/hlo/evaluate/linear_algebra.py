"""Meanings of dot, fft, cholesky and triangular-solve."""

import math

import numpy as np

from ..ir import Instruction, numpy_dtype
from .interpreter import Array, EvaluateError, Value, meaning, wide


def _accumulated(x: Instruction, *values: Array) -> list[Array]:
    """The factors of a product in the type that it is summed in."""
    if x.kind in "su":
        return [v.astype(numpy_dtype(x.dtype)) for v in values]
    return [wide(v, o.shape) for v, o in zip(values, x.operands)]


@meaning("dot")
def _dot(x: Instruction, a: Array, b: Array) -> Value:
    a, b = _accumulated(x, a, b)
    a_contract = x["lhs_contracting_dims"]
    b_contract = x["rhs_contracting_dims"]
    a_batch = x["lhs_batch_dims"]
    b_batch = x["rhs_batch_dims"]
    a_free = [d for d in range(a.ndim) if d not in (*a_contract, *a_batch)]
    b_free = [d for d in range(b.ndim) if d not in (*b_contract, *b_batch)]
    batch = [a.shape[d] for d in a_batch]
    rows = [a.shape[d] for d in a_free]
    columns = [b.shape[d] for d in b_free]
    depth = math.prod(a.shape[d] for d in a_contract)
    left = a.transpose(*a_batch, *a_free, *a_contract)
    right = b.transpose(*b_batch, *b_contract, *b_free)
    product = np.matmul(
        left.reshape(*batch, math.prod(rows), depth),
        right.reshape(*batch, depth, math.prod(columns)),
    )
    return product.reshape((*batch, *rows, *columns))


@meaning("ragged-dot")
def _ragged_dot(x: Instruction, a: Array, b: Array, sizes: Array) -> Value:
    """Groups of consecutive indices along the ragged dimension of `a`: rows (group g is multiplied
    with b[g]), or the contracted dimension (a product for each group). No batch dimensions."""
    ragged = x["lhs_ragged_dims"][0]
    contract = x["lhs_contracting_dims"]
    b_contract = x["rhs_contracting_dims"]
    if x["lhs_batch_dims"] or ragged not in contract and len(x["rhs_group_dims"]) != 1:
        raise EvaluateError(
            f"ragged-dot of {x.operand.shape} and {x.operands[1].shape}: batch dimensions are"
            " not supported here"
        )
    a, b = _accumulated(x, a, b)
    result = np.zeros(x.shape.sizes, np.result_type(a, b))
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), a.shape[ragged])
    for g, (begin, end) in enumerate(zip((0, *ends), ends)):
        part = np.take(a, range(begin, end), ragged)
        if ragged in contract:
            other = np.take(b, range(begin, end), b_contract[contract.index(ragged)])
            result[g] = np.tensordot(part, other, (contract, b_contract))
        else:
            (group,) = x["rhs_group_dims"]
            axis = [d for d in range(a.ndim) if d not in contract].index(ragged)
            kept = [d - (d > group) for d in b_contract]
            place = (slice(None),) * axis + (slice(begin, end),)
            result[place] = np.tensordot(part, np.take(b, g, group), (contract, kept))
    return result


_FFT = {
    "FFT": np.fft.fftn,
    "IFFT": np.fft.ifftn,
}


@meaning("fft")
def _fft(x: Instruction, v: Array) -> Value:
    kind = x["fft_type"]
    lengths = tuple(x["fft_length"])
    axes = tuple(range(v.ndim - len(lengths), v.ndim))
    if 0 in v.shape:
        return np.zeros(x.shape.sizes, np.complex128)
    v = wide(v, x.operand.shape)
    if kind in _FFT:
        return _FFT[kind](v, lengths, axes)
    return np.fft.rfftn(v, lengths, axes) if kind == "RFFT" else np.fft.irfftn(v, lengths, axes)


def _lower_of(v: Array, lower: bool) -> Array:
    return np.tril(v) if lower else np.conj(np.swapaxes(np.triu(v), -1, -2))


@meaning("cholesky")
def _cholesky(x: Instruction, v: Array) -> Value:
    lower = x.get("lower", False)
    half = _lower_of(wide(v, x.shape), lower)
    diagonal = np.einsum("...ii->...i", half).real
    full = half + np.conj(np.swapaxes(half, -1, -2))
    n = v.shape[-1]
    full[..., np.arange(n), np.arange(n)] = diagonal
    flat = full.reshape(math.prod(full.shape[:-2]), n, n)
    result = np.empty_like(flat)
    for i, matrix in enumerate(flat):
        try:
            result[i] = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:  # not positive definite: XLA's factor is nan
            result[i] = np.tril(np.full_like(matrix, np.nan))
    result = result.reshape(full.shape)
    return result if lower else np.conj(np.swapaxes(result, -1, -2))


@meaning("triangular-solve")
def _triangular_solve(x: Instruction, a: Array, b: Array) -> Value:
    left, lower, unit = (x.get(name, False) for name in ("left_side", "lower", "unit_diagonal"))
    transpose = x.get("transpose_a", "NO_TRANSPOSE")
    a = wide(a, x.shape)
    b = wide(b, x.shape)
    if transpose != "NO_TRANSPOSE":
        a = np.swapaxes(a, -1, -2)
        lower = not lower
        a = np.conj(a) if transpose == "ADJOINT" else a
    if not left:  # X A = B  <=>  A^T X^T = B^T
        a = np.swapaxes(a, -1, -2)
        lower = not lower
        b = np.swapaxes(b, -1, -2)
    n = a.shape[-1]
    solution = np.array(b)
    for i in range(n) if lower else reversed(range(n)):
        before = slice(0, i) if lower else slice(i + 1, n)
        known = np.matmul(a[..., i : i + 1, before], solution[..., before, :])[..., 0, :]
        row = solution[..., i, :] - known
        solution[..., i, :] = row if unit else row / a[..., i, i][..., None]
    return solution if left else np.swapaxes(solution, -1, -2)
