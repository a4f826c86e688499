"""Padding to buckets: the sizes, and as many compiles as buckets."""

from __future__ import annotations

import pytest
import torch

import torch_hlo
from torch_hlo.buckets import bucket


@pytest.mark.parametrize(
    ("size", "want"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (17, 32), (512, 512), (513, 1024)],
)
def test_powers_of_two(size, want):
    assert bucket(size) == want


def test_a_list_of_buckets():
    assert bucket(5, (64, 8)) == 8 and bucket(9, (64, 8)) == 64
    with pytest.raises(ValueError, match="size 65 is larger than all buckets .8, 64."):
        bucket(65, (64, 8))


def test_padding():
    x, size = torch_hlo.pad_to_bucket(torch.ones(2, 5, dtype=torch.int64), 1, value=-100)
    assert size == 5 and x.tolist() == [[1] * 5 + [-100] * 3] * 2
    same = torch.ones(4)
    assert torch_hlo.pad_to_bucket(same)[0] is same


def test_one_program_per_bucket():
    before = torch_hlo.metrics.counter_value("UncachedCompile") or 0
    for size in (17, 18, 31, 32, 40, 64, 63):
        x, size = torch_hlo.pad_to_bucket(torch.randn(3, size))
        assert torch.equal(x.to("hlo").cumsum(1)[:, : x.shape[1]].cpu()[:, :1], x[:, :1])
    # fewer where other tests have made the program for all sizes
    assert torch_hlo.metrics.counter_value("UncachedCompile") - before <= 2
