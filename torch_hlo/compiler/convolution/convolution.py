"""convolution: any dimension numbers, groups, strides, dilations and reversals, with the kernels of
conv_direct.py and conv_gradient.py.

The pass conv_layout has brought most convolutions to the form of a kernel: channels last. What it
has not, the step rewrites: foreign orders of dimensions become transposes, a dilated base (gradient
of a strided convolution) one dense convolution per phase, element types without a kernel
conversions.
"""

from __future__ import annotations

import itertools
from dataclasses import replace as with_fields

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Ints,
    WindowDim,
    build,
    ceildiv,
    instr,
    replace,
)

from ..codegen import Index, Program, index as ix
from ..conv_forms import digits_of, is_planar, sides
from ..loops.elementwise_loops import emit_instruction
from ..matmul.amx_kernels import element
from ..matmul.dot import (
    arguments_of,
    emit_apart,
    emit_tree,
    narrow,
    parts_of_output,
)
from ..matmul.dot_task import Finish
from ..matmul.epilogue import epilogue
from ..matmul.product import ACCUMULATORS, SOURCES, in_real_parts
from .conv_amx import emit_amx, is_amx
from .conv_amx_gradient import emit_amx_gradient, is_amx_gradient
from .conv_depthwise import emit_planar
from .conv_direct import emit_direct, is_direct
from .conv_gradient import emit_gradient, is_gradient
from .conv_layout import preferred, relabeled
from .conv_winograd import emit_winograd, is_winograd
from .conv_winograd_gradient import emit_winograd_gradient, is_winograd_gradient


@frozen
class Labels:
    """Positions of the dimensions: (batch, feature, spatial…), (output feature, input feature,
    spatial…), (batch, feature, spatial…)."""

    lhs: Ints
    rhs: Ints
    out: Ints

    @staticmethod
    def parse(text: str) -> Labels:
        lhs, rest = text.split("_")
        rhs, out = rest.split("->")
        digits = [c for c in lhs if c.isdigit()]
        digits.sort()
        return Labels(
            *(
                tuple(side.index(c) for c in (*names, *digits))
                for side, names in ((lhs, "bf"), (rhs, "oi"), (out, "bf"))
            )
        )


KERNELS = (
    (is_winograd_gradient, emit_winograd_gradient),
    (is_gradient, emit_gradient),
    (is_winograd, emit_winograd),
    (is_direct, emit_direct),
    (is_planar, emit_planar),
)


def convolution(program: Program, x: Instruction) -> None:
    if x.size == 0:
        return
    if any(o.size == 0 for o in x.operands):
        return emit_tree(program, build.full(0, x.dtype, x.dims), (), x)
    if is_amx(program, x):
        return emit_output(program, x, narrow(x))
    if is_amx_gradient(program, x):
        return emit_amx_gradient(program, x)
    if (
        _has_phases(x)
        and element(program.target, ("bf16",)) is not None
        and all(o.dtype == "bf16" for o in x.operands)
    ):
        return _emit_phases(program, x)  # while they are bf16
    rewritten = with_kernel_types(x)
    if rewritten is None and any(o.dtype != x.dtype for o in x.operands):
        operands = tuple(o if o.dtype == x.dtype else build.convert(o, x.dtype) for o in x.operands)
        rewritten = replace(x, operands, x.shape)
    if rewritten is None and not any(fits(x) for fits, _ in KERNELS):
        if _has_phases(x):
            return _emit_phases(program, x)
        rewritten = _prepared(x)
    if rewritten is not None:
        return emit_tree(program, rewritten, x.operands, x)
    emit = next(emit for fits, emit in KERNELS if fits(x))
    emit(program, x, ACCUMULATORS[x.dtype][0])


def fusion(program: Program, x: Instruction) -> None:
    """A fusion of kind output around a convolution."""
    emit_output(program, x, x["calls"])


def emit_output(program: Program, x: Instruction, body: Computation) -> None:
    """A step with the value of `body` on the operands of `x`: a convolution of parameters, and
    elementwise instructions on its result."""
    o = parts_of_output(program, x, body, "convolution")
    outer = o.outer
    if outer.size == 0:
        return
    amx = is_amx(program, outer)
    planar = is_planar(outer)  # its matrix: a row for each plane of pixels
    direct = (
        (planar or is_direct(outer))
        and with_kernel_types(outer) is None
        and all(a.size != 0 for a in outer.operands)
    )
    found = (
        epilogue(
            program,
            body,
            o.inner,
            len(outer["window"]) if planar else 1,
            "f32" if amx else outer.dtype,
        )
        if amx or direct
        else None
    )
    if found is None:
        return emit_apart(program, o)
    finish = Finish(found.form, arguments_of(program, found, o), lambda: "null")
    if amx:
        return emit_amx(program, outer, finish)
    (emit_winograd if is_winograd(outer) else emit_planar if planar else emit_direct)(
        program, outer, ACCUMULATORS[outer.dtype][0], finish
    )


