"""View ops: new metadata over the same storage, and a step of the chain that leads to the value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from torch_hlo.hlo.ir import Shape
from torch_hlo.lowering.core import TAPE
from torch_hlo.pytorch import plain_sizes
from torch_hlo.pytorch.operators import OpOverload

from ..record import (
    TABLE,
    Handler,
    Meta,
    View,
    aten,
    blank,
    call,
    checks,
    decompose,
    handles,
    in_inference_mode,
    make,
    meta as metas,
    nested,
)
from ..record.views import chain

# ---- views


# for each result what to add to the chain: (op, arguments, shape), or None
Steps = list[tuple | None]


def outside_inference_mode(handler: Handler, args: tuple, kwargs: dict):
    """A view, made under inference_mode, of a tensor that was made outside: like that tensor it has
    a version counter and may be written."""
    with torch.inference_mode(False):
        return handler(args, kwargs)


def maker(op: OpOverload) -> Handler | None:
    """The handler of an op whose results share memory with its argument."""
    if op in VIEWS:
        return viewer(op)
    return aliasing(op) if any(r.alias_info for r in op._schema.returns) else None


def aliasing(op: OpOverload) -> Handler:
    """Handler of an op that may return a view and is made of other ops (`reshape`, which arrives
    under inference_mode)."""
    kernel = decompose.composite(op)
    if kernel is None:
        return partial(_refuse, op)
    return lambda args, kwargs: nested(kernel, args, kwargs)


def _refuse(op: OpOverload, args: tuple, kwargs: dict) -> None:
    checks.admit_all([args, kwargs])  # a nested tensor knows more of them
    raise NotImplementedError(
        f"the hlo device does not know the view operation {op}; use an operation that copies"
    )


class ViewRule:
    """What a view op does to tensors of one Meta: the resulting metas and, for each, the step of
    the chain; `views` are those of tensors that are no views."""

    __slots__ = ("metas", "steps", "views", "many")

    def __init__(
        self, metas: list[Meta], steps: list[tuple | None], base: Shape, many: bool
    ) -> None:
        self.metas, self.steps, self.many = (
            metas,
            [step and (*step, base) for step in steps],
            many,
        )
        self.views = [step and View(None, *step) for step in self.steps]


def viewer(op: OpOverload) -> Handler:
    """Handler of a view op: `op(self, *args)`."""
    names = [a.name for a in op._schema.arguments]
    cache: dict[tuple, ViewRule] = {}
    plan = VIEWS[op]
    lists = sum("List" in str(a.type) for a in op._schema.arguments)  # come first

    def view(args: tuple, kwargs: dict) -> torch.Tensor:
        x = args[0]
        if in_inference_mode() and not x.is_inference():
            return outside_inference_mode(view, args, kwargs)
        if kwargs:
            args = (*args, *[kwargs[n] for n in names[len(args) :] if n in kwargs])
        meta = x._meta
        key = (
            (meta, *args[1:])
            if not lists
            else (meta, tuple(args[1]), *args[2:])
            if lists == 1
            else (meta, *map(tuple, args[1:]))
        )
        rule = cache.get(key)
        if rule is None:
            rule = cache[key] = make_rule(op, plan, meta, args[1:])
        base = x._storage
        parent = x._view
        if not rule.many:
            t = blank(rule.metas[0])
            t._storage = base
            if parent is None:
                t._view = rule.views[0]
            else:
                step = rule.steps[0]
                t._view = parent if step is None else View(parent, *step)
            return t
        if parent is None:
            return [make(m, base, v) for m, v in zip(rule.metas, rule.views)]
        return [make(m, base, View(parent, *s)) for m, s in zip(rule.metas, rule.steps)]

    return view


@plain_sizes.answers()
def make_rule(op: OpOverload, plan: Callable[..., Steps], meta: Meta, args: tuple) -> ViewRule:
    """Run the view on a meta tensor for its metadata; `plan` says what to record."""
    result = op(metas.meta_tensor(meta), *args)
    many = isinstance(result, (list, tuple))
    found = [metas.of(t) for t in (result if many else [result])]
    steps = [step and (*step, TAPE.form_of_view(*step)) for step in plan(meta, args, found)]
    if not many and found[0].hlo == meta.hlo and op in _RESHAPES:
        steps = [None]  # nothing changes but strides
    return ViewRule(found, steps, meta.hlo, many)


def _as_is(op: OpOverload, meta: Meta, args: tuple, found: list[Meta]) -> Steps:
    return [
        (
            op,
            tuple(list(a) if isinstance(a, (tuple, list)) else a for a in args),
            found[0].hlo,
        )
    ]


def _to_size(op: OpOverload, meta: Meta, args: tuple, found: list[Meta]) -> Steps:
    return [(op, (list(found[0].size),), found[0].hlo)]


def _as_slices(meta: Meta, args: tuple, found: list[Meta]) -> Steps:
    dim = (args[1] if len(args) > 1 else 0) % len(meta.size)
    steps = []
    start = 0
    for m in found:
        steps.append((aten.slice.Tensor, (dim, start, start + m.size[dim]), m.hlo))
        start += m.size[dim]
    return steps


def _as_selects(meta: Meta, args: tuple, found: list[Meta]) -> Steps:
    dim = (args[0] if args else 0) % len(meta.size)
    return [(aten.select.int, (dim, i), m.hlo) for i, m in enumerate(found)]


def _as_slice(meta: Meta, args: tuple, found: list[Meta]) -> Steps:
    dim, start, stop, step = (*args, *(0, None, None, 1)[len(args) :])
    dim %= len(meta.size)
    size = meta.size[dim]
    start = min(max(start + size if start < 0 else start, 0), size) if start is not None else 0
    length = found[0].size[dim]
    stop = min(start + (length - 1) * step + 1, size) if length else start
    if length == size and step == 1:
        return [None]
    return [
        (
            aten.slice.Tensor,
            (dim, start, stop) if step == 1 else (dim, start, stop, step),
            found[0].hlo,
        )
    ]


def _as_select(meta: Meta, args: tuple, found: list[Meta]) -> Steps:
    dim, index = args
    dim %= len(meta.size)
    return [(aten.select.int, (dim, index % meta.size[dim]), found[0].hlo)]


_AS_VIEW = (
    aten.view.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
_AS_THEY_ARE = (
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.diagonal.default,
    aten.unfold.default,
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.view.dtype,
)
_RESHAPES = {*_AS_VIEW, aten.expand.default, aten.slice.Tensor}
VIEWS: dict[OpOverload, Callable] = {
    **dict.fromkeys(_AS_VIEW, partial(_to_size, aten.view.default)),
    aten.expand.default: partial(_to_size, aten.expand.default),
    **{op: partial(_as_is, op) for op in _AS_THEY_ARE},
    aten.select.int: _as_select,
    aten.slice.Tensor: _as_slice,
    aten.split.Tensor: _as_slices,
    aten.split_with_sizes.default: _as_slices,
    aten.unbind.int: _as_selects,
}


@handles(aten._unsafe_view.default)
def unsafe_view(args: tuple, kwargs: dict):
    """A view whose schema does not say so: `kron(out=)` writes through it."""
    return call(aten.view.default, *args)


@handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def detach(args: tuple, kwargs: dict):
    x = args[0]
    if in_inference_mode() and not x.is_inference():
        return outside_inference_mode(detach, args, kwargs)
    t = blank(x._meta)
    t._storage = x._storage
    t._view = x._view
    return t


def _bit_view(op: OpOverload) -> Handler:
    # conj() and _neg_view() are views whose bit other devices keep in the tensor; here the values
    # are computed.
    def view(args: tuple, kwargs: dict) -> torch.Tensor:
        x = args[0]
        if in_inference_mode() and not x.is_inference():
            return outside_inference_mode(view, args, kwargs)
        return make(x._meta, x._storage, chain(x._view, x._meta.hlo, (op, (), x._meta.hlo)))

    return view


TABLE[aten._conj.default] = _bit_view(aten._conj_physical.default)
TABLE[aten._neg_view.default] = _bit_view(aten.neg.default)
