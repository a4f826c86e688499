"""hlo tensors under torch.compile. Dynamo makes fake tensors of them as of any device's tensors,
and the graphs it finds are called with the real ones: their operations are recorded, with autograd,
and become part of the step."""

import functools
from collections.abc import Callable

import torch

from torch_hlo.pytorch import tracing
from torch_hlo.pytorch.registration import PLACE

from .record import Array, HloTensor

_through: list[tuple[Callable, tuple[type, ...]]] = []  # see `trace_through`


def trace_through(function: Callable, *constants: type) -> None:
    """Under torch.compile `function` becomes the ops that it calls on tensors, instead of ending
    the graph; `constants` are types of arguments that are compared by value."""
    _through.append((function, constants))
    if enable.cache_info().currsize:
        tracing.trace_through(function, constants)


def dynamo_came(dynamo: object) -> None:
    """Dynamo is imported, maybe for another back end, or for `torch.cond`."""
    enable()


def vary(tensor: torch.Tensor, sizes: frozenset[int]) -> None:
    """Tell the compiler that these sizes of an hlo tensor's array vary from step to step."""
    value = tensor._storage.value
    if isinstance(value, Array):
        value.varying |= sizes.intersection(value.shape.dims)


@functools.cache
def enable() -> None:
    """From now on hlo tensors can be traced. It imports Dynamo."""
    tracing.trace_package("torch_hlo")
    tracing.trace_as_plain(HloTensor)
    tracing.run_without_meta(PLACE.device)
    for function, constants in _through:
        tracing.trace_through(function, constants)
