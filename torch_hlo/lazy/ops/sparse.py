"""Sparse tensors: a tensor without memory of its own, which holds the dense tensors of the device
that describe it. Each op on it is some ops on those.

    x.layout is torch.sparse_coo: x.parts = (indices, values)
    x.layout is torch.sparse_csr: x.parts = (crow_indices, col_indices, values); csc likewise

How many elements `coalesce` and `to_sparse` leave follows from values, which they read: from the
CPU, without cutting a step, if the indices came from there. What is not here refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_hlo.pytorch import operators, participants, tensors
from torch_hlo.pytorch.operators import OpOverload
from torch_hlo.pytorch.registration import PLACE
from torch_hlo.tables import entry

from ..record import (
    aten,
    conditions,
    decompose,
    fallback,
    handlers,
    nested,
    recording,
    to_cpu,
)

COO = torch.sparse_coo
CSR = torch.sparse_csr
CSC = torch.sparse_csc
_NAMES = {
    COO: ("indices", "values"),
    CSR: ("crow_indices", "col_indices", "values"),
    CSC: ("ccol_indices", "row_indices", "values"),
}
_RULES: dict[OpOverload, Callable] = {}


class HloSparse(Tensor):
    """A sparse tensor of the "hlo" device. Users see it as a `torch.Tensor` with its layout."""

    parts: tuple[Tensor, ...]
    merged: bool  # coalesced: no two elements are at the same place, and they are sorted
    form: torch.layout
    __torch_function__ = participants.disabled_torch_function

    @staticmethod
    def __torch_dispatch__(op: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(op)
        if rule is None and (operators.is_composite(op) or "::_foreach_" in op._schema.name):
            rule = decompose.composite(op)
        if rule is None:
            raise NotImplementedError(
                f"{op} of sparse tensors is not there on the hlo device: use .to_dense(), or do it"
                f" on the CPU (.cpu()). It was given {fallback.describe(args, kwargs)}"
            )
        return nested(rule, args, kwargs)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        text = tensors.tensor_text(self, tensor_contents)
        # the name is longer than that of a plain tensor, by which PyTorch indents
        return text.replace("HloSparse(", "tensor(", 1).replace("\n   ", "\n")

    def __reduce_ex__(self, protocol: Any) -> tuple:
        state = (*self.parts, self.shape, self.merged)
        return tensors.rebuild_sparse, (self.form, state if self.form is COO else state[:-1])


def _new(parts: Sequence[Tensor], size: Sequence[int], form: torch.layout, merged: bool) -> Any:
    if form not in _NAMES or form is not COO and len(size) != 2:
        raise NotImplementedError(
            f"the hlo device has sparse tensors of layout coo, and matrices of csr and csc, not a"
            f" {form} tensor of shape {[*size]}: use .to_sparse_coo() or .to_dense()"
        )
    options = {"dtype": parts[-1].dtype, "layout": form, "device": PLACE.device}
    x = tensors.make_wrapper(HloSparse, tuple(size), dispatch_layout=form is not COO, **options)
    x.parts = tuple(parts)
    x.form = form
    x.merged = merged
    return x


def _coo(indices: Tensor, values: Tensor, size: Sequence[int], merged: bool = False) -> Any:
    return _new((indices, values), size, COO, merged)


def _like(x: HloSparse, values: Tensor, merged: bool = False) -> Any:
    """Other values at the same places."""
    return _new((*x.parts[:-1], values), x.shape, x.form, merged or x.merged)


def _rule(*ops: OpOverload) -> Callable:
    """Register what is done where a sparse tensor is among the arguments."""
    return entry(_RULES, ops)


def _makes(*ops: OpOverload) -> Callable:
    """Register what makes a sparse tensor of dense ones, too."""

    def register(function: Callable) -> Callable:
        handlers.handles(*ops)(lambda args, kwargs: nested(function, args, kwargs))
        return _rule(*ops)(function)

    return register


# ---- making


@_makes(aten._sparse_coo_tensor_with_dims_and_tensors.default)
def _from_parts(sparse, dense, size, indices, values, is_coalesced=None, dtype=None, **options):
    values = values.to(PLACE.device, dtype)
    return _coo(indices.to(PLACE.device, torch.int64), values, size, bool(is_coalesced))


@_makes(
    aten._sparse_compressed_tensor_unsafe.default,
    aten.sparse_compressed_tensor.comp_plain_value_size,
)
def _from_compressed(compressed, plain, values, size, dtype=None, layout=CSR, **options):
    parts = [t.to(PLACE.device) for t in (compressed, plain, values)]
    return _new((*parts[:2], parts[2].to(dtype)), size, layout, True)


def _empty_coo(sparse: int, dense: int, size: Sequence[int], dtype=None, **options: Any) -> Any:
    values = torch.empty(0, *size[sparse:], dtype=dtype, device=PLACE.device)
    return _coo(torch.empty(sparse, 0, dtype=torch.int64, device=PLACE.device), values, size, True)


def _empty(size: Sequence[int], layout: torch.layout = COO, **options: Any) -> Any:
    empty = _empty_coo(len(size), 0, size, **options)
    return _compress(empty, layout)


@_makes(aten._to_sparse.sparse_dim)
def _sparse_dim(x, sparse_dim):
    if isinstance(x, HloSparse):
        return _expanded(x)
    known = x.ne(0)
    if sparse_dim < x.dim():
        known = known.flatten(sparse_dim).any(-1)
    places = known.nonzero()
    return _coo(places.t(), x[places.unbind(1)], x.shape, True)


@_makes(aten._to_sparse.default)
def _to_sparse(x, *, layout=None, blocksize=None, dense_dim=None):
    return _compress(_sparse_dim(x, x.dim() - (dense_dim or 0)), layout or COO)


_makes(aten._to_sparse_csr.default)(lambda x, _=None: _to_sparse(x, layout=CSR))
_makes(aten._to_sparse_csc.default)(lambda x, _=None: _to_sparse(x, layout=CSC))


def _compress(x: HloSparse, layout: torch.layout) -> Any:
    if x.form is layout:
        return x
    across = layout is CSC
    indices, values = _coalesce(_transpose(x, 0, 1) if across else x).parts
    rows = torch.arange(x.shape[across] + 1, device=PLACE.device)
    compressed = torch.searchsorted(indices[0].contiguous(), rows)
    return _new((compressed, indices[1], values), x.shape, layout, True)


# ---- parts


def _expanded(x: HloSparse) -> Any:
    """A tensor of layout csr or csc as one of layout coo."""
    if x.form is COO:
        return x
    compressed, plain, values = x.parts
    count = torch.arange(values.shape[0], device=PLACE.device)
    pair = [torch.searchsorted(compressed.long(), count, right=True) - 1, plain.long()]
    ordered = x.form is CSR
    return _coo(torch.stack(pair if ordered else pair[::-1]), values, x.shape, ordered)


def _flat(x: HloSparse, without: Sequence[int] = ()) -> tuple[Tensor, int]:
    """The place of each element, counted through the sparse dimensions but these, and how many
    there are."""
    indices = x.parts[0]
    flat = indices.new_zeros(indices.shape[1])
    count = 1
    for d, index in enumerate(indices):
        if d not in without:
            flat = flat * x.shape[d] + index
            count *= x.shape[d]
    return flat, count


@_rule(aten._coalesce.default)
def _coalesce(x):
    values = x.parts[-1]
    if x.merged or values.shape[0] < 2:
        return _like(x, values, True)
    flat, _ = _flat(x)
    known = conditions.known(flat)
    kept, place = torch.unique(to_cpu([flat])[0] if known is None else known, return_inverse=True)
    sums = values.new_zeros((len(kept), *values.shape[1:])).index_add_(0, place.to(flat), values)
    places = torch.unravel_index(kept, x.shape[: x.sparse_dim()])
    return _coo(torch.stack(places).to(flat), sums, x.shape, True)


def _part(name: str) -> Callable:
    plain = name.removeprefix("_")

    def part(x: HloSparse) -> Tensor:
        names = _NAMES[x.form]
        if plain not in names:
            raise RuntimeError(f"{name} of a tensor of layout {x.form}, which has {names}")
        if name is plain and not x.merged:
            raise RuntimeError(f"{name} of an uncoalesced tensor: call .coalesce() first")
        return x.parts[names.index(plain)].detach()

    return part


_RULES |= {
    getattr(aten, name).default: _part(name)
    for name in ("_indices", "_values", *_NAMES[COO], *_NAMES[CSR], *_NAMES[CSC])
}
_RULES |= {
    aten._nnz.default: lambda x: x.parts[-1].shape[0],
    aten.sparse_dim.default: lambda x: x.parts[0].shape[0] if x.form is COO else 2,
    aten.dense_dim.default: lambda x: x.parts[-1].dim() - 1,
    aten.is_coalesced.default: lambda x: x.merged,
    torch.ops.prim.layout.default: lambda x: x.form,
    aten.detach.default: lambda x: _like(x, x.parts[-1]),
    aten.t.default: lambda x: _transpose(x, 0, x.dim() - 1),
    aten.neg.default: lambda x: _like(x, -x.parts[-1]),
    aten.sum.default: lambda x, **options: x.parts[-1].sum(**options),
}


@_rule(aten._coalesced_.default)
def _call_coalesced(x, merged):
    x.merged = merged
    return x


@_rule(aten.clone.default)
def _clone(x, memory_format=None):
    return _new([t.clone() for t in x.parts], x.shape, x.form, x.merged)


@_rule(aten._to_copy.default)
def _to_copy(x, dtype=None, device=None, **options):
    if recording.on_device(device):
        return _like(x, x.parts[-1].to(dtype or x.dtype, copy=True))
    parts = [t.to(device) for t in x.parts]
    parts[-1] = parts[-1].to(dtype)
    if x.form is COO:
        return torch.sparse_coo_tensor(*parts, x.shape, is_coalesced=x.merged)
    return torch.sparse_compressed_tensor(*parts, x.shape, layout=x.form)


def _put(x: HloSparse, new: HloSparse) -> HloSparse:
    x.parts = (*new.parts[:-1], new.parts[-1].to(x.dtype))
    x.merged = new.merged
    return x


@_rule(aten.copy_.default, aten.copy_sparse_to_sparse_.default)
def _copy(x, source, non_blocking=False):
    if source.layout is not x.layout or source.shape != x.shape:
        raise RuntimeError(
            f"copy_ from {source.layout} {[*source.shape]} to {x.layout} {[*x.shape]}: both have to"
            " be of one layout and shape"
        )
    if not isinstance(x, HloSparse):
        return x.copy_(source.to(x.device))
    coo = x.form is COO
    parts = [getattr(source, "_" * coo + n)() for n in _NAMES[x.form]]
    parts = [t.to(PLACE.device, copy=True) for t in parts]
    return _put(x, _new(parts, x.shape, x.form, not coo or source.is_coalesced()))


@_rule(aten.zero_.default)
def _zero(x):
    if x.form is not COO:
        return _put(x, _like(x, torch.zeros_like(x.parts[-1])))
    return _put(x, _coo(x.parts[0][:, :0], x.parts[1][:0], x.shape, True))


@_rule(aten.empty_like.default, aten.zeros_like.default)
def _zeros_like(x, *, dtype=None, device=None, layout=None, **options):
    new = _to_copy(x, dtype, device)
    return (new if layout in (None, x.form) else new.to_dense()).zero_()


@_rule(aten._to_dense.default)
def _to_dense(x, dtype=None, masked_grad=None):
    return _add_to(torch.zeros(x.shape, dtype=dtype or x.dtype, device=PLACE.device), x)


@_rule(aten.transpose.int)
def _transpose(x, a, b):
    order = list(range(x.dim()))
    order[a], order[b] = order[b], order[a]
    size = [x.shape[d] for d in order]
    if x.form is not COO:
        return _new(x.parts, size, CSC if x.form is CSR else CSR, True)
    if x.dense_dim():
        raise NotImplementedError(
            f"transpose of a sparse tensor {[*x.shape]} with dense dimensions: use .to_dense()"
        )
    return _coo(x.parts[0][order], x.parts[1], size)


# ---- arithmetic


def _add_to(dense: Tensor, x: HloSparse, alpha: Any = 1) -> Tensor:
    """`dense + alpha * x`."""
    x = _expanded(x)
    flat, count = _flat(x)
    values = x.parts[1].to(dense.dtype)
    rows = dense.expand(x.shape).reshape(count, *values.shape[1:])
    return rows.index_add(0, flat, values if alpha == 1 else values * alpha).view(x.shape)


@_rule(aten.add.Tensor)
def _add(a, b, alpha=1):
    if not isinstance(b, Tensor):
        raise RuntimeError(f"a number, {b}, is not added to a sparse tensor: use .to_dense() on it")
    if not isinstance(b, HloSparse):
        return _add(b if alpha == 1 else b * alpha, a)
    dtype = torch.result_type(a.parts[-1] if isinstance(a, HloSparse) else a, b.parts[-1])
    if not isinstance(a, HloSparse):
        return _add_to(a.to(dtype), b, alpha)
    if a.shape != b.shape:
        raise RuntimeError(f"add of sparse tensors: {[*a.shape]} and {[*b.shape]} are different")
    x = _expanded(a)
    y = _expanded(b)
    values = torch.cat([x.parts[1].to(dtype), y.parts[1].to(dtype) * alpha])
    both = _coo(torch.cat([x.parts[0], y.parts[0]], 1), values, x.shape)
    return _compress(_coalesce(both) if x.merged and y.merged else both, a.form)


@_rule(aten.sub.Tensor)
def _sub(a, b, alpha=1):
    return _add(a, b, -alpha)


def _scaled(op: Callable) -> Callable:
    """Product or quotient with a number, or elementwise with a tensor, of which only a factor may
    be sparse."""

    def function(x: Any, y: Any, _: Any = 1) -> Tensor:
        if not isinstance(x, HloSparse) and op is torch.mul:
            x, y = y, x
        if op is torch.mul and isinstance(y, HloSparse):
            y = _to_dense(y)
        if not isinstance(x, HloSparse) or isinstance(y, HloSparse):
            raise NotImplementedError(
                f"{op.__name__} by a sparse tensor of shape {[*y.shape]} is not there on the hlo"
                " device: use .to_dense() on it"
            )
        number = not isinstance(y, Tensor) or y.dim() == 0
        return _like(x, op(x.parts[-1], y if number else _taken(y, x)))

    return function


def _taken(dense: Tensor, x: HloSparse) -> Tensor:
    """The elements of a dense tensor at the places of a sparse one."""
    flat, count = _flat(_expanded(x))
    return dense.expand(x.shape).reshape(count, *x.parts[-1].shape[1:]).index_select(0, flat)


def _in_place(op: Callable) -> Callable:
    def function(x: Tensor, *args: Any, **options: Any) -> Tensor:
        new = op(x, *args, **options)
        if not torch.can_cast(new.dtype, x.dtype):
            raise RuntimeError(
                f"result type {new.dtype} can't be cast to the desired output type {x.dtype}"
            )
        if not isinstance(x, HloSparse):
            return x.copy_(_to_dense(new) if isinstance(new, HloSparse) else new)
        if not isinstance(new, HloSparse):
            raise RuntimeError(f"a dense result does not fit into a tensor of layout {x.layout}")
        return _put(x, new)

    return function


for _name, _function in {"mul": _scaled(torch.mul), "div": _scaled(torch.div)}.items():
    for _kind in ("Tensor", "Scalar"):
        _RULES[getattr(getattr(aten, _name), _kind)] = _function
        _RULES[getattr(getattr(aten, _name + "_"), _kind)] = _in_place(_function)
_RULES |= {
    aten.add_.Tensor: _in_place(_add),
    aten.sub_.Tensor: _in_place(_sub),
    aten.sparse_mask.default: lambda x, mask: _like(
        mask, _taken(_to_dense(x) if isinstance(x, HloSparse) else x, mask)
    ),
}


# functions of one number that are zero at zero
_ZERO_AT_ZERO = (
    "abs asin asinh atan atanh ceil conj_physical deg2rad erf erfinv expm1 floor frac isinf isnan"
    " log1p nan_to_num rad2deg relu round sgn sign sin sinh sqrt tan tanh trunc"
)


def _of_elements(op: Callable) -> Callable:
    def function(x: HloSparse, *args: Any, **options: Any) -> Tensor:
        x = _coalesce(x)
        return _like(x, op(x.parts[-1], *args, **options))

    return function


for _name in _ZERO_AT_ZERO.split():
    _function = _of_elements(getattr(torch, _name))
    _RULES[getattr(aten, _name).default] = _function
    if not _name.startswith("is"):
        _RULES[getattr(aten, _name + "_").default] = _in_place(_function)


@_rule(aten.pow.Tensor_Scalar)
def _pow(x, exponent):
    if exponent == 0:
        raise RuntimeError("pow of a sparse tensor: the zeroth power is dense: use .to_dense()")
    return _of_elements(torch.pow)(x, exponent)


# ---- reductions


@_rule(aten.sum.dim_IntList)
def _sum_along(x, dim, keepdim=False, *, dtype=None):
    if keepdim or x.form is not COO:
        raise NotImplementedError(
            f"sum of a {x.form} tensor with keepdim={keepdim}: use .to_sparse_coo() or .to_dense()"
        )
    values = x.parts[1]
    y = _sum(_like(x, values.to(dtype or values.new_empty(0).sum().dtype)), dim or ())
    return _coalesce(y) if isinstance(y, HloSparse) else y


@_rule(aten._sparse_sum.dim)
def _sum(x, dims):
    x = _expanded(x)
    for d in sorted((d % x.dim() for d in dims), reverse=True):
        places, values = x.parts
        first = len(places)
        size = [n for e, n in enumerate(x.shape) if e != d]
        if d >= first:
            x = _coo(places, values.sum(d - first + 1), size, x.merged)
        elif first > 1:
            x = _coo(places[[e for e in range(first) if e != d]], values, size)
        else:
            return values.sum(0)
    return x


@_rule(aten._sparse_sum_backward.default)
def _sum_gradient(grad, x, dims):
    x = _coalesce(_expanded(x))
    dims = [d % x.dim() for d in dims]
    flat, count = _flat(x, dims)
    values = x.parts[1]
    inner = [1 if d in dims else x.shape[d] for d in range(len(x.parts[0]), x.dim())]
    return _like(x, grad.to_dense().reshape(count, *inner)[flat].expand_as(values))


def _reduced(x: HloSparse, values: Tensor, dim: int, kind: str) -> Tensor:
    """The "sum" or "amax" of `values` along a dimension of `x`, for each of its elements."""
    dense = dim % x.dim() - x.sparse_dim()
    if dense >= 0:
        return getattr(values, kind)(dense + 1, keepdim=True)
    flat, count = _flat(x, [dim % x.dim()])
    place = flat.view(-1, *(1,) * (values.dim() - 1)).expand_as(values)
    start = values.new_zeros(count, *values.shape[1:])
    return start.scatter_reduce(0, place, values, kind, include_self=False)[flat]


@_rule(aten._sparse_log_softmax.default)
def _log_softmax(x, dim, half_to_float):
    x = _coalesce(_expanded(x))
    shifted = x.parts[1] - _reduced(x, x.parts[1], dim, "amax")
    return _like(x, shifted - _reduced(x, shifted.exp(), dim, "sum").log())


@_rule(aten._sparse_softmax.default)
def _softmax(*args):
    logs = _log_softmax(*args)
    return _like(logs, logs.parts[1].exp())


def _softmax_gradient(grad, y, dim, x, of_logs=False):
    values = y.parts[1]
    grads = _taken(grad.to_dense(), y)
    weights = values.exp() if of_logs else values
    total = _reduced(y, grads if of_logs else grads * weights, dim, "sum")
    return _like(y, grads - weights * total if of_logs else (grads - total) * weights)


_RULES |= {
    aten._sparse_softmax_backward_data.default: _softmax_gradient,
    aten._sparse_log_softmax_backward_data.default: partial(_softmax_gradient, of_logs=True),
}


@_rule(aten.index_select.default)
def _index_select(x, dim, index):
    dim %= x.dim()
    first = x.sparse_dim()
    size = list(x.shape)
    size[dim] = len(index)
    places, values = _expanded(x).parts
    if dim >= first:
        return _coo(places, values.index_select(dim - first + 1, index), size, x.merged)
    ordered, order = places[dim].sort()
    begin = torch.searchsorted(ordered, index)
    counts = torch.searchsorted(ordered, index, right=True) - begin
    rows = torch.repeat_interleave(counts)
    nth = torch.arange(len(rows), device=PLACE.device)
    found = order[(begin - counts.cumsum(0) + counts)[rows] + nth]
    taken = places[:, found].index_copy(0, index.new_tensor([dim]), rows[None])
    return _coo(taken, values[found], size)


@_rule(aten.cat.default)
def _cat(xs, dim=0):
    dim %= xs[0].dim()
    others = [(x.layout, x.sparse_dim(), [*x.shape[:dim], *x.shape[dim + 1 :]]) for x in xs]
    if any(other != others[0] for other in others) or dim >= others[0][1]:
        raise NotImplementedError(
            f"cat along {dim} needs sparse tensors of layout coo that are equal in all other"
            f" dimensions, and sparse in this: use .to_dense(). {fallback.describe((xs,), {})}"
        )
    places = []
    size = [*xs[0].shape]
    size[dim] = 0
    for x in xs:
        place = x.parts[0]
        places.append(torch.cat([place[:dim], place[dim : dim + 1] + size[dim], place[dim + 1 :]]))
        size[dim] += x.shape[dim]
    return _coo(torch.cat(places, 1), torch.cat([x.parts[1] for x in xs]), size)


# ---- products


@_rule(aten.mm.default, aten.mv.default, aten._sparse_sparse_matmul.default)
def _product(a, b):
    if not isinstance(a, HloSparse):
        return _product(_transpose(b, 0, 1), a.t()).t()
    if isinstance(b, HloSparse):
        return _to_sparse(_product(a, _to_dense(b)), layout=a.form)
    if a.dim() != 2 or a.shape[1] != b.shape[0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({[*a.shape]} and {[*b.shape]})"
        )
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected both matrices of one dtype, but got {a.dtype} and {b.dtype}")
    (rows, columns), values = _expanded(a).parts
    parts = b.index_select(0, columns) * values.view(-1, *(1,) * (b.dim() - 1))
    return b.new_zeros((a.shape[0], *b.shape[1:])).index_add_(0, rows, parts)


@_rule(aten.addmm.default, aten._sparse_addmm.default, aten.addmv.default)
def _addmm(x, a, b, *, beta=1, alpha=1):
    product = _product(a, b) * alpha
    return product if beta == 0 else product + x * beta


@_rule(aten.sparse_sampled_addmm.default)
def _sampled(x, a, b, *, beta=1, alpha=1):
    rows, columns = _expanded(x).parts[0]
    dots = (a.index_select(0, rows) * b.t().index_select(0, columns)).sum(1)
    return _like(x, dots * alpha + x.parts[-1] * beta)


_dense_bag = recording.recorder(aten._embedding_bag_backward.default)


@handlers.handles(aten._embedding_bag_backward.default)
def _bag_gradient(args: tuple, kwargs: dict) -> Any:
    """The gradient of embedding_bag's weight."""
    grad, indices, offsets, bag, sizes, maximum, rows, by_frequency, mode, sparse, *rest = args
    if not sparse or PLACE.name == "xla":
        return _dense_bag((*args[:9], False, *rest), kwargs)
    args = (grad, indices, offsets, bag, sizes, rows, by_frequency, mode, *rest)
    return nested(aten._embedding_bag_sparse_backward.default, args, kwargs)


def register(library: torch.library.Library) -> None:
    """Register what makes sparse tensors of nothing, with PyTorch's dispatcher (which has no name
    for sparse tensors of the device "xla")."""
    if PLACE.name == "xla":
        return
    for kind in ("Sparse", "SparseCsr"):
        library.impl("empty.memory_format", _empty, kind + PLACE.key)
    library.impl("_sparse_coo_tensor_with_dims", _empty_coo, "Sparse" + PLACE.key)
