"""Higher-order operators: cond, while_loop, scan, map become HLO's conditional and while; the loop's body is compiled once.

A lowering takes the operator's arguments as they are in the FX graph: graphs as GraphModules, tensors as Instructions.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from torch_hlo.hlo import build
from torch_hlo.hlo.dim import Dim
from torch_hlo.hlo.ir import Computation, Instruction, instr
from torch_hlo.hlo.shape import Shape, literal, tuple_shape
from torch_hlo.lowering import promote
from torch_hlo.lowering.expand import _existing
from torch_hlo.lowering.fx import FxGraph, from_fx
from torch_hlo.lowering.graph import Leaf, apply
from torch_hlo.lowering.promote import reshape
from torch_hlo.lowering.registry import LOWERINGS, LoweringError, Weak, expected

HIGHER_ORDER: dict[object, Callable] = {}


def _lowers(*names: str):
    def register(fn: Callable) -> Callable:
        HIGHER_ORDER.update(dict.fromkeys(_existing(*names), fn))
        return fn

    return register


def _random_inside() -> tuple:
    raise LoweringError("random operators inside cond, while_loop, scan or map are not supported: draw the numbers outside and pass them in")


def _value(x) -> Instruction:
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


def call_graph(module: fx.GraphModule | FxGraph, operands: Sequence) -> list[Instruction]:
    """The results of a graph applied to `operands`, one per placeholder (sizes are known by their symbols)."""
    g = module if isinstance(module, FxGraph) else from_fx(module, _random_inside, inner=True)
    values: dict[int, Instruction | Weak] = {}
    for x in g.inputs:
        if isinstance(x.source, torch.Tensor):
            values[id(x.leaf)] = _constant(x.source, x.leaf.shape.dtype)
        elif isinstance(x.source, int) and isinstance(x.leaf, Leaf):
            values[id(x.leaf)] = _value(operands[x.source])
        else:
            raise LoweringError("a Python number that changes inside cond, while_loop, scan or map cannot be carried: make it a tensor, torch.tensor(0)")
    if g.writes:
        raise LoweringError("a graph inside cond, while_loop, scan or map writes to its inputs; return the new values instead")
    plain = [v is None or isinstance(v, (bool, int, float, str, Dim)) for v, _ in g.outputs]
    found = iter(apply(g.nodes, [v for (v, _), p in zip(g.outputs, plain) if not p], values))
    return [_value(v) if p else next(found) for (v, _), p in zip(g.outputs, plain)]


def _constant(tensor: torch.Tensor, dtype: str) -> Instruction:
    plain = tensor.float() if tensor.dtype == torch.bfloat16 or tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
    return instr("constant", (), Shape(dtype, tuple(tensor.shape)), literal=literal(plain.numpy(), dtype))


def _elements(x: Instruction, count: int) -> list[Instruction]:
    return [build.get_tuple_element(x, i) for i in range(count)]


def _tuple(values: Sequence[Instruction]) -> Instruction:
    return instr("tuple", tuple(values), tuple_shape(*(v.shape for v in values)))


@_lowers("cond")
def cond(predicate, true_graph, false_graph, operands=()):
    tensors = [_value(o) for o in operands]
    given = _tuple(tensors)
    branches = []
    for graph in (true_graph, false_graph):
        param = instr("parameter", (), given.shape, index=0)
        results = call_graph(graph, _elements(param, len(tensors)))
        branches.append(Computation("branch", (param,), _tuple(results)))
    if branches[0].root.shape != branches[1].root.shape:
        raise LoweringError(f"cond: the branches give {branches[0].root.shape} and {branches[1].root.shape}")
    chosen = promote.cast(reshape(_value(predicate), ()), "pred")
    result = instr("conditional", (chosen, given, given), branches[0].root.shape, branch_computations=tuple(branches))
    return tuple(_elements(result, len(branches[0].root.operands)))


def loop(condition: Callable, body: Callable, state: Sequence[Instruction]) -> list[Instruction]:
    """Repeat `body(*state) -> state` while `condition(*state) -> pred` holds."""
    start = _tuple(state)
    param = instr("parameter", (), start.shape, index=0)
    inner = _elements(param, len(state))
    after = body(*inner)
    for i, (old, new) in enumerate(zip(state, after, strict=True)):
        if (old.shape.dtype, old.shape.dims) != (new.shape.dtype, new.shape.dims):
            raise LoweringError(f"loop: value {i} is {old.shape} before and {new.shape} after the body; they must be alike")
    holds = promote.cast(reshape(condition(*inner), ()), "pred")
    result = instr("while", (start,), start.shape, condition=Computation("condition", (param,), holds), body=Computation("body", (param,), _tuple(after)))
    return _elements(result, len(state))


@_lowers("while_loop")
def while_loop(condition, body, carried, additional=()):
    carried, additional = [_value(x) for x in carried], [_value(x) for x in additional]
    n = len(carried)

    def step(*state):
        return [*call_graph(body, state), *state[n:]]

    return tuple(loop(lambda *state: call_graph(condition, state)[0], step, [*carried, *additional])[:n])


def _at(x: Instruction, i: Instruction) -> Instruction:
    """Element `i` along dimension 0."""
    zero = promote.constant(0, "s64")
    sizes = (1, *x.shape.dims[1:])
    one = instr("dynamic-slice", (x, i, *[zero] * (x.shape.rank - 1)), Shape(x.shape.dtype, sizes), dynamic_slice_sizes=sizes)
    return reshape(one, x.shape.dims[1:])


def _put(x: Instruction, i: Instruction, value: Instruction) -> Instruction:
    zero = promote.constant(0, "s64")
    update = reshape(value, (1, *value.shape.dims))
    return instr("dynamic-update-slice", (x, update, i, *[zero] * (x.shape.rank - 1)), x.shape)


def scan_loop(combine: Callable, carry: Sequence[Instruction], xs: Sequence[Instruction], rest: Sequence[Instruction], length) -> tuple[list, list]:
    """`combine(carry, x, rest) -> (carry, y)` over dimension 0 of `xs`. Returns the last carry and the ys, stacked."""
    nc, nx = len(carry), len(xs)

    def slices(x_state, i):
        return [_at(x, i) for x in x_state]

    # The shapes of ys: the body applied once, outside, is not part of the program.
    _, y0 = combine(carry, slices(xs, promote.constant(0, "s64")), rest)
    ys = [promote.full(0, y.shape.dtype, (length, *y.shape.dims)) for y in y0]
    count = promote.scalar(length, "s64")
    state = [promote.constant(0, "s64"), count, *carry, *xs, *rest, *ys]
    first_y = 2 + nc + nx + len(rest)

    def body(i, count, *values):
        c, x, r, out = values[:nc], values[nc:nc + nx], values[nc + nx:first_y - 2], values[first_y - 2:]
        new, y = combine(c, slices(x, i), r)
        one = promote.constant(1, "s64")
        return [instr("add", (i, one)), count, *new, *x, *r, *[_put(o, i, v) for o, v in zip(out, y, strict=True)]]

    def holds(i, count, *_):
        return instr("compare", (i, count), direction="LT")

    after = loop(holds, body, state)
    return after[2:2 + nc], after[first_y:]


@_lowers("scan")
def scan(combine, init, xs, additional=()):
    init, xs, additional = ([_value(x) for x in group] for group in (init, xs, additional))

    def step(carry, x, rest):
        results = call_graph(combine, [*carry, *x, *rest])
        return results[: len(carry)], results[len(carry):]

    carry, ys = scan_loop(step, init, xs, additional, xs[0].shape.dims[0])
    return (*carry, *ys)


@_lowers("map_impl")
def map_(body, xs, additional=()):
    xs, additional = [_value(x) for x in xs], [_value(x) for x in additional]

    def step(carry, x, rest):
        return [], call_graph(body, [*x, *rest])

    return tuple(scan_loop(step, [], xs, additional, xs[0].shape.dims[0])[1])


# ---- random operators under activation checkpointing: forward saves (seed, offset) where PyTorch saves the generator's state


@_lowers("run_and_save_rng_state")
def run_and_save_rng_state(op, *args, seed, offset, **kwargs):
    state = expected()[0]
    words = reshape_concat([promote.scalar(seed, "s64"), promote.scalar(offset, "s64")])
    raw = instr("bitcast-convert", (words,), Shape("u8", (2, 8)))
    padding = ((0, state.dims[0] - 16, 0),)
    saved = instr("pad", (reshape(raw, (16,)), promote.constant(0, "u8")), state, padding=padding)
    return saved, _call(op, expected()[1:], args, {**kwargs, "seed": seed, "offset": offset})


@_lowers("run_with_rng_state")
def run_with_rng_state(state, op, *args, **kwargs):
    raw = instr("slice", (state,), Shape("u8", (16,)), slice=((0, 16, 1),))
    words = instr("bitcast-convert", (reshape(raw, (2, 8)),), Shape("s64", (2,)))
    seed, offset = (reshape(instr("slice", (words,), Shape("s64", (1,)), slice=((i, i + 1, 1),)), ()) for i in range(2))
    return _call(op, expected(), args, {**kwargs, "seed": seed, "offset": offset})


def reshape_concat(scalars: Sequence[Instruction]) -> Instruction:
    """Rank-0 values as one vector."""
    return instr("concatenate", tuple(reshape(s, (1,)) for s in scalars), dimensions=(0,))


def _call(op, shapes, args, kwargs):
    from torch_hlo.lowering.opaque import opaque
    from torch_hlo.lowering.registry import nested

    fn = LOWERINGS.get(op)
    if fn is None:
        return opaque(op, args, kwargs, shapes)
    return nested(shapes, fn, *args, **kwargs)


__all__ = ["HIGHER_ORDER", "call_graph", "loop", "scan_loop"]
