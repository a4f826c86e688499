"""What the rules of StableHLO operations stand on: `rule(c: Context) -> Instruction |
list[Instruction]`, one for each operation, in RULES.

Scopes, regions (values they capture become elements of the state or the branch operand), calls,
quantized types (an operation on quantized values dequantizes, computes, quantizes, as the
specification says), unknown sizes.

An unknown size `?` of an argument is a symbol; two that an operation needs to be equal become one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch_hlo.frozen import frozen
from torch_hlo.tables import entry

from ..ir import (
    Computation,
    Dim,
    Instruction,
    Ints,
    Meta,
    Module,
    Shape,
    ShapeError,
    Size,
    build as b,
    instr,
    needs,
    noted,
    parameters_of,
    postorder,
    symbol,
    symbols,
)
from ..text.printer import quoted
from ..text.scanner import ErrorAt, ParseError
from .attributes import integers
from .operation import Block, Operation, free_names, walk
from .shardings import Shardings, annotated, constrained
from .sizes import sizes_of
from .types import UNKNOWN, Quantized, Type

Made = Instruction | Sequence[Instruction] | None  # the results of an operation
Rule = Callable[["Context"], Made]
R = TypeVar("R", bound=Rule)
RULES: dict[str, Rule] = {}
MAX_CALLS = 200


def rule(*names: str) -> Callable[[R], R]:
    """Decorator: the function converts these operations."""
    return entry(RULES, names)


@dataclass
class Unify(Exception):
    """The symbol `name` must be `size`; conversion starts again with that."""

    name: str
    size: Size


class Scope:
    """Values by name; `parent` holds those of the enclosing region."""

    def __init__(self, parent: Scope | None = None) -> None:
        self.values: dict[str, list[Instruction]] = {}
        self.quantized: dict[tuple[str, int], Quantized] = {}
        self.parent = parent

    def find(self, name: str) -> tuple[Scope, list[Instruction]] | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope, scope.values[name]
            scope = scope.parent
        return None


@frozen
class Context:
    """What a rule sees of one operation."""

    converter: Converter
    op: Operation
    scope: Scope
    x: list[Instruction]
    types: list[Type]
    kinds: list[Quantized | None]

    def error(self, message: str) -> ParseError:
        return self.converter.s.error(f"{self.op.name}: {message}", self.op.position)

    def attr(self, *names: str, default: Any = None) -> Any:
        """The first of these attributes that is there."""
        for name in names:
            if name in self.op.attrs:
                return self.op.attrs[name]
        return default

    def ints(self, *names: str, default: Sequence[int] = ()) -> Ints:
        value = self.attr(*names)
        return (
            tuple(default) if value is None else integers(self.converter.s, value, self.op.position)
        )

    @property
    def dtype(self) -> str:
        """Of the first result."""
        return self.types[0].shape.dtype

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.attr(*names, default=default)
        if type(value) not in (int, bool):
            raise self.error(f"attribute {names[0]} must be an integer")
        return int(value)

    def shape(self, i: int = 0) -> Shape:
        """The declared shape of a result, all sizes known."""
        found = self.types[i].shape
        if UNKNOWN in found.dims:
            raise self.error(
                f"the sizes of its result {self.declared(i)} are unknown; use the operation's"
                " dynamic form"
            )
        return found

    def declared(self, i: int = 0) -> str:
        found = self.types[i].shape
        return f"{found.dtype}[{','.join('?' if d == UNKNOWN else str(d) for d in found.dims)}]"

    def region(self, i: int, shapes: Sequence[Shape] | None = None) -> Computation:
        """Region `i` as a computation of its block's arguments."""
        if i >= len(self.op.regions):
            raise self.error(f"region {i} is missing")
        return self.converter.closed_region(self, self.op.regions[i], shapes)


