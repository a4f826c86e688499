"""From an annotated program to the program of one device.

    per_device = partition(module)      # every instruction of `module` carries the attribute
                                        # `sharding`

Each array becomes the block that a device holds of it. An instruction is brought onto blocks in
three steps: its factors (hlo/sharding/factors.py) are given atoms of the grid (assign.py), its
operands are brought into the layouts that this means (reshard.py), and its opcode's row of HANDLERS
writes the blocks' program (rules.py). Partial results stay partial until somebody needs the sum:
opcodes that commute with it pass them on.

References: Xu et al., GSPMD, 2021; Shardy's documentation of sharding rules.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace as changed
from itertools import chain
from typing import Any, TypeAlias

from torch_hlo import metrics
from torch_hlo.hlo.ir import (
    DTYPES,
    OPCODES,
    Attrs,
    Computation,
    Instruction,
    Module,
    Shape,
    build as h,
    called,
    carry_meta,
    has_effect,
    instr,
    interned,
    postorder,
    tuple_shape,
)
from torch_hlo.hlo.sharding.factors import Factors, factors
from torch_hlo.hlo.sharding.sharding import Axis, Sharding

from ..collectives.number_channels import number_channels
from ..cost import trip_count
from ..simplify import legalize
from . import rules_contract, rules_index, rules_moves, rules_window
from .assign import Choice, Question, choose
from .grid import Atoms, Grid, Layout, ShardingTree
from .reshard import Local, Planner
from .rules import Site, handler, on_first

# of an instruction of tuple shape: a tuple of values
Value: TypeAlias = "Local | tuple[Value, ...]"
# the same structure: a Layout, a tuple of what its elements want, or None. Both are tuples, which
# only the shape tells apart
Wants: TypeAlias = Any
Env = dict[Instruction, Value]

HANDLED_BY = rules_contract, rules_index, rules_moves, rules_window  # they fill HANDLERS
UNKNOWN_TRIPS = 8  # how often a loop is taken to run when nothing tells
COUNTER = "PartitionReplicated"


class PartitionWarning(UserWarning):
    """An instruction that every device computes whole because its opcode has no sharding rule."""


class PartitionError(ValueError):
    """An instruction that has no place in a program of several devices; names it and its shapes."""


def partition(module: Module) -> Module:
    """The per-device program. Its parameters and results are blocks (`in_shardings`,
    `out_shardings` say of what), its collectives XLA's.

    A program without a mesh comes back as it is. Raises PartitionError, ShardingError.
    """
    if is_per_device(module):
        return module
    if module.symbols:
        raise PartitionError(
            f"{module.name} has symbolic sizes ({', '.join(n for n, _, _ in module.symbols)}): only"
            " arrays of known sizes are cut into blocks"
        )
    assert module.mesh is not None  # else it is per device
    grid = Grid(module.mesh, (a for s in _shardings(module.entry) for a in _axes(s)))
    return Partitioner(grid).module(module)


def is_per_device(module: Module) -> bool:
    """Whether nothing is left to partition: a program for one device, or one that says how its
    parameters were cut, or has no annotations."""
    return (
        module.mesh is None
        or bool(module.in_shardings)
        or module.num_partitions > 1
        and not _shardings(module.entry)
    )


def _shardings(computation: Computation) -> set[Sharding]:
    found: set[Sharding] = set()
    pending = [computation]
    seen = set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for x in current.instructions():
            found.update(_flat_shardings(x.get("sharding")))
            pending.extend(called(x))
    return found


def _flat_shardings(value: ShardingTree) -> Iterator[Sharding]:
    if isinstance(value, tuple):
        for v in value:
            yield from _flat_shardings(v)
    elif value is not None:
        yield value


def _axes(s: Sharding) -> Iterable[Axis]:
    return (*s.axes, *s.replicated, *s.unreduced, *s.manual)


def flat(value: Value) -> list[Local]:
    return [v for e in value for v in flat(e)] if isinstance(value, tuple) else [value]


def array(value: Value) -> Local:
    """A value that is known to be no tuple."""
    assert isinstance(value, Local)
    return value


def elements(value: Value) -> tuple[Value, ...]:
    """Those of a value that is known to be a tuple."""
    assert isinstance(value, tuple)
    return value


class Partitioner:
    """State of one partitioning: the grid, plans and emitted reshardings, choices made,
    computations already partitioned."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.planner = Planner(grid)
        self._choices: dict[tuple[object, ...], tuple[float, Choice]] = {}
        self._computations: dict[tuple[object, ...], tuple[Computation, Value]] = {}
        self._uses: dict[Instruction, int] = {}
        self._summed: set[Instruction] = set()  # what an annotation wants unreduced

    def module(self, module: Module) -> Module:
        entry = module.entry
        env: Env = {}
        params = []
        for p in entry.params:
            layout = self.wanted(p)
            new = h.parameter(p["index"], self.block_shape(p.shape, layout))
            carry_meta(p, new)
            params.append(new)
            value = self.spread(new, p.shape, layout, p.get("sharding"))
            env[p] = self.moved(p, value, home=True)
        value = self.run(entry.root, env)
        root = self.placed(value, self.wanted(entry.root), entry.root.get("sharding"))
        root = self.moved(entry.root, root)
        outputs = root if isinstance(root, tuple) else (root,)
        ins = [self.places(p, env[p]) for p in entry.params]
        ends = iter(self.places(entry.root, root))
        outs = [[next(ends) for _ in flat(v)] for v in outputs]
        aliases = tuple((o, i) for o, i in module.aliases if outs[o] == ins[i])
        whole = Computation(entry.name, tuple(params), self.gathered(root))
        return number_channels(
            Module(
                module.name,
                whole,
                aliases,
                module.symbols,
                module.mesh,
                num_partitions=self.grid.devices,
                in_shardings=tuple(chain(*ins)),
                out_shardings=tuple(chain(*outs)),
                out_dims=tuple(v.dims for v in flat(root)),
            )
        )

    # Values

    def places(self, x: Instruction, value: Value) -> list[Sharding]:
        """Of the arrays of a value of `x`, on the mesh of its annotation."""
        made = [self.grid.sharding(v.layout, v.partial) for v in flat(value)]
        given = [*_flat_shardings(x.get("sharding"))] or made
        return [changed(m, mesh=g.mesh) for m, g in zip(made, given, strict=True)]

    def moved(self, x: Instruction, value: Value, home: bool = False) -> Value:
        """Blocks where the annotation of `x` wants them: it may list the devices in another order
        than the mesh does. Or from there home."""

        def one(v: Local, place: Sharding) -> Local:
            if place.mesh == self.grid.mesh:
                return v
            orders = [m.devices or range(m.size) for m in (self.grid.mesh, place.mesh)]
            pairs = zip(*orders[:: -1 if home else 1])
            return changed(v, x=self.planner.permute(v.x, pairs))

        return _nested(x.shape, map(one, flat(value), self.places(x, value)))

    def wanted(self, x: Instruction) -> Wants:
        """The layouts that the annotation of `x` asks for; None where there is none."""
        return self._wants(x.shape, x.get("sharding"))

    def _wants(self, shape: Shape, sharding: ShardingTree) -> Wants:
        if shape.is_tuple:
            many = sharding if isinstance(sharding, tuple) else (sharding,) * len(shape.elements)
            return tuple(self._wants(e, s) for e, s in zip(shape.elements, many, strict=True))
        if sharding is None:
            return None
        assert not isinstance(sharding, tuple), sharding
        if sharding.maximal is not None or sharding.rank != shape.rank:
            return ((),) * shape.rank
        return self.grid.layout(sharding)

    def block_shape(self, shape: Shape, wants: Wants) -> Shape:
        if shape.is_tuple:
            return tuple_shape(
                *(self.block_shape(e, w) for e, w in zip(shape.elements, wants, strict=True))
            )
        return (
            shape
            if wants is None or not shape.rank
            else Shape(shape.dtype, self.grid.block(shape.sizes, wants))
        )

    def spread(
        self, x: Instruction, shape: Shape, wants: Wants, sharding: ShardingTree = None
    ) -> Value:
        """The value of an instruction of the per-device program that stands for one of `shape`,
        which may be unreduced."""
        if shape.is_tuple:
            many = sharding if isinstance(sharding, tuple) else (None,) * len(shape.elements)
            return tuple(
                self.spread(h.get_tuple_element(x, i), e, w, s)
                for i, (e, w, s) in enumerate(zip(shape.elements, wants, many, strict=True))
            )
        layout = wants or ((),) * shape.rank
        return Local(x, shape.sizes, layout, self.unreduced(sharding), goal=layout)

    def gathered(self, value: Value) -> Instruction:
        """The inverse of `spread`."""
        return h.tuple_(*map(self.gathered, value)) if isinstance(value, tuple) else value.x

    def bring(self, value: Value, wants: Wants) -> Value:
        """`value` without partial results, in the wanted layouts where there are any."""
        if isinstance(value, tuple):
            many = wants or (None,) * len(value)
            return tuple(self.bring(v, w) for v, w in zip(value, many, strict=True))
        goal = value.goal or value.layout
        return self.planner.apply(
            self.planner.apply(value, goal) if value.partial else value, wants or goal
        )

    def unreduced(self, sharding: ShardingTree) -> Atoms:
        """Along these the devices hold summands of an array with this annotation."""
        given = sharding.unreduced if isinstance(sharding, Sharding) else ()
        return tuple(sorted(self.grid.atoms_of(given)))

    def manual(self, x: Instruction) -> set[int]:
        """Along these the program is per device already where `x` stands."""
        places = _flat_shardings(x.get("sharding"))
        return {a for s in places for a in self.grid.atoms_of(s.manual)}

    def placed(self, value: Value, wants: Wants, sharding: ShardingTree) -> Value:
        """`bring`, to what may be unreduced."""
        if isinstance(value, tuple) and isinstance(sharding, tuple):
            return tuple(map(self.placed, value, wants, sharding))
        atoms = self.unreduced(sharding)
        return self.summands(array(value), atoms, wants) if atoms else self.bring(value, wants)

    def summands(self, value: Local, atoms: Atoms, layout: Layout) -> Local:
        """`value` unreduced along `atoms`. Along those where it is no sum, the first device has all
        of it."""
        reduced = self.planner.reduced(value, atoms, layout) if value.reducer == "add" else None
        if reduced is None:
            reduced = self.planner.scattered(array(self.bring(value, None)), atoms, layout)
        new = tuple(a for a in atoms if a not in reduced.partial)
        x = on_first(self.planner, reduced.x, new, h.constant(0, value.dtype))
        return Local(x, value.dims, layout, atoms, goal=layout, rate=value.rate)

    def layouts(self, value: Value) -> Wants:
        return (
            tuple(map(self.layouts, value))
            if isinstance(value, tuple)
            else value.goal or value.layout
        )

    # Instructions

    def run(
        self,
        root: Instruction,
        env: Env,
        known: Iterable[Instruction] = (),
    ) -> Value:
        """The value of `root`, given those of parameters."""
        order = postorder((root,), known)
        for x in order:
            for o in x.operands:
                self._uses[o] = self._uses.get(o, 0) + 1
            if self.unreduced(x.get("sharding")):
                self._summed.update(x.operands)
        self._uses[root] = self._uses.get(root, 0) + 1
        for x in order:
            if x not in env:
                try:
                    env[x] = self.visit(x, env)
                except Exception as error:
                    error.add_note(f"while partitioning {x.op}({x.operand_shapes}) -> {x.shape}")
                    raise
        return env[root]

    def visit(self, x: Instruction, env: Env) -> Value:
        sharding = x.get("sharding")
        if not self.unreduced(sharding):
            return self._visit(x, env)
        constraint = x.get("custom_call_target") == "Sharding"
        value = env[x.operand] if constraint else self._visit(x, env)
        return self.placed(value, self.wanted(x), sharding)

    def _visit(self, x: Instruction, env: Env) -> Value:
        special = SPECIAL.get(x.op)
        if special is not None:
            return special(self, x, env)
        if x.get("custom_call_target") in _REGION:
            return _REGION[x["custom_call_target"]](self, x, env)
        alone = has_effect(x) or x.get("serial") is not None
        if alone and (whole := self.grid.atoms - self.manual(x)):
            return _act(self, x, env, tuple(sorted(whole)))
        wants = self.wanted(x)
        values = [env[o] for o in x.operands]
        passed = self._passed_on(x, values, wants)
        if passed is not None:
            return passed
        operands = tuple(o for v in values for o in flat(self.bring(v, None)))
        source = self._source(x, operands)
        if source is not None:
            layout = wants or ((),) * x.rank
            dims = x.shape.sizes
            block = self.planner.block_of(source, dims, layout)
            return Local(block, dims, layout, source=source)
        fast = self._same(x, operands, wants)
        if fast is not None:
            return fast
        return self.localized(x, operands, wants)

    def _source(self, x: Instruction, operands: Sequence[Local]) -> Instruction | None:
        """The whole array, when it is made of constants, iotas and scalars alone."""
        if x.op in ("constant", "iota") or x.op == "broadcast" and not x.operand.rank:
            return interned(x.op, tuple(o.x for o in operands), _plain_attrs(x), x.shape)
        if x.rank and operands and (x.op == "broadcast" or "pointwise" in OPCODES[x.op].traits):
            if all(o.source is not None or not o.dims for o in operands):
                return interned(
                    x.op,
                    tuple(o.x if o.source is None else o.source for o in operands),
                    _plain_attrs(x),
                    x.shape,
                )
        return None

    def _same(self, x: Instruction, operands: Sequence[Local], wants: Wants) -> Local | None:
        """The common case: a pointwise opcode whose operands are where the result is wanted."""
        if "pointwise" not in OPCODES[x.op].traits or not operands:
            return None
        layout = operands[-1].layout
        if wants is not None and wants != layout or any(o.layout != layout for o in operands):
            return None
        block = operands[-1].x.dims
        y = interned(x.op, tuple(o.x for o in operands), _plain_attrs(x), Shape(x.dtype, block))
        carry_meta(x, y)
        return Local(y, x.shape.sizes, layout, rate=max(o.rate for o in operands))

    def localized(self, x: Instruction, operands: tuple[Local, ...], wants: Wants) -> Value:
        rule = factors(x)
        row = handler(x.op)
        flat_wants = tuple(_flat_wants(wants, x.shape))
        price, choice = self.choice(x, rule, operands, flat_wants)
        through = rules_moves.seen_through(x, operands)
        if through != operands:
            other, alternative = self.choice(x, rule, through, flat_wants)
            spared = sum(o.made_for for o, t in zip(operands, through, strict=True) if t is not o)
            if other <= price + spared:
                operands = through
                choice = alternative
                price = other
        if not rule.sizes:
            self._complain(x, operands)
        moved = [
            self.planner.apply(o, layout)
            for o, layout in zip(operands, choice.operands, strict=True)
        ]
        results = row.localize(Site(self.planner, x, choice, moved))
        rate = max((o.rate for o in operands), default=1.0)
        if rate < 1 or results[0].view is not None:
            results = [changed(r, rate=rate, made_for=price) for r in results]
        return _nested(
            x.shape,
            iter([self._finished(x, r, w) for r, w in zip(results, flat_wants, strict=True)]),
        )

    def choice(
        self,
        x: Instruction,
        rule: Factors,
        operands: tuple[Local, ...],
        wants: tuple[Layout | None, ...],
    ) -> tuple[float, Choice]:
        """Price and assignment for `x` on these operands."""
        row = handler(x.op)
        price = row.price
        given = tuple(
            (
                o.layout,
                o.x.shape,
                o.rate,
                o.source is None,
                o.crop,
                self.planner.layouts(o),
            )
            for o in operands
        )
        key = (x.op, rule, given, wants, x.attrs if row.price else None, x.shape)
        found = self._choices.get(key)
        if found is None:
            empty = any(0 in s.dims for s in x.shape.arrays)
            allowed = tuple(
                role in row.roles and (role == "free" or not empty) for role in rule.roles
            )
            extra = (
                None
                if price is None
                else lambda atoms: price(self.planner, x, rule, atoms, operands)
            )
            found = self._choices[key] = choose(
                self.planner, Question(x, rule, operands, wants, allowed, extra)
            )
        return found

    def _finished(self, x: Instruction, result: Local, want: Layout | None) -> Local:
        carry_meta(x, result.x)
        if result.partial:
            return changed(result, goal=want or result.layout)
        return result if want is None else self.planner.apply(result, want)

    def _passed_on(self, x: Instruction, values: Sequence[Value], wants: Wants) -> Local | None:
        """Partial operands that nobody else uses stay partial through opcodes that commute with the
        sum."""
        locals_ = [v for v in values if isinstance(v, Local)]
        if x.op not in LINEAR or len(locals_) < len(values):
            return None
        arrays_ = locals_[: LINEAR[x.op]]
        first = arrays_[0]
        kinds = {(v.partial, v.reducer, v.goal, v.layout) for v in arrays_}
        if (
            not first.partial
            or len(kinds) > 1
            or any(self._uses.get(o, 0) > 1 for o in x.operands[: len(arrays_)])
        ):
            return None
        if (
            x.op in _ONLY_ADD
            and first.reducer != "add"
            or x.op == "reduce"
            and not _same_sum(x, first.reducer)
            or x.op == "convert"
            and not (x in self._summed and _widens(x))
            or x.op == "broadcast"
            and x.size != x.operand.size
        ):
            return None
        goal = first.goal if wants is None and len(x.dims) == len(first.dims) else wants
        if (
            goal is None
            or x.op not in ("add", "subtract", "negate", "copy", "convert")
            and any(a for a in (*first.layout, *goal))
        ):
            return None
        if x.op == "reduce":
            init = on_first(self.planner, locals_[1].x, first.partial, h.constant(0, x.dtype))
            operands: tuple[Instruction, ...] = (first.x, init)
        else:
            rest = self.bring(tuple(locals_[len(arrays_) :]), None)
            operands = tuple(v.x for v in (*arrays_, *flat(rest)))
        layout = first.layout if len(goal) == len(first.layout) else ((),) * len(goal)
        block = self.grid.block(x.shape.sizes, layout)
        y = interned(x.op, operands, _plain_attrs(x), Shape(x.dtype, block))
        return Local(
            y,
            x.shape.sizes,
            layout,
            first.partial,
            first.reducer,
            goal,
            rate=max(v.rate for v in arrays_),
        )

    def _complain(self, x: Instruction, operands: Sequence[Local]) -> None:
        if any(a for o in operands for a in o.layout) and "collective" not in OPCODES[x.op].traits:
            metrics.count(COUNTER)
            target = f" {x['custom_call_target']!r}" if x.op == "custom-call" else ""
            warnings.warn(
                f"{x.op}{target}({x.operand_shapes}) -> {x.shape} has no sharding rule: every"
                " device computes all of it",
                PartitionWarning,
                stacklevel=2,
            )

    # Computations

    def called(
        self,
        computation: Computation,
        arguments: Sequence[Value],
        wants: Wants,
        sharding: ShardingTree = None,
    ) -> tuple[Computation, Value]:
        """`computation` on blocks like those of `arguments`, its result in the wanted layouts; with
        the (spread) value of its root. Both may be unreduced."""
        key = (computation, tuple(map(_key, arguments)), wants, sharding)
        found = self._computations.get(key)
        if found is None:
            env: Env = {}
            params = []
            for p, v in zip(computation.params, arguments, strict=True):
                layouts = self.layouts(v)
                new = h.parameter(p["index"], self.block_shape(p.shape, layouts))
                params.append(new)
                env[p] = _at_rate(self.spread(new, p.shape, layouts, sharding), v)
            outer = self._uses
            self._uses = {}
            root = self.placed(self.run(computation.root, env), wants, sharding)
            self._uses = outer
            found = self._computations[key] = (
                Computation(computation.name, tuple(params), self.gathered(root)),
                root,
            )
        return found


