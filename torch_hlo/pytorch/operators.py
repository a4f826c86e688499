"""PyTorch's operators as objects: their types, their kernels by dispatch key, and its Python
functions for them. The same in 2.11 to 2.13."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils.checkpoint import checkpoint

__all__ = [
    "HigherOrderOperator", "Key", "OpOverload", "OpOverloadPacket",
    "call_kernel", "check_convolution", "checkpoint_again",
    "core_decompositions", "core_decompositions_after_autograd", "decompositions", "has_kernel",
    "implement", "integers", "is_composite", "runs_on_cpu",
]  # fmt: skip

Key = torch._C.DispatchKey


def base_name(op: OpOverload) -> str:
    """ "add" of aten::add.Tensor."""
    name: str = op._schema.name
    return name.split("::")[1]


def has_kernel(op: OpOverload, key: torch._C.DispatchKey) -> bool:
    """True if a kernel of `op` is registered for this very key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def runs_on_cpu(op: OpOverload) -> bool:
    """True if `op` works on CPU tensors, by a kernel of its own or by other operators."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU")


def call_kernel(
    op: OpOverload, key: torch._C.DispatchKey, *args: object, **kwargs: object
) -> object:
    """Call the kernel of `op` for one key."""
    return op._op_dk(key, *args, **kwargs)


def is_composite(op: OpOverload) -> bool:
    """Whether the dispatcher takes the operator apart before autograd sees it."""
    return op.has_kernel_for_dispatch_key(Key.CompositeImplicitAutograd)


@functools.cache
def integers(op: OpOverload) -> dict[str, str]:
    """The integers, and lists of them, among the arguments: "SymInt" where one may be a size, which
    graphs of symbolic sizes have symbols for, else "int", such as dimensions."""
    found = re.findall(r"[ (](SymInt|int)(?:\[\d*\])?\?? (\w+)", str(op._schema))
    return {name: kind for kind, name in found}


def implement(names: Iterable[str], kind: type[torch.Tensor], function: Callable) -> None:
    """Let higher-order operators of these names call `function(name, *arguments)` for tensors of
    class `kind`, below autograd."""
    for name in names:
        if (op := getattr(torch.ops.higher_order, name, None)) is not None:
            op.py_impl(kind)(functools.partial(function, name))


def decompositions() -> dict[OpOverload, Callable]:
    """All of PyTorch's Python functions for operators."""
    from torch._decomp import decomposition_table

    return decomposition_table


def core_decompositions() -> dict[OpOverload, Callable]:
    """Those that lead to core aten operators, of composite ones as well. Collecting these takes
    0.1 s."""
    from torch._decomp import core_aten_decompositions

    return core_aten_decompositions()


def core_decompositions_after_autograd() -> dict[OpOverload, Callable]:
    """Those that lead to core aten operators, of what the dispatcher leaves."""
    from torch._decomp import _core_aten_decompositions_post_autograd

    return _core_aten_decompositions_post_autograd()


def check_convolution(*args: object) -> None:
    """Raise what `aten.convolution` raises for arguments that do not fit, on any device."""
    torch._C._select_conv_backend(*args)


def checkpoint_again(graph_module: fx.GraphModule) -> None:
    """Let checkpoints of a graph that PyTorch runs draw the random numbers of the forward pass
    again, which it leaves to Inductor."""
    found = graph_module.graph.find_nodes(op="call_function", target=_CHECKPOINT)
    for node in found:
        node.target = _checkpointed
    if found:
        graph_module.recompile()


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def _checkpointed(function: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"use_reentrant": False}
    options["preserve_rng_state"] = kwargs.get("preserve_rng_state", True)
    if "_checkpoint_context_fn" in function.meta:
        options["context_fn"] = function.meta["_checkpoint_context_fn"]
    return checkpoint(function, *args, **options)
