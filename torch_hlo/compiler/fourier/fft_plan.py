"""How a Fourier transform is computed: radices, their twiddle factors, and whether a line is cut in
two. No code is written here.

A line of n points is transformed in passes of small radices (Stockham 1966: results are in order,
no bit reversal), for as many lines as a vector has lanes. A long line, or one of few, is a matrix
of rows x columns instead (Bailey 1990, "four-step"): its columns are transformed, multiplied by
twiddle factors, and its rows transformed; either way lanes are lines."""

from functools import lru_cache

import numpy as np

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import ceildiv, round_up

from ..thresholds import FFT_LONGEST, FFT_MOST, ONE_TABLE

# radices that butterflies are written for; a length with a larger factor is a convolution, see
# compiler/fourier/fourier.py
LARGEST_PRIME = 23
SPLIT = 32  # above: a product of two factors, for 32 neighbouring rows and for the row within them


@lru_cache(1024)
def radices(n: int) -> tuple[int, ...] | None:
    """Factors of n in the order of the passes, eights and fours first; None when a prime above
    LARGEST_PRIME divides n."""
    twos = (n & -n).bit_length() - 1
    rest = n >> twos
    odd = []
    for p in range(3, LARGEST_PRIME + 1, 2):
        while rest % p == 0:
            odd.append(p)
            rest //= p
    if rest > 1:
        return None
    eights, left = divmod(twos, 3)
    if left == 1 and eights:
        return (*[8] * (eights - 1), 4, 4, *reversed(odd))
    return (*[8] * eights, *([2**left] if left else ()), *reversed(odd))


def passes(n: int) -> tuple[int, ...]:
    """The radices of a length that has some."""
    found = radices(n)
    assert found is not None
    return found


@lru_cache(1024)
def split(n: int) -> tuple[int, int] | None:
    """(rows, columns), the factors of n that are nearest to each other, both at least 4; None when
    there are none."""
    best = None
    for rows in range(4, int(n**0.5) + 1):
        if n % rows == 0:
            best = (rows, n // rows)
    return best


@frozen
class Plan:
    """How lines of `n` complex points are transformed: in one piece, or as a matrix of `rows` x
    `columns` (0: in one piece)."""

    n: int
    rows: int = 0
    columns: int = 0
    ns: float = 0.0  # estimated, for all lines, on one thread


def plan(n: int, lines: int | None, lanes: int) -> Plan | None:
    """The fastest way for `lines` lines (None: unknown, many); None when there is no way."""
    if radices(n) is None or n > FFT_LONGEST:
        return None
    many = 64 * lanes if lines is None else lines
    found = []
    if n <= FFT_MOST:
        found.append(Plan(n, ns=ceildiv(many, lanes) * 2.7 * n * (2 * len(passes(n)) + 3)))
    parts = split(n)
    if parts and max(parts) <= FFT_MOST:
        r, c = parts
        found.append(
            Plan(
                n,
                r,
                c,
                many
                * (30 + 1.5 * (ceildiv(c, lanes) * _vector(r) + ceildiv(r, lanes) * _vector(c))),
            )
        )
    return min(found, key=lambda p: p.ns, default=None)


def _vector(n: int) -> float:
    """Nanoseconds of one vector of lines of n points, within a matrix in a cache. (Fitted to
    measurements with AVX-512, as the numbers above.)"""
    return n * (2 * len(passes(n)) + 1.5) + 20


def roots(count: np.ndarray, n: int) -> np.ndarray:
    """exp(-2 pi i count / n), with the angle reduced exactly."""
    turn = np.asarray(count, np.int64) % n
    found: np.ndarray = np.exp(-2j * np.pi * (turn / n))
    return found


def pass_twiddles(n: int) -> np.ndarray:
    """Factors of all passes but the last: for p < m and 0 < k < r the root p k of r m; complex128,
    one after the other."""
    found = [np.zeros(0, complex)]
    length = n
    for r in passes(n)[:-1]:
        length //= r
        p = np.arange(length)[:, None]
        k = np.arange(1, r)[None]
        found.append(roots(p * k, length * r).ravel())
    return np.concatenate(found)


def lane_order(lanes: int, itemsize: int) -> list[int]:
    """Which of `lanes` neighbouring complex numbers each lane holds after even and odd parts were
    taken out of their two vectors within 16 bytes."""
    piece = min(16 // itemsize, lanes)  # numbers in 16 bytes
    half = max(piece // 2, 1)
    return (
        [
            h * (lanes // 2) + p * half + k
            for p in range(lanes // piece)
            for h in (0, 1)
            for k in range(half)
        ]
        if lanes > 1
        else [0]
    )


def in_lanes(values: np.ndarray, lanes: int, itemsize: int) -> np.ndarray:
    """The last dimension cut into vectors (padded with ones), lanes in `lane_order`: real parts of
    a vector, then imaginary ones."""
    *outer, n = values.shape
    padded = np.ones((*outer, round_up(n, lanes)), complex)
    padded[..., :n] = values
    blocks = padded.reshape(*outer, -1, lanes)[..., lane_order(lanes, itemsize)]
    return np.stack([blocks.real, blocks.imag], -2)


def matrix_twiddles(rows: int, columns: int, lanes: int, itemsize: int) -> list[np.ndarray]:
    """Factors between columns and rows: [one per row], or [one per row within SPLIT, one per SPLIT
    rows]; rows of `in_lanes`."""
    n = rows * columns
    column = np.arange(columns)[None]
    if n <= ONE_TABLE:
        return [in_lanes(roots(np.arange(rows)[:, None] * column, n), lanes, itemsize)]
    near = np.arange(min(SPLIT, rows))[:, None]
    far = np.arange(0, rows, SPLIT)[:, None]
    return [in_lanes(roots(r * column, n), lanes, itemsize) for r in (near, far)]


def real_roots(n: int) -> np.ndarray:
    """Factors of `untangle` and `tangle` for lines of n = N / 2 numbers: those of the points 0 to n
    / 2."""
    return roots(np.arange(n // 2 + 1), 2 * n)


def mirror_roots(n: int, lanes: int, itemsize: int) -> np.ndarray:
    """The same from point 1 on, in whole vectors. What is past the middle is exactly what mirrors
    it: both ways to compute a point give the same bits."""
    known = real_roots(n)
    k = np.arange(1, round_up(n // 2, lanes) + 1)
    return in_lanes(
        np.where(
            k <= n // 2,
            known[np.minimum(k, n // 2)],
            -known[np.clip(n - k, 0, n // 2)].conj(),
        ),
        lanes,
        itemsize,
    )
