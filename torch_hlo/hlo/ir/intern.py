"""Making instructions: of two with the same structure there is one.

    y = instr("add", (x, x))                      # shape inferred from the opcode table
    assert instr("add", (x, x)) is y              # same structure <=> same object: CSE is free

Builders with the opcodes' names live in build.py.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..text.printer import instruction_text, module_text
from .instruction import (
    DEFAULTS,
    UNKNOWN,
    Attrs,
    Instruction,
    carry_meta,
    install_text,
    postorder,
)
from .opcodes import OPCODES
from .shape import Shape

install_text(instruction_text, module_text)

_MISSING = object()
_INTERNED: weakref.WeakValueDictionary[tuple[Any, ...], Instruction] = weakref.WeakValueDictionary()


def instr(
    op: str,
    operands: Sequence[Instruction] = (),
    shape: Shape | None = None,
    **attrs: Any,
) -> Instruction:
    """The instruction with this structure. The shape is inferred from the opcode's row when not
    given.

    Lists in attributes become tuples; attributes that are None or have their default value
    (DEFAULTS) are left out. Raises ShapeError (infer.py) when the operands do not fit the opcode.
    """
    pairs: Attrs = ()
    if attrs:
        kept = [(k, tuple(v) if type(v) is list else v) for k, v in attrs.items() if v is not None]
        stated = [p for p in kept if DEFAULTS.get(p[0], _MISSING) != p[1]]
        pairs = tuple(sorted(stated, key=_attr_name))
    return interned(op, tuple(operands), pairs, shape)


def parameters_of(shapes: Iterable[Shape]) -> tuple[Instruction, ...]:
    """Parameters of a computation that is called with arrays of these shapes."""
    return tuple(instr("parameter", (), s, index=i) for i, s in enumerate(shapes))


def _attr_name(pair: tuple[str, object]) -> str:
    return pair[0]


def interned(
    op: str, operands: tuple[Instruction, ...], attrs: Attrs, shape: Shape | None
) -> Instruction:
    """The one instruction with these attributes, (name, value) pairs as `Instruction.attrs` has
    them; its shape is inferred where None is given."""
    # Operands enter the key by id: they are interned, and the instruction found keeps them alive.
    key = (op, tuple(map(id, operands)), attrs, shape)
    found = _INTERNED.get(key)
    if found is not None:
        return found
    if shape is None:
        shape = OPCODES[op].infer(*operands, **dict(attrs))
        found = interned(op, operands, attrs, shape)
    else:
        found = object.__new__(Instruction)
        found.op = op
        found.operands = operands
        found.attrs = attrs
        found.shape = shape
        found.dtype = shape.dtype
        found.dims = shape.dims
        found.meta = UNKNOWN
        found.settled = 0
        found.below = None
    _INTERNED[key] = found
    return found


def replace(
    x: Instruction,
    operands: Iterable[Instruction] | None = None,
    shape: Shape | None = None,
    **attrs: Any,
) -> Instruction:
    """`x` with other operands, shape and/or attributes; a shape that is not given is inferred
    anew unless nothing but equal-shaped operands changed. It has `x`'s name and source."""
    new = x.operands if operands is None else tuple(operands)
    if attrs:
        found = instr(x.op, new, shape, **{**dict(x.attrs), **attrs})
    else:
        if shape is None and len(new) == len(x.operands):
            for a, b in zip(new, x.operands):
                if a is not b and a.shape is not b.shape and a.shape != b.shape:
                    break
            else:
                shape = x.shape
        found = interned(x.op, new, x.attrs, shape)
    carry_meta(x, found)
    return found


def on_operands(x: Instruction, new: dict[Instruction, Instruction]) -> Instruction:
    """`x` on what its operands have become, itself when they are the same."""
    operands = tuple(new[o] for o in x.operands)
    return x if operands == x.operands else replace(x, operands)


def rewrite_bottom_up(root: Instruction, fn: Callable[[Instruction], Instruction]) -> Instruction:
    """Rebuild from the leaves: `fn` sees each instruction with operands already rewritten and
    returns its replacement."""
    done: dict[Instruction, Instruction] = {}
    for x in postorder((root,)):
        done[x] = fn(on_operands(x, done))
    return done[root]
