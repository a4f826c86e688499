"""Layouts that a text gives to arrays, as transposes and copies between row-major arrays."""

from collections.abc import Sequence

from ..ir import (
    DTYPES,
    OPCODES,
    Instruction,
    Replacements,
    Shape,
    instr,
    postorder,
    rebuild,
    replace,
)
from .attributes import plain


def bitcast(
    operands: list[Instruction],
    want: Shape,
    result: Shape,
    written: Sequence[Shape],
) -> Instruction:
    """The same bytes under another shape; layouts decide which element stands where."""
    OPCODES["bitcast"].verify(want, *operands)
    x = operands[0]
    source = written[0].layout
    target = result.layout
    if source is not None:
        order = tuple(reversed(source))
        x = instr("transpose", (x,), dimensions=order)
    if x.dtype != want.dtype:
        x = _retyped(x, want.dtype)
    if target is None:
        return x if x.shape == want and operands[0].shape != want else instr("bitcast", (x,), want)
    order = tuple(reversed(target))
    physical = instr("bitcast", (x,), Shape(want.dtype, tuple(want.dims[d] for d in order)))
    return instr(
        "transpose",
        (physical,),
        dimensions=tuple(order.index(d) for d in range(len(order))),
    )


def _retyped(x: Instruction, dtype: str) -> Instruction:
    """The row-major bytes of `x` as elements of `dtype`, in any shape."""
    old = x.bits
    new = DTYPES[dtype].bits
    if old < new:
        ratio = new // old
        x = instr("reshape", (x,), x.shape.with_dims((x.size // ratio, ratio)))
        return instr("bitcast-convert", (x,), Shape(dtype, x.dims[:1]))
    extra = (old // new,) if old > new else ()
    return instr("bitcast-convert", (x,), Shape(dtype, (*x.dims, *extra)))


def has_layout(s: Shape) -> bool:
    return s.layout is not None or any(map(has_layout, s.elements))


def kept_copy(x: Instruction, to: Shape) -> Instruction:
    """`x` with another layout; a copy that is already there becomes it."""
    sharding = None
    if x.op == "copy" and x.operand.shape == plain(to):
        x, sharding = x.operand, x.get("sharding")
    return x if x.shape == to else instr("copy", (x,), to, sharding=sharding)


def replaced(root: Instruction, swaps: Replacements) -> Instruction:
    """`root` with parameters replaced. A copy of a parameter to the row-major layout is the
    replacement itself."""
    done = dict(swaps)
    for x in postorder((root,)):
        if x.op == "copy" and x.operand in swaps and x not in done:
            inner = swaps[x.operand]
            done[x] = (
                inner
                if x.get("sharding") is None or inner.op != "copy"
                else replace(inner, sharding=x["sharding"])
            )
    return rebuild(root, done)
