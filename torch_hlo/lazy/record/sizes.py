"""Results of ops whose operands have sizes that were not seen before: the dtype is known from other
sizes, the size follows from a rule.

Programs whose sizes change from step to step (experts that compute what `nonzero` found for them,
sentences of any length) show new sizes to most of their ops. Running one on meta tensors, and small
stand-ins on the CPU to have dtypes judged, takes 0.2 to 1 ms. What is learned here from one such
run holds for all sizes of the same *kind*: operands of the same dtypes and ranks, dense and
row-major, and the same static arguments; a size is 1 in both or in neither. A rule that does not
know, as where sizes do not fit, leaves the op to PyTorch, which raises its own errors."""

from collections.abc import Callable

import torch
from torch import Tensor

from torch_hlo.pytorch.operators import OpOverload

from . import meta as metas
from .meta import Meta, Result, aten
from .tensor import HloTensor

Size = tuple[int, ...]


def predict(
    op: OpOverload, args: list, kwargs: dict, learned: dict[tuple, torch.dtype]
) -> Meta | None:
    """Metadata of the op's only result, or None if nothing is known about this kind of operands."""
    rule = rule_of(op)
    kind = rule and _kind(op, args, kwargs)
    dtype = learned.get(kind) if kind else None
    size = None if dtype is None else rule(*args, **kwargs)
    return None if size is None else metas.contiguous(size, dtype)


def learn(
    op: OpOverload,
    args: list,
    kwargs: dict,
    result: Result,
    learned: dict[tuple, torch.dtype],
) -> None:
    """Remember what PyTorch said, if it is what the rule says."""
    rule = rule_of(op)
    if rule is not None and result.form == 0 and rule(*args, **kwargs) == result.metas[0].size:
        kind = _kind(op, args, kwargs)
        meta = result.metas[0]
        if kind is not None and meta is metas.contiguous(meta.size, meta.dtype):
            learned[kind] = meta.dtype


def rule_of(op: OpOverload) -> Callable[..., Size | None] | None:
    """The function of the op's arguments that returns the size of its result, None where it cannot
    tell; None if the op has no rule."""
    if op not in _RULES:
        elementwise = (
            torch.Tag.pointwise in op.tags
            and torch.Tag.nondeterministic_seeded not in op.tags
            and len(op._schema.returns) == 1
        )
        _RULES[op] = _broadcast if elementwise else None
    return _RULES[op]


def _kind(op: OpOverload, args: list, kwargs: dict) -> tuple | None:
    """What the result's dtype depends on. None: an operand has gaps, other strides than row-major,
    or no elements."""
    kind: list = [op]
    for name, value in kwargs.items():
        kind.append(name)
        if not _describe(value, kind):
            return None
    return tuple(kind) if all([_describe(a, kind) for a in args]) else None


def _describe(value: object, kind: list) -> bool:
    if type(value) is HloTensor:
        meta = value._meta
        kind.append(meta.dtype)
        kind.append(tuple([n > 1 for n in meta.size]))
        return 0 not in meta.size and meta.stride == metas.row_major(meta.size)
    kind.append(type(value))
    if isinstance(value, (list, tuple)):
        kind.append(len(value))
        return all([_describe(v, kind) for v in value])
    if type(value) is not float:  # as in the cache of metadata: floats are inputs of programs
        kind.append(value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _size(x: Tensor) -> Size:
    return x._meta.size


def _broadcast(*args, **kwargs) -> Size | None:
    """Of the tensors among the arguments. PyTorch's choice of strides looks at sizes of 1 only, if
    operands are row-major."""
    sizes = [a._meta.size for a in (*args, *kwargs.values()) if type(a) is HloTensor]
    if any(type(a) is list for a in args) or not sizes:
        return None
    result = list(max(sizes, key=len))
    for size in sizes:
        for d in range(1, len(size) + 1):
            if result[-d] != size[-d]:
                if result[-d] == 1:
                    result[-d] = size[-d]
                elif size[-d] != 1:
                    return None
    return tuple(result)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Size | None:
    (*rows, k), (n, k_) = (
        _size(x),
        _size(weight) if len(_size(weight)) == 2 else (0, 0),
    )
    return (*rows, n) if k == k_ and (bias is None or _size(bias) == (n,)) else None


def _mm(x: Tensor, y: Tensor) -> Size | None:
    return (
        (_size(x)[0], _size(y)[1])
        if len(_size(x)) == len(_size(y)) == 2 and _size(x)[1] == _size(y)[0]
        else None
    )


def _bmm(x: Tensor, y: Tensor) -> Size | None:
    if len(_size(x)) != 3 or len(_size(y)) != 3:
        return None
    (b, m, k), (b_, k_, n) = _size(x), _size(y)
    return (b, m, n) if b == b_ and k == k_ else None


def _embedding(weight: Tensor, indices: Tensor, *rest, **options) -> Size:
    return (*_size(indices), *_size(weight)[1:])


def _like_first(x: Tensor, *rest, **options) -> Size:
    return _size(x)


def _index_select(x: Tensor, dim: int, index: Tensor) -> Size | None:
    size = _size(x)
    return (
        (*size[:dim], _size(index)[0], *size[dim + 1 :])
        if len(_size(index)) == 1 and 0 <= dim < len(size)
        else None
    )


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, **options) -> Size | None:
    return _size(x) if _index_select(x, dim, index) == _size(source) else None


def _index(x: Tensor, indices: list[Tensor]) -> Size | None:
    """Positions in the first dimensions, arrays of one size."""
    if any(type(i) is not HloTensor or _size(i) != _size(indices[0]) for i in indices):
        return None
    return (*_size(indices[0]), *_size(x)[len(indices) :])


def _index_put(
    x: Tensor,
    indices: list[Tensor],
    values: Tensor,
    accumulate: bool = False,
) -> Size | None:
    return _size(x) if _index(x, indices) == _size(values) else None


def _sum(x: Tensor, dims: list[int] | None = None, keepdim: bool = False, **options) -> Size | None:
    if not dims:
        return None
    size = _size(x)
    away = [d in dims or d - len(size) in dims for d in range(len(size))]
    return tuple([1 if gone else n for n, gone in zip(size, away) if keepdim or not gone])


_RULES: dict[OpOverload, Callable | None] = {
    aten.linear.default: _linear, aten.mm.default: _mm, aten.bmm.default: _bmm,
    aten.embedding.default: _embedding, aten.index_select.default: _index_select,
    aten.index_add.default: _index_add, aten.index.Tensor: _index,
    aten.index_put.default: _index_put, aten.sum.dim_IntList: _sum, aten.mean.dim: _sum,
    aten._softmax.default: _like_first, aten._log_softmax.default: _like_first,
    aten.empty_like.default: _like_first, aten.fill.Scalar: _like_first,
}  # fmt: skip
