"""Conversions move to where they touch fewer bytes.

    gather(convert(table))                ->  convert(gather(table))             only the rows that
        are read
    concatenate(f32(x: bf16), f32(y))     ->  f32(concatenate(x, y))             widening late
    bf16(reverse(x: f32))                 ->  reverse(bf16(x))                   narrowing early
    compare(convert(x), convert(y))       ->  compare(x, y)                      when the conversion
        is exact

Conversions and reshapes or transposes are put in order by reshape_motion: the conversion comes
first.
"""

from __future__ import annotations

from torch_hlo.compiler.hlo_pass import hlo_pass
from torch_hlo.hlo.ir import DTYPES, Instruction, Module, fixed, instr
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.literal import literal
from torch_hlo.hlo.ir.match import op, rewrite, rules, splat, var

from .algebra import exact

_PERMUTES = "reverse"  # as many elements after as before
_SUBSETS = "slice dynamic-slice gather"  # at most as many

x, y = var("x"), var("y")


def narrows(convert: Instruction) -> bool:
    return DTYPES[convert.dtype].bits < DTYPES[convert.operands[0].dtype].bits


def _on(move: Instruction, x: Instruction) -> Instruction:
    """The data movement `move` applied to `x` in place of its first operand."""
    return instr(
        move.op,
        (x, *move.operands[1:]),
        move.shape.with_dtype(x.dtype),
        **dict(move.attrs),
    )


def outward(out: Instruction, inner: Instruction, x: Instruction) -> Instruction | None:
    return None if narrows(inner) else h.convert(_on(out, x), out.dtype)


def outward_of_subset(out: Instruction) -> Instruction | None:
    inner = out.operands[0]
    if inner.op != "convert":
        return None
    static = out.shape.is_static and inner.shape.is_static
    fewer = static and fixed(out.size) <= fixed(inner.size)
    if out.op == "gather" and narrows(inner) and not fewer:
        return None
    return h.convert(_on(out, inner.operands[0]), out.dtype)


def inward(out: Instruction, inner: Instruction, x: Instruction) -> Instruction | None:
    return _on(inner, h.convert(x, out.dtype)) if narrows(out) else None


def widened_concatenate(out: Instruction) -> Instruction | None:
    first = out.operands[0]
    if first.op != "convert" or narrows(first):
        return None
    dtype = first.operands[0].dtype
    if any(o.op != "convert" or o.operands[0].dtype != dtype for o in out.operands):
        return None
    return h.convert(
        h.concatenate([o.operands[0] for o in out.operands], out["dimensions"][0]),
        out.dtype,
    )


def compare_converted(out: Instruction, x: Instruction, y: Instruction) -> Instruction | None:
    if x.dtype != y.dtype or x.kind in "c" or out.get("type"):
        return None
    return h.compare(x, y, out["direction"]) if exact(x.dtype, out.operands[0].dtype) else None


def compare_constant(out: Instruction, x: Instruction, y: Instruction) -> Instruction | None:
    """compare(convert(x), 3.0) -> compare(x, 3) when both conversions are exact"""
    value = splat(y)
    if (
        not isinstance(value, (int, float))
        or x.kind in "pc"
        or value != value
        or not exact(x.dtype, y.dtype)
    ):
        return None
    if x.kind in "su" and (
        abs(value) == float("inf")
        or value != int(value)
        or not h.lowest(x.dtype) <= value <= h.highest(x.dtype)
    ):
        return None
    small = value if x.kind == "f" else int(value)
    if literal(small, x.dtype).numpy().item() != value:
        return None
    return h.compare(x, h.full_like(x, small), out["direction"])


RULES = rules(
    (op(_PERMUTES, op("convert", x, name="inner")), outward),
    (op("convert", op(_PERMUTES, x, name="inner")), inward),
    (op(_SUBSETS), outward_of_subset),
    (op("concatenate"), widened_concatenate),
    (op("compare", op("convert", x), op("convert", y)), compare_converted),
    (op("compare", op("convert", x), y), compare_constant),
)


@hlo_pass
def convert_motion(module: Module) -> Module:
    """Move conversions. Every firing makes fewer bytes cross an instruction."""
    return rewrite(module, RULES)
