"""narrow_arrays: what lies in memory between two kernels is as narrow as the values in it.

    a = f32[n] fusion(x), calls={… f32[n] convert(y)}    # y: bf16[n]
    b = fusion(a), calls={p = f32[n] parameter(0) …}
->  a = bf16[n] fusion(x), calls={… y}
    b = fusion(a), calls={p = bf16[n] parameter(0); f32[n] convert(p) …}

An array is narrowed where its kernel widens what it writes, and where every kernel that reads it
rounds it first. No value changes, and half the bytes move.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch_hlo.hlo.ir import (
    DTYPES,
    OPCODES,
    Computation,
    Instruction,
    Module,
    Replacements,
    Shape,
    build as b,
    carry_meta,
    instr,
    replace,
    substituted,
    users,
)

from ..hlo_pass import hlo_pass

SMALLEST = 1 << 16  # elements
_MOVES = frozenset("broadcast gather reshape transpose slice".split())

Array = tuple[Instruction, int]  # a step and the number of one of its results


@hlo_pass
def narrow_arrays(module: Module) -> Module:
    """Arrays between kernels are as narrow as their values."""
    plan = _Plan(module.entry)
    return module.with_root(plan.root(module.entry)) if plan.narrower else module


class _Plan:
    """`narrower`: the new element types of arrays."""

    def __init__(self, computation: Computation) -> None:
        self.readers: dict[Array, list[tuple[Instruction, int]]] = {}
        for x in computation.instructions():
            if x.op not in ("reshape", "get-tuple-element"):
                for n, operand in enumerate(x.operands):
                    self.readers.setdefault(_array(operand), []).append((x, n))
        self.narrower: dict[Array, str] = {}
        for x in computation.instructions():
            if _is_kernel(x) or x.op == "dot" or _is_attention(x):
                for number, value in enumerate(_results(x)):
                    dtype = self._narrower((x, number), value)
                    if dtype is not None and x is not computation.root:
                        self.narrower[x, number] = dtype

    def _narrower(self, array: Array, value: Instruction) -> str | None:
        readers = self.readers.get(array, [])
        if not _is_large(value) or not readers or not all(_is_kernel(r) for r, _ in readers):
            return None
        uses = [_uses(r["calls"], r["calls"].params[n]) for r, n in readers]
        if _is_widened(value) and all(_takes_any_type(u) for each in uses for u in each):
            return value.operand.dtype
        types = {_rounded_to(u, value) for each in uses for u in each}
        found = types.pop() if len(types) == 1 else None
        return found if value.op != "reduce" else None

    def root(self, computation: Computation) -> Instruction:
        new: Replacements = {}
        for x in computation.instructions():
            operands = [new[o] for o in x.operands]
            if x.op == "reshape":
                new[x] = replace(x, operands, Shape(operands[0].dtype, x.dims))
            elif _is_kernel(x) or _is_attention(x):
                new[x] = self._kernel(x, operands)
            elif (x, 0) in self.narrower:
                new[x] = self._product(x, operands)
            else:
                new[x] = replace(x, operands) if operands else x
        return new[computation.root]

    def _kernel(self, x: Instruction, operands: list[Instruction]) -> Instruction:
        body: Computation = x["calls"]
        params: list[Instruction] = []
        table: Replacements = {}
        for n, (p, operand) in enumerate(zip(body.params, operands, strict=True)):
            q = p
            if operand.dtype != p.dtype:
                q = instr("parameter", (), operand.shape, index=n)
                table |= _widened_late(body, p, q)
            params.append(q)
        values = [
            _narrowed(substituted(value, table), self.narrower.get((x, n)))
            for n, value in enumerate(_results(x))
        ]
        if len(values) == 1 and values[0].op == "parameter":
            index: int = values[0]["index"]
            return operands[index]  # it did nothing but round
        root = b.tuple_(*values) if x.is_tuple else values[0]
        calls = Computation(body.name, tuple(params), root)
        return replace(x, operands, root.shape, calls=calls)

    def _product(self, x: Instruction, operands: list[Instruction]) -> Instruction:
        """A product that rounds its sums."""
        params = tuple(
            instr("parameter", (), o.shape, index=n) for n, o in enumerate(dict.fromkeys(operands))
        )
        inside = dict(zip(dict.fromkeys(operands), params, strict=True))
        root = b.convert(replace(x, [inside[o] for o in operands]), self.narrower[x, 0])
        calls = Computation("fused", params, root)
        made = instr("fusion", tuple(inside), root.shape, kind="output", calls=calls)
        carry_meta(x, made)
        return made


def _array(x: Instruction) -> Array:
    """The result of a step that an operand is, or is a view of."""
    while x.op == "reshape":
        x = x.operand
    return (x.operand, x["index"]) if x.op == "get-tuple-element" else (x, 0)


def _is_kernel(x: Instruction) -> bool:
    return x.op == "fusion" and x.get("kind") != "custom"


def _is_attention(x: Instruction) -> bool:
    """Whether this is a kernel of compiler/attention, which rounds what it writes."""
    return x.op == "fusion" and '"attention"' in (x.get("backend_config") or "")


def _results(x: Instruction) -> Iterable[Instruction]:
    if x.op != "fusion":
        return (x,)
    root = x["calls"].root
    values: Iterable[Instruction] = root.operands if root.op == "tuple" else (root,)
    return values


def _is_large(x: Instruction) -> bool:
    return not x.is_tuple and (not isinstance(x.size, int) or x.size >= SMALLEST)


def _is_widened(value: Instruction) -> bool:
    return (
        value.op == "convert"
        and _is_narrower(value.operand, value)
        and value.operand.op != "parameter"
    )


def _is_narrower(x: Instruction, y: Instruction) -> bool:
    a = DTYPES[x.dtype]
    c = DTYPES[y.dtype]
    return a.kind == c.kind == "f" and a.bits < c.bits


def _uses(body: Computation, x: Instruction) -> list[Instruction]:
    """What a kernel does with the elements of `x`, wherever it moves them first."""
    table = users((body.root,))
    found: list[Instruction] = []
    todo = [x]
    while todo:
        y = todo.pop()
        for use in table.get(y) or [body.root]:
            (todo if _moves(use, y) and use is not body.root else found).append(use)
    return found


def _moves(use: Instruction, x: Instruction) -> bool:
    return use.op in _MOVES and use.operands.index(x) == 0


def _widened_late(body: Computation, p: Instruction, q: Instruction) -> Replacements:
    """What stands for the instructions of a kernel that work on `p`, given the narrower `q`."""
    table = users((body.root,))
    new = {p: b.convert(q, p.dtype)}
    todo = [(p, q)]
    while todo:
        x, y = todo.pop()
        for use in table.get(x, ()):
            if _moves(use, x):
                moved = replace(use, (y, *use.operands[1:]), Shape(y.dtype, use.dims))
                new[use] = b.convert(moved, use.dtype)
                todo.append((use, moved))
            elif use.op == "convert" and use.dtype == y.dtype:
                new[use] = y
    return new


def _takes_any_type(use: Instruction) -> bool:
    """Whether a kernel may convert this operand on the way."""
    return use.op == "reduce" or "pointwise" in OPCODES[use.op].traits


def _rounded_to(use: Instruction, value: Instruction) -> str | None:
    """What a use makes of `value` first."""
    return use.dtype if use.op == "convert" and _is_narrower(use, value) else None


def _narrowed(x: Instruction, dtype: str | None) -> Instruction:
    if dtype is None or x.dtype == dtype:
        return x
    return x.operand if x.op == "convert" and x.operand.dtype == dtype else b.convert(x, dtype)
