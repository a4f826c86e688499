"""Results of a graph that share memory, as in eager PyTorch: `return y, y[0]`, `x.data = y`.

A program gives each of its results memory of its own. AOTAutograd cares for views of inputs, and
for views of other results where gradients are taken. What is left is done here: the program
computes what the views are of, and they are taken after it has run."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_hlo.pytorch.operators import OpOverload

Run = Callable[[list], list]


def viewed(graph_module: fx.GraphModule, compiler: Callable[[fx.GraphModule], Run]) -> Run:
    """The graph as `compiler` makes it, with results that share memory where the graph's do. Its
    outputs are changed in place."""
    (end,) = graph_module.graph.find_nodes(op="output")
    outputs = list(end.args[0])
    bases = {x: _base(x) for x in outputs if isinstance(x, fx.Node)}
    count = Counter(bases.values())
    shared = {base for base, n in count.items() if n > 1 and base.op != "placeholder"}
    if not shared:
        return compiler(graph_module)
    views = [x for x in bases if bases[x] in shared and x not in shared]
    kept = list(dict.fromkeys([*(x for x in outputs if x not in views), *shared, *_sizes(views)]))
    end.args = (tuple(kept),)
    graph_module.recompile()
    run = compiler(graph_module)

    def call(args: list) -> list:
        values = dict(zip(kept, run(args)))
        return [_taken(x, values) if isinstance(x, fx.Node) else x for x in outputs]

    return call


def rebound(graph_module: fx.GraphModule, compiler: Callable[[fx.GraphModule], Run]) -> Run:
    """The graph as `compiler` makes it; then inputs get the memory that the graph gives them, which
    no program can do. The graph is changed in place."""
    graph = graph_module.graph
    found = graph.find_nodes(op="call_function", target=torch.ops.aten.set_.source_Tensor)
    if not found:
        return compiler(graph_module)
    places = list(graph.find_nodes(op="placeholder"))
    (end,) = graph.find_nodes(op="output")
    outputs = list(end.args[0])
    sources = {n.args[0]: n.args[1] for n in found}
    for n in found:
        graph.erase_node(n)
    views = list(sources.values())
    needed = dict.fromkeys([*map(_base, views), *_sizes(views)])
    more = [x for x in needed if x not in places and x not in outputs]
    end.args = ((*outputs, *more),)
    graph_module.recompile()
    run = compiler(graph_module)

    def call(args: list) -> list:
        values = dict(zip(places, args))
        results = run(args)
        values |= zip([*outputs, *more], results)
        memory = [_taken(source, values).detach() for source in sources.values()]
        with torch.no_grad():
            for target, source in zip(sources, memory):
                values[target].set_(source)
        return results[: len(outputs)]

    return call


def _base(x: fx.Node) -> fx.Node:
    """The node whose memory `x` shows."""
    while _is_view(x):
        x = x.args[0]
    return x


def _is_view(x: fx.Node) -> bool:
    if x.target is operator.getitem:
        return _is_view(x.args[0])
    if not isinstance(x.target, OpOverload) or not isinstance(x.meta.get("val"), _SHOWN):
        return False
    first = x.target._schema.arguments[0].alias_info if x.target._schema.arguments else None
    return first is not None and not first.is_write


_SHOWN = (torch.Tensor, list, tuple)


def _sizes(views: Sequence[fx.Node]) -> list[fx.Node]:
    """The symbolic sizes that the views are taken with."""
    found = []
    left = list(views)
    while left:
        x = left.pop()
        if _is_view(x):
            left += x.all_input_nodes
        elif not isinstance(x.meta.get("val"), torch.Tensor):
            found.append(x)
    return found


def _taken(x: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node: a result of the program, or a view of one."""
    if x not in values:
        args, kwargs = fx.map_arg((x.args, x.kwargs), lambda n: _taken(n, values))
        values[x] = x.target(*args, **kwargs)
    return values[x]
