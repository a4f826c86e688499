"""Higher-order operators: cond, while_loop, scan, map become HLO's conditional and while; the
loop's body is compiled once.

A lowering takes the operator's arguments as they are in the FX graph: graphs as GraphModules,
tensors as Instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx

from torch_hlo.hlo.ir import Computation, Dim, Instruction, Instructions, Shape, instr
from torch_hlo.hlo.ir.literal import literal
from torch_hlo.pytorch.operators import OpOverload
from torch_hlo.tables import entry

from ..core import (
    HIGHER_ORDER,
    LOWERINGS,
    Leaf,
    LoweringError,
    Operand,
    Weak,
    concatenate,
    elements,
    expected,
    expected_shapes,
    loop,
    nested,
    new_channel,
    promote,
    reshape,
    scan_loop,
    slice_dim,
    tupled,
)
from ..core.graph import apply
from ..core.looks import TOKEN
from ..core.opaque import opaque
from ..random.threefry import turn_seeds
from .expand import existing
from .fx_graph import FxGraph, from_fx

F = TypeVar("F", bound=Callable[..., Any])
Graph: TypeAlias = fx.GraphModule | FxGraph  # a function among an operator's arguments
Values = Sequence[Instruction]


def _lowers(*names: str) -> Callable[[F], F]:
    return entry(HIGHER_ORDER, existing(*names))


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
    module: Graph,
    operands: Sequence[object],
    seed: Instruction | None = None,
    token: Instruction | None = None,
) -> list[Instruction]:
    """The results of a graph applied to `operands`, one per placeholder (sizes are known by their
    symbols). `seed`: of this turn, if it draws random numbers. After a `token`, the next one is the
    last result."""
    g = module if isinstance(module, FxGraph) else from_fx(module, inner=True)
    values: dict[int, Instruction | Weak] = {}
    first, last = g.tokens or (Leaf(TOKEN),) * 2
    if token is not None:
        values[id(first)] = token
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
    wanted = [v for (v, _), p in zip(g.outputs, plain) if not p]
    found = iter(apply(g.nodes, [*wanted, *[last] * (token is not None)], values))
    return [*[_value(v) if p else next(found) for (v, _), p in zip(g.outputs, plain)], *found]


def _token(token: Instruction | None, *graphs: Graph) -> list[Instruction]:
    """The token that an operator starts with, if one of its graphs needs any: its own, since
    instructions that are equal are one."""
    if not any(isinstance(g, FxGraph) and g.tokens for g in graphs):
        return []
    if token is None:
        number = promote.full(-new_channel(), "s64", (1,))
        token = _list(number, promote.full(0, "s64", (TOKEN.dims[0] - 1,)))
    return [token]


def _list(token: Instruction, *turns: Instruction) -> Instruction:
    """The list of a token, and other turns."""
    return concatenate([slice_dim(token, 0, 0, 1), *turns], 0)


def _entered(token: Instruction) -> Instruction:
    """In the first turn of a loop."""
    return _list(token, promote.full(1, "s64", (1,)), slice_dim(token, 0, 1, 3))


def _turned(token: Instruction) -> Instruction:
    """In the next turn."""
    turn = instr("add", (slice_dim(token, 0, 1, 2), promote.full(1, "s64", (1,))))
    return _list(token, turn, slice_dim(token, 0, 2, 4))


def _left(token: Instruction, outside: Instruction) -> Instruction:
    return _list(token, slice_dim(outside, 0, 1, 4))


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
    token: Instruction | None = None,
) -> Instructions:
    drawn = [] if seed is None else [turn_seeds(seed, offset, promote.constant(0, "s64"))]
    tokens = _token(token, true_graph, false_graph)
    tensors = [_value(o) for o in operands]
    given = tupled([*tensors, *drawn, *tokens])
    branches = []
    for graph in (true_graph, false_graph):
        param = instr("parameter", (), given.shape, index=0)
        inner = elements(param, len(given.operands))
        now = dict(zip(["seed"] * len(drawn) + ["token"], inner[len(tensors) :]))
        results = call_graph(graph, inner[: len(tensors)], **now)
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
    token: Instruction | None = None,
) -> Instructions:
    tokens = _token(token, condition, body)
    start = [*map(_value, carried), *map(_entered, tokens)]
    key = [] if seed is None else [_value(seed), _value(offset), promote.constant(0, "s64")]
    k = len(key)
    n = len(start)
    logs = len(tokens)
    more = [*map(_value, additional)]
    # a condition that is looked at gives a token as well, so it is the end of a turn
    judged = bool(_token(None, condition))

    def call(graph: Graph, state: Values, stream: int) -> list[Instruction]:
        drawn = turn_seeds(state[0], state[1], state[2], stream) if k else None
        operands = [*state[k : k + n - logs], *state[k + n :]]
        return call_graph(graph, operands, drawn, state[k + n - 1] if logs else None)

    def judge(state: Values) -> Values:
        if not judged:
            return state
        holds, last = call(condition, state, 1)
        return [*state[: k + n - 1], last, *state[k + n : k + n + len(more)], holds]

    def step(*state: Instruction) -> Values:
        after = [instr("add", (x, promote.constant(1, "s64"))) for x in state[2:k]]
        found = call(body, state, 0)
        found[n - logs :] = map(_turned, found[n - logs :])
        return judge([*state[: min(k, 2)], *after, *found, *state[k + n :]])

    def holds(*state: Instruction) -> Instruction:
        return state[-1] if judged else call(condition, state, 1)[0]

    found = loop(holds, step, judge([*key, *start, *more]))[k : k + n]
    return (*found[: n - logs], *map(_left, found[n - logs :], tokens))


@_lowers("scan")
def scan(
    combine: Graph,
    init: Sequence[Operand],
    xs: Sequence[Operand],
    additional: Sequence[Operand] = (),
    reverse: bool = False,
    seed: Operand | None = None,
    offset: Operand | None = None,
    token: Instruction | None = None,
) -> Instructions:
    tokens = _token(token, combine)
    start, given, fixed = ([_value(x) for x in group] for group in (init, xs, additional))
    length = given[0].dims[0]
    count = len(given)
    n = len(start)
    if seed is not None:  # of each turn, a slice like the others
        turns = instr("iota", (), Shape("s64", (length,)), iota_dimension=0)
        given.append(turn_seeds(seed, offset, turns))

    def step(carry: Values, x: Values, rest: Values) -> tuple[Values, Values]:
        now = dict(zip(["seed"] * len(x[count:]) + ["token"], [*x[count:], *carry[n:]]))
        results = call_graph(combine, [*carry[:n], *x[:count], *rest], **now)
        end = len(results) - len(tokens)
        return [*results[:n], *map(_turned, results[end:])], results[n:end]

    start += map(_entered, tokens)
    carry, ys = scan_loop(step, start, given, fixed, length, reverse)
    return (*carry[:n], *ys, *map(_left, carry[n:], tokens))


@_lowers("map_impl")
def map_(
    body: Graph,
    xs: Sequence[Operand],
    additional: Sequence[Operand] = (),
    **drawn: Any,
) -> Instructions:
    return scan(body, (), xs, additional, **drawn)


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
    saved = instr("pad", (reshape(raw, (16,)), promote.constant(0, "u8")), state, padding=padding)
    return saved, _call(op, expected_shapes()[1:], args, {**kwargs, "seed": seed, "offset": offset})


@_lowers("run_with_rng_state")
def run_with_rng_state(state: Instruction, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    raw = instr("slice", (state,), Shape("u8", (16,)), slice=((0, 16, 1),))
    words = instr("bitcast-convert", (reshape(raw, (2, 8)),), Shape("s64", (2,)))
    seed, offset = (
        reshape(instr("slice", (words,), Shape("s64", (1,)), slice=((i, i + 1, 1),)), ())
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
