"""View operations: how a view is computed from its base (recorded as nodes), and how a write
through it changes the base.

A `View` is one step of a chain that starts at the storage's value; `parent` is the step before it.
Views are functions of the *logical* arrays; strides are metadata. `as_strided`, which speaks of
memory, starts again from the storage in memory order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_hlo.hlo.ir import Shape
from torch_hlo.lowering.core import HLO_TO_TORCH, NO_KWARGS, TAPE, Node, Out, recorded
from torch_hlo.pytorch.operators import OpOverload

from . import meta as metas
from .meta import Meta, aten

LAZY_BITS = {aten._conj_physical.default: torch.conj, aten.neg.default: aten._neg_view.default}


def has_lazy_bits(view: View | None) -> bool:
    """Whether a tensor with this view is conjugated or negated without having been computed."""
    while view is not None:
        if view.op in LAZY_BITS:
            return True
        view = view.parent
    return False


def lazy_bits(view: View | None, target: Meta) -> list[OpOverload]:
    """How the tensor `target` with this view is conjugated or negated, which strides do not say.
    Raises NotImplementedError if not all of an element is."""
    found = []
    while view is not None:
        if view.op in LAZY_BITS:
            if view.base.dtype != target.hlo.dtype:
                raise NotImplementedError(
                    "as_strided of a conjugated or negated view of another dtype: call .clone()"
                    " first"
                )
            found.append(view.op)
        view = view.parent
    return found


class View:
    """`op(base, *args)` has the shapes `outs`; the base has the shape `base`. `form`: what stands
    on the tape for it."""

    __slots__ = ("parent", "op", "args", "outs", "form", "base")

    def __init__(
        self,
        parent: View | None,
        op,
        args: tuple,
        out: Shape,
        form: int,
        base: Shape,
    ) -> None:
        self.parent, self.op, self.args, self.outs, self.form, self.base = (
            parent,
            op,
            args,
            (out,),
            form,
            base,
        )

    def of(self, value) -> Out:
        """The view of a value of the base."""
        base = TAPE.base
        place = value.place - base
        return recorded(
            self.op,
            (value, *self.args),
            NO_KWARGS,
            self.outs,
            "",
            base,
            [self.form, place if place >= 0 else TAPE.put(value)],
        )

    def inverse(self, base: Out, value: Out) -> Out:
        """Value of the base after `value` has been written to the view."""
        return _INVERSES.get(self.op, _scatter)(self, base, value)


def _node(shape: Shape, op, *args, **kwargs) -> Out:
    return Out(Node(op, args, kwargs, (shape,)))


def _identity(view: View, base: Out, value: Out) -> Out:
    return value


def _reshape(view: View, base: Out, value: Out) -> Out:
    return _node(view.base, aten.view.default, value, list(view.base.dims))


def _slice_like(op: OpOverload) -> Callable[..., Any]:
    return lambda view, base, value: _node(view.base, op, base, value, *view.args)


def _same_op(op: OpOverload) -> Callable[..., Any]:
    return lambda view, base, value: _node(view.base, op, value, *view.args)


def _permute(view: View, base: Out, value: Out) -> Out:
    rank = view.base.rank
    inverse = [0] * rank
    for i, d in enumerate(view.args[0]):
        inverse[d % rank] = i
    return _node(view.base, aten.permute.default, value, inverse)


def _expand(view: View, base: Out, value: Out) -> Out:
    # Only idempotent writes (fill_) come here: every copy of an element holds the same value. Take
    # the first.
    shape = view.outs[0]
    lead = shape.rank - view.base.rank
    for d in range(shape.rank):
        if shape.dims[d] != 1 and (d < lead or view.base.dims[d - lead] != shape.dims[d]):
            shape = shape.with_dims([*shape.dims[:d], 1, *shape.dims[d + 1 :]])
            value = _node(shape, aten.slice.Tensor, value, d, 0, 1)
    return _reshape(view, base, value)


def _bitcast(view: View, base: Out, value: Out) -> Out:
    return _node(view.base, aten.view.dtype, value, HLO_TO_TORCH[view.base.dtype])


def _scatter(view: View, base: Out, value: Out) -> Out:
    """Any view that only selects elements: number the base's elements, look at the numbers through
    the view, scatter."""
    numbers = view.base.with_dtype("s64")
    flat = numbers.with_dims([metas.numel(view.base.dims)])
    shape = view.outs[0]
    count = metas.numel(shape.dims)
    x = _node(flat, aten.arange.start_step, 0, flat.dims[0], 1, dtype=torch.int64)
    x = _node(numbers, aten.view.default, x, list(numbers.dims))
    x = _node(shape.with_dtype("s64"), view.op, x, *view.args)
    x = _node(shape.with_dtype("s64").with_dims([count]), aten.view.default, x, [count])
    value = _node(shape.with_dims([count]), aten.view.default, value, [count])
    base = _node(view.base.with_dims(flat.dims), aten.view.default, base, list(flat.dims))
    return _reshape(view, base, _node(base.node.outs[0], aten.scatter.src, base, 0, x, value))


_INVERSES = {
    aten.view.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.t.default: _same_op(aten.t.default),
    aten.transpose.int: _same_op(aten.transpose.int),
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.select.int: _slice_like(aten.select_scatter.default),
    aten.slice.Tensor: _slice_like(aten.slice_scatter.default),
    aten.diagonal.default: _slice_like(aten.diagonal_scatter.default),
    aten.view_as_real.default: _same_op(aten.view_as_complex.default),
    aten.view_as_complex.default: _same_op(aten.view_as_real.default),
    aten._conj_physical.default: _same_op(aten._conj_physical.default),
    aten.neg.default: _same_op(aten.neg.default),
    aten.view.dtype: _bitcast,
}


def chain(parent: View | None, base: Shape, *steps: tuple) -> View | None:
    """Add steps `(op, args, out shape)` to a chain."""
    for op, args, out in steps:
        parent = View(parent, op, args, out, TAPE.form_of_view(op, args, out), base)
        base = out
    return parent


def on_host(base: Tensor, view: View | None) -> Tensor:
    """What a view is of a storage's value on the CPU."""
    if view is None:
        return base
    return HOST_OPS.get(view.op, view.op)(on_host(base, view.parent), *view.args)


