"""Metadata of an op's results: by running it on meta tensors, by a rule of its own, or from what
was
learned with other sizes (sizes.py).
"""

from collections.abc import Callable

import torch

from torch_hlo.pytorch import plain_sizes
from torch_hlo.pytorch.operators import OpOverload

from . import checks, meta as metas, sizes
from .meta import Meta, Result, aten
from .tensor import HloTensor

_caches: list[dict] = []
_KEPT = 1 << 14  # kinds of arguments that one op is remembered with: integers may change for ever


class _Remembered(dict):
    """A dictionary that is emptied when it is full."""

    def __setitem__(self, key, value):
        if len(self) >= _KEPT:
            self.clear()
        super().__setitem__(key, value)


def remembered() -> dict:
    """A new cache of metadata, which depends on the default dtype."""
    _caches.append(_Remembered())
    return _caches[-1]


def forget() -> None:
    """The default dtype has changed: what was learned about results is no longer true."""
    for cache in _caches:
        cache.clear()


def _grouped_mm(a, b, offs=None, bias=None, out_dtype=None) -> list[Meta]:
    """PyTorch's meta kernel has the limits of the CUDA kernel: bfloat16, aligned strides."""
    (*ga, m, k), (*gb, k_, n) = a.shape, b.shape
    if len(ga) > 1 or len(gb) > 1:
        raise RuntimeError(
            f"_grouped_mm takes 2-D and 3-D operands, not {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dtype != b.dtype or bias is not None or out_dtype not in (None, a.dtype):
        raise RuntimeError(
            f"_grouped_mm: {a.dtype} x {b.dtype} ->"
            f" {out_dtype}{' + bias' if bias is not None else ''}: one dtype, no bias"
        )
    both = bool(ga and gb)
    if (
        k != k_
        or both
        and (ga != gb or offs is not None)
        or not both
        and (offs is None or [*ga, *gb] not in ([], [*offs.shape]))
    ):
        ends = None if offs is None else tuple(offs.shape)
        raise RuntimeError(
            f"_grouped_mm: operands {tuple(a.shape)} and {tuple(b.shape)} do not fit with offsets"
            f" {ends}"
        )
    groups = tuple(ga) if both else () if ga or gb else tuple(offs.shape)
    return [metas.contiguous((*groups, m, n), a.dtype)]


def _multilabel_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int) -> list[Meta]:
    if not 1 <= x.ndim <= 2 or x.shape != target.shape or not x.shape[-1]:
        raise RuntimeError(
            f"multilabel_margin_loss: input {tuple(x.shape)} and target {tuple(target.shape)}: one"
            " shape, a row of classes or several rows, and at least one class"
        )
    size = () if reduction else tuple(x.shape[:-1])
    return [metas.contiguous(size, x.dtype), metas.contiguous(tuple(x.shape), x.dtype)]


def _nansum(
    x: torch.Tensor, dim: list[int] | None = None, keepdim: bool = False, **options
) -> Result:
    args = (x, dim or None, keepdim)  # no dimensions are all of them
    checks.judge(aten.nansum.default, args, options)
    return metas.infer(aten.nansum.default, args, options, HloTensor)


# Ops whose meta kernel is missing or wrong: arguments -> metas of the results (None: undefined), or
# a Result.
INFER: dict[OpOverload, Callable] = {
    aten.nansum.default: _nansum,
    aten._grouped_mm.default: _grouped_mm,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    **dict.fromkeys(
        (aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default),
        lambda grad, x, *rest, **options: [metas.dense(x._meta)],
    ),
}


@plain_sizes.answers()
def infer(op: OpOverload, args: tuple, kwargs: dict) -> Result:
    """Metadata of the results, by running the op on meta tensors; raises PyTorch's own errors."""
    args = checks.admit_all(args)
    kwargs = checks.admit_all(kwargs)
    if op in INFER:
        return unchecked(op, args, kwargs)
    validate = checks.VALIDATE.get(op)
    if validate is not None:
        validate(*args, **kwargs)
    meta = sizes.predict(op, args, kwargs, _dtypes)
    if meta is not None:
        checks.judge_sum(op, args)
        return Result.of([meta], single=True)
    try:
        result = unchecked(op, args, kwargs)
    except metas.NoElementType:
        raise
    except Exception:
        found = checks.explain(op, args, kwargs)
        if found is None:
            raise
        return Result(found)
    checks.judge(op, args, kwargs)
    checks.judge_sum(op, args)
    if result.form == 0 and len(result.metas[0].size) > 1 or op is aten.flip.default:
        strides = checks.cpu_strides(op, args, kwargs)
        if strides is not None and strides != result.metas[0].stride:
            meta = result.metas[0]
            return Result.of([metas.intern(meta.size, strides, meta.dtype)], single=True)
    sizes.learn(op, args, kwargs, result, _dtypes)
    return result


def unchecked(op: OpOverload, args: tuple | list, kwargs: dict) -> Result:
    """Metadata of the results by that of the arguments alone; raises PyTorch's own errors."""
    own = INFER.get(op)
    if own is None:
        return metas.infer(op, args, kwargs, HloTensor)
    found = own(*args, **kwargs)
    return found if type(found) is Result else Result.of(found, len(op._schema.returns) == 1)


_dtypes: dict[tuple, torch.dtype] = remembered()
