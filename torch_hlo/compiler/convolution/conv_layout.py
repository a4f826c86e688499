"""conv_layout: convolutions with their channels last, between transposes that meet and cancel.

    y = convolution(x, k), dim_labels=bf01_oi01->bf01
    ->  transpose(convolution(transpose(x, {0,2,3,1}), k), dim_labels=b01f_oi01->b01f), {0,3,1,2}

The kernels of the CPU read runs of channels (compiler/convolution/convolution.py). reshape_motion
and algebra then move the transposes outward through pointwise instructions, pools, pads and
concatenations until two of them cancel, so that a network is transposed where the program's own
arrays enter and leave. Windows of one element, windows that do not overlap, and results of which
every element meets one tap become dots; so do results of few features, whose elements are sums of
what the dot gives. Images of few channels are padded as they are transposed. A gradient of weights,
recognized by a window larger than its result, contracts images and pixels: f01b_i01o->fb01.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace as with_fields

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Dim,
    Instruction,
    Module,
    WindowDim,
    build as h,
    ceildiv,
    fixed,
    instr,
    op,
    product,
    replace,
    rewrite,
    rules,
)

from ..conv_forms import digits_of, is_planar, sides
from ..hlo_pass import Pass, hlo_pass
from ..simplify.reshape_motion import wants_channels_last
from ..thresholds import FEW_CHANNELS, FEW_PIECES
from .conv_pack import static_dims


def contracts_pixels(x: Instruction) -> bool:
    """Whether the window has no fewer positions than the result, and images are contracted (they
    are outermost in the input): the gradient of weights."""
    lhs, _, out = sides(x)
    if lhs.index("f") > lhs.index("b"):
        return False
    taps = product(w.size for w in x["window"])
    places = product(x.dims[out.index(str(i))] for i in range(len(x["window"])))
    return not isinstance(taps, Dim) and not isinstance(places, Dim) and taps >= places


def preferred(x: Instruction) -> tuple[str, str, str]:
    """The labels that the kernels take without copying."""
    _, rhs, out = sides(x)
    digits = digits_of(x)
    if contracts_pixels(x):
        return (
            f"f{digits}b",
            f"i{digits}o",
            out if out == f"fb{digits}" else f"{digits}bf",
        )
    return f"b{digits}f", rhs, f"b{digits}f"


def relabeled(x: Instruction, want: tuple[str, str, str]) -> Instruction:
    """The convolution on transposed operands, its result transposed back."""
    have = sides(x)
    operands = [
        o if a == b else h.transpose(o, [a.index(c) for c in b])
        for o, a, b in zip(x.operands, have, want)
    ]
    attrs = dict(x.attrs) | {"dim_labels": f"{want[0]}_{want[1]}->{want[2]}"}
    dims = tuple(x.dims[have[2].index(c)] for c in want[2])
    inner = instr("convolution", operands, x.shape.with_dims(dims), **attrs)
    return inner if have[2] == want[2] else h.transpose(inner, [want[2].index(c) for c in have[2]])


def channels_last(out: Instruction) -> Instruction | None:
    """convolution -> transpose(convolution(transpose, transpose)) with channels last, but for
    filters of a few planes"""
    if (
        not out["window"]
        or out.size == 0
        or sides(out) == (want := preferred(out))
        or is_planar(out)
        and out.operand.dims[1] == fixed(out.dims[1]) < FEW_CHANNELS
    ):
        return None
    return relabeled(out, want)


def pointwise_product(out: Instruction) -> Instruction | None:
    """A convolution with a window of one element, or with one that is all of the image -> a dot of
    pixels and channels"""
    if (
        out["feature_group_count"] * out["batch_group_count"] > 1
        or not out["window"]
        or sides(out) != preferred(out)
    ):
        return None
    x, k = out.operands
    _, rhs, _ = sides(out)
    pads = any((w.pad_low, w.pad_high) != (0, 0) or w.base_dilation != 1 for w in out["window"])
    channels = x.dims[-1]
    if contracts_pixels(out):
        if (
            pads
            or any(w.window_dilation != 1 for w in out["window"])
            or any(w.output_size(n) != 1 for w, n in zip(out["window"], x.dims[1:]))
        ):
            return None
        pixels = product(x.dims[:-1])
        pair = (
            h.reshape(x, (pixels, channels)),
            h.reshape(k, (pixels, k.dims[-1])),
        )
        return h.reshape(
            h.dot(
                *((pair[1], pair[0]) if sides(out)[2][0] == "f" else pair),
                (0,),
                (0,),
                dtype=out.dtype,
            ),
            out.dims,
        )
    if pads or any(w.size != 1 or w.stride != 1 for w in out["window"]):
        return None
    o = rhs.index("o")
    i = rhs.index("i")
    flat = h.reshape(k, [k.dims[d] for d in sorted((o, i))])
    found = h.dot(
        h.reshape(x, (product(x.dims[:-1]), channels)),
        flat,
        (1,),
        (int(i > o),),
        dtype=out.dtype,
    )
    return h.reshape(found, out.dims)


def for_matrix_units(dtypes: frozenset[str]) -> Pass:
    """The pass for a device whose matrix units take `dtypes`: of kernels, too, the input features
    come last, and of gradients of weights. Features that are no multiple of 16 bytes get zeros.
    Convolutions with other types or in groups stay as they are."""

    rules_of_types = _MatrixUnits(dtypes)
    all_rules = rules(
        (op("convolution"), rules_of_types.whole_chunks),
        (op("convolution"), rules_of_types.features_last),
        (op("convolution"), pointwise_product),
    )
    return Pass(
        "conv_layout",
        lambda module: rewrite(module, all_rules),
        for_matrix_units.__doc__ or "",
    )


@frozen
class _MatrixUnits:
    """The rules of `for_matrix_units`."""

    dtypes: frozenset[str]

    def wanted(self, x: Instruction) -> tuple[str, str, str]:
        digits = digits_of(x)
        if not contracts_pixels(x):
            return f"b{digits}f", f"o{digits}i", f"b{digits}f"
        image = x.operand.shape
        sizes = (image.dims[sides(x)[0].index(d)] for d in digits)
        one = all(
            w.window_dilation == 1 and w.output_size(n) == 1 for w, n in zip(x["window"], sizes)
        )
        return preferred(x) if one else (f"f{digits}b", f"i{digits}o", f"f{digits}b")

    def missing(self, x: Instruction) -> dict[str, int] | None:
        """How many features, by the label of the input (f; b in a gradient) or of the kernel (o),
        are missing to whole 16 bytes; None for other types."""
        lhs, rhs, _ = sides(x)
        image, kernel = (o.shape for o in x.operands)
        if (
            image.dtype not in self.dtypes
            or kernel.dtype != image.dtype
            or x["feature_group_count"] * x["batch_group_count"] > 1
            or not x["window"]
        ):
            return None
        if contracts_pixels(x):
            runs = {
                "b": image.dims[lhs.index("b")],
                "o": kernel.dims[rhs.index("o")],
            }
        else:
            runs = {"f": image.dims[lhs.index("f")]}
        known = {label: n for label, n in runs.items() if isinstance(n, int)}
        if len(known) < len(runs):
            return None
        return {label: -n % (16 // image.itemsize) for label, n in known.items()}

    def whole_chunks(self, out: Instruction) -> Instruction | None:
        """convolution -> slice(convolution(pad, pad)) with features in whole 16 bytes; windows of
        one element are dots of any size"""
        more = self.missing(out)
        if (
            not more
            or not any(more.values())
            or out.size == 0
            or all(w.size == 1 for w in out["window"])
        ):
            return None
        labels = sides(out)
        gradient = "o" in more
        grown = [
            {"b": more.get("b", 0), "f": more.get("f", 0)},
            {"i": more.get("f", 0), "o": more.get("o", 0)},
            {"b": more.get("b", 0), "f": more.get("o", 0)},
        ]
        operands = []
        for x, side, by in zip(out.operands, labels, grown):
            edges = [(0, by.get(label, 0), 0) for label in side]
            operands.append(h.pad(x, h.full(0, x.dtype, ()), edges))
        dims = tuple(n + grown[2].get(label, 0) for n, label in zip(out.dims, labels[2]))
        wide = replace(out, operands, out.shape.with_dims(dims))
        return h.slice_(wide, (0,) * out.rank, out.dims) if gradient else wide

    def features_last(self, out: Instruction) -> Instruction | None:
        """convolution -> transpose(convolution(transpose, transpose)) with features last"""
        more = self.missing(out)
        if out.size == 0 or more is None or any(more.values()):
            return None
        wanted = self.wanted(out)
        return relabeled(out, wanted) if sides(out) != wanted else None


def patches_product(out: Instruction) -> Instruction | None:
    """A convolution whose windows do not overlap, of few channels (the patches of a vision
    transformer) -> dot(patches, kernel)"""
    lhs, rhs, to = sides(out)
    x, k = out.operands
    window = out["window"]
    digits = digits_of(out)
    at = [lhs.index(d) for d in digits]
    channels = x.dims[lhs.index("f")]
    plain = all(
        w.stride == w.size
        and not (w.pad_low or w.pad_high or w.reversal)
        and w.base_dilation == w.window_dilation == 1
        for w in window
    )
    if (
        not plain
        or rhs != f"oi{digits}"
        or out["feature_group_count"] * out["batch_group_count"] > 1
        or not x.is_static
        or not k.is_static
    ):
        return None
    if (
        fixed(channels) >= FEW_CHANNELS
        or all(w.size == 1 for w in window)
        or any(x.dims[d] % w.size for d, w in zip(at, window))
    ):
        return None
    dims: list[int] = []
    # label -> dimensions of the split input: for spatial ones which window, and where in it
    place: dict[str, list[int]] = {}
    for label, n in zip(lhs, static_dims(x)):
        parts = [n // window[int(label)].size, window[int(label)].size] if label.isdigit() else [n]
        place[label] = list(range(len(dims), len(dims) + len(parts)))
        dims += parts
    order = [
        *place["b"],
        *(place[d][0] for d in digits),
        *place["f"],
        *(place[d][1] for d in digits),
    ]
    outs = [dims[place[d][0]] for d in digits]
    depth = product(k.dims[1:])
    features = k.dims[0]
    patches = h.reshape(
        h.transpose(h.reshape(x, dims), order),
        (dims[place["b"][0]] * product(outs), depth),
    )
    found = h.reshape(
        h.dot(patches, h.reshape(k, (features, depth)), (1,), (1,), dtype=out.dtype),
        (dims[place["b"][0]], *outs, features),
    )
    return h.transpose(found, [f"b{digits}f".index(c) for c in to])


def spread_product(out: Instruction) -> Instruction | None:
    """A convolution in which every element of the result meets at most one tap of its group -> the
    pieces that dot(pixels, kernel) gives, next to each other. So are upsampling by transposed
    windows that do not overlap, gradients of patches, and everything computed from an image of one
    pixel, or of a window as high as the image.

    Where an element meets several, it is their sum. That pays for results of few features (images,
    masks): the dot's lanes are pairs of tap and feature."""
    lhs, rhs, to = sides(out)
    x, k = out.operands
    window = out["window"]
    digits = digits_of(out)
    if (
        out["batch_group_count"] > 1
        or not digits
        or not all(o.is_static and o.size for o in (x, k, out))
    ):
        return None
    image = static_dims(x)
    wanted = static_dims(out)
    sizes = [image[lhs.index(d)] for d in digits]
    taps = [fixed(w.size) for w in window]
    steps = [t if n == 1 else w.base_dilation for w, t, n in zip(window, taps, sizes)]
    if all(t == 1 for t in taps) or any(w.stride != 1 or w.window_dilation != 1 for w in window):
        return None
    batch, features, depth = (
        dims[labels.index(c)]
        for dims, labels, c in ((image, lhs, "b"), (wanted, to, "f"), (image, lhs, "f"))
    )
    groups = out["feature_group_count"]
    met = math.prod(ceildiv(t, step) for t, step in zip(taps, steps))
    few = features * met <= FEW_PIECES and depth >= FEW_CHANNELS and groups == 1
    if met > 1 and not few:
        return None
    flipped = [rhs.index(d) for d, w in zip(digits, window) if not w.reversal and w.size > 1]
    kernel = h.transpose(
        h.reverse(k, flipped) if flipped else k,
        [rhs.index(c) for c in f"i{digits}o"],
    )
    pixels = h.reshape(
        h.transpose(x, [lhs.index(c) for c in f"b{digits}f"]),
        (batch * product(sizes), groups, depth // groups),
    )
    kernel = h.reshape(kernel, (depth // groups, product(taps), groups, features // groups))
    wide = "f32" if met > 1 and out.dtype in ("bf16", "f16") else out.dtype
    # by group: sums of few terms are no products for kernels, see dot_narrow
    found = h.dot(pixels, kernel, (2,), (0,), (1,), (2,), dtype=wide)
    pieces = h.reshape(h.transpose(found, (1, 2, 0, 3)), (batch, *sizes, *taps, features))
    lows = [w.pad_low - t + 1 for w, t in zip(window, taps)]
    found = _summed_pieces(pieces, steps, lows, [wanted[to.index(d)] for d in digits])
    return h.transpose(h.convert(found, out.dtype), [f"b{digits}f".index(c) for c in to])


def _summed_pieces(
    pieces: Instruction, steps: Sequence[int], lows: Sequence[int], wanted: Sequence[int]
) -> Instruction:
    """[batch, wanted..., features]: the sum of pieces [batch, sizes..., taps..., features], each
    where its tap is: the first of the first pixel at `lows`, pixels `steps` apart. So many taps of
    all pixels do not meet."""
    n = len(steps)
    dims = static_dims(pieces)
    batch = dims[0]
    sizes = dims[1 : 1 + n]
    taps = dims[1 + n : -1]
    features = dims[-1]
    order = [0, *(at for i in range(n) for at in (1 + i, 1 + n + i)), 1 + 2 * n]
    zero = h.full(0, pieces.dtype, ())
    none = (0, 0, 0)
    found: Instruction | None = None
    for first in itertools.product(*(range(0, t, step) for t, step in zip(taps, steps))):
        ends = [min(a + step, t) for a, step, t in zip(first, steps, taps)]
        part = h.slice_(pieces, (*(0,) * (1 + n), *first, 0), (batch, *sizes, *ends, features))
        holes = [e for a, end, s in zip(first, ends, steps) for e in (none, (0, a + s - end, 0))]
        joined = h.reshape(
            h.pad(h.transpose(part, order), zero, [none, *holes, none]),
            (batch, *(size * step for size, step in zip(sizes, steps)), features),
        )
        edges = [
            (low + a, want - size * step - low - a, 0)
            for low, a, want, size, step in zip(lows, first, wanted, sizes, steps)
        ]
        placed = h.pad(joined, zero, [none, *edges, none])
        found = placed if found is None else h.add(found, placed)
    assert found is not None
    return found


def _flat(x: Instruction, window: tuple[WindowDim, ...], labels: str) -> int | None:
    """The first spatial dimension in which an image has one element and the window several."""
    for i, w in enumerate(window):
        one = x.dims[labels.index(str(i))] == 1
        if one and fixed(w.size) > 1 and w.stride == w.window_dilation == 1:
            return i
    return None


def taps_as_features(out: Instruction) -> Instruction | None:
    """A convolution of an image of one row (or column) by a window of several -> one by windows of
    one row, whose features are pairs of feature and tap: each row of the result meets one tap. So
    is the gradient of a window as high as the image (spectrograms), and rows of padding meet
    nothing."""
    lhs, rhs, to = sides(out)
    x, k = out.operands
    window = out["window"]
    digits = digits_of(out)
    if (
        out["batch_group_count"] > 1
        or contracts_pixels(out)
        or not all(o.is_static and o.size for o in (x, k, out))
    ):
        return None
    d = _flat(x, window, lhs)
    if d is None:
        return None
    w = window[d]
    count = out.dims[to.index(str(d))]
    at = rhs.index(str(d))
    # which tap, from the last one, the first row of the result meets
    first = w.size - 1 - w.pad_low
    low = max(first, 0)
    high = min(first + count, w.size)
    if low >= high:
        return None
    taps = high - low
    edge = low - first
    kernel = k if w.reversal else h.reverse(k, [at])
    kernel = h.slice_(
        kernel,
        [low if i == at else 0 for i in range(k.rank)],
        [high if i == at else n for i, n in enumerate(k.dims)],
    )
    others = [c for c in rhs if c not in ("o", str(d))]
    kernel = h.transpose(kernel, [rhs.index("o"), at, *(rhs.index(c) for c in others)])
    kernel = h.reshape(kernel, (kernel.dims[0] * taps, *kernel.dims[2:], 1))
    plain = f"b{digits}f"
    attrs = dict(out.attrs) | {
        "window": (*window[:d], WindowDim(1), *window[d + 1 :]),
        "dim_labels": f"{lhs}_o{''.join(others)}{d}->{plain}",
    }
    rows = instr("convolution", (x, kernel), **attrs)
    rows = instr("convolution", rows.operands, rows.shape.with_dtype(out.dtype), **attrs)
    dims = [
        *rows.dims[: 1 + d],
        *rows.dims[2 + d : -1],
        rows.dims[-1] // taps,
        taps,
    ]
    last = len(dims) - 1
    found = h.transpose(h.reshape(rows, dims), [*range(1 + d), last, *range(1 + d, last)])
    edges = [(edge, count - taps - edge, 0) if i == 1 + d else (0, 0, 0) for i in range(found.rank)]
    return h.transpose(h.pad(found, h.full(0, out.dtype, ()), edges), [plain.index(c) for c in to])


def padded_rows(out: Instruction) -> Instruction | None:
    """convolution of few channels -> convolution(pad) without padding along rows: the taps of a row
    are one run in memory. The transpose pads, too."""
    lhs, _, _ = sides(out)
    window = out["window"]
    x = out.operand
    if (
        not window
        or out["feature_group_count"] * out["batch_group_count"] > 1
        or sides(out) != preferred(out)
        or not x.is_static
    ):
        return None
    last = window[-1]
    taps = (
        out.dims[sides(out)[2].index(str(len(window) - 1))] if contracts_pixels(out) else last.size
    )
    # elements of a run for which padding pays
    least = 2 if contracts_pixels(out) or x.dims[-1] == 1 else FEW_CHANNELS
    if (
        not last.size
        or fixed(x.dims[-1]) >= FEW_CHANNELS
        or taps == 1
        or fixed(taps) * fixed(x.dims[-1]) < least
    ):
        return None
    if max(last.pad_low, last.pad_high) <= 0 or min(last.pad_low, last.pad_high) < 0:
        return None
    if (
        last.base_dilation != 1
        or (last.stride if contracts_pixels(out) else last.window_dilation) != 1
    ):
        return None
    wide = h.pad(
        x,
        h.full(0, x.dtype, ()),
        [(last.pad_low, last.pad_high, 0) if c == str(len(window) - 1) else (0, 0, 0) for c in lhs],
    )
    attrs = dict(out.attrs) | {"window": (*window[:-1], with_fields(last, pad_low=0, pad_high=0))}
    return instr("convolution", (wide, out.operands[1]), out.shape, **attrs)


def window_channels_last(out: Instruction) -> Instruction | None:
    """A gradient of pooling (select-and-scatter, or reduce-window of a dilated base) whose
    innermost dimension is windowed -> transposed, with one last that is not"""
    window = out["window"]
    if out.is_tuple:
        return None
    whole = [d for d, w in enumerate(window) if w.is_trivial and out.dims[d] != 1]
    if not whole or out.size == 0 or window[-1].is_trivial or not wants_channels_last(out):
        return None
    order = [*(d for d in range(out.rank) if d != whole[-1]), whole[-1]]
    operands = [h.transpose(o, order) if o.rank else o for o in out.operands]
    attrs = dict(out.attrs) | {"window": tuple(window[d] for d in order)}
    return h.transpose(instr(out.op, operands, **attrs), [order.index(d) for d in range(out.rank)])


RULES = rules(
    (op("select-and-scatter"), window_channels_last),
    (op("reduce-window"), window_channels_last),
    (op("convolution"), patches_product),
    (op("convolution"), spread_product),
    (op("convolution"), taps_as_features),
    (op("convolution"), channels_last),
    (op("convolution"), pointwise_product),
    (op("convolution"), padded_rows),
)


@hlo_pass
def conv_layout(module: Module) -> Module:
    """Give every convolution the layout that its kernel reads in place."""
    return rewrite(module, RULES)
