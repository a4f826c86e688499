"""Higher-order operators: cond, while_loop, scan, map become HLO's conditional and while; the
loop's body is compiled once.

A lowering takes the operator's arguments as they are in the FX graph: graphs as GraphModules,
tensors as Instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx

from torch_hlo.hlo.ir import Computation, Dim, Instruction, Shape, instr
from torch_hlo.hlo.ir.literal import literal
from torch_hlo.lowering.core import (
    HIGHER_ORDER,
    LOWERINGS,
    Leaf,
    LoweringError,
    Operand,
    Weak,
    elements,
    expected,
    expected_shapes,
    loop,
    nested,
    promote,
    reshape,
    scan_loop,
    tupled,
)
from torch_hlo.lowering.core.graph import apply
from torch_hlo.lowering.core.opaque import opaque
from torch_hlo.lowering.random.threefry import turn_seeds
from torch_hlo.pytorch.operators import OpOverload

from .expand import existing
from .fx_graph import FxGraph, from_fx

F = TypeVar("F", bound=Callable[..., Any])
Graph: TypeAlias = fx.GraphModule | FxGraph  # a function among an operator's arguments
Values = Sequence[Instruction]


def _lowers(*names: str) -> Callable[[F], F]:
    def register(fn: F) -> F:
        HIGHER_ORDER.update(dict.fromkeys(existing(*names), fn))
        return fn

    return register


def _value(x: object) -> Instruction:
    """A tensor, number or size as an Instruction."""
    if isinstance(x, Instruction):
        return x
    if isinstance(x, Weak):
        return x.value
    if isinstance(x, Dim):
        return promote.size_value(x)
    if isinstance(x, (bool, int, float)):
        return promote.constant(x, promote.number_type(x))
    raise LoweringError(f"{x!r} cannot be an operand of a higher-order operator: pass tensors")


def call_graph(
    module: Graph, operands: Sequence[object], seed: Instruction | None = None
) -> list[Instruction]:
    """The results of a graph applied to `operands`, one per placeholder (sizes are known by their
    symbols). `seed`: of this turn, if it draws random numbers."""
    g = module if isinstance(module, FxGraph) else from_fx(module, inner=True)
    values: dict[int, Instruction | Weak] = {}
    for x in g.inputs:
        if isinstance(x.source, torch.Tensor):
            values[id(x.leaf)] = _constant(x.source, x.leaf.shape.dtype)
        elif x.source is None and seed is not None:
            values[id(x.leaf)] = seed
        elif isinstance(x.source, int) and isinstance(x.leaf, Leaf):
            values[id(x.leaf)] = _value(operands[x.source])
        else:
            raise LoweringError(
                "a Python number that changes inside cond, while_loop, scan or map cannot be"
                " carried: make it a tensor, torch.tensor(0)"
            )
    if g.writes:
        raise LoweringError(
            "a graph inside cond, while_loop, scan or map writes to its inputs; return the new"
            " values instead"
        )
    plain = [v is None or isinstance(v, (bool, int, float, str, Dim)) for v, _ in g.outputs]
    found = iter(apply(g.nodes, [v for (v, _), p in zip(g.outputs, plain) if not p], values))
    return [_value(v) if p else next(found) for (v, _), p in zip(g.outputs, plain)]


def _constant(tensor: torch.Tensor, dtype: str) -> Instruction:
    plain = (
        tensor.float()
        if tensor.dtype == torch.bfloat16
        or tensor.dtype.itemsize == 1
        and tensor.dtype.is_floating_point
        else tensor
    )
    return instr(
        "constant",
        (),
        Shape(dtype, tuple(tensor.shape)),
        literal=literal(plain.numpy(), dtype),
    )


@_lowers("cond")
def cond(
    predicate: Operand,
    true_graph: Graph,
    false_graph: Graph,
    operands: Sequence[Operand] = (),
    seed: Operand | None = None,
    offset: Operand | None = None,
) -> tuple[Instruction, ...]:
    drawn = [] if seed is None else [turn_seeds(seed, offset, promote.constant(0, "s64"))]
    tensors = [_value(o) for o in operands]
    given = tupled([*tensors, *drawn])
    branches = []
    for graph in (true_graph, false_graph):
        param = instr("parameter", (), given.shape, index=0)
        inner = elements(param, len(tensors) + len(drawn))
        results = call_graph(graph, inner[: len(tensors)], *inner[len(tensors) :])
        branches.append(Computation("branch", (param,), tupled(results)))
    if branches[0].root.shape != branches[1].root.shape:
        raise LoweringError(
            f"cond: the branches give {branches[0].root.shape} and {branches[1].root.shape}"
        )
    chosen = promote.cast(reshape(_value(predicate), ()), "pred")
    result = instr(
        "conditional",
        (chosen, given, given),
        branches[0].root.shape,
        branch_computations=tuple(branches),
    )
    return tuple(elements(result, len(branches[0].root.operands)))


@_lowers("while_loop")
def while_loop(
    condition: Graph,
    body: Graph,
    carried: Sequence[Operand],
    additional: Sequence[Operand] = (),
    seed: Operand | None = None,
    offset: Operand | None = None,
) -> tuple[Instruction, ...]:
    start = [_value(x) for x in carried]
    n = len(start)
    key = [] if seed is None else [_value(seed), _value(offset), promote.constant(0, "s64")]
    k = len(key)

    def call(graph: Graph, state: Values, stream: int) -> list[Instruction]:
        return call_graph(
            graph, state[k:], turn_seeds(state[0], state[1], state[2], stream) if k else None
        )

    def step(*state: Instruction) -> list[Instruction]:
        after = [instr("add", (x, promote.constant(1, "s64"))) for x in state[2:k]]
        return [*state[: min(k, 2)], *after, *call(body, state, 0), *state[k + n :]]

    return tuple(
        loop(
            lambda *state: call(condition, state, 1)[0],
            step,
            [*key, *start, *map(_value, additional)],
        )[k : k + n]
    )


@_lowers("scan")
def scan(
    combine: Graph,
    init: Sequence[Operand],
    xs: Sequence[Operand],
    additional: Sequence[Operand] = (),
    reverse: bool = False,
    seed: Operand | None = None,
    offset: Operand | None = None,
) -> tuple[Instruction, ...]:
    start, given, fixed = ([_value(x) for x in group] for group in (init, xs, additional))
    length, count = given[0].dims[0], len(given)
    if seed is not None:  # of each turn, a slice like the others
        turns = instr("iota", (), Shape("s64", (length,)), iota_dimension=0)
        given.append(turn_seeds(seed, offset, turns))

    def step(carry: Values, x: Values, rest: Values) -> tuple[Values, Values]:
        results = call_graph(combine, [*carry, *x[:count], *rest], *x[count:])
        return results[: len(carry)], results[len(carry) :]

    carry, ys = scan_loop(step, start, given, fixed, length, reverse)
    return (*carry, *ys)


@_lowers("map_impl")
def map_(
    body: Graph,
    xs: Sequence[Operand],
    additional: Sequence[Operand] = (),
    seed: Operand | None = None,
    offset: Operand | None = None,
) -> tuple[Instruction, ...]:
    return scan(body, (), xs, additional, False, seed, offset)


# ---- random operators under activation checkpointing: forward saves (seed, offset) where PyTorch
# saves the generator's state


@_lowers("run_and_save_rng_state")
def run_and_save_rng_state(
    op: OpOverload,
    *args: Any,
    seed: Operand,
    offset: Operand,
    **kwargs: Any,
) -> tuple[Instruction, Any]:
    state = expected()
    words = reshape_concat([promote.scalar(seed, "s64"), promote.scalar(offset, "s64")])
    raw = instr("bitcast-convert", (words,), Shape("u8", (2, 8)))
    padding = ((0, state.dims[0] - 16, 0),)
    saved = instr(
        "pad",
        (reshape(raw, (16,)), promote.constant(0, "u8")),
        state,
        padding=padding,
    )
    return saved, _call(
        op,
        expected_shapes()[1:],
        args,
        {**kwargs, "seed": seed, "offset": offset},
    )


@_lowers("run_with_rng_state")
def run_with_rng_state(state: Instruction, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    raw = instr("slice", (state,), Shape("u8", (16,)), slice=((0, 16, 1),))
    words = instr("bitcast-convert", (reshape(raw, (2, 8)),), Shape("s64", (2,)))
    seed, offset = (
        reshape(
            instr("slice", (words,), Shape("s64", (1,)), slice=((i, i + 1, 1),)),
            (),
        )
        for i in range(2)
    )
    return _call(op, expected_shapes(), args, {**kwargs, "seed": seed, "offset": offset})


def reshape_concat(scalars: Sequence[Instruction]) -> Instruction:
    """Rank-0 values as one vector."""
    return instr("concatenate", tuple(reshape(s, (1,)) for s in scalars), dimensions=(0,))


def _call(
    op: OpOverload,
    shapes: tuple[Shape | None, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    fn = LOWERINGS.get(op)
    if fn is None:
        return opaque(op, args, kwargs, shapes)
    return nested(shapes, fn, *args, **kwargs)
