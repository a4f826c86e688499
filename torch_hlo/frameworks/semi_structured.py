"""Weights of which two of each four in a row are zero (2:4), stored compressed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor

from torch_hlo.pytorch.registration import PLACE


def register(module: Any) -> None:
    """Let the classes of `module`, torch.sparse, make one of ours of a tensor of the device."""
    for kind in (
        module.SparseSemiStructuredTensorCUTLASS,
        module.SparseSemiStructuredTensorCUSPARSELT,
    ):
        kind.from_dense = staticmethod(_by_device(kind.from_dense))


def _by_device(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def from_dense(tensor: Tensor, alg_id: int = 0) -> Tensor:
        own = PLACE.has(tensor)
        return (SparseSemiStructuredTensorHLO.from_dense if own else original)(tensor, alg_id)

    return from_dense


_ANY_SIZE = SimpleNamespace(dense_min_rows=1, dense_min_cols=1)


class SparseSemiStructuredTensorHLO(SparseSemiStructuredTensor):
    """`packed` are the two values of each four, `meta` a byte with their places. A product unpacks
    them in its program."""

    BACKEND = PLACE.key
    # of what it is multiplied with: it needs no padding
    _DTYPE_SHAPE_CONSTRAINTS = defaultdict(lambda: _ANY_SIZE)

    @classmethod
    def from_dense(cls, tensor: Tensor, alg_id: int = 0) -> Tensor:
        """Raises RuntimeError where more than two of four are not zero. That reads the tensor."""
        size = [*tensor.shape]
        if len(size) != 2 or size[1] % 4:
            raise RuntimeError(f"2:4 sparsity is that of matrices [rows, 4 * n], not of {size}")
        fours = tensor.detach().unflatten(1, (-1, 4))
        kept = fours.ne(0).int()
        if kept.sum(2).max() > 2:
            raise RuntimeError(
                f"a {size} tensor is not 2:4 sparse: in some four values of a row more than two are"
                " not zero. Set those to zero first"
            )
        # the first two that are not zero
        places = (kept * 4 - torch.arange(4, device=tensor.device)).topk(2, 2).indices
        meta = (places[..., 0] + 4 * places[..., 1]).byte()
        return cls(tensor.shape, fours.gather(2, places).flatten(1), meta, None, None, None)

    def to_dense(self) -> Tensor:
        if self.packed is None:
            return self.t().to_dense().t()
        places = torch.stack([self.meta % 4, self.meta // 4], 2).long()
        pairs = self.packed.unflatten(1, (-1, 2))
        fours = pairs.new_zeros((*self.meta.shape, 4)).scatter(2, places, pairs)
        return fours.flatten(1)

    def _mm(
        self,
        B: Tensor,
        *,
        bias: Tensor | None = None,
        should_transpose_dense: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        # since 2.13 PyTorch asks for the transposed product of a transposed B
        product = self.to_dense() @ (B.t() if should_transpose_dense else B)
        if bias is not None:
            product = product + bias[:, None]
        return product.t() if should_transpose_dense else product
