"""Higher-order operators that PyTorch can write as plain ones: traced again and inlined (flex
attention, nested graphs, scans)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torch_hlo.pytorch.graphs import FakeTensorMode, dense_kernel, existing
from torch_hlo.pytorch.operators import OpOverload, core_decompositions

from ..core import LOWERINGS, LoweringError

hop = torch.ops.higher_order

EXPANDED = existing(
    "flex_attention",
    "flex_attention_backward",
    "associative_scan",
    "invoke_subgraph",
)
RANDOM = existing("run_and_save_rng_state")  # draw from the generator


def node_arguments(n: fx.Node) -> list[fx.Node]:
    """The nodes with values among the arguments of `n`, each once, in order."""
    return [
        a
        for a in n.all_input_nodes
        if a.op != "get_attr" or isinstance(a.meta.get("val"), torch.Tensor)
    ]


def traced_again(n: fx.Node) -> Any:
    """The (fake) results of a node that a graph pass left without, as the partitioner does with
    random operators."""
    fakes = [a.meta["val"] for a in n.all_input_nodes if "val" in a.meta]
    mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None) or FakeTensorMode()
    args, kwargs = pytree.tree_map(
        lambda x: x.meta.get("val") if isinstance(x, fx.Node) else x,
        (n.args, n.kwargs),
    )
    with mode:
        if n.target in RANDOM:
            return torch.empty(torch.get_rng_state().numel(), dtype=torch.uint8), args[0](
                *args[1:], **kwargs
            )
        if n.target is hop.run_with_rng_state:
            return args[1](*args[2:], **kwargs)
        return n.target(*args, **kwargs)


def expanded(n: fx.Node) -> fx.GraphModule:
    """A graph of plain ops that computes the node from its `node_arguments`. Raises LoweringError
    when the operator has no dense kernel."""
    from torch.fx.experimental.proxy_tensor import make_fx

    kernel = dense_kernel(n.target)
    if kernel is None:
        raise LoweringError(f"{n.target} has no kernel made of plain operators")
    operands = node_arguments(n)
    module = n.graph.owning_module

    def call(*values: torch.Tensor) -> Any:
        given = dict(zip(operands, values, strict=True))

        def argument(x: Any) -> Any:
            if not isinstance(x, fx.Node):
                return x
            return given[x] if x in given else getattr(module, x.target)

        with torch.no_grad():
            return kernel(
                *[pytree.tree_map(argument, a) for a in n.args],
                **{k: pytree.tree_map(argument, v) for k, v in n.kwargs.items()},
            )

    fakes = [a.meta["val"] for a in operands]
    mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None) or FakeTensorMode()
    with mode:
        found = make_fx(
            torch.func.functionalize(call),
            decomposition_table=_decompositions(),
            tracing_mode="real",
        )(*fakes)
    found.graph.eliminate_dead_code()
    return found


def _decompositions() -> dict[OpOverload, Callable[..., Any]]:
    return {op: fn for op, fn in core_decompositions().items() if op not in LOWERINGS}