def _key(value: Value) -> tuple[object, ...]:
    return (
        tuple(map(_key, value))
        if isinstance(value, tuple)
        else (value.layout, value.dims, value.rate)
    )


def _at_rate(value: Value, like: Value) -> Value:
    return (
        tuple(map(_at_rate, value, elements(like)))
        if isinstance(value, tuple)
        else changed(value, rate=array(like).rate)
    )


def _flat_wants(wants: Wants, shape: Shape) -> Iterator[Layout | None]:
    if shape.is_tuple:
        for w, e in zip(wants, shape.elements, strict=True):
            yield from _flat_wants(w, e)
    else:
        yield wants


def _nested(shape: Shape, values: Iterator[Local]) -> Value:
    return tuple(_nested(e, values) for e in shape.elements) if shape.is_tuple else next(values)


def _plain_attrs(x: Instruction) -> Attrs:
    return tuple(a for a in x.attrs if a[0] != "sharding")


# Opcodes that commute with a sum over devices, and how many of their operands are summands.
_OF_ONE = "negate copy convert reshape transpose slice reduce broadcast dynamic-slice"
LINEAR = dict.fromkeys(_OF_ONE.split(), 1) | dict.fromkeys(
    ("add", "subtract", "dynamic-update-slice"), 2
)
_ONLY_ADD = frozenset(("subtract", "negate", "add"))


