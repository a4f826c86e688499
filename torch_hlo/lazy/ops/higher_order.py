"""PyTorch's own loops and branches on lazy tensors: torch.cond, and scan, while_loop and map of
torch._higher_order_ops, alone and in graphs of Dynamo's. Their gradients are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torch_hlo.lazy.record import HloTensor
from torch_hlo.pytorch import operators

from . import control

Tensors = Sequence[Tensor]


def _cond(predicate: Tensor, true_fn: Callable, false_fn: Callable, given: Tensors = ()) -> Tensors:
    return control.cond(predicate, true_fn, false_fn, tuple(given))


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


def register() -> None:
    table = {"cond": _cond, "while_loop": _while, "scan": _scan, "map_impl": _map}
    operators.implement(table, HloTensor)
