"""Gradients that a captured function drops before it makes new ones.

PyTorch frees them at once; a graph's bytecode drops them only when the graph has run, so for a
moment there would be two of each. A graph says which it drops (`release`), and a launch writes new
ones over those that nobody else holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from sys import getrefcount

import torch

from torch_hlo.lazy.record import meta as metas
from torch_hlo.lazy.record import session
from torch_hlo.lazy.record.storage import Array
from torch_hlo.lazy.record.tensor import HloTensor, fresh
from torch_hlo.pytorch import steps
from torch_hlo.pytorch.tensors import use_count

Holders = tuple[int, int, int]  # of a gradient in Python and in C++, of its storage


def release(parameters: Sequence[HloTensor]) -> None:
    """In a graph: the gradients that these had before the graph are dropped by it."""
    if not steps.is_fake(parameters[0]):
        session.engine().releasing(parameters)


def free_gradients(parameters: Sequence[HloTensor], used: set[int]) -> list[HloTensor]:
    """Gradients of these parameters that nobody holds but they, of storages that are not in `used`
    (by id)."""
    alone, found = _alone(), []
    for parameter in parameters:
        gradient = parameter.grad
        if (
            type(gradient) is HloTensor
            and gradient._view is None
            and id(gradient._storage) not in used
            and type(gradient._storage.value) is Array
            and gradient._storage.sharding is None
            and _holders(gradient) == alone
        ):
            found.append(gradient)
    return found


def _holders(gradient: HloTensor) -> Holders:
    return getrefcount(gradient), use_count(gradient), getrefcount(gradient._storage)


@functools.cache
def _alone() -> Holders:
    """The counts of a gradient that only its parameter holds."""
    meta = metas.contiguous((1,), torch.float32)
    parameter = fresh(meta, Array(meta.hlo, None)).requires_grad_()
    parameter.grad = fresh(meta, Array(meta.hlo, None))
    gradient = parameter.grad
    return _holders(gradient)