def _same_sum(x: Instruction, reducer_: str) -> bool:
    from torch_hlo.hlo.sharding.factors import reducer

    return len(x.operands) == 2 and reducer_ == "add" == reducer(x["to_apply"])


def _widens(x: Instruction) -> bool:
    """Whether a sum of what this converts is rounded less than the sum of what it is given."""
    return x.kind == x.operand.kind == "f" and DTYPES[x.dtype].bits > DTYPES[x.operand.dtype].bits


# Structure and control flow


def _tuple(p: Partitioner, x: Instruction, env: Env) -> Value:
    return p.placed(tuple(env[o] for o in x.operands), p.wanted(x), x.get("sharding"))


def _element(p: Partitioner, x: Instruction, env: Env) -> Value:
    value = elements(env[x.operand])[x["index"]]
    wants = p.wanted(x)
    if isinstance(value, Local) and value.partial:
        return changed(value, goal=wants or value.goal)
    return value if wants is None else p.bring(value, wants)


def _barrier(p: Partitioner, x: Instruction, env: Env) -> Value:
    value = p.bring(env[x.operand], p.wanted(x))
    return p.spread(instr("opt-barrier", (p.gathered(value),)), x.shape, p.layouts(value))


def _token(p: Partitioner, x: Instruction, env: Env) -> Value:
    return Local(instr(x.op, tuple(p.gathered(p.bring(env[o], None)) for o in x.operands)), (), ())


