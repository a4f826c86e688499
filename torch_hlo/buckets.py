"""Sizes from a short list: pad a dimension up to the next bucket, so that as many programs as
buckets are compiled, each for its own sizes.

    ids, length = torch_hlo.pad_to_bucket(ids, 1)                            # powers of two
    labels, _ = torch_hlo.pad_to_bucket(labels, 1, (64, 128, 512), value=-100)

The other way, and the default, is one program for all sizes (docs/guide/sizes.md). Buckets waste
work on the padding and need a mask where padding would count, but their programs know all sizes.
"""

from collections.abc import Sequence

import torch


def bucket(size: int, buckets: Sequence[int] | None = None) -> int:
    """The least bucket that holds `size`; without a list the next power of two. Raises ValueError
    when none does."""
    if buckets is None:
        return 1 << max(size - 1, 0).bit_length()
    fitting = [b for b in buckets if b >= size]
    if not fitting:
        raise ValueError(
            f"size {size} is larger than all buckets ({', '.join(map(str, sorted(buckets)))}); add"
            " one or cut the data"
        )
    return min(fitting)


def pad_to_bucket(
    tensor: torch.Tensor,
    dim: int = -1,
    buckets: Sequence[int] | None = None,
    value: float = 0,
) -> tuple[torch.Tensor, int]:
    """`tensor` with `value` appended along `dim` up to the next bucket (see `bucket`), and the size
    it had.

    Pad on the CPU, before `.to("hlo")`: a tensor that is already on the device makes its unpadded
    size a part of the recorded step. Raises IndexError for a dimension that does not exist,
    ValueError for a size larger than all buckets."""
    size = tensor.size(dim)
    missing = bucket(size, buckets) - size
    if missing == 0:
        return tensor, size
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], dim), size
