"""Invariants of a program: `verify(module)` raises VerifyError naming the instruction.

Checked: opcodes known; number of operands; attributes legal, hashable and not spelled out at their
default; shapes equal to the inferred ones; parameters numbered and listed; signatures of called
computations; aliases and symbols. Recursion is impossible by construction (a computation is
immutable and holds its root). What passed once is not looked at again: instructions are immutable.
"""

from ..sharding.sharding import Placement, Sharding, ShardingError
from .dim import Dim, symbol, symbols
from .infer import ShapeError, compatible
from .instruction import DEFAULTS, Computation, Instruction, Module, called, outputs
from .literal import Literal
from .match import new_mark
from .opcodes import OPCODES
from .shape import DTYPES, Shape
from .window import WindowDim

_VERIFIED = new_mark()  # of instructions that were found in order


class VerifyError(ValueError):
    """A program that breaks an invariant of the language."""


def verify(module: Module) -> Module:
    """`module` itself when every invariant holds. Raises VerifyError."""
    pending = [module.entry]
    seen = {id(module.entry)}
    while pending:
        for inner in _verify_computation(pending.pop()):
            if id(inner) not in seen:
                seen.add(id(inner))
                pending.append(inner)
    _verify_boundary(module)
    return module


def _verify_computation(c: Computation) -> list[Computation]:
    """Check one computation; returns those it calls."""
    for i, p in enumerate(c.params):
        if p.op != "parameter" or p["index"] != i:
            raise VerifyError(f"computation {c.name}: parameter {i} is {p.op} {dict(p.attrs)}")
    listed = set(map(id, c.params))
    found: list[Computation] = []
    for position, x in enumerate(c.instructions()):
        if x.op == "parameter" and id(x) not in listed:
            raise VerifyError(
                f"computation {c.name}: uses parameter {x['index']} of shape {x.shape}, which is"
                " not in its signature"
            )
        if not x.settled & _VERIFIED:
            try:
                _verify_instruction(x)
            except (ShapeError, VerifyError) as error:
                name = x.meta.name or f"#{position}"
                raise VerifyError(f"{x.op} ({name} of computation {c.name}): {error}") from None
            x.settled |= _VERIFIED
        if x.attrs:
            found.extend(called(x))
    return found


def _verify_instruction(x: Instruction) -> None:
    opcode = OPCODES.get(x.op)
    if opcode is None:
        raise VerifyError("unknown opcode")
    _verify_shape(x.shape)
    for name, value in x.attrs:
        if DEFAULTS.get(name, _verify_instruction) == value:
            raise VerifyError(
                f"attribute {name} is spelled out at its default {value!r}; build it with instr()"
            )
        _verify_value(name, value)
    if (sharding := x.get("sharding")) is not None:
        _verify_sharding(sharding, x.shape)
    opcode.verify(x.shape, *x.operands, **dict(x.attrs))


def _verify_sharding(sharding: Placement | None, shape: Shape) -> None:
    nested = sharding if isinstance(sharding, tuple) else None
    if shape.is_tuple != (nested is not None) or nested and len(nested) != len(shape.elements):
        raise VerifyError(f"sharding {sharding} is not of the structure of {shape}")
    if isinstance(sharding, tuple):
        for inner, element in zip(sharding, shape.elements):
            _verify_sharding(inner, element)
    elif sharding is not None:
        try:
            sharding.check_rank(shape.dims)
        except ShardingError as error:
            raise VerifyError(str(error)) from None


def _verify_shape(shape: Shape) -> None:
    for s in shape.arrays:
        if s.dtype not in DTYPES:
            raise VerifyError(f"unknown element type {s.dtype!r}")
        if any(not isinstance(d, Dim) and (type(d) is not int or d < 0) for d in s.dims):
            raise VerifyError(f"bad dims in {s}")


def _verify_value(name: str, value: object) -> None:
    if type(value) is tuple:
        for v in value:
            _verify_value(name, v)
    elif not isinstance(
        value,
        (int, str, float, Dim, Computation, Literal, WindowDim, Shape, Sharding),
    ):
        raise VerifyError(f"attribute {name} holds a {type(value).__name__}")


def _verify_boundary(module: Module) -> None:
    params = module.entry.params
    results = outputs(module)
    for table, kind in (
        (list(zip(*module.aliases))[:1], "output"),
        (list(zip(*module.aliases))[1:], "parameter"),
    ):
        for indices in table:
            if len(set(indices)) != len(indices):
                raise VerifyError(f"aliases {module.aliases} name an {kind} twice")
    for output, param in module.aliases:
        if not 0 <= output < len(results) or not 0 <= param < len(params):
            raise VerifyError(
                f"alias ({output}, {param}) is out of range: {len(results)} outputs, {len(params)}"
                " parameters"
            )
        made = results[output].shape
        given = params[param].shape
        if not compatible(made, given) and made.nbytes != given.nbytes:
            raise VerifyError(f"alias ({output}, {param}) joins {made} and {given}")
    if any(not 0 <= p < len(params) for p in module.constants) or {
        p for _, p in module.aliases
    }.intersection(module.constants):
        raise VerifyError(
            f"constants {module.constants} are parameters that no output overwrites; there are"
            f" {len(params)}, aliases {module.aliases}"
        )
    bound = set()
    for name, param, dimension in module.symbols:
        ok = 0 <= param < len(params) and 0 <= dimension < params[param].rank
        if not ok or params[param].dims[dimension] is not symbol(name):
            raise VerifyError(f"symbol {name} is not dimension {dimension} of parameter {param}")
        bound.add(name)
    for p in params:
        for d in p.dims:
            if free := symbols(d) - bound:
                raise VerifyError(
                    f"symbol {min(free)} of parameter {p['index']} ({p.shape}) is read nowhere; add"
                    " it to Module.symbols"
                )
