"""Gradients that a captured function drops before it makes new ones.

PyTorch frees them at once; a graph's bytecode drops them only when the graph has run, so for a
moment there would be two of each. A graph says which it drops (`release`), and a launch writes new
ones over those that nobody else holds."""

import functools
from collections.abc import Sequence
from sys import getrefcount

import torch

from torch_hlo.lazy.record import Array, HloTensor, Meta, fresh, meta as metas, session
from torch_hlo.pytorch import steps
from torch_hlo.pytorch.tensors import use_count

Holders = tuple[int, int, int]  # of a gradient in Python and in C++, of its storage


def release(parameters: Sequence[HloTensor]) -> None:
    """In a graph: the gradients that these had before the graph are dropped by it."""
    if not steps.is_fake(parameters[0]):
        session.engine().releasing(parameters)


def reused(pairs: Sequence[tuple[int, int, Meta]], args: Sequence) -> dict[int, HloTensor]:
    """Gradients of parameters that nobody else holds, for results: `pairs` of the positions of a
    parameter in `args` and of the result's storage, and the result's metadata."""
    alone = _alone()
    found = {}
    for argument, at, meta in pairs:
        gradient = args[argument].grad
        if type(gradient) is not HloTensor or getrefcount(gradient) != alone[0]:
            continue
        storage = gradient._storage
        if getrefcount(storage) != alone[2] or use_count(gradient) != alone[1]:
            continue
        if (
            gradient._meta is meta
            and storage.meta is meta
            and gradient._view is None
            and storage.sharding is None
            and type(storage.value) is Array
        ):
            found[at] = gradient
    return found


@functools.cache
def _alone() -> Holders:
    """The counts of a gradient that only its parameter holds."""
    meta = metas.contiguous((1,), torch.float32)
    parameter = fresh(meta, Array(meta.hlo, None)).requires_grad_()
    parameter.grad = fresh(meta, Array(meta.hlo, None))
    gradient = parameter.grad
    storage = gradient._storage
    return getrefcount(gradient), use_count(gradient), getrefcount(storage)
