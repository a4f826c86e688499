"""Which operation made the first NaN of a compiled graph on the CPU's tensors: see
lazy/run/nan_checks.py for those of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torch_hlo.lazy.run.nan_checks import can_be_nan, statistics
from torch_hlo.lowering.fx.fx_graph import source_line


def searched(graph_module: fx.GraphModule, run: Callable[[list], Any]) -> Callable[[list], Any]:
    """`run`, which computes the graph. Where that returns a NaN, FloatingPointError is raised: the
    graph is computed again, an operation at a time."""

    def call(args: list) -> Any:
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        results = run(args)
        if any(_nan(results)):
            _Search(graph_module).run(*before)
            given = [x for x in before if any(_nan(x))]
            reason = f"{statistics(given[0])}, which it reads" if given else "a result"
            raise FloatingPointError(f"torch.compile: {reason} is NaN")
        return results

    return call


def _nan(values: Any) -> Iterator[bool]:
    """Of each tensor, whether it has a NaN."""
    for x in pytree.tree_leaves(values):
        if isinstance(x, torch.Tensor) and can_be_nan(x.dtype):
            yield bool(x.isnan().any())


class _Search(fx.Interpreter):
    """Raises FloatingPointError at the first operation that makes a NaN of operands without."""

    def run_node(self, n: fx.Node) -> Any:
        operands: Sequence[Any] = [self.env[x] for x in n.all_input_nodes]
        was = any(_nan(operands))
        result = super().run_node(n)
        if was or n.op != "call_function" or not any(_nan(result)):
            return result
        line = source_line(n)
        lines = [f"{n.target} makes a NaN" + (f" at {line}" if line else "")]
        lines += [f"  given {statistics(x)}" for x in operands if isinstance(x, torch.Tensor)]
        raise FloatingPointError("\n".join(lines))