def _dependency(p: Partitioner, x: Instruction, env: Env) -> Value:
    value, token = (
        p.bring(env[x.operand], p.wanted(x)),
        array(env[x.operands[1]]),
    )
    return p.spread(
        instr("add-dependency", (p.gathered(value), token.x)),
        x.shape,
        p.layouts(value),
    )


def _while(p: Partitioner, x: Instruction, env: Env) -> Value:
    """What each turn leaves unreduced is carried so, and reduced behind the loop."""
    root = x["body"].root
    sums = tuple(o.get("sharding") for o in root.operands) if root.op == "tuple" else None
    state = p.placed(env[x.operand], p.wanted(x), sums)
    layouts = p.layouts(state)
    body, _ = p.called(x["body"], [_slowed(x, state)], layouts, sums)
    condition, _ = p.called(x["condition"], [state], (), sums)
    return p.spread(h.while_(condition, body, p.gathered(state)), x.shape, layouts, sums)


def _slowed(x: Instruction, state: Value) -> Value:
    """The state as the body sees it: what it passes on unchanged changes once in all its runs."""
    runs = trip_count(x) or UNKNOWN_TRIPS
    root, (param,) = x["body"].root, x["body"].params
    if root.op != "tuple":
        return state
    kept = [
        o.op == "get-tuple-element" and o["index"] == i and o.operand is param
        for i, o in enumerate(root.operands)
    ]
    return tuple(
        changed(v, rate=v.rate / runs) if k and isinstance(v, Local) else v
        for v, k in zip(elements(state), kept, strict=True)
    )


