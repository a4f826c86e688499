"""torch_xla.amp: PyTorch's own autocast and optimizers, which know the device. And products with
int8 weights."""

from __future__ import annotations

import logging

import torch
from torch.amp import GradScaler as _GradScaler

logger = logging.getLogger(__name__)
_WARNING_MESSAGE = "products are computed in the precision of their operands, whatever is set"


class autocast(torch.autocast):
    """`torch.autocast` of a device; bfloat16 unless said."""

    def __init__(
        self,
        device,
        enabled=True,
        dtype=None,
        cache_enabled=None,
    ):
        kind = torch.device(device).type
        super().__init__(kind, dtype or torch.bfloat16, enabled, cache_enabled)


class GradScaler(_GradScaler):
    """`torch.amp.GradScaler` of the device."""

    def __init__(self, *args, use_zero_grad=False, **kwargs):
        super().__init__("xla", *args, **kwargs)


def _skipping(kind):
    class SyncFree(kind):
        """The optimizer of PyTorch, whose step does nothing where `found_inf` is true."""

        def step(self, closure=None, found_inf=None):
            return None if found_inf is not None and found_inf else super().step(closure)

    return SyncFree


Adam, AdamW, SGD = map(_skipping, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD))


class _Products:
    precision = "default"


def set_mat_mul_precision(precision):
    """Products are computed in the precision of their operands, whatever is asked for."""
    if precision not in ("default", "high", "highest"):
        raise ValueError(f"precision {precision!r}: there are default, high and highest")
    logger.warning(_WARNING_MESSAGE)
    _Products.precision = precision


def get_mat_mul_precision():
    return _Products.precision


_xla_set_mat_mul_precision = set_mat_mul_precision
_xla_get_mat_mul_precision = get_mat_mul_precision


def _xla_dot_general(lhs, rhs, dimension_numbers, preferred_element_type=None):
    """The product over ((contracted of lhs, of rhs), (batch of lhs, of rhs)); its dimensions are
    the batch's, those of `lhs` and those of `rhs`."""
    contracted = dimension_numbers[0]
    batch = dimension_numbers[1] or ((), ())
    left = [*range(lhs.dim())]
    right = [*range(lhs.dim(), lhs.dim() + rhs.dim())]
    for d, e in (*zip(*contracted), *zip(*batch)):
        right[e] = left[d]
    first = [left[d] for d in batch[0]]
    shared = {*first, *(left[d] for d in contracted[0])}
    out = first + [d for d in left + right if d not in shared]
    kind = preferred_element_type or lhs.dtype
    return torch.einsum(lhs.to(kind), left, rhs.to(kind), right, out)


_library = torch.library.Library("xla", "FRAGMENT")
_library.define(
    "quantized_matmul(Tensor x, Tensor w, Tensor scale, Tensor? zero_point=None,"
    " int block_size=-1, bool int4_weight=False, bool quantize_activation=False) -> Tensor"
)


def _quantized_matmul(
    x, w, scale, zero_point=None, block_size=-1, int4_weight=False, quantize_activation=False
):
    """x times int8 weights: of shape (out, in) with a scale per row, or (blocks, block, out) with
    one per block and column."""
    if block_size != -1:
        if quantize_activation:
            raise NotImplementedError(
                f"quantized_matmul of {[*x.shape]} and {[*w.shape]}: activations are not quantized"
                " with weights in blocks; scale each row of the weights (block_size=-1)"
            )
        x = x.unflatten(-1, (-1, block_size))
        out = torch.einsum("scn,...sc,sn->...n", w.to(x.dtype), x, scale)
        return out if zero_point is None else out - x.sum(-1) @ zero_point.to(x.dtype)
    top = None
    if quantize_activation:
        top = (x.abs().amax(-1, keepdim=True) / 127).to(x.dtype)
        x = torch.round(x / top).to(torch.int8).to(torch.int32)
    out = torch.nn.functional.linear(x, w.to(x.dtype)) * scale
    if zero_point is not None:
        out = out - x.sum(-1, keepdim=True) * zero_point
    return out if top is None else out * top


_library.impl("quantized_matmul", _quantized_matmul, "CompositeImplicitAutograd")


class XlaQuantizedLinear(torch.nn.Module):
    """A linear layer without bias whose weights are int8; `load_quantized_weight` gives them."""

    def __init__(
        self,
        input_dim,
        output_dim,
        is_symmetric=False,
        block_size=-1,
        int4_weight=False,
        quantize_activation=False,
    ):
        super().__init__()
        self.options = block_size, int4_weight, quantize_activation
        weight = torch.zeros(output_dim, input_dim, dtype=torch.int8)
        zero = None if is_symmetric else torch.zeros(output_dim)
        self.load_quantized_weight(weight, torch.zeros(output_dim), zero)

    def load_quantized_weight(self, weight, weight_scaler, zero_point=None):
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scaler", weight_scaler)
        self.register_buffer("zero_point", zero_point)

    def forward(self, x):
        given = self.weight, self.weight_scaler, self.zero_point
        return torch.ops.xla.quantized_matmul(x, *given, *self.options)