class Converter:
    def __init__(
        self,
        s: ErrorAt,
        functions: dict[str, Operation],
        equal: dict[str, Size],
        shardings: Shardings,
    ) -> None:
        self.s = s
        self.functions = functions
        self.equal = equal
        self.shardings = shardings
        self.active: list[str] = []
        self.effects: list[Instruction] = []  # custom calls that have some
        # of Shardy: where the first member of a group is
        self.groups: dict[int, tuple[list[Instruction], int]] = {}
        # functions, and their effects
        self.computations: dict[tuple[Any, ...], tuple[Computation, list[Instruction]]] = {}
        # Sizes that captured integers of the region being converted are known to hold.
        self.known: dict[Instruction, list[Size]] = {}

    def module(self, name: str) -> Module:
        entry_name = "main" if "main" in self.functions else self._first_public()
        entry = self.functions[entry_name]
        if not entry.regions:
            raise self.s.error(f"function @{entry_name} has no body", entry.position)
        params: list[Instruction] = []
        table: list[tuple[str, int, int]] = []
        placed = self.shardings.boundary(
            entry, "arg_attrs", [t.shape for _, t in entry.regions[0].args]
        ) or [None] * len(entry.regions[0].args)
        for i, (arg, t) in enumerate(entry.regions[0].args):
            dims: list[Size] = []
            for d, n in enumerate(t.shape.dims):
                size: Size = n
                if n == UNKNOWN:
                    size = self._resolve(symbol(f"{arg if arg.isidentifier() else 'd'}_{d}"))
                    if (
                        isinstance(size, Dim)
                        and str(size) in symbols(size)
                        and all(str(size) != found[0] for found in table)
                    ):
                        table.append((str(size), i, d))
                dims.append(size)
            shape = t.shape if t.shape.is_tuple else Shape(t.shape.dtype, tuple(dims))
            params.append(instr("parameter", (), shape, index=i, sharding=placed[i]))
        results = self._body(entry, params)
        wanted = None
        if entry.types:
            wanted = self.shardings.boundary(entry, "res_attrs", [x.shape for x in results])
        elif results:  # the effects of a program without results: ((), true)
            results = [b.tuple_(), *results]
        if len(results) == 1 and not results[0].is_tuple:
            root = results[0] if wanted is None else constrained(results[0], wanted[0])
        else:
            root = b.tuple_(*results)
            if wanted is not None:
                root = annotated(
                    root,
                    tuple(w or self.shardings.open(x.rank) for w, x in zip(wanted, results)),
                )
        return Module(
            name,
            Computation(entry_name, tuple(params), root),
            _aliases(entry, params, results),
            tuple(table),
            self.shardings.mesh,
            requests=(
                _said(entry, "arg_attrs", len(params), "mhlo.layout_mode"),
                _said(entry, "res_attrs", len(results), "mhlo.layout_mode"),
                _said(entry, "res_attrs", len(results), "mhlo.memory_kind"),
                _said(entry, "arg_attrs", len(params), "jax.buffer_donor"),
            ),
        )

    def _first_public(self) -> str:
        return next(
            (n for n, f in self.functions.items() if f.attrs.get("sym_visibility") != "private"),
            next(iter(self.functions)),
        )

    def _resolve(self, size: Size) -> Size:
        seen = 0
        while isinstance(size, Dim) and str(size) in self.equal and seen < 200:
            size = self.equal[str(size)]
            seen = seen + 1
        return size

    # Bodies

    def _body(self, function: Operation, args: Sequence[Instruction]) -> list[Instruction]:
        name = str(function.attrs.get("sym_name", ""))
        self.active.append(name)
        scope = Scope()
        block = function.regions[0]
        self._bind(scope, block, args, function.position)
        results = self.block(block, scope)
        self.active.pop()
        returned = len(block.ops[-1].operands)
        if returned != len(function.types):
            raise self.s.error(
                f"function @{name} returns {returned} values, its type says {len(function.types)}",
                function.position,
            )
        return results

    def _bind(
        self,
        scope: Scope,
        block: Block,
        values: Sequence[Instruction],
        position: int,
    ) -> None:
        if len(block.args) != len(values):
            raise self.s.error(f"takes {len(block.args)} values, got {len(values)}", position)
        for (name, kind), value in zip(block.args, values, strict=True):
            scope.values[name] = [value]
            if kind.quantized is not None:
                scope.quantized[name, 0] = kind.quantized

    def block(self, block: Block, scope: Scope) -> list[Instruction]:
        """Convert a block; the values it returns. One that has effects and returns nothing returns
        that they have run."""
        carriers: list[Instruction] = []  # what runs the effects of this block
        for op in block.ops:
            if op.name in ("return", "sdy.return"):
                found = [self.use(scope, name, index, op.position) for name, index in op.operands]
                return tied(found or [b.constant(True, "pred")] * bool(carriers), carriers)
            known = len(self.effects)
            results = self.operation(op, scope)
            if len(self.effects) > known:
                carriers.append((results or self.effects[-1:])[0])
        raise self.s.error(
            "this block does not end in a return",
            block.ops[-1].position if block.ops else self.s.pos,
        )

    def use(self, scope: Scope, name: str, index: int, position: int) -> Instruction:
        found = scope.find(name)
        if found is None:
            raise self.s.error(f"%{name} is not defined before its use", position)
        if index >= len(found[1]):
            raise self.s.error(
                f"%{name} has {len(found[1])} results, there is no %{name}#{index}",
                position,
            )
        return found[1][index]

    def operation(self, op: Operation, scope: Scope) -> list[Instruction]:
        operands = [self.use(scope, name, index, op.position) for name, index in op.operands]
        kinds = [self._quantized(scope, name, index) for name, index in op.operands]
        try:
            results = self._results(op, scope, operands, kinds)
        except (ParseError, Unify):
            raise
        except ShapeError as error:
            self._unify_operands(operands)
            raise self.s.error(f"{op.name}: {error}", op.position) from None
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise self.s.error(
                f"{op.name}: bad operands or attributes ({error})", op.position
            ) from error
        wanted = sum(n for _, n in op.results)
        if wanted not in (0, len(results)):
            raise self.s.error(
                f"{op.name} has {len(results)} results, {wanted} are named",
                op.position,
            )
        if op.types and len(op.types) == len(results):
            for value, declared in zip(results, op.types):
                self._check(op, value, declared)
        at = 0
        for name, count in op.results:
            scope.values[name] = results[at : at + count]
            for k in range(count):
                if at + k < len(op.types) and (q := op.types[at + k].quantized) is not None:
                    scope.quantized[name, k] = q
                if not name.isdigit():
                    noted(results[at + k], Meta(name))
            at += count
        return results

    def _quantized(self, scope: Scope, name: str, index: int) -> Quantized | None:
        found = scope.find(name)
        return found[0].quantized.get((name, index)) if found else None

    def _results(
        self,
        op: Operation,
        scope: Scope,
        operands: list[Instruction],
        kinds: list[Quantized | None],
    ) -> list[Instruction]:
        convert = RULES.get(op.name)
        if convert is None:
            raise self.s.error(f"operation {op.name!r} is not supported", op.position)
        types = op.types
        quantize = op.name not in _STORED and (any(kinds) or any(t.quantized for t in types))
        if quantize:
            operands = [x if q is None else dequantized(x, q) for x, q in zip(operands, kinds)]
            types = [
                t if t.quantized is None else Type(Shape(t.quantized.expressed, t.shape.dims))
                for t in types
            ]
        made = convert(Context(self, op, scope, operands, types, kinds))
        results = [made] if isinstance(made, Instruction) else list(made or [])
        if (
            op.name != "custom_call"
            and ("sdy.sharding" in op.attrs or "mhlo.sharding" in op.attrs)
            and results
        ):
            given = self.shardings.of(op.attrs, [x.shape for x in results])
            if given is not None:
                results = [annotated(x, g, operands) for x, g in zip(results, given, strict=True)]
        if quantize:
            results = [
                x if t.quantized is None else quantized(x, t.quantized)
                for x, t in zip(results, op.types, strict=True)
            ]
        return results

    def _check(self, op: Operation, value: Instruction, declared: Type) -> None:
        """The value must have the declared type; a symbol where an integer is declared becomes
        it."""
        got = value.shape
        want = declared.shape
        if got.is_tuple or want.is_tuple:
            return
        if got.dtype != want.dtype or got.rank != want.rank:
            raise self.s.error(f"{op.name} gives {got}, its type says {want}", op.position)
        for g, w in zip(got.dims, want.dims):
            if w != UNKNOWN and g != w:
                self.unify(g, w)
                raise self.s.error(f"{op.name} gives {got}, its type says {want}", op.position)

    def _unify_operands(self, operands: Sequence[Instruction]) -> None:
        for x in operands:
            for y in operands:
                if x.rank == y.rank:
                    for p, q in zip(x.dims, y.dims):
                        if p is not q and p != q:
                            self.unify(p, q)

    def unify(self, p: Size, q: Size) -> None:
        """Make two sizes equal when one is a plain symbol that the other does not contain."""
        for a, c in ((p, q), (q, p)):
            if isinstance(a, Dim) and str(a) in symbols(a) and str(a) not in symbols(c):
                raise Unify(str(a), c)

    # Regions

    def inner_block(
        self, c: Context, block: Block, values: Sequence[Instruction]
    ) -> list[Instruction]:
        """The results of a region that runs once, in place, for these arguments."""
        scope = Scope(c.scope)
        self._bind(scope, block, values, c.op.position)
        return self.block(block, scope)

    def closed_region(
        self, c: Context, block: Block, shapes: Sequence[Shape] | None
    ) -> Computation:
        """A region without captured parameters: of reduce, sort, scatter, …"""
        scope = Scope()
        for name in free_names(block):
            found = c.scope.find(name)
            if found is None:
                raise c.error(f"%{name} is not defined before its use")
            if any(has_parameter(v) for v in found[1]):
                raise c.error(
                    f"its region uses %{name} from outside; only constants can be captured here"
                )
            scope.values[name] = found[1]
        shapes = [t.shape for _, t in block.args] if shapes is None else shapes
        params = parameters_of(shapes)
        self._bind(scope, block, params, c.op.position)
        results = self.block(block, scope)
        root = results[0] if len(results) == 1 else b.tuple_(*results)
        return Computation(c.op.name, params, root)

    def captured(
        self, c: Context, blocks: Sequence[Block]
    ) -> tuple[list[str], list[list[Instruction]]]:
        """Names and values that regions use from outside and that depend on parameters."""
        names: dict[str, list[Instruction]] = {}
        for name in (n for block in blocks for n in free_names(block)):
            found = c.scope.find(name)
            if found is None:
                raise c.error(f"%{name} is not defined before its use")
            if any(has_parameter(v) for v in found[1]):
                names[name] = found[1]
        return list(names), list(names.values())

    def open_region(
        self,
        c: Context,
        block: Block,
        state: Instruction,
        names: Sequence[str],
        groups: list[list[Instruction]],
        what: str,
        constant: Sequence[int] = (),
    ) -> Computation:
        """A region as a computation of one tuple: the block's arguments, then the captured values,
        which a body returns too.

        `state` is the tuple it starts with; the arguments in `constant` never change.
        """
        param = instr("parameter", (), state.shape, index=0)
        parts = [b.get_tuple_element(param, i) for i in range(len(state.operands))]
        outer = self.known
        fixed = (*constant, *range(len(block.args), len(parts)))
        self.known = {
            parts[i]: sizes
            for i in fixed
            if (sizes := sizes_of(state.operands[i], outer)) is not None
        }
        around = Scope()
        scope = Scope(around)
        count = len(block.args)
        self._bind(scope, block, parts[:count], c.op.position)
        at = count
        for name, group in zip(names, groups):
            around.values[name] = parts[at : at + len(group)]
            for k in range(len(group)):
                if (q := self._quantized(c.scope, name, k)) is not None:
                    around.quantized[name, k] = q
            at += len(group)
        for name in free_names(block):
            if name not in around.values and (found := c.scope.find(name)) is not None:
                around.values[name] = found[1]
        results = self.block(block, scope)
        self.known = outer
        root = (
            results[0]
            if what == "condition"
            else b.tuple_(*results, *(parts[count:] if what == "body" else ()))
        )
        return Computation(f"{c.op.name}_{what}", (param,), root)

    # Functions

    def call(self, c: Context, name: str) -> list[Instruction]:
        """Call a function; one with unknown sizes is converted in place for these arguments."""
        function = self._defined(c, name)
        if name in self.active or len(self.active) > MAX_CALLS:
            raise c.error(f"function @{name} calls itself")
        unknown = any(
            UNKNOWN in t.shape.dims
            for t in (*function.types, *(t for _, t in function.regions[0].args))
        )
        if unknown or any(
            UNKNOWN in t.shape.dims for op in walk(function.regions[0]) for t in op.types
        ):
            return self._body(function, c.x)
        known = len(self.effects)
        called = self.function(c, name, [x.shape for x in c.x])
        if len(self.effects) > known:  # each call has effects of its own
            del self.effects[known:]
            return self._body(function, c.x)
        named = c.attr("mhlo.frontend_attributes")
        attrs: dict[str, Any] = {}
        if isinstance(named, dict):  # what XLA's passes are told, such as `inlineable`
            text = ",".join(f"{key}={quoted(str(value))}" for key, value in named.items())
            attrs["frontend_attributes"] = f"{{{text}}}"
        made = instr("call", c.x, to_apply=called, **attrs)
        return [made] if len(function.types) == 1 else unpacked(made, len(function.types))

    def _defined(self, c: Context, name: str) -> Operation:
        function = self.functions.get(name)
        if function is None or not function.regions:
            raise c.error(f"function @{name} is not defined")
        return function

    def function(self, c: Context, name: str, shapes: Sequence[Shape]) -> Computation:
        """A function of arguments of these shapes as a computation."""
        function = self._defined(c, name)
        key = (name, tuple(shapes))
        found, effects = self.computations.get(key) or (None, [])
        self.effects += effects
        if found is None:
            params = [instr("parameter", (), s, index=i) for i, s in enumerate(shapes)]
            known = self.known
            self.known = {}
            before = len(self.effects)
            results = self._body(function, params)
            self.known = known
            found = Computation(
                name,
                tuple(params),
                results[0] if len(results) == 1 else b.tuple_(*results),
            )
            self.computations[key] = found, self.effects[before:]
        return found