def _conditional(p: Partitioner, x: Instruction, env: Env) -> Value:
    which, *operands = (p.bring(env[o], None) for o in x.operands)
    wants = p.wanted(x)
    branches = []
    for computation, operand in zip(x["branch_computations"], operands, strict=True):
        new, root = p.called(computation, [operand], wants)
        if _missing(x.shape, wants):  # the first branch decides
            wants = p.layouts(root)
            new, root = p.called(computation, [operand], wants)
        branches.append(new)
    return p.spread(
        h.conditional(array(which).x, branches, [p.gathered(o) for o in operands]),
        x.shape,
        wants,
    )


def _missing(shape: Shape, wants: Wants) -> bool:
    return wants is None or shape.is_tuple and any(map(_missing, shape.elements, wants))


def _call(p: Partitioner, x: Instruction, env: Env) -> Value:
    operands = [p.bring(env[o], None) for o in x.operands]
    name = "to_apply" if x.op == "call" else "calls"
    new, root = p.called(x[name], operands, p.wanted(x))
    y = instr(x.op, tuple(p.gathered(o) for o in operands), **(dict(_plain_attrs(x)) | {name: new}))
    return p.spread(y, x.shape, p.layouts(root))


def _expanded(p: Partitioner, x: Instruction, env: Env) -> Value:
    """Composite opcodes are partitioned as what they stand for."""
    plain = interned(x.op, x.operands, _plain_attrs(x), x.shape)
    return p.bring(p.run(EXPANSIONS[x.op](plain), env, x.operands), p.wanted(x))


