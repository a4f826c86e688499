"""Control flow on lazy tensors that stays in the program: `cond`, `while_loop`, `scan`. The
functions are recorded once, whatever the count.

    total, ys = torch_hlo.scan(lambda c, x: (c + x, c * x), init, xs)
    i, x = torch_hlo.while_loop(lambda i, x: i < 10, lambda i, x: (i + 1, x * 2), (i, x))
    y = torch_hlo.cond(p, lambda x: x.sin(), lambda x: x.cos(), (x,))

The functions get and return tensors (or tuples and dictionaries of them) and may read other
tensors. They must not need a value (`.item()`, `if tensor:`), or write to tensors from outside.
Random numbers: the loop takes one draw of the generator, and gives each turn a seed of its own.
What is to be looked at later (`torch_hlo.debug.print`) is put on a list: lowering/core/looks.py.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hlo.hlo.ir import Ints, Shape
from torch_hlo.lowering.core import (
    RECORDING,
    SERIALS,
    TORCH_TO_HLO,
    Node,
    Out,
    Subgraph,
    looks,
)
from torch_hlo.lowering.fx.fx_graph import FxGraph, Input

from ..record import (
    Array,
    Engine,
    HloTensor,
    Number,
    Watcher,
    fresh,
    generator,
    meta as metas,
    pending_storages,
    read,
    session,
)
from ..record.recording import source
from ..run.fingerprint import Graph, operands

hop = torch.ops.higher_order


class _Refusing(Watcher):
    """The engine while a function is recorded: nothing can be evaluated. Values that are to be
    looked at later go on the list of `logged`; nowhere without one."""

    def __init__(self, what: str, inner: Engine, logged: looks.Logged | None) -> None:
        super().__init__(inner)
        self.what = what
        self.logged = logged
        self.first: Array = Array(looks.TOKEN, None)
        self.token: Out | Array = self.first

    def later(self, tensor: Tensor, check: looks.Check) -> None:
        if self.logged is not None:
            args = self.token, read(tensor), self.logged.number(check)
            self.token = Out(Node(looks.log, args, {}, (looks.TOKEN,), source()))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"torch_hlo.{self.what}: a value is needed at {source()}, while the function is"
            " recorded; use torch_hlo.cond instead of `if`"
        )

    mark_step = materialize = sync = synchronize = items = _refuse


class Recorded(FxGraph, Subgraph):
    """A function as a graph. `captured`: the values from outside that it reads; they are its last
    inputs, but for the seed of a turn where it draws random numbers. `key` identifies it."""

    captured: list[Out | Array]
    form: object


def _logged(what: str) -> looks.Logged | None:
    """Where values of a loop go: those of one inside another, to the outer one's list."""
    engine = session.engine()
    if isinstance(engine, _Refusing):
        return engine.logged
    return looks.Logged(f"{what} at {source()}")


def record(
    what: str,
    fn: Callable,
    shapes: Sequence[Tensor],
    form,
    logged: looks.Logged | None,
    own: int = 0,
) -> Recorded:
    """Call `fn` on stand-ins for tensors like `shapes`, nested as `form`. Raises RuntimeError when
    it needs a value, writes to more than the first `own` of its arguments, or to others, or keeps
    a tensor."""
    given = [metas.contiguous(tuple(t.shape), t.dtype) for t in shapes]
    stand_ins = [Array(m.hlo, None) for m in given]
    first = next(SERIALS)
    arguments = [fresh(m, a) for m, a in zip(given, stand_ins)]
    refusing = _Refusing(what, session.engine(), logged)
    used = session.use(refusing), session.use(refusing, everywhere=False)  # autograd has threads
    with used[0], used[1], generator.apart(what) as seed:
        result = fn(*pytree.tree_unflatten(arguments, form))
    flat, result_form = _inputs(what, result, ": the function must return")
    values = [*map(read, flat)]
    written = any(t._storage.version for t in arguments[own:])
    del arguments, result, flat
    if written or _kept(first) and (gc.collect(), _kept(first))[1]:
        raise RuntimeError(
            f"torch_hlo.{what}: an in-place operation on an input of the function or on a tensor"
            " from outside, or a tensor that outlives it: return what is to be seen outside"
        )
    return _graph(values, stand_ins, first, result_form, seed, refusing)


