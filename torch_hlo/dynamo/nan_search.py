"""Which operation made the first NaN of a compiled graph on the CPU's tensors: see
lazy/run/nan_checks.py for those of the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torch_hlo.lazy.run.nan_checks import (
    Judge,
    can_be_nan,
    statistics,
    wanted,
    writes_infinity,
)
from torch_hlo.lowering.fx.fx_graph import source_line
from torch_hlo.pytorch.operators import HigherOrderOperator


def searched(graph_module: fx.GraphModule, run: Callable[[list], Any]) -> Callable[[list], Any]:
    """`run`, which computes the graph. Where that returns a NaN, FloatingPointError is raised: the
    graph is computed again, an operation at a time."""

    inputs = graph_module.graph.find_nodes(op="placeholder")
    copies = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [inputs.index(n.args[0]) for n in copies if n.args[0] in inputs]

    def call(args: list) -> Any:
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        changed = [args[i] for i in written]
        results = run(args)
        for what, judge in wanted().items():
            if any(_bad((results, changed), judge)):
                _Search(graph_module, what, judge).run(*before)
                given = [x for x in before if any(_bad(x, judge))]
                reason = f"{statistics(given[0])}, which it reads" if given else "a result"
                if judge is torch.isnan:
                    raise FloatingPointError(f"torch.compile: {reason} is NaN")
        return results

    return call


def _bad(values: Any, judge: Judge) -> Iterator[bool]:
    """Of each tensor, whether it has a NaN, or an infinity."""
    for x in pytree.tree_leaves(values):
        if isinstance(x, torch.Tensor) and can_be_nan(x.dtype):
            yield bool(judge(x).any())


class _Search(fx.Interpreter):
    """Raises FloatingPointError at the first operation that makes a NaN, or an infinity, of
    operands without. `where`: in which turn of a loop."""

    def __init__(self, module: fx.GraphModule, what: str, judge: Judge) -> None:
        super().__init__(module)
        self.what = what
        self.judge = judge
        self.where = ""  # the line is named
        self.extra_traceback = False

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """Functions of loops and branches are searched, too."""
        if isinstance(target, HigherOrderOperator):
            args = tuple(map(self._inner, itertools.repeat(target), args))
        return super().call_function(target, args, kwargs)

    def _inner(self, operator: HigherOrderOperator, function: Any) -> Any:
        if not isinstance(function, fx.GraphModule):
            return function
        search = _Search(function, self.what, self.judge)
        turns = itertools.count(1)

        def run(*args: Any) -> Any:
            turn = "a branch" if operator.name() == "cond" else f"turn {next(turns)}"
            search.where = f", in {turn} of {operator.name()}{self.where}"
            return search.run(*args)

        return run

    def run_node(self, n: fx.Node) -> Any:
        operands: Sequence[Any] = [self.env[x] for x in n.all_input_nodes]
        was = any(_bad(operands, self.judge)) or n.op != "call_function"
        result = super().run_node(n)
        if (
            was
            or not any(_bad(result, self.judge))
            or self.judge is torch.isinf
            and writes_infinity(n.args)
        ):
            return result
        line = source_line(n)
        lines = [f"{n.target} makes {self.what}" + (f" at {line}" if line else "") + self.where]
        lines += [f"  given {statistics(x)}" for x in operands if isinstance(x, torch.Tensor)]
        raise FloatingPointError("\n".join(lines))