def _rng(p: Partitioner, x: Instruction, env: Env) -> Value:
    """The first device draws for all: hidden states differ."""
    y = interned(
        x.op,
        tuple(array(p.bring(env[o], None)).x for o in x.operands),
        _plain_attrs(x),
        x.shape,
    )
    whole = ((),) * x.rank
    drawn = p.summands(Local(y, x.shape.sizes, whole), tuple(sorted(p.grid.atoms)), whole)
    return changed(drawn, goal=p.wanted(x) or whole)


def _dimension_size(p: Partitioner, x: Instruction, env: Env) -> Value:
    (d,) = x["dimensions"]
    return Local(h.constant(x.operand.dims[d], "s32"), (), ())


def _refused(p: Partitioner, x: Instruction, env: Env) -> Value:
    raise PartitionError(
        f"{x.op}({x.operand_shapes}) -> {x.shape} cannot be partitioned: run it on one device, or"
        " write it per device in a manual region"
    )


def _enter(p: Partitioner, x: Instruction, env: Env) -> Value:
    """SPMDFullToShardShape: from here on shapes are those of the blocks along the manual axes."""
    (operand,) = x.operands
    value = array(p.placed(env[operand], p.wanted(operand), operand.get("sharding")))
    value = array(p.moved(operand, value))
    return p.spread(value.x, x.shape, p.wanted(x), x.get("sharding"))


