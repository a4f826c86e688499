"""fourier: transforms that compiler/fourier/fft.py has kernels for.

real lines of odd length        -> complex ones, of which half is kept
dimensions but the last that kernels do not take (too long, few numbers beside them)  -> one
    dimension at a time, transposed
lengths with a large prime      -> a convolution by transforms of a length that has none
    (Bluestein 1970):
    X[k] = c[k] sum over i of (x[i] c[i]) conj(c[k - i]),  c[k] = exp(-pi i k^2 / n)
transposes around a transform   -> the dimension is transformed where it is:
    y = transpose(fft(transpose(x)))
 -> y = fusion(x), kind=custom, calls={the same}, backend_config={"fft":"across"}
gradients of real transforms    -> real transforms:
    real(fft(g filled up with zeros), IFFT)
 -> fft(g w, IRFFT), w = 1 for the points that have no mirror image, 1/2 for the others
    dynamic-update-slice(y, slice(y) c) at the place of the slice       (what PyTorch does to
        the points that have one)
 -> y w
"""

from __future__ import annotations

from math import prod

import numpy as np

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Ints,
    Module,
    build as b,
    carry_meta,
    fixed,
    instr,
    rewrite_bottom_up,
)

from ..hlo_pass import hlo_pass, over_computations
from ..thresholds import FFT_FEW, FFT_LONGEST, FFT_MOST
from .fft_plan import radices

_CONFIG = '{"fft":"across"}'


@hlo_pass
def fourier(module: Module) -> Module:
    """Fourier transforms of any length -> those that have kernels."""
    return over_computations(module, _rewritten)


def across(x: Instruction) -> tuple[str, int, int] | None:
    """(fft_type, length, dimension) of a fusion made here."""
    if x.get("backend_config") != _CONFIG:
        return None
    back = x["calls"].root
    return (
        back.operand["fft_type"],
        back.operand["fft_length"][0],
        back["dimensions"].index(x.rank - 1),
    )


def _rewritten(c: Computation) -> Computation:
    if not any(x.op == "fft" for x in c.instructions()):
        return c

    def visit(x: Instruction) -> Instruction:
        if x.op == "transpose":
            return _across(x)
        if x.op == "real":
            return _real_inverse(x)
        if x.op == "dynamic-update-slice":
            return _weighted(x)
        if x.op != "fft" or x.size == 0 or not all(isinstance(n, int) for n in x["fft_length"]):
            return x
        made = _transform(x.operand, x["fft_type"], x["fft_length"])
        if made is not x:
            carry_meta(x, made)
        return made

    return Computation(c.name, c.params, rewrite_bottom_up(c.root, visit))


