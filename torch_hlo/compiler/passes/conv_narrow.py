"""conv_narrow: convolutions with fewer output features than a vector has lanes compute neighbouring pixels as features.

    f32[n,28,28,6] = convolution(x, 5x5)   ->  reshape(f32[n,28,14,12] = convolution(x, 5x6 with stride 2)),  features (pixel of a pair, feature)

The kernel of pixel i of a run is the old one moved by i strides, zeros elsewhere: r pixels take (size + (r - 1) * stride) / r products per pixel instead
of size, in r times as many lanes. What a dilated base gives (a transposed convolution, sub-pixel convolution in Shi et al., 2016) has one such kernel per
remainder of the pixel's position. The zeros meet pixels outside of a window: an infinity or NaN there reaches the pixels of the same run.
"""
from __future__ import annotations

import itertools
from dataclasses import replace

from torch_hlo.compiler.passes.base import hlo_pass
from torch_hlo.compiler.passes.conv_layout import contracts_pixels, sides
from torch_hlo.hlo import build as h
from torch_hlo.hlo.infer import product
from torch_hlo.hlo.ir import Instruction, Module, instr
from torch_hlo.hlo.match import op, rewrite, rules
from torch_hlo.hlo.window import WindowDim

LANES = 16  # of f32 in a vector of 512 bits


def _is_narrow(out: Instruction) -> bool:
    """Whether a convolution has its channels last, one group, and few features."""
    digits = "".join(map(str, range(len(out["window"]))))
    lhs, _, to = sides(out)
    known = all(o.shape.is_static and o.shape.size for o in (*out.operands, out))
    return (digits != "" and lhs == to == f"b{digits}f" and out["feature_group_count"] * out["batch_group_count"] == 1 and known
            and 2 * out.shape.dims[-1] <= LANES and not contracts_pixels(out) and all(w.window_dilation == 1 for w in out["window"]))  # fmt: skip


def _plain(out: Instruction) -> tuple[Instruction, str]:
    """(the kernel without reversals, its labels)."""
    labels = sides(out)[1]
    flipped = [labels.index(str(i)) for i, w in enumerate(out["window"]) if w.reversal and w.size > 1]
    return h.reverse(out.operands[1], flipped) if flipped else out.operands[1], labels


def _with(out: Instruction, kernel: Instruction, window: tuple[WindowDim, ...]) -> Instruction:
    """The convolution with another kernel and window."""
    made = instr("convolution", (out.operands[0], kernel), **dict(out.attrs) | {"window": window})
    return instr("convolution", made.operands, made.shape.with_dtype(out.shape.dtype), **dict(made.attrs))


def runs_of_pixels(out: Instruction) -> Instruction | None:
    """convolution -> reshape(convolution): pixels next to each other in a row are features"""
    if not _is_narrow(out):
        return None
    *rows, last = out["window"]
    if last.size <= last.stride or any(w.base_dilation != 1 for w in out["window"]):
        return None
    wide, features = out.shape.dims[-2:]
    run = next(r for r in range(LANES // features, 0, -1) if wide % r == 0)
    if run == 1:
        return None
    kernel, labels = _plain(out)
    at, zero = labels.index(str(len(rows))), h.full(0, kernel.shape.dtype, ())
    reach = (run - 1) * last.stride
    moved = [h.pad(kernel, zero, [(i * last.stride, reach - i * last.stride, 0) if d == at else (0, 0, 0) for d in range(kernel.shape.rank)]) for i in range(run)]
    window = (*(replace(w, reversal=False) for w in rows), replace(last, size=last.size + reach, stride=last.stride * run, reversal=False))
    return h.reshape(_with(out, h.concatenate(moved, labels.index("o")), window), out.shape.dims)


def remainders(out: Instruction) -> Instruction | None:
    """convolution of a dilated base -> the pixels of each remainder, from a convolution without holes, next to each other"""
    window = out["window"]
    steps = [w.base_dilation for w in window]
    if not _is_narrow(out) or product(steps) == 1 or out.shape.dims[-1] * product(steps) > LANES or any(w.stride != 1 or w.size < w.base_dilation for w in window):
        return None
    kernel, labels = _plain(out)
    sizes = out.operands[0].shape.dims[1:-1]
    # Per dimension and remainder: (first tap, taps, how far before the pixel's position they begin).
    phases = [[(first := (w.pad_low - r) % w.base_dilation, -(-(w.size - first) // w.base_dilation), (w.pad_low - r - first) // w.base_dilation)
               for r in range(w.base_dilation)] for w in window]  # fmt: skip
    lows = [max(low for _, _, low in each) for each in phases]
    spans = [low + max(taps - before for _, taps, before in each) for low, each in zip(lows, phases)]
    counts = [-(-n // step) for n, step in zip(out.shape.dims[1:-1], steps)]
    pieces = []
    for chosen in itertools.product(*phases):
        starts, strides, edges = [0] * kernel.shape.rank, [1] * kernel.shape.rank, [(0, 0, 0)] * kernel.shape.rank
        for i, (first, taps, before) in enumerate(chosen):
            d = labels.index(str(i))
            starts[d], strides[d] = first, steps[i]
            edges[d] = (lows[i] - before, spans[i] - taps - (lows[i] - before), 0)
        pieces.append(h.pad(h.slice_(kernel, starts, kernel.shape.dims, strides), h.full(0, kernel.shape.dtype, ()), edges))
    dense = tuple(WindowDim(span, 1, low, count - n - low + span - 1) for span, low, count, n in zip(spans, lows, counts, sizes))
    found = _with(out, h.concatenate(pieces, labels.index("o")), dense)
    batch, features, n = out.shape.dims[0], out.shape.dims[-1], len(window)
    apart = h.transpose(h.reshape(found, (batch, *counts, *steps, features)), [0, *(d for i in range(n) for d in (1 + i, 1 + n + i)), 1 + 2 * n])
    joined = h.reshape(apart, (batch, *(count * step for count, step in zip(counts, steps)), features))
    return h.slice_(joined, (0,) * out.shape.rank, out.shape.dims)


RULES = rules((op("convolution"), remainders), (op("convolution"), runs_of_pixels))


@hlo_pass
def conv_narrow(module: Module) -> Module:
    """Fill the lanes of vectors that few output features leave idle."""
    return rewrite(module, RULES)
