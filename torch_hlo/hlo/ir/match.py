"""Patterns over instructions, and the driver that rewrites programs with a table of rules.

    RULES = rules(
        (op("add", x, const(0)), lambda x: x, where_ints),            # x + 0 -> x
        (op("transpose", op("transpose", x, name="inner"), name="outer"), compose),
    )
    module = rewrite(module, RULES)

A builder (and a guard) takes the bound names it mentions as parameters, plus `out`, the matched
instruction, and returns an Instruction of the same shape, or None to decline. Commutative opcodes
match in both orders. The driver works bottom-up to a fixed point, without recursion on deep graphs,
rewrites called computations too, and returns the module itself when nothing fired.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

from torch_hlo.frozen import frozen

from .build import broadcast
from .infer import compatible
from .instruction import Computation, Instruction, Module, called, carry_meta, postorder
from .intern import instr, on_operands, replace
from .literal import Literal
from .opcodes import OPCODES

# rule firings per instruction, on average, before the driver suspects rules that undo each other
BUDGET = 16
T = TypeVar("T")


class RewriteError(RuntimeError):
    """A rule changed a shape, or rules alternate forever."""


# Patterns


@frozen
class Var:
    """Any instruction (satisfying `where`); the same name matches the same instruction
    everywhere."""

    name: str
    where: Callable[[Instruction], bool] | None = None

    def match(self, x: Instruction, bound: dict[str, Instruction]) -> bool:
        seen = bound.setdefault(self.name, x)
        return seen is x and (self.where is None or self.where(x))


@frozen
class Const:
    """A scalar constant or a broadcast of one; of `value` when given (0.0 and -0.0 differ, integers
    compare by value)."""

    value: int | float | bool | None = None
    name: str = ""

    def match(self, x: Instruction, bound: dict[str, Instruction]) -> bool:
        if x.op != "constant" and x.op != "broadcast":
            return False
        found = splat(x)
        if found is None or self.value is not None and not _same(found, self.value):
            return False
        return not self.name or bound.setdefault(self.name, x) is x


@frozen
class Op:
    """An instruction with one of `ops`; operands are matched unless the pattern lists none of
    them."""

    ops: frozenset[str]
    operands: tuple[Pattern, ...]
    name: str = ""
    where: Callable[[Instruction], bool] | None = None

    def match(self, x: Instruction, bound: dict[str, Instruction]) -> bool:
        if x.op not in self.ops:
            return False
        if self.operands:
            if len(self.operands) != len(x.operands):
                return False
            for pattern, operand in zip(self.operands, x.operands):
                if not pattern.match(operand, bound):
                    return False
        if self.where is not None and not self.where(x):
            return False
        return not self.name or bound.setdefault(self.name, x) is x


Pattern = Var | Const | Op


# As tables of rules write them, beside `op`.
var = Var
const = Const


def op(
    names: str,
    *operands: Pattern,
    name: str = "",
    where: Callable[[Instruction], bool] | None = None,
) -> Op:
    """`names`: one or several opcodes separated by spaces."""
    return Op(frozenset(names.split()), operands, name, where)


def all_or_none(found: Iterable[T | None]) -> list[T] | None:
    """What was found; None when one of them was not."""
    known: list[T] = []
    for x in found:
        if x is None:
            return None
        known.append(x)
    return known


@lru_cache(maxsize=4096)
def scalar_value(literal: Literal) -> int | float | bool | complex | None:
    """The Python value of a rank-0 literal."""
    return literal.numpy().item() if not literal.dims else None


def splat(x: Instruction) -> int | float | bool | complex | None:
    """The value of every element when `x` is a scalar constant or a broadcast of one, else None."""
    if x.op == "broadcast":
        x = x.operand
    return scalar_value(x["literal"]) if x.op == "constant" else None


def _same(a: complex, b: float) -> bool:
    if isinstance(a, complex):
        return (
            a == b
            and math.copysign(1, a.real) == math.copysign(1, b)
            and math.copysign(1, a.imag) == 1
        )
    if isinstance(a, float) and isinstance(b, (int, float)):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return a == b


# Rules

Needs = tuple[tuple[int, frozenset[str]], ...]  # (operand, its kinds), see Table.candidates


@frozen
class Rule:
    name: str
    # one per order of commutative operands
    patterns: tuple[tuple[Op, Needs], ...]
    build: Callable[[dict[str, Instruction]], Instruction | None]
    where: Callable[[dict[str, Instruction]], bool] | None

    def may_match(self, kinds: tuple[str, ...]) -> bool:
        """Whether some instruction with operands of these kinds matches."""
        for pattern, needs in self.patterns:
            if (not pattern.operands or len(pattern.operands) == len(kinds)) and all(
                kinds[i] in wanted for i, wanted in needs
            ):
                return True
        return False

    def apply(self, x: Instruction) -> Instruction | None:
        for pattern, _ in self.patterns:
            bound: dict[str, Instruction] = {}
            if pattern.match(x, bound):
                bound["out"] = x
                if self.where is None or self.where(bound):
                    y = self.build(bound)
                    if y is not None and y is not x:
                        return y
        return None


def _needs(pattern: Op) -> Needs:
    return tuple((i, _kinds(o)) for i, o in enumerate(pattern.operands) if not isinstance(o, Var))


def _kinds(pattern: Const | Op) -> frozenset[str]:
    if isinstance(pattern, Const):
        return frozenset(("constant", "splat"))
    return pattern.ops | {"splat"} if "broadcast" in pattern.ops else pattern.ops


_marks = itertools.count()


def new_mark() -> int:
    """A bit of `Instruction.settled` for one rewrite: set where nothing is left to do, there and
    below. Rewrites are pure, so it stays so."""
    return 1 << next(_marks)


class Table(dict[str, tuple[Rule, ...]]):
    """Rules by opcode, and their mark."""

    def __init__(self, rules: dict[str, tuple[Rule, ...]]) -> None:
        super().__init__(rules)
        self.mark = new_mark()
        self._candidates: dict[tuple[str, ...], tuple[Rule, ...]] = {}

    def candidates(self, x: Instruction) -> tuple[Rule, ...]:
        """The rules that may match `x` by the kinds of its operands: an opcode, or "splat" for a
        broadcast constant. Kinds are few and come back, so most rules are never tried: of 30,000
        trials on a training step 92 fired."""
        rules = self.get(x.op, ())
        if not rules or len(x.operands) > _FEW:
            return rules
        kinds = tuple(
            [
                "splat" if o.op == "broadcast" and o.operand.op == "constant" else o.op
                for o in x.operands
            ]
        )
        key = (x.op, *kinds)
        found = self._candidates.get(key)
        if found is None:
            found = self._candidates[key] = tuple(r for r in rules if r.may_match(kinds))
        return found


_FEW = 4  # operands: the patterns of opcodes with any number of them list none


def rules(*rows: tuple[Any, ...]) -> Table:
    """Rules `(pattern, builder[, guard])` indexed by the opcode of the pattern."""
    table: dict[str, list[Rule]] = {}
    for pattern, builder, *guard in rows:
        where = _by_name(guard[0]) if guard and guard[0] is not None else None
        code = builder.__code__ if hasattr(builder, "__code__") else None
        line = f"{builder.__module__.rsplit('.', 1)[-1]}:{code.co_firstlineno}" if code else ""
        label = (
            builder.__name__ if builder.__name__ != "<lambda>" else "/".join(sorted(pattern.ops))
        )
        rule = Rule(
            f"{label} ({line})",
            tuple((p, _needs(p)) for p in _orders(pattern) if isinstance(p, Op)),
            _by_name(builder),
            where,
        )
        for name in pattern.ops:
            table.setdefault(name, []).append(rule)
    return Table({name: tuple(found) for name, found in table.items()})


def merged(*tables: Table) -> Table:
    """The rules of all tables, in order."""
    result: dict[str, tuple[Rule, ...]] = {}
    for table in tables:
        for name, found in table.items():
            result[name] = result.get(name, ()) + found
    return Table(result)


def _by_name(fn: Callable[..., Any]) -> Callable[[dict[str, Instruction]], Any]:
    names = tuple(inspect.signature(fn).parameters)
    if len(names) == 1:
        (only,) = names
        return lambda bound: fn(bound[only])
    return lambda bound: fn(*[bound[n] for n in names])


def _orders(pattern: Pattern) -> list[Pattern]:
    """The pattern with every combination of operand orders of commutative opcodes."""
    if not isinstance(pattern, Op) or not pattern.operands:
        return [pattern]
    combinations: list[tuple[Pattern, ...]] = [()]
    for operand in pattern.operands:
        combinations = [(*c, o) for c in combinations for o in _orders(operand)]
    if len(pattern.operands) == 2 and all("commutative" in OPCODES[n].traits for n in pattern.ops):
        a, b = pattern.operands
        if not (isinstance(a, Var) and isinstance(b, Var) and a.where is b.where):
            combinations += [(y, x) for x, y in combinations]
    return [Op(pattern.ops, c, pattern.name, pattern.where) for c in combinations]


# The driver

Fire = Callable[[Instruction], tuple[Instruction | None, str]]


def rewrite(module: Module, table: Table) -> Module:
    """`module` with rules applied until none matches; itself when none did. Raises RewriteError."""

    def fire(x: Instruction) -> tuple[Instruction | None, str]:
        for rule in table.candidates(x):
            y = rule.apply(x)
            if y is not None:
                return y, rule.name
        return None, ""

    return rewrite_module(module, fire, table.mark)


def rewrite_module(module: Module, fire: Fire, mark: int) -> Module:
    """The driver with a function in place of a table: `fire(x)` is (replacement or None, name of
    the rule), and depends on `x` alone.
    `mark`: the function's, see new_mark."""
    return module.with_root(rewrite_root(module.entry.root, fire, mark, {}))