def _aliases(
    entry: Operation, params: list[Instruction], results: list[Instruction]
) -> tuple[tuple[int, int], ...]:
    """(result, argument) pairs from the arguments' `tf.aliasing_output`."""
    found = {
        o: i
        for i, row in enumerate(_rows(entry, "arg_attrs", len(params)))
        if type(o := row.get("tf.aliasing_output")) is int
        and o < len(results)
        and results[o].shape == params[i].shape
    }
    return tuple(sorted(found.items()))


def _rows(entry: Operation, key: str, count: int) -> list[dict[str, Any]]:
    """The attributes of each argument or result; [] for nothing."""
    given = entry.attrs.get(key)
    rows = given if isinstance(given, list) and len(given) == count else []
    return [row if isinstance(row, dict) else {} for row in rows]


def _said(entry: Operation, key: str, count: int, name: str) -> tuple[str, ...]:
    """What an attribute says of each argument or result; () for nothing."""
    found = [str(row.get(name, "")) for row in _rows(entry, key, count)]
    return tuple(found) if any(found) else ()


def tied(results: list[Instruction], effects: list[Instruction]) -> list[Instruction]:
    """Results that need these effects, each of them: whoever uses one has them run."""
    lost = [x for x in effects if not all(needs(y, x) for y in results)]
    if not lost:
        return results
    whole = instr("opt-barrier", (b.tuple_(*results, *lost),))
    return [b.get_tuple_element(whole, i) for i in range(len(results))]


