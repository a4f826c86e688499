"""What graphs of operators hold besides operators, for whoever lowers them: higher-order operators
and fake tensors. Importing this file imports what defines them. The same in 2.11 to 2.13."""

from collections.abc import Callable

import torch
import torch._higher_order_ops.associative_scan
import torch._higher_order_ops.flex_attention
import torch._higher_order_ops.invoke_subgraph
import torch._prims.rng_prims  # noqa: F401
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from .operators import HigherOrderOperator, Key

__all__ = [
    "FakeTensorMode",
    "dense_kernel",
    "existing",
    "scan",
    "unset_fake_temporarily",
    "while_loop",
    "with_effects",
]


def existing(*names: str) -> set[HigherOrderOperator]:
    """The higher-order operators of these names that this PyTorch has."""
    hop = torch.ops.higher_order
    return {op for name in names if (op := getattr(hop, name, None)) is not None}


def dense_kernel(op: HigherOrderOperator) -> Callable | None:
    """The function that computes a higher-order operator by plain ones, if it has one."""
    return op.py_kernels.get(Key.CompositeExplicitAutograd)