def _strided_on_host(x: Tensor, *args) -> Tensor:
    x = x.contiguous()
    return aten.as_strided.default(x.clone() if x.storage_offset() else x, *args)


def bitcast_on_host(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.view(dtype)` of a row-major copy, whatever the strides of dimensions of size 1 or 0."""
    flat = x.clone(memory_format=torch.contiguous_format).reshape(-1).view(dtype)
    last = x.shape[-1] * x.element_size() // dtype.itemsize if x.dim() else 1
    return flat.reshape(*x.shape[:-1], last) if x.dim() else flat.reshape(())


# Views speak of logical arrays; on the host an earlier step may have left other strides.
HOST_OPS = {
    aten.view.default: aten.reshape.default,
    aten.as_strided.default: _strided_on_host,
    aten.view.dtype: bitcast_on_host,
    aten.view_as_complex.default: lambda x: torch.view_as_complex(
        x.clone(memory_format=torch.contiguous_format)  # of nothing, too, has to have strides
    ),
}


def restrided(view: View | None, storage_meta: Meta, target: Meta) -> View | None:
    """The chain to `target` by strides and offset, conjugated and negated as `view` is."""
    bits = [(op, (), target.hlo) for op in lazy_bits(view, target)]
    return chain(strided(storage_meta, target), target.hlo, *bits)


def strided(storage_meta: Meta, target: Meta) -> View | None:
    """The chain from a storage to the tensor `target` by strides and offset alone.

    Slices, reshapes and permutations where they suffice, `as_strided` of the flat memory otherwise.
    None if the storage itself is the target. The storage must be dense.
    """
    if target is storage_meta:
        return None
    order = metas.physical_order(storage_meta)
    shape = storage_meta.hlo
    steps: list[tuple] = []
    if order != tuple(range(len(order))):
        shape = shape.with_dims([shape.dims[d] for d in order])
        steps.append((aten.permute.default, (list(order),), shape))
    count = metas.numel(storage_meta.size)
    if shape.dims != (count,):
        shape = shape.with_dims([count])
        steps.append((aten.view.default, ([count],), shape))
    if target.dtype != storage_meta.dtype:
        # The memory seen as another type (view_as_real, view(dtype)): in a flat array the sizes
        # follow from the widths.
        have = storage_meta.dtype.itemsize
        want = target.dtype.itemsize
        count = count * have // want
        if count * want // have != shape.dims[0]:  # bytes are left over
            shape = shape.with_dims([count * want // have])
            steps.append((aten.slice.Tensor, (0, 0, shape.dims[0]), shape))
        shape = target.hlo.with_dims([count])
        steps.append((aten.view.dtype, (target.dtype,), shape))
    steps += _select(shape, target, count)
    return chain(None, storage_meta.hlo, *steps)


def _select(flat: Shape, target: Meta, count: int) -> list[tuple]:
    """Steps from `count` elements of flat memory to `target`."""
    general = [
        (
            aten.as_strided.default,
            (list(target.size), list(target.stride), target.offset),
            target.hlo,
        )
    ]
    n = metas.numel(target.size)
    order = metas.physical_order(metas.intern(target.size, target.stride, target.dtype))
    if order is None or not n:
        return general
    # A dense block of memory: a slice, a reshape, a permutation.
    steps = []
    shape = flat
    if n != count:
        shape = flat.with_dims([n])
        steps.append((aten.slice.Tensor, (0, target.offset, target.offset + n), shape))
    block = [target.size[d] for d in order]
    if tuple(block) != shape.dims:
        shape = flat.with_dims(block)
        steps.append((aten.view.default, (block,), shape))
    if order != tuple(range(len(order))):
        inverse = [0] * len(order)
        for i, d in enumerate(order):
            inverse[d] = i
        steps.append((aten.permute.default, (inverse,), target.hlo))
    return steps
