"""torch_hlo's loops and branches in graphs of Dynamo's, where they are PyTorch's operators.

Their results are copies, since PyTorch's operators want no function that returns what it was
given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hlo.pytorch.graphs import scan as scanned, while_loop as looped


def _copies(tree: Any) -> Any:
    return pytree.tree_map(torch.clone, tree)


def cond(
    predicate: Tensor,
    true_fn: Callable,
    false_fn: Callable,
    operands: Sequence = (),
) -> Any:
    branches = [lambda fn=fn: _copies(fn(*operands)) for fn in (true_fn, false_fn)]
    return torch.cond(predicate.reshape(()), *branches)


def while_loop(cond_fn: Callable, body_fn: Callable, carried: Sequence) -> Any:
    flat, form = pytree.tree_flatten(carried)

    def run(fn: Callable, state: Sequence[Tensor]) -> Any:
        return _copies(fn(*pytree.tree_unflatten(state, form)))

    last = looped(
        lambda *state: run(cond_fn, state).reshape(()),
        lambda *state: tuple(pytree.tree_leaves(run(body_fn, state))),
        tuple(flat),
    )
    return pytree.tree_unflatten(last, form)


def scan(fn: Callable, init: Any, xs: Any) -> Any:
    return scanned(lambda carry, x: _copies(fn(carry, x)), init, xs)


_PUBLIC = sys.modules["torch_hlo"]  # which imports this file
IN_PLACE_OF = {getattr(_PUBLIC, f.__name__): f for f in (cond, while_loop, scan)}
