"""The ops that nn.TransformerEncoder and nn.MultiheadAttention call in evaluation (PyTorch's "fast
path"), from the ops that training uses.

With a padding mask nn.TransformerEncoder turns its input into a nested tensor, one row of tokens
per sequence. Here that is a `Padded`: the array as it was, and which tokens count. Padding is left
out of the attention and is zero in the result, as on the CPU; whether the padding is at the end,
which the CPU asks the values of the mask, does not matter. And what jagged tensors need to become
padded, and back.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_hlo.pytorch import participants, tensors

from ..record import HloTensor, aten, handlers


class Padded(Tensor):
    """In place of a nested tensor: `values` [batch, length, features] and `counts` [batch, length],
    False at padding."""

    __torch_function__ = participants.disabled_torch_function
    values: HloTensor
    counts: HloTensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in _OF_PADDED:
            raise NotImplementedError(
                f"{func} of a nested tensor: the hlo device has them between the layers of"
                " nn.TransformerEncoder only; build it with enable_nested_tensor=False"
            )
        return handlers.nested(_OF_PADDED[func], args, kwargs or {})


def nested_from_mask(values: HloTensor, counts: HloTensor, mask_check: bool = True) -> Padded:
    """`torch._nested_tensor_from_mask`."""
    if values.dim() != 3 or counts.shape != values.shape[:2]:
        raise RuntimeError(
            "a nested tensor takes values of 3 dimensions and a mask of the first two, not"
            f" {tuple(values.shape)} and {tuple(counts.shape)}"
        )
    padded = tensors.make_wrapper(Padded, *values._meta.wrapper)
    padded.values = values
    padded.counts = counts
    return padded


def to_padded(padded: Padded, padding: float, output_size=None) -> HloTensor:
    """`Tensor.to_padded_tensor`."""
    values = padded.values
    if output_size is not None and tuple(output_size) != tuple(values.shape):
        raise NotImplementedError(
            f"to_padded_tensor: {tuple(values.shape)} to {tuple(output_size)}; pad it afterwards"
        )
    return torch.where(padded.counts.unsqueeze(-1), values, padding)


def _attended(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """True where a query sees a key. Masks are nonzero where it does not: [batch, keys] (type 1),
    or what broadcasts to the scores."""
    if mask is None:
        return None
    seen = mask == 0
    return seen[:, None, None] if mask_type == 1 else seen


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor | None, ...]:
    """`torch._native_multi_head_attention`: [batch, length, embed_dim] and the weights (None if not
    needed)."""
    if query is key and key is value:
        projected = F.linear(query, qkv_weight, qkv_bias).split(embed_dim, -1)
    else:
        projected = [
            F.linear(x, w, b)
            for x, w, b in zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
        ]
    # operations that are recorded as they are: PyTorch's compounds take as long again
    q, k, v = (x.view(*x.shape[:2], heads, embed_dim // heads).transpose(1, 2) for x in projected)
    seen = _attended(mask, mask_type)
    weights = None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        weights = (scores if seen is None else scores.where(seen, float("-inf"))).softmax(-1)
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, seen)
        if seen is not None:  # that gives zeros to who sees nothing
            mixed = mixed.where(seen.any(-1, True), float("nan"))
    mixed = mixed.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return F.linear(mixed.view(query.shape), proj_weight, proj_bias), weights


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """`torch._transformer_encoder_layer_fwd`: [batch, length, embed_dim]."""
    activation = F.gelu if use_gelu else F.relu

    def norm(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        return torch.native_layer_norm(x, (embed_dim,), weight, bias, eps)[0]

    first = partial(norm, norm_weight_1, norm_bias_1)
    second = partial(norm, norm_weight_2, norm_bias_2)

    def attend(x: Tensor) -> Tensor:
        return attention(
            x,
            x,
            x,
            embed_dim,
            heads,
            qkv_weight,
            qkv_bias,
            proj_weight,
            proj_bias,
            mask,
            False,
            True,
            mask_type,
        )[0]

    def feed_forward(x: Tensor) -> Tensor:
        return F.linear(activation(F.linear(x, ffn_weight_1, ffn_bias_1)), ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attend(first(src))
        return x + feed_forward(second(x))
    x = first(src + attend(src))
    return second(x + feed_forward(x))


def padded_layer(src: Padded, *args, **kwargs) -> Padded:
    """`encoder_layer` of a `Padded`: padding is no key."""
    if any(a is not None for a in args[17:]) or kwargs:
        raise NotImplementedError(
            "a mask beside a nested tensor; build nn.TransformerEncoder with"
            " enable_nested_tensor=False"
        )
    return nested_from_mask(
        encoder_layer(src.values, *args[:17], src.counts.logical_not(), 1),
        src.counts,
    )


def jagged_to_padded(
    values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float = 0.0
) -> Tensor:
    """[total, …] -> [batch, longest, …]: the rows from one offset to the next, then padding."""
    (ends,) = offsets
    place = ends[:-1, None] + torch.arange(max_lengths[0], device=values.device)
    filled = F.pad(values, (*[0, 0] * (values.dim() - 1), 0, 1), value=padding_value)
    return filled[torch.where(place < ends[1:, None], place, len(values))]


def padded_to_jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    """[batch, longest, …] -> [total, …]. Without a total the last offset is read."""
    (ends,) = offsets
    place = torch.arange(int(ends[-1]) if total_L is None else total_L, device=dense.device)
    batch = torch.searchsorted(ends[1:].contiguous(), place, right=True)
    return dense[batch, (place - ends[batch]).clamp(max=dense.shape[1] - 1)]


DECOMPOSITIONS = {
    aten._jagged_to_padded_dense_forward.default: jagged_to_padded,
    aten._padded_dense_to_jagged_forward.default: padded_to_jagged,
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
    aten._native_multi_head_attention.default: attention,
}
_OF_PADDED = {
    aten._transformer_encoder_layer_fwd.default: padded_layer,
    aten.to_padded_tensor.default: to_padded,
}
_OF_MASKS = {
    aten._nested_tensor_from_mask.default: nested_from_mask,
    aten._nested_tensor_from_mask_left_aligned.default: lambda values, counts: True,
}
for _op, _fn in {**DECOMPOSITIONS, **_OF_MASKS}.items():
    handlers.TABLE[_op] = partial(handlers.nested, _fn)