def _kept(first: int) -> bool:
    """Whether a tensor that is alive has a value that was recorded since `first`."""
    return any(s.value.node.serial > first for s in pending_storages())


def _graph(
    values: list, stand_ins: list[Array], first: int, form, seed: int, engine: _Refusing
) -> Recorded:
    """`seed`: the one that draws carry which are numbered within a turn."""
    start, *logs = dict.fromkeys((engine.first, engine.token))
    inside = _nodes([*values, *logs], first)
    g = Recorded()
    g.form, g.captured = form, []
    inputs = list(stand_ins)
    outer: dict[tuple, Array] = {}
    turn = Array(Shape("s64"), None)
    made: dict[int, Node] = {}

    def value(x):
        kind = type(x)
        if kind is Out and x.array is None and id(x.node) in made:
            return Out(made[id(x.node)], x.index)
        if kind is Out or kind is Array:
            x = x.array if kind is Out and x.array is not None else x
            if x is start or any(x is s for s in stand_ins):
                return x
            key = (id(x.node), x.index) if type(x) is Out else (id(x),)
            if key not in outer:
                shape = x.node.outs[x.index] if type(x) is Out else x.shape
                outer[key] = Array(shape, None)
                inputs.append(outer[key])
                g.captured.append(x)
            return outer[key]
        if kind is Number:
            return x.value
        if kind is list or kind is tuple:
            return [value(v) for v in x]
        return x

    for n in inside:
        kwargs = {k: value(v) for k, v in n.kwargs.items()}
        if kwargs.get("seed") == seed:
            kwargs["seed"] = turn
        made[id(n)] = Node(n.target, tuple(map(value, n.args)), kwargs, n.outs, n.source)
    g.nodes = list(made.values())
    results = [value(v) for v in values]
    g.outputs = [(r, None) for r in results]
    for last in logs:
        g.tokens = start, value(last)
        results.append(g.tokens[1])
        inputs.append(start)
    g.inputs = [Input(leaf, i) for i, leaf in enumerate(inputs) if leaf is not start]
    inner = Graph(g.nodes, [r for r in results if type(r) is Out])
    if any(leaf is turn for leaf in inner.leaves):
        inputs.append(turn)
        g.inputs.append(Input(turn, None))
    order = {id(leaf): i for i, leaf in enumerate(inputs)}
    g.key = (
        inner.key,
        tuple(order[id(leaf)] for leaf in inner.leaves),
        tuple(order.get(id(r), -1) for r in results),
        tuple(a.shape for a in inputs),
    )
    return g


def _nodes(values: list, first: int) -> list[Node]:
    """Nodes recorded since `first` that the values need, operands first."""
    found: dict[Node, None] = {}
    stack = [v.node for v in values if type(v) is Out and v.array is None]
    while stack:
        n = stack.pop()
        if n not in found and n.serial > first:
            found[n] = None
            stack += operands(n)
    return sorted(found, key=lambda n: n.serial)


def _inputs(what: str, tree: object, says: str = " takes") -> tuple[list[HloTensor], object]:
    """The tensors of an argument, or of a result, and how they are nested."""
    flat, form = pytree.tree_flatten(tree)
    for t in flat:
        if not isinstance(t, HloTensor):
            raise TypeError(f"torch_hlo.{what}{says} hlo tensors, not {type(t).__name__}")
        _refuse_gradient(what, t)
    return flat, form


