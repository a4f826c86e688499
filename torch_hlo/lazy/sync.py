"""Ops whose result or shape depends on values: they evaluate the graph and run on the CPU, giving the CPU's results.

Masks are the exception where the shape does not depend on them: `x[mask] = scalar` is recorded as a `where`.
"""

from __future__ import annotations

import torch

from torch_hlo.lazy import checks, conditions, dispatch, engine
from torch_hlo.lazy import meta as metas
from torch_hlo.lazy.dispatch import call, handles
from torch_hlo.lazy.meta import aten
from torch_hlo.lazy.tensor import HloTensor, from_cpu, to_cpu


@handles(
    aten._local_scalar_dense.default, aten.item.default
)  # composite kernels call `item` itself
def _local_scalar_dense(args: tuple, kwargs: dict):
    x = args[0]
    if metas.numel(x._meta.size) != 1:
        raise RuntimeError(
            f"a Tensor with {metas.numel(x._meta.size)} elements cannot be converted to Scalar"
        )
    value = _known(x)
    if value is None:
        read = getattr(engine.current(), "number", None)  # a function that is being captured asks
        return to_cpu([x])[0].item() if read is None else read(x)
    return value.item()


def _known(x: HloTensor) -> torch.Tensor | None:
    """The value if it does not take a step. A captured function may take another branch with other data, so there it takes constants, and truth values
    and whole numbers that replays can look at as well."""
    assume = getattr(engine.current(), "assume", None)
    value = conditions.known(x, constant=assume is not None)
    return (
        assume(x)
        if value is None
        and assume is not None
        and not (x.dtype.is_floating_point or x.dtype.is_complex)
        else value
    )


def on_cpu(op):
    """A handler that evaluates what was recorded and runs `op` on the CPU."""

    def run(args: tuple, kwargs: dict):
        from torch_hlo.lazy.fallback import execute

        return execute(op, tuple(checks.admit_all(args)), checks.admit_all(kwargs))

    return run


@handles(aten._linalg_check_errors.default)
def _linalg_check_errors(args: tuple, kwargs: dict) -> None:
    """At the call, as torch.linalg documents: code that catches LinAlgError tries something else then."""
    info = None
    read = getattr(engine.current(), "number", None)
    if read is None:
        info = _known(args[0])
    else:  # a function that is being captured: its replays look at one number, and are traced again if there is an error
        failed = call(aten.any.default, args[0])
        known = _known(failed)
        if not (read(failed) if known is None else known):
            return
    aten._linalg_check_errors.default(
        _values(args[0]) if info is None else info, *args[1:], **kwargs
    )


def _values(x: HloTensor) -> torch.Tensor:
    return engine.current().read(x) if hasattr(engine.current(), "read") else to_cpu([x])[0]


DATA_DEPENDENT = (
    aten.allclose.default, aten.nonzero.default, aten.nonzero_static.default, aten.masked_select.default,
    aten.argwhere.default, aten.repeat_interleave.Tensor, aten._unique.default, aten._unique2.default,
    aten.unique_consecutive.default, aten.unique_dim.default, aten.unique_dim_consecutive.default, aten.linalg_lstsq.default,
    aten._ctc_loss.default, aten.is_nonzero.default, aten.histogram.bin_ct, aten.histogram.bins_tensor,
    aten._histogramdd_bin_edges.default, aten._histogramdd_from_bin_cts.default, aten._histogramdd_from_bin_tensors.default,
)  # fmt: skip
for _op in DATA_DEPENDENT:
    dispatch.TABLE[_op] = on_cpu(_op)


_MANY = 1 << 14  # values that are worth counting on the device, where the program is compiled first


@handles(aten.equal.default)
def equal(args: tuple, kwargs: dict) -> bool:
    """Compared on the device where there is much to compare, or a function is being captured: its replays look at one truth value."""
    a, b = args
    read = getattr(engine.current(), "number", None)
    if (
        type(a) is type(b) is HloTensor
        and a.shape == b.shape
        and a.dtype == b.dtype
        and (read is not None or a.numel() >= _MANY)
    ):
        same = call(aten.all.default, call(aten.eq.Tensor, a, b))
        known = _known(same)
        if known is None:
            known = to_cpu([same])[0] if read is None else read(same)
        return bool(known)
    return on_cpu(aten.equal.default)(args, kwargs)