def with_kernel_types(x: Instruction) -> Instruction | None:
    """The convolution on element types that have kernels, or None when it is already."""
    dtype = x.dtype
    if x.kind == "c":
        return in_real_parts(x)
    wide = ACCUMULATORS[dtype][1] if dtype in ACCUMULATORS else "f32" if x.kind == "f" else "s32"
    if wide != dtype:
        accumulated = replace(x, shape=x.shape.with_dtype(wide))
        return (
            build.compare(accumulated, build.full_like(accumulated, 0), "NE")
            if dtype == "pred"
            else build.convert(accumulated, dtype)
        )
    kind = ACCUMULATORS[dtype][0]
    if any((o.dtype, kind) not in SOURCES for o in x.operands):
        return replace(x, (build.convert(o, dtype) for o in x.operands), x.shape)
    return None


def _remake(x: Instruction, lhs: Instruction, rhs: Instruction, **changes: object) -> Instruction:
    """The convolution with other operands and attributes, of the same element type."""
    attrs = {
        k: x[k] for k in ("window", "dim_labels", "feature_group_count", "batch_group_count")
    } | changes
    inferred = instr("convolution", (lhs, rhs), **attrs)
    return instr("convolution", (lhs, rhs), inferred.shape.with_dtype(x.dtype), **attrs)


def _prepared(x: Instruction) -> Instruction:
    """The convolution as instructions that have kernels."""
    if not x["window"]:  # a matrix product with a dimension of size 1 added
        lhs, rhs = (build.reshape(o, (*o.dims, 1)) for o in x.operands)
        label = "->".join(
            "_".join(s + "0" for s in side.split("_")) for side in x["dim_labels"].split("->")
        )
        return build.reshape(_remake(x, lhs, rhs, window=(WindowDim(1),), dim_labels=label), x.dims)
    if sides(x) != (want := preferred(x)):
        return relabeled(x, want)
    image, kernel, _ = want
    mirrored = [i for i, w in enumerate(x["window"]) if w.reversal and w.size != 1]
    if image[0] == "f" and mirrored:
        flipped = build.reverse(x.operands[1], [kernel.index(str(i)) for i in mirrored])
        return _remake(
            x,
            x.operand,
            flipped,
            window=tuple(with_fields(w, reversal=False) for w in x["window"]),
        )
    if any(w.base_dilation > 1 for w in x["window"]):
        padding = [(0, 0, 0)] * x.operand.rank
        for i, w in enumerate(x["window"]):
            padding[image.index(str(i))] = (
                w.pad_low,
                w.pad_high,
                w.base_dilation - 1,
            )
        plain = tuple(with_fields(w, pad_low=0, pad_high=0, base_dilation=1) for w in x["window"])
        return _remake(
            x,
            build.pad(x.operand, build.full(0, x.dtype), padding),
            x.operands[1],
            window=plain,
        )
    # A gradient that its kernel does not take: the other kernel computes it with images as
    # channels.
    digits = digits_of(x)
    return relabeled(x, (f"b{digits}f", kernel, f"b{digits}f"))


def _has_phases(x: Instruction) -> bool:
    """Whether the base is dilated (gradient of a strided convolution) in a way that splits into
    convolutions without holes."""
    return (
        any(w.base_dilation > 1 for w in x["window"])
        and x.is_static
        and all(o.is_static for o in x.operands)
        and all(
            w.base_dilation == 1 or w.stride == 1 and w.window_dilation == 1 for w in x["window"]
        )
    )


def _emit_phases(program: Program, x: Instruction) -> None:
    """Outputs u = d * v + r of dilation d only meet the taps t = r' + d * j: one dense convolution
    per remainder r."""
    lhs, rhs = x.operands
    at = Labels.parse(x["dim_labels"])
    target = program.place(x)
    for phase in itertools.product(*(range(w.base_dilation) for w in x["window"])):
        window = []
        starts = [0] * rhs.rank
        counts = list(x.dims)
        steps = [1] * rhs.rank
        for s, (w, r) in enumerate(zip(x["window"], phase, strict=True)):
            d = w.base_dilation
            n = lhs.dims[at.lhs[2 + s]]
            outputs = x.dims[at.out[2 + s]]
            if d == 1:
                window.append(w)
                continue
            first = (w.pad_low - r) % d
            taps = max(0, ceildiv(w.size - first, d))
            count = ceildiv(outputs - r, d)
            low = (w.pad_low - r - first) // d
            window.append(WindowDim(taps, 1, low, count - n - low + taps - 1, 1, 1, w.reversal))
            if w.reversal:  # tap t is element size - 1 - t of the kernel
                first = (w.size - 1 - first) % d
            starts[at.rhs[2 + s]] = first
            steps[at.rhs[2 + s]] = d
            counts[at.out[2 + s]] = count
        if 0 in counts:
            continue
        if any(w.size == 0 for w in window):
            y = build.full(0, x.dtype, counts)
        else:
            y = _remake(x, lhs, build.slice_(rhs, starts, rhs.dims, steps), window=tuple(window))

        def place(index: tuple[Index, ...], phase: Ints = phase) -> ix.Index:
            spread = list(index)
            for s, (w, r) in enumerate(zip(x["window"], phase, strict=True)):
                spread[at.out[2 + s]] = index[at.out[2 + s]] * w.base_dilation + r
            return ix.linear(spread, x.dims)

        with program.rebound():
            program.bind(y, program.allocate_shape(y.shape))
            emit_tree(program, y, x.operands, y)
            emit_instruction(program, instr("copy", (y,), y.shape), target, place, key=(x, phase))
