"""conv_narrow: convolutions with fewer output features than a vector has lanes compute neighbouring
pixels as features.

    f32[n,28,28,6] = convolution(x, 5x5)   ->  reshape(f32[n,28,14,12] = convolution(x, 5x6 with
        stride 2)),  features (pixel of a pair, feature)
    f32[n,28,28,3] = convolution(x, 5x5), feature_group_count=3  ->  the same of f32[3 * n,28,28,1],
        batch_group_count=3: filters of images

The kernel of pixel i of a run is the old one moved by i strides, zeros elsewhere: r pixels take
(size + (r - 1) * stride) / r products per pixel instead of size, in r times as many lanes. The
zeros meet pixels outside of a window: an infinity or NaN there reaches the pixels of the same run.
"""

from __future__ import annotations

from dataclasses import replace as with_fields

from torch_hlo.hlo.ir import (
    Instruction,
    Module,
    WindowDim,
    build as h,
    fixed,
    op,
    replace,
    rewrite,
    rules,
)

from ..conv_forms import digits_of, sides
from ..hlo_pass import hlo_pass
from ..thresholds import PER_TAP
from .conv_layout import contracts_pixels

LANES = 16  # of f32 in a vector of 512 bits


def _is_narrow(out: Instruction) -> bool:
    """Whether a convolution has its channels last, and few features (of each group of images)."""
    digits = digits_of(out)
    lhs, _, to = sides(out)
    known = all(o.shape.is_static and o.size for o in (*out.operands, out))
    return (
        digits != ""
        and lhs == to == f"b{digits}f"
        and out["feature_group_count"] == 1
        and known
        and 2 * out.dims[-1] <= LANES * out["batch_group_count"]
        and not contracts_pixels(out)
        and all(w.window_dilation == 1 for w in out["window"])
    )


def _plain(out: Instruction) -> tuple[Instruction, str]:
    """(the kernel without reversals, its labels)."""
    labels = sides(out)[1]
    flipped = [
        labels.index(str(i)) for i, w in enumerate(out["window"]) if w.reversal and w.size > 1
    ]
    return h.reverse(out.operands[1], flipped) if flipped else out.operands[1], labels


def _with(out: Instruction, kernel: Instruction, window: tuple[WindowDim, ...]) -> Instruction:
    """The convolution with another kernel and window."""
    made = replace(out, (out.operand, kernel), window=window)
    return replace(made, shape=made.shape.with_dtype(out.dtype))


def _run(wide: int, features: int, last: WindowDim) -> int:
    """How many neighbouring pixels of `wide` should be features: fewest products per row; what a
    last run computes too much is cut off, in a pass of its own."""

    def products(run: int) -> float:
        return (
            -(-wide // run)
            * (fixed(last.size) + (run - 1) * last.stride)
            * (1.25 if wide % run else 1)
        )

    return min(range(min(LANES // features, wide), 0, -1), key=products)


def runs_of_pixels(out: Instruction) -> Instruction | None:
    """convolution -> reshape(convolution): pixels next to each other in a row are features"""
    if not _is_narrow(out):
        return None
    *rows, last = out["window"]
    if last.size <= last.stride or any(w.base_dilation != 1 for w in out["window"]):
        return None
    groups, dims = out["batch_group_count"], out.dims
    wide, features = fixed(dims[-2]), fixed(dims[-1]) // groups
    run = _run(wide, features, last)
    if run == 1:
        return None
    joined = _moved_kernels(out, run, features)
    reach, runs = (run - 1) * last.stride, -(-wide // run)
    # what the last run reads after what the last pixel does
    beyond = (runs * run - wide) * last.stride
    window = (
        *(with_fields(w, reversal=False) for w in rows),
        with_fields(
            last,
            size=last.size + reach,
            stride=last.stride * run,
            reversal=False,
            pad_high=last.pad_high + beyond,
        ),
    )
    found = h.reshape(_with(out, joined, window), (*dims[:-2], runs, groups, run, features))
    rank = len(dims)
    order = [*range(rank - 1), rank, rank - 1, rank + 1]  # pixels before groups
    whole = h.reshape(h.transpose(found, order), (*dims[:-2], runs * run, dims[-1]))
    return h.slice_(whole, (0,) * rank, dims)


def _moved_kernels(out: Instruction, run: int, features: int) -> Instruction:
    """The kernel of a run of pixels: per group, the kernel of each of its pixels, moved to where
    that pixel's window is."""
    kernel, labels = _plain(out)
    at, to = labels.index(str(len(out["window"]) - 1)), labels.index("o")
    stride, groups = out["window"][-1].stride, out["batch_group_count"]
    zero = h.full(0, kernel.dtype, ())
    moved = []
    for i in range(run):
        edges = [(0, 0, 0)] * kernel.rank
        edges[at] = (i * stride, (run - 1 - i) * stride, 0)
        moved.append(h.pad(kernel, zero, edges))
    apart = [h.reshape(m, (*m.dims[:to], groups, 1, features, *m.dims[to + 1 :])) for m in moved]
    joined = h.concatenate(apart, to + 1)
    before, after = joined.dims[:to], joined.dims[to + 3 :]
    return h.reshape(joined, (*before, groups * run * features, *after))


def images_of_channels(out: Instruction) -> Instruction | None:
    """A convolution of few channels, each on its own (filters of images) -> one of as many groups
    of images of one channel: lanes are pixels"""
    digits = digits_of(out)
    lhs, _, to = sides(out)
    x, groups = out.operand, out["feature_group_count"]
    if (
        groups == 1
        or out["batch_group_count"] > 1
        or not digits
        or not lhs == to == f"b{digits}f"
        or not all(o.shape.is_static and o.size for o in (x, out))
    ):
        return None
    if (
        x.dims[-1] != groups
        or any(w.base_dilation != 1 or w.window_dilation != 1 for w in out["window"])
        or 2 * fixed(out.dims[-1]) > LANES
    ):
        return None
    last, features = out["window"][-1], out.dims[-1] // groups
    run = _run(fixed(out.dims[-2]), fixed(features), last)
    if (
        last.size <= last.stride
        or groups * (last.size + (run - 1) * last.stride) > PER_TAP * run * last.size
    ):
        return None
    rank = x.rank
    images = h.reshape(
        h.transpose(x, [rank - 1, *range(rank - 1)]),
        (groups * x.dims[0], *x.dims[1:-1], 1),
    )
    low, high = max(last.pad_low, 0), max(last.pad_high, 0)
    # taps of a row are a run
    images = h.pad(
        images,
        h.full(0, x.dtype, ()),
        [(low, high, 0) if d == rank - 2 else (0, 0, 0) for d in range(rank)],
    )
    window = (
        *out["window"][:-1],
        with_fields(last, pad_low=last.pad_low - low, pad_high=last.pad_high - high),
    )
    return replace(
        out,
        (images, out.operands[1]),
        out.shape,
        window=window,
        feature_group_count=1,
        batch_group_count=groups,
    )


RULES = rules(
    (op("convolution"), images_of_channels),
    (op("convolution"), runs_of_pixels),
)


@hlo_pass
def conv_narrow(module: Module) -> Module:
    """Fill the lanes of vectors that few output features leave idle."""
    return rewrite(module, RULES)