def _leave(p: Partitioner, x: Instruction, env: Env) -> Value:
    """SPMDShardToFullShape: the blocks are again parts of a whole."""
    (operand,) = x.operands
    sharding = operand.get("sharding")
    manual = (
        set(p.grid.atoms_of(sharding.manual))
        if isinstance(sharding, Sharding) and sharding.manual
        else p.grid.atoms
    )
    layout = p.wanted(x)
    if layout is None:
        raise PartitionError(f"SPMDShardToFullShape({operand.shape}) -> {x.shape} needs a sharding")
    inner = tuple(tuple(a for a in atoms if a not in manual) for atoms in layout)
    value = array(p.placed(env[operand], inner, sharding))
    return p.moved(x, p.spread(value.x, x.shape, layout, x.get("sharding")), home=True)


def _act(p: Partitioner, x: Instruction, env: Env, atoms: Atoms) -> Value:
    """A call with effects, or that one device shall make, is made by the first along `atoms`; all
    get its results."""
    operands = [p.bring(env[o], ((),) * o.rank) for o in x.operands]
    state = h.tuple_(*map(p.gathered, operands))
    param = h.parameter(0, state.shape)
    parts = tuple(h.get_tuple_element(param, i) for i in range(len(operands)))
    call = interned(x.op, parts, _plain_attrs(x), x.shape)
    zeros = [h.broadcast(h.constant(0, s.dtype), s.dims, ()) for s in x.shape.arrays]
    others = h.tuple_(*zeros) if x.is_tuple else zeros[0]
    which = p.grid.table(int(i != 0) for i in p.grid.indices(atoms))
    branches = [Computation(f"call{i}", (param,), root) for i, root in enumerate((call, others))]
    made = h.conditional(which, branches, [state, state])

    def shared(v: Local) -> Local:
        how = "or" if v.dtype == "pred" else "add"
        return changed(v, partial=atoms, reducer=how, goal=v.layout)

    return _nested(x.shape, map(shared, flat(p.spread(made, x.shape, p._wants(x.shape, None)))))