def _real_inverse(x: Instruction) -> Instruction:
    """The real part of an inverse transform of half a spectrum: Re(h) = (h + conj h) / 2, so the
    other half is its mirror image."""
    y = x.operand
    factor = 1.0
    if y.op == "multiply" and (c := _number(y.operands[1])) is not None:
        y = y.operand
        factor = c
    rank = x.rank
    if y.op == "fft" and y["fft_type"] == "IFFT":
        d = rank - 1
        lengths = y["fft_length"]
    elif y.op == "fusion" and (found := across(y)) and found[0] == "IFFT":
        d = found[2]
        lengths = (found[1],)
    else:
        return x
    n = lengths[-1]
    g = _filled_up(y.operand, d)
    # (an odd length would be filled up again)
    if g is None or not isinstance(n, int) or n % 2 or g.dims[d] != n // 2 + 1:
        return x
    weights = np.full(n // 2 + 1, 0.5 * factor)
    weights[[0, -1]] = factor
    halved = _times(g, weights, d)
    if d == rank - 1:
        return _transform(halved, "IRFFT", lengths)
    turn = (*(i for i in range(rank) if i != d), d)
    return _across(
        b.transpose(
            _transform(b.transpose(halved, turn), "IRFFT", lengths),
            tuple(turn.index(i) for i in range(rank)),
        )
    )


def _weighted(x: Instruction) -> Instruction:
    """A slice that is multiplied by a number in place: everything is, by numbers that are mostly
    one."""
    y, part, *starts = x.operands
    if (
        part.op != "multiply"
        or part.operand.op != "slice"
        or part.operand.operand is not y
        or x.kind not in "fc"
    ):
        return x
    cut = part.operand["slice"]
    factor = _number(part.operands[1])
    if factor is None:
        return x
    if not all(
        o.op == "constant" and o["literal"].numpy().item() == low and step == 1
        for o, (low, _, step) in zip(starts, cut, strict=True)
    ):
        return x
    partial = [d for d, (low, high, _) in enumerate(cut) if (low, high) != (0, y.dims[d])]
    if len(partial) != 1 or not all(
        isinstance(n, int) for n in (*cut[partial[0]], y.dims[partial[0]])
    ):
        return x
    d = partial[0]
    low, high, _ = cut[partial[0]]
    weights = np.ones(fixed(y.dims[d]))
    weights[low:high] = factor
    return _times(y, weights, d)


def _number(x: Instruction) -> float | None:
    """The real number that every element is."""
    x = x.operand if x.op == "broadcast" else x
    if x.op != "constant" or x.size != 1:
        return None
    found = complex(x["literal"].numpy().item())
    return None if found.imag else found.real


def _times(x: Instruction, weights: np.ndarray, d: int) -> Instruction:
    """x times real numbers along dimension d."""
    if x.kind == "c":
        return b.complex_(_times(b.real(x), weights, d), _times(b.imag(x), weights, d))
    return b.multiply(x, b.broadcast(b.constant(weights, x.dtype), x.dims, (d,)))


def _filled_up(x: Instruction, d: int) -> Instruction | None:
    """What `x` is with zeros after it along dimension d."""

    def zero(y: Instruction) -> bool:
        y = y.operand if y.op == "broadcast" else y
        return y.op == "constant" and y.size == 1 and not y["literal"].numpy().any()

    if x.op == "pad" and zero(x.operands[1]):
        alone = all(
            low == inner == 0 and (high == 0 or i == d and high > 0)
            for i, (low, high, inner) in enumerate(x["padding"])
        )
        return x.operand if alone else None
    if x.op == "dynamic-update-slice" and all(zero(o) for o in (x.operand, *x.operands[2:])):
        g = x.operands[1]
        return (
            g
            if all(i == d or m == n for i, (m, n) in enumerate(zip(g.dims, x.dims, strict=True)))
            else None
        )
    return None


def _across(x: Instruction) -> Instruction:
    """A fusion for transposes around a transform, if there are enough numbers beside each other."""
    inner = x.operand
    if inner.op != "fft":
        return x
    source = inner.operand
    lengths = inner["fft_length"]
    back = x["dimensions"]
    rank = x.rank
    if source.op != "transpose" or len(lengths) > 1 or not isinstance(lengths[0], int):
        return x
    d = back.index(rank - 1)
    (n,) = lengths
    turn = (*(i for i in range(rank) if i != d), d)
    beside = prod(x.dims[d + 1 :])
    points = n if inner["fft_type"] in ("FFT", "IFFT") else n // 2 if n % 2 == 0 else 0
    if (
        source["dimensions"] != turn
        or tuple(turn.index(i) for i in range(rank)) != back
        or not isinstance(beside, int)
    ):
        return x
    if not 0 < points <= FFT_MOST or radices(points) is None or beside < FFT_FEW:
        return x
    given = source.operand
    p = instr("parameter", (), given.shape, index=0)
    root = b.transpose(b.fft(b.transpose(p, turn), inner["fft_type"], lengths), back)
    return b.kernel((given,), Computation("fft", (p,), root), _CONFIG)


def _transform(x: Instruction, kind: str, lengths: Ints) -> Instruction:
    *others, last = lengths
    if others:
        beside = last if kind in ("FFT", "IFFT") else last // 2 + 1
        if (
            _is_smooth(last, kind)
            and all(n <= FFT_MOST and _is_smooth(n) for n in others)
            and beside >= FFT_FEW
        ):
            return b.fft(x, kind, lengths)
        rank = x.rank
        inner = "IFFT" if kind in ("IFFT", "IRFFT") else "FFT"
        dims = range(rank - len(lengths), rank - 1)
        if kind == "RFFT":
            x = _transform(x, kind, (last,))
        for d, n in zip(dims, others, strict=True):
            turn = (*(i for i in range(rank) if i != d), d)
            x = _across(
                b.transpose(
                    _transform(b.transpose(x, turn), inner, (n,)),
                    tuple(turn.index(i) for i in range(rank)),
                )
            )
        return x if kind == "RFFT" else _transform(x, kind, (last,))
    if kind == "RFFT" and last % 2:
        return _cut(_transform(b.convert(x, _COMPLEX[x.dtype]), "FFT", lengths), last // 2 + 1)
    if kind == "IRFFT" and last % 2:
        return _odd_inverse(x, last)
    if not _is_smooth(last, kind):
        return _convolution(x, kind, last)
    return b.fft(x, kind, lengths)


_COMPLEX = {"f32": "c64", "f64": "c128"}


def _is_smooth(n: int, kind: str = "FFT") -> bool:
    half = n // 2 if kind in ("RFFT", "IRFFT") else n
    return n > FFT_LONGEST or half > 0 and radices(half) is not None


def _cut(x: Instruction, n: int) -> Instruction:
    dims = x.dims
    return b.slice_(x, (0,) * len(dims), (*dims[:-1], n))


def _conjugate(x: Instruction) -> Instruction:
    return b.complex_(b.real(x), b.negate(b.imag(x)))


def _mirrored(x: Instruction, n: int) -> Instruction:
    """All n points of a line's spectrum from the n // 2 + 1 that real lines have. The first one is
    real."""
    rank = x.rank
    half = n // 2 + 1
    first = b.slice_(x, (0,) * rank, (*x.dims[:-1], 1))
    first = b.complex_(b.real(first), b.subtract(b.imag(first), b.imag(first)))
    low = b.slice_(x, (*(0,) * (rank - 1), 1), x.dims)
    high = b.reverse(
        _conjugate(b.slice_(x, (*(0,) * (rank - 1), 1), (*x.dims[:-1], n - half + 1))),
        (rank - 1,),
    )
    return b.concatenate([first, low, high], rank - 1)


def _odd_inverse(x: Instruction, n: int) -> Instruction:
    return b.real(_transform(_mirrored(x, n) if n > 1 else x, "IFFT", (n,)))


def _convolution(x: Instruction, kind: str, n: int) -> Instruction:
    """Bluestein's way for a line of n points."""
    if kind == "RFFT":
        return _cut(_convolution(b.convert(x, _COMPLEX[x.dtype]), "FFT", n), n // 2 + 1)
    if kind == "IRFFT":
        return _odd_inverse(x, n)
    m = _smooth_from(2 * n - 1)
    square = np.arange(n, dtype=np.int64) ** 2 % (2 * n)
    chirp = np.exp((1j if kind == "IFFT" else -1j) * np.pi * square / n)
    filter_ = np.zeros(m, complex)
    filter_[:n] = chirp.conj()
    filter_[m - n + 1 :] = chirp[1:][::-1].conj()
    outer = x.dims[:-1]
    rank = x.rank

    def table(values: np.ndarray) -> Instruction:
        return b.broadcast(b.constant(values, x.dtype), (*outer, len(values)), (rank - 1,))

    y = b.multiply(x, table(chirp))
    y = b.pad(y, b.constant(0, x.dtype), ((0, 0, 0),) * (rank - 1) + ((0, m - n, 0),))
    y = b.multiply(_transform(y, "FFT", (m,)), table(np.fft.fft(filter_)))
    y = _cut(_transform(y, "IFFT", (m,)), n)
    return b.multiply(y, table(chirp / (n if kind == "IFFT" else 1)))


def _smooth_from(n: int) -> int:
    """The smallest number from n on that is a power of two times 1, 3, 5, 9, 15 or 25."""
    return min(odd << max(2, (-(-n // odd) - 1).bit_length()) for odd in (1, 3, 5, 9, 15, 25))