def _refuse_gradient(what: str, t: Tensor) -> None:
    """Of an argument, or of a result that is made of what the function reads besides."""
    if t.requires_grad and torch.is_grad_enabled():
        known = " but that of init and xs: hand in there what needs one," if what == "scan" else ";"
        raise RuntimeError(
            f"torch_hlo.{what} has no gradient{known} call it under torch.no_grad(), or use"
            f" torch.compile(backend='hlo') and PyTorch's {what}"
        )


def _node(
    op,
    args: tuple,
    outs: Sequence[Tensor | tuple],
    form,
    kwargs: dict,
    logged: looks.Logged | None,
) -> Tensor | tuple[Tensor, ...]:
    found = [metas.contiguous(size, dtype) for size, dtype in outs]
    engine = session.engine()
    logs = any(x.tokens for x in args if isinstance(x, Recorded))
    if logs and isinstance(engine, _Refusing):
        kwargs["token"] = engine.token
    node = Node(op, args, kwargs, (*[m.hlo for m in found], *[looks.TOKEN] * logs), source())
    if logs:
        token = Out(node, len(found))
        if isinstance(engine, _Refusing):
            engine.token = token
        else:
            engine.later(fresh(metas.contiguous(looks.TOKEN.dims, torch.int64), token), logged)
    return pytree.tree_unflatten([fresh(m, Out(node, i)) for i, m in enumerate(found)], form)


def _alone(verb: Callable) -> Callable:
    """The verb, while no other thread records."""

    @functools.wraps(verb)
    def run(*args, **kwargs) -> Tensor | tuple[Tensor, ...] | None:
        with RECORDING:
            return verb(*args, **kwargs)

    return run


def _described(g: Recorded) -> list[tuple[Ints, torch.dtype]]:
    back = {v: k for k, v in TORCH_TO_HLO.items()}
    shapes = [r.node.outs[r.index] if type(r) is Out else r.shape for r, _ in g.outputs]
    return [(s.dims, back[s.dtype]) for s in shapes]


def _same(what: str, have: list, want: list, forms: tuple) -> None:
    if forms[0] != forms[1]:
        raise TypeError(f"torch_hlo.{what}: the function returns {forms[0]}, expected {forms[1]}")
    for i, (h, w) in enumerate(zip(have, want, strict=True)):
        if h != w:
            raise TypeError(
                f"torch_hlo.{what}: value {i} is {w[1]}{list(w[0])} before and {h[1]}{list(h[0])}"
                " after; they must be alike"
            )


def _like(
    tensors: Sequence[Tensor],
) -> list[tuple[Ints, torch.dtype]]:
    return [(tuple(t.shape), t.dtype) for t in tensors]


@_alone
def cond(
    predicate: Tensor,
    true_fn: Callable,
    false_fn: Callable,
    operands: Sequence = (),
) -> Tensor | None:
    """`true_fn(*operands)` if the one-element tensor `predicate` is true, else
    `false_fn(*operands)`; only one of them runs."""
    (p,), _ = _inputs("cond", (predicate,))
    if p.numel() != 1:
        raise ValueError(
            f"torch_hlo.cond: the predicate must have one element, not {list(p.shape)}"
        )
    flat, form = _inputs("cond", tuple(operands))
    logged = _logged("cond")
    graphs = [record("cond", fn, flat, form, logged) for fn in (true_fn, false_fn)]
    _same("cond", _described(graphs[1]), _described(graphs[0]), (graphs[1].form, graphs[0].form))
    captured = _share(graphs, len(flat))
    args = (read(p), *graphs, [*map(read, flat), *captured])
    outs = _described(graphs[0])
    drawn = _draw(graphs, [])
    return _node(hop.cond, args, outs, graphs[0].form, drawn, logged)


def _draw(graphs: Sequence[Recorded], key: list[Number]) -> dict:
    """Keywords of a node with these graphs: the seed and offset that the seeds of its turns come
    from, if they need any. They are those in `key`, or new ones, which are put there."""
    if all(x.source is not None for g in graphs for x in g.inputs):
        return {}
    if not key:
        key += generator.draw({})
    return dict(zip(("seed", "offset"), key))


