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


def _random_inside() -> tuple:
    raise LoweringError(
        "random operators inside cond, while_loop, scan or map are not supported: draw the numbers"
        " outside and pass them in"
    )


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


def call_graph(module: Graph, operands: Sequence[object]) -> list[Instruction]:
    """The results of a graph applied to `operands`, one per placeholder (sizes are known by their
    symbols)."""
    g = module if isinstance(module, FxGraph) else from_fx(module, _random_inside, inner=True)
    values: dict[int, Instruction | Weak] = {}
    for x in g.inputs:
        if isinstance(x.source, torch.Tensor):
            values[id(x.leaf)] = _constant(x.source, x.leaf.shape.dtype)
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
) -> tuple[Instruction, ...]:
    tensors = [_value(o) for o in operands]
    given = tupled(tensors)
    branches = []
    for graph in (true_graph, false_graph):
        param = instr("parameter", (), given.shape, index=0)
        results = call_graph(graph, elements(param, len(tensors)))
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
) -> tuple[Instruction, ...]:
    start = [_value(x) for x in carried]
    n = len(start)

    def step(*state: Instruction) -> list[Instruction]:
        return [*call_graph(body, state), *state[n:]]

    return tuple(
        loop(
            lambda *state: call_graph(condition, state)[0],
            step,
            [*start, *map(_value, additional)],
        )[:n]
    )


@_lowers("scan")
def scan(
    combine: Graph,
    init: Sequence[Operand],
    xs: Sequence[Operand],
    additional: Sequence[Operand] = (),
) -> tuple[Instruction, ...]:
    start, given, fixed = ([_value(x) for x in group] for group in (init, xs, additional))

    def step(carry: Values, x: Values, rest: Values) -> tuple[Values, Values]:
        results = call_graph(combine, [*carry, *x, *rest])
        return results[: len(carry)], results[len(carry) :]

    carry, ys = scan_loop(step, start, given, fixed, given[0].dims[0])
    return (*carry, *ys)


@_lowers("map_impl")
def map_(
    body: Graph,
    xs: Sequence[Operand],
    additional: Sequence[Operand] = (),
) -> tuple[Instruction, ...]:
    given, fixed = [_value(x) for x in xs], [_value(x) for x in additional]

    def step(carry: Values, x: Values, rest: Values) -> tuple[Values, Values]:
        return [], call_graph(body, [*x, *rest])

    return tuple(scan_loop(step, [], given, fixed, given[0].dims[0])[1])


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