def rewrite_computation(
    c: Computation, fire: Fire, mark: int, memo: dict[Computation, Computation]
) -> Computation:
    found = memo.get(c)
    if found is None:
        root = rewrite_root(c.root, fire, mark, memo)
        found = memo[c] = c.with_root(root)
    return found


def rewrite_root(
    root: Instruction, fire: Fire, mark: int, memo: dict[Computation, Computation]
) -> Instruction:
    """Rewrite everything `root` depends on; each new instruction is visited too."""
    if root.settled & mark:
        return root
    done: dict[Instruction, Instruction] = {}
    # fired: what an instruction became, and by which rule
    forward: dict[Instruction, tuple[Instruction, str]] = {}
    order = postorder((root,), mark=mark)
    fired = 0
    limit = BUDGET * (64 + len(order))
    stack = order[::-1]  # operands come first, so that most are done in one visit
    while stack:
        x = stack[-1]
        if x in done:
            stack.pop()
            continue
        if x in forward:
            z, rule = forward[x]
            if z not in done:
                text = f"rule {rule} turned {x.op} {x.shape} into something that contains it"
                raise RewriteError(text)
            done[x] = done[z]
            stack.pop()
            continue
        try:
            operands = tuple([done[o] for o in x.operands])
        except KeyError:  # settled long ago, or made by a rule
            done.update((o, o) for o in x.operands if o.settled & mark)
            stack.extend([o for o in reversed(x.operands) if o not in done])
            continue
        y = rebuilt(x, operands, fire, mark, memo)
        if y is not x and (y in done or y in forward):
            z = y
            rule = "operands"
        else:
            made, rule = fire(y)
            if made is None:
                done[x] = done[y] = y
                y.settled |= mark
                stack.pop()
                continue
            z = made
            fired += 1
            if not compatible(z.shape, y.shape):
                text = f"{y.op} of shape {y.shape} into {z.op} of shape {z.shape}"
                raise RewriteError(f"rule {rule} turned {text}")
            carry_meta(y, z)
        forward[x] = (z, rule)
        if z in forward and z not in done:
            other = forward[z][1]
            raise RewriteError(f"rules {other} and {rule} undo each other on {y.op} {y.shape}")
        if fired > limit:
            raise _endless(fired, limit // BUDGET - 64, forward)
        if z.settled & mark:
            done[z] = z
        else:
            stack.append(z)
    return done[root]


def _endless(
    fired: int, size: int, forward: dict[Instruction, tuple[Instruction, str]]
) -> RewriteError:
    names = sorted({r for _, r in list(forward.values())[-64:]} - {"operands"})
    return RewriteError(
        f"{fired} firings on a program of {size} instructions; the last rules were"
        f" {', '.join(names)}"
    )


def rebuilt(
    x: Instruction,
    operands: tuple[Instruction, ...],
    fire: Fire,
    mark: int,
    memo: dict[Computation, Computation],
) -> Instruction:
    """`x` on new operands, its called computations rewritten."""
    y = x
    if operands != x.operands:
        y = replace(x, operands)
        carry_meta(x, y)
    if y.attrs and y.op != "fusion" and (calls := called(y)):
        table = {c: rewrite_computation(c, fire, mark, memo) for c in calls}
        y = with_computations(y, table)
    return y


def with_computations(x: Instruction, table: dict[Computation, Computation]) -> Instruction:
    """`x` calling `table[c]` in place of each computation `c`; itself when nothing changes."""
    if all(old is new for old, new in table.items()):
        return x

    def swap(value: object) -> object:
        if isinstance(value, Computation):
            return table[value]
        return tuple(map(swap, value)) if type(value) is tuple else value

    return instr(x.op, x.operands, x.shape, **{k: swap(v) for k, v in x.attrs})


def rebuild(root: Instruction, table: dict[Instruction, Instruction]) -> Instruction:
    """`root` with the instructions of `table` replaced (a replacement's own operands are left
    alone), without recursion."""
    done: dict[Instruction, Instruction] = dict(table)
    stack = [root]
    while stack:
        x = stack[-1]
        if x in done:
            stack.pop()
            continue
        pending = [o for o in x.operands if o not in done]
        if pending:
            stack.extend(reversed(pending))
            continue
        done[x] = on_operands(x, done)
        stack.pop()
    return done[root]


def substituted(root: Instruction, table: dict[Instruction, Instruction]) -> Instruction:
    """`root` with instructions replaced by what the table has for them; what it has is made of
    instructions that may be replaced too."""
    done: dict[Instruction, Instruction] = {}
    stack = [root]
    while stack:
        x = stack[-1]
        needs = (table[x],) if x in table else x.operands
        missing = [o for o in needs if o not in done]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if x not in done:
            new = tuple(done[o] for o in needs)
            done[x] = new[0] if x in table else x if new == x.operands else replace(x, new)
            carry_meta(x, done[x])
    return done[root]


def inline(c: Computation, operands: Iterable[Instruction]) -> Instruction:
    """The root of `c` computed from `operands`."""
    return rebuild(c.root, dict(zip(c.params, operands, strict=True)))


def lift(c: Computation, operands: Iterable[Instruction]) -> Instruction | None:
    """The scalar computation `c` applied to every element of arrays of equal dims; None when it is
    not pointwise."""
    operands = tuple(operands)
    dims = operands[0].dims
    done = dict(zip(c.params, operands, strict=True))
    for x in postorder((c.root,)):
        if x in done:
            continue
        if x.op == "constant":
            done[x] = broadcast(x, dims, ())
        elif x.op in ("tuple", "get-tuple-element"):
            done[x] = replace(x, (done[o] for o in x.operands))
        elif "pointwise" in OPCODES[x.op].traits:
            done[x] = replace(x, (done[o] for o in x.operands), x.shape.with_dims(dims))
        else:
            return None
    return done[c.root]