def _share(graphs: Sequence[Recorded], own: int) -> list[Out | Array]:
    """One list of captured values for several graphs with `own` inputs each; renumbers their last
    inputs."""
    values: list = []
    for g in graphs:
        for i, v in enumerate(g.captured):
            g.inputs[own + i].source = own + len(values)
            values.append(v)
    for g in graphs:
        g.key = (*g.key, tuple(x.source for x in g.inputs))
    return values


@_alone
def while_loop(cond_fn: Callable, body_fn: Callable, carried: Sequence) -> tuple[Tensor, ...]:
    """Repeat `carried = body_fn(*carried)` while `cond_fn(*carried)` (one element) is true. One
    loop in the program."""
    flat, form = _inputs("while_loop", tuple(carried))
    logged = _logged("while_loop")
    test = record("while_loop", cond_fn, flat, form, logged)
    body = record("while_loop", body_fn, flat, form, logged, len(flat))
    described = _described(test)
    if len(described) != 1 or torch.Size(described[0][0]).numel() != 1:
        raise ValueError(
            "torch_hlo.while_loop: the condition must return one tensor of one element"
        )
    result = body.form if body.form != pytree.tree_structure(0) or len(flat) != 1 else form
    _same("while_loop", _described(body), _like(flat), (_tupled(result), _tupled(form)))
    captured = _share([test, body], len(flat))
    return _node(
        hop.while_loop,
        (test, body, [read(t) for t in flat], captured),
        _like(flat),
        form,
        _draw([test, body], []),
        logged,
    )


def _tupled(form) -> tuple:
    """A nesting without regard to whether its outermost level is a list or a tuple."""
    return tuple(form.children()) if form.type in (list, tuple) else form


@_alone
def scan(
    fn: Callable,
    init: object,
    xs: object,
    reverse: bool = False,
    key: list[Number] | None = None,
    again: bool = False,
) -> tuple[Tensor, ...]:
    """`carry, y = fn(carry, x)` for every slice x of `xs` along dimension 0, from its end when
    `reverse`. Returns the last carry and the ys, stacked: y of x[i] is at i. Scans with one `key`
    (see `_draw`) draw the same random numbers at each i. `again`: what is computed has been looked
    at before."""
    carry, carry_form = _inputs("scan", init)
    stacked, xs_form = _inputs("scan", xs)
    if not stacked or any(x.dim() == 0 or x.shape[0] != stacked[0].shape[0] for x in stacked):
        raise ValueError(
            "torch_hlo.scan: xs must be tensors of one length along dimension 0, got"
            f" {[list(x.shape) for x in stacked]}"
        )
    length = stacked[0].shape[0]
    slices = [torch.empty(x.shape[1:], dtype=x.dtype, device="meta") for x in stacked]
    logged = None if again else _logged("scan")
    g = record(
        "scan",
        fn,
        [*carry, *slices],
        pytree.tree_structure(
            (
                pytree.tree_unflatten(carry, carry_form),
                pytree.tree_unflatten(stacked, xs_form),
            )
        ),
        logged,
        len(carry),
    )
    described = _described(g)
    results = pytree.tree_unflatten(list(range(len(described))), g.form)
    if not isinstance(results, (tuple, list)) or len(results) != 2:
        raise TypeError("torch_hlo.scan: the function must return (carry, y)")
    new_carry = pytree.tree_leaves(results[0])
    _same(
        "scan",
        described[: len(new_carry)],
        _like(carry),
        (pytree.tree_structure(results[0]), carry_form),
    )
    captured = _share([g], len(carry) + len(slices))
    outs = [
        *described[: len(carry)],
        *[((length, *size), dtype) for size, dtype in described[len(carry) :]],
    ]
    args = (g, [read(t) for t in carry], [read(t) for t in stacked], captured, reverse)
    drawn = _draw([g], [] if key is None else key)
    return _node(hop.scan, args, outs, g.form, drawn, logged)