def unpacked(x: Instruction, count: int) -> list[Instruction]:
    """The `count` results of an instruction."""
    return (
        [x] if count == 1 and not x.is_tuple else [b.get_tuple_element(x, i) for i in range(count)]
    )


def has_parameter(x: Instruction) -> bool:
    return any(v.op == "parameter" for v in postorder((x,)))


def dequantized(x: Instruction, q: Quantized) -> Instruction:
    scale, zero, axes = _parameters(q)
    return b.uniform_dequantize(x, scale, zero, q.expressed, axes)


def quantized(x: Instruction, q: Quantized) -> Instruction:
    scale, zero, axes = _parameters(q)
    y = b.uniform_quantize(x, scale, zero, q.storage, axes)
    if q.limits is not None:
        low, high = (b.constant(v, q.storage) for v in q.limits)
        y = b.clamp(low, y, high)
    return y


def _parameters(q: Quantized) -> tuple[Instruction, Instruction, Ints]:
    if q.axis is None:
        return (
            b.constant(q.scales[0], q.expressed),
            b.constant(q.zero_points[0], "s32"),
            (),
        )
    return (
        b.constant(list(q.scales), q.expressed),
        b.constant(list(q.zero_points), "s32"),
        (q.axis,),
    )


# Operations on the stored integers themselves, those without results, and those whose regions or
# functions handle types.
_STORED = frozenset(
    "constant uniform_quantize uniform_dequantize reshape transpose broadcast_in_dim slice reverse"
    " concatenate dynamic_slice optimization_barrier return gather bitcast_convert"
    " func.call composite while case if tuple get_tuple_element async_start async_done".split()
)