@handles(aten.bincount.default)
def bincount(args: tuple, kwargs: dict):
    """Counted on the device if `minlength` covers the values, as the number of classes does; the result's shape depends on them otherwise."""
    x, weights, minlength = (
        *args,
        *(kwargs.get(n, d) for n, d in (("weights", None), ("minlength", 0))[len(args) - 1 :]),
    )
    read = getattr(
        engine.current(), "number", None
    )  # a function that is being captured: its replays look at one truth value
    on_device = (
        type(x) is HloTensor
        and x.dim() == 1
        and (x.numel() >= _MANY or read is not None)
        and not x.dtype.is_floating_point
        and x.dtype != torch.bool
    )
    if weights is not None:
        on_device = (
            on_device
            and type(weights) is HloTensor
            and weights.shape == x.shape
            and weights.dtype in (torch.float32, torch.float64)
        )
    if on_device and minlength > 0:
        outside = call(
            aten.any.default,
            call(
                aten.logical_or.default,
                call(aten.lt.Scalar, x, 0),
                call(aten.ge.Scalar, x, minlength),
            ),
        )
        known = _known(outside)
        if known is None:
            known = to_cpu([outside])[0] if read is None else read(outside)
        if not known:
            source = (
                call(aten.ones_like.default, x, dtype=torch.int64) if weights is None else weights
            )
            zeros = call(aten.new_zeros.default, source, [minlength])
            return call(
                aten.scatter_add.default,
                zeros,
                0,
                call(aten._to_copy.default, x, dtype=torch.int64),
                source,
            )
    return on_cpu(aten.bincount.default)(args, kwargs)


# ---- indexing with masks, and with indices on the CPU


_MASKS = frozenset({torch.bool, torch.uint8})


def _is_mask(index) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in _MASKS


def _positions(x: torch.Tensor, indices) -> list:
    """`indices` with CPU tensors moved to the device and masks replaced by the positions of their True elements."""
    if len(indices) > x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
    found: list = []
    for index in indices:
        if not isinstance(index, torch.Tensor):
            found.append(index)
        elif _is_mask(index):
            dim = len(found)
            if tuple(index.shape) != tuple(x.shape[dim : dim + index.dim()]):
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index 0 does not match the shape of the indexed tensor {list(x.shape)} at index {dim}"
                )
            value = to_cpu([index])[0] if isinstance(index, HloTensor) else index
            found += [from_cpu(p.contiguous()) for p in value.nonzero().unbind(1)]
        else:
            found.append(_here(index))
    return found


def _here(index: torch.Tensor) -> HloTensor:
    if type(index) is HloTensor:
        return index
    # Indices may live on the CPU, as with CUDA.
    return (
        from_cpu(index)
        if type(index) is torch.Tensor and index.device.type == "cpu"
        else checks.admit(index)
    )


def _special(indices) -> bool:
    for i in indices:
        if i is not None and (type(i) is not HloTensor or i._meta.dtype in _MASKS):
            return True
    return False


_record_index = dispatch.recorder(aten.index.Tensor)


@handles(aten.index.Tensor)
def index(args: tuple, kwargs: dict):
    x, indices = args
    if _special(indices):
        if type(x) is not HloTensor:  # a CPU tensor indexed on the device
            checks.admit_target(x, args)
        indices = _positions(x, indices)
    elif type(x) is not HloTensor:
        checks.admit_target(x, args)
    return _record_index((x, indices), _NONE)


_NONE: dict = {}
_record_put = dispatch.recorder(aten.index_put.default)


@handles(aten.index_put.default)
def index_put(args: tuple, kwargs: dict):
    x, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if _special(indices):
        masked = _as_where(x, indices, values, accumulate)
        if masked is not None:
            return masked
        indices = _positions(x, indices)
    if type(values) is not HloTensor:
        values = checks.admit(values)
    if values.dtype != x.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {_name(x.dtype)} for the destination and {_name(values.dtype)} "
            "for the source."
        )
    return _record_put((x, indices, values, accumulate), _NONE)


def _name(dtype: torch.dtype) -> str:
    return {
        torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.int64: "Long",
        torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte", torch.bool: "Bool",
        torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
    }.get(dtype, str(dtype))  # fmt: skip


def _as_where(x: HloTensor, indices, values: torch.Tensor, accumulate: bool):
    """`x[mask] = scalar` without looking at the mask; None if that is not what is asked."""
    masks = [i for i in indices if i is not None]
    if (
        len(masks) != 1
        or masks[0].dtype != torch.bool
        or type(masks[0]) is not HloTensor
        or values.numel() != 1
        or accumulate
    ):
        return None
    mask, dim = masks[0], next(i for i, m in enumerate(indices) if m is not None)
    if tuple(mask.shape) != tuple(x.shape[dim : dim + mask.dim()]) or values.dtype != x.dtype:
        return None
    value = checks.admit(values)
    full = call(
        aten.view.default, mask, [1] * dim + list(mask.shape) + [1] * (x.dim() - dim - mask.dim())
    )
    return call(aten.where.self, full, call(aten.view.default, value, []), x)


@handles(aten.index_put_.default, aten._index_put_impl_.default)
def index_put_(args: tuple, kwargs: dict):
    from torch_hlo.lazy.mutation import assign, put_expanded

    x = args[0]
    if type(x) is not HloTensor:
        checks.admit_target(x, args)
    rest = args[1:4] if len(args) > 3 else (*args[1:3], kwargs.get("accumulate", False))
    if not (x._meta.overlaps and put_expanded(x, *rest)):
        assign(x, index_put((x, *rest), _NONE))
    return x
