"""PyTorch's own loops and branches on lazy tensors: torch.cond, and scan, while_loop and map of
torch._higher_order_ops, alone and in graphs of Dynamo's. Their gradients are PyTorch's."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from torch_hlo import config
from torch_hlo.lowering.core import looks
from torch_hlo.lowering.fx.fx_graph import any_check, source_line
from torch_hlo.pytorch import participants
from torch_hlo.pytorch.graphs import dense_kernel

from ..record import checks, conditions, session
from . import control

Tensors = Sequence[Tensor]


class Lines(fx.Interpreter):
    """Runs a graph, and says of each of its operations which line of the user's it came from."""

    def run_node(self, n: fx.Node) -> Any:
        here = session.current().here
        outer, here.line, here.module = here.line, source_line(n), _module(n)
        since = participants.sequence_number()
        try:
            result = super().run_node(n)
            if torch.is_anomaly_enabled() and here.line:
                participants.set_forward_trace(result, here.line, since)
            return result
        finally:
            here.line = outer
            here.module = ""


def _module(n: fx.Node) -> str:
    """The path of the module that an operation was called in: `layers.0.fc`."""
    stack = [*(n.meta.get("nn_module_stack") or {}).values()]
    if not stack:
        return ""
    path, kind = stack[-1]
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path) or getattr(kind, "__name__", str(kind))


def lines_wanted() -> bool:
    return session.current().sources or config.get("NAN")


def _lined(x: Any) -> Any:
    """What runs a graph among the arguments of an operation, and keeps none of its values."""
    if isinstance(x, fx.GraphModule) and (lines_wanted() or any_check(x)):
        return lambda *args: Lines(x).run(*args)
    return x


def _cond(
    predicate: Tensor, true_fn: Callable, false_fn: Callable, given: Sequence = ()
) -> Tensors:
    # sizes are among what is given
    return control.cond(predicate, lambda: true_fn(*given), lambda: false_fn(*given), ())


def _while(test: Callable, body: Callable, carried: Tensors, fixed: Tensors = ()) -> Tensors:
    return control.while_loop(
        lambda *state: test(*state, *fixed), lambda *state: body(*state, *fixed), tuple(carried)
    )


def _scan(combine: Callable, init: Tensors, xs: Tensors, fixed: Tensors = ()) -> Tensors:
    def step(carry: Tensors, x: Tensors) -> tuple[Tensors, Tensors]:
        found = list(combine(*carry, *x, *fixed))
        return found[: len(init)], found[len(init) :]

    last, ys = control.scan(step, list(init), list(xs))
    return [*last, *ys]


def _map(body: Callable, xs: Tensors, fixed: Tensors = ()) -> Tensors:
    return _scan(body, [], xs, fixed)


def _plain(name: str, *args: Any) -> Any:
    """PyTorch's own kernel, of plain operations."""
    return dense_kernel(getattr(torch.ops.higher_order, name))(*args)


def _print(form: str, *args: Any, **kwargs: Any) -> None:
    conditions.hand(*looks.printed(form, args, kwargs, Tensor))


def as_looks(graph_module: fx.GraphModule) -> None:
    """Replace PyTorch's print in graphs of Dynamo's by what `torch_hlo.debug.print` becomes, and
    have the debugger see the graph's variables."""
    for module, n in _nodes(graph_module):
        graph = n.graph
        number, values = _looked_at(graph, n)
        if number is None:
            continue
        variables = _variables(graph).values()
        place = {"device": next((x.meta["example_value"].device for x in variables), "cpu")}
        with graph.inserting_before(n):
            for value in values or [graph.call_function(torch.zeros, ((),), place)]:
                graph.call_function(looks.look, (value, number)).meta = n.meta
        graph.erase_node(n)
        module.recompile()


def _nodes(graph_module: fx.GraphModule) -> Iterator[tuple[Any, fx.Node]]:
    """The nodes of a graph and of those inside it, with their modules."""
    for module in graph_module.modules():
        graph = getattr(module, "graph", None)
        yield from [(module, n) for n in graph.nodes] if graph else ()


def _looked_at(graph: fx.Graph, n: fx.Node) -> tuple[int | None, list]:
    """The number of what is to be called in place of a node, and with which values."""
    if n.target is torch.ops.higher_order.print:
        form, *args = n.args
        function, values = looks.printed(form, args, n.kwargs, fx.Node)
        return looks.number(function, len(values)), values
    if n.target is not looks.look:
        return None, []
    look = looks.numbered(n.args[1])
    if isinstance(look.function, looks.Stopped):
        file, _, line = source_line(n).rpartition(":")
        found = {} if look.count else _variables(graph, n.args[0])
        names = look.function.names or (*found,)
        here = looks.Stopped(names, file, int(line or 1))
        return looks.number(here, look.count or len(found)), [*found.values()] or [n.args[0]]
    return (None if look.count else n.args[1]), []


def _variables(graph: fx.Graph, until: Any = None) -> dict[str, fx.Node]:
    """The tensors before a node, by the variables that Dynamo has named them after; those on the
    device of the first."""
    before = itertools.takewhile(lambda n: n is not until, graph.nodes)
    found = [n for n in before if isinstance(n.meta.get("example_value"), Tensor)]
    return {
        re.sub(r"^l_(\w+)_$|_\d+$", r"\1", n.name): n
        for n in found
        if n.meta["example_value"].device == found[0].meta["example_value"].device
        and "_modules_" not in n.name
    }


def check_indices(graph_module: fx.GraphModule) -> None:
    """Have indices looked at when they have been computed: what record/checks.py does for those of
    the device."""
    for _, n in _nodes(graph_module):
        if n.target not in checks.INDICES:
            continue
        given = {id(x.meta["val"]): x for x in n.all_input_nodes}
        args = fx.node.map_arg(n.args, lambda x: x.meta["val"])
        with n.graph.inserting_before(n):
            for index, *allowed in checks.INDICES[n.target](args, n.kwargs):
                number = looks.number(checks.Range(n.target, *map(int, allowed)), 1)
                look = n.graph.call_function(looks.look, (given[id(index)], number))
                look.meta["stack_trace"] = n.meta.get("stack_trace")


RULES = {
    **{
        name: partial(_plain, name)
        for name in ("associative_scan", "flex_attention", "flex_attention_backward")
    },
    "cond": _cond,
    "map_impl": _map,
    "print": _print,
    "scan": _scan,
    "while_loop": _while,
}


def call(name: str, args: Sequence, kwargs: dict) -> Any:
    """What the operator of this name does with tensors of the device."""
    return RULES[name](*map(_lined, args), **kwargs)
