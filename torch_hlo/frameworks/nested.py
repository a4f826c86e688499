"""Nested jagged tensors: what PyTorch has kernels of CUDA for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_hlo.lazy.ops import encoder
from torch_hlo.pytorch.registration import PLACE


def attention(
    original: Callable[..., Tensor],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """scaled_dot_product_attention of jagged [batch, heads, sequence, features]: padded, and under
    a mask of the keys that there are."""
    given = [x.transpose(1, 2) for x in (query, key, value)]
    if query.device.type not in PLACE.names or any(x._ragged_idx != 1 for x in given):
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None:
        raise RuntimeError(
            f"attention of jagged tensors with a mask {[*attn_mask.shape]}: pad them with"
            " .to_padded_tensor(0.0)"
        )
    rows, keys, values = (_padded(x) for x in given)
    place = torch.arange(keys.shape[1], device=PLACE.device)
    mask = (place < _lengths(given[1])[:, None])[:, None, None]
    if is_causal:
        mask = mask & (place <= torch.arange(rows.shape[1], device=PLACE.device)[:, None])
    padded = (x.transpose(1, 2) for x in (rows, keys, values))
    result = torch.nn.functional.scaled_dot_product_attention(
        *padded, mask, dropout_p=dropout_p, **options
    )
    offsets = query.offsets()
    # PyTorch's operator for it has no gradient
    found = encoder.padded_to_jagged(result.transpose(1, 2), [offsets], given[0].values().shape[0])
    jagged = torch.nested.nested_tensor_from_jagged(found, offsets, query.lengths())
    return jagged.transpose(1, 2)


def _lengths(x: Any) -> Tensor:
    return x.offsets().diff() if x.lengths() is None else x.lengths()


def _padded(x: Any) -> Tensor:
    """[batch, longest, heads, features], with zeros behind each sequence."""
    lengths = _lengths(x)
    longest = int(lengths.max())
    found = encoder.jagged_to_padded(x.values(), [x.offsets()], [longest])
    gap = torch.arange(longest, device=PLACE.device) >= lengths[:, None]
    return found.masked_fill(gap[..., None, None], 0)
