"""How each opcode runs on blocks: the table `HANDLERS`, filled by the families (rules_moves.py,
rules_contract.py, rules_window.py, rules_index.py).

    @localizes("reverse", roles="shift")
    def reverse(s: Site) -> list[Local]: ...

The operands come in the layouts of the choice; the results, one Local per array, leave in its
layouts. `roles` are the factor roles (hlo/sharding/factors.py) beyond `free` that the function can
split. Opcodes without a row run unchanged on their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    OPCODES,
    Instruction,
    Ints,
    Shape,
    build as h,
    instr,
    tuple_shape,
)
from torch_hlo.hlo.sharding.factors import Factors

from .assign import Assignment, Choice
from .reshard import Local, Planner

Price = Callable[[Planner, Instruction, Factors, Assignment, Sequence[Local]], float | None]


@frozen
class Site:
    """An instruction that is about to run on blocks: its operands are in the layouts of the
    choice."""

    p: Planner
    x: Instruction
    choice: Choice
    operands: Sequence[Local]

    def on_blocks(self, operands: Sequence[Instruction], **attrs: object) -> Instruction:
        """`x` on block-sized operands, with other attributes; its shape is inferred, or the block
        of x's where the operands do not determine it."""
        x, row = self.x, OPCODES[self.x.op]
        given = {name: value for name, value in x.attrs if name != "sharding"} | attrs
        if row.rule is not None and row.check is None:
            return instr(x.op, operands, **given)
        shapes = [
            Shape(s.dtype, self.p.grid.block(s.sizes, layout))
            for s, layout in zip(x.shape.arrays, self.choice.results, strict=True)
        ]
        shape = tuple_shape(*shapes) if x.is_tuple else shapes[0]
        return instr(x.op, operands, shape, **given)

    def results(
        self, y: Instruction, reducer: str = "add", partial: Ints | None = None
    ) -> list[Local]:
        """The arrays of `y` as Locals of the arrays of `x`."""
        shapes = self.x.shape.arrays
        many = self.x.is_tuple
        parts = [h.get_tuple_element(y, i) for i in range(len(shapes))] if many else [y]
        split = self.choice.partial if partial is None else partial
        return [
            Local(v, s.sizes, layout, split, reducer)
            for v, s, layout in zip(parts, shapes, self.choice.results, strict=True)
        ]


Localize = Callable[[Site], list[Local]]


@frozen
class Handler:
    localize: Localize
    roles: frozenset[str]
    # bytes exchanged inside the localized program; None: this assignment is impossible
    price: Price | None


HANDLERS: dict[str, Handler] = {}


def localizes(
    names: str, roles: str = "", price: Price | None = None
) -> Callable[[Localize], Localize]:
    def register(fn: Localize) -> Localize:
        for name in names.split():
            HANDLERS[name] = Handler(fn, frozenset(("free", *roles.split())), price)
        return fn

    return register


def handler(op: str) -> Handler:
    return HANDLERS.get(op, DEFAULT)


def rebuilt(s: Site) -> list[Local]:
    """The same opcode with the same attributes on blocks."""
    return s.results(s.on_blocks([o.x for o in s.operands]))


DEFAULT = Handler(rebuilt, frozenset(("free",)), None)


def identity(reducer: str, dtype: str) -> Instruction:
    """The scalar that `reducer` leaves other values unchanged with."""
    value: float | None = {"add": 0, "or": 0, "xor": 0, "multiply": 1}.get(reducer)
    if reducer == "maximum":
        value = h.lowest(dtype)
    elif reducer == "minimum":
        value = h.highest(dtype)
    elif reducer == "and":
        value = (
            True if dtype == "pred" else -1 if dtype.startswith("s") else (1 << int(dtype[1:])) - 1
        )
    return h.constant(value, dtype)


def on_first(p: Planner, x: Instruction, atoms: Ints, other: Instruction) -> Instruction:
    """`x` on the first device along `atoms`, the scalar `other` everywhere else."""
    if not atoms or x is other:
        return x
    first = h.compare(
        p.grid.table(int(i != 0) for i in p.grid.indices(atoms)),
        h.constant(0, "s32"),
        "EQ",
    )
    dims = x.dims
    return h.select(h.broadcast(first, dims, ()), x, h.broadcast(other, dims, ()))