_REGION: dict[str, Callable[[Partitioner, Instruction, Env], Value]] = {
    "InspectSharding": lambda p, x, env: env[x.operand],  # who asked has been told
    "SPMDFullToShardShape": _enter,
    "SPMDShardToFullShape": _leave,
}
EXPANSIONS: dict[str, Callable[[Instruction], Instruction]] = {
    "batch-norm-training": legalize.batch_norm_training,
    "batch-norm-inference": legalize.batch_norm_inference,
    "batch-norm-grad": legalize.batch_norm_grad,
    "ragged-dot": legalize.expand_ragged_dot,
}
SPECIAL: dict[str, Callable[[Partitioner, Instruction, Env], Value]] = {
    "tuple": _tuple,
    "get-tuple-element": _element,
    "opt-barrier": _barrier,
    "domain": _barrier,
    "after-all": _token,
    "add-dependency": _dependency,
    "while": _while,
    "conditional": _conditional,
    "call": _call,
    "fusion": _call,
    "rng": _rng,
    "get-dimension-size": _dimension_size,
    **dict.fromkeys(EXPANSIONS, _expanded),
    **dict.fromkeys(
        "infeed outfeed send send-done recv recv-done set-dimension-size dynamic-reshape"
        " rng-get-and-update-state".split(),
        _refused,
    ),
}
