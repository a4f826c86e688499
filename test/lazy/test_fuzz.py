"""A fast part of the fuzzer (test/sweeps/fuzz.py): random programs give the CPU's values, strides,
dtypes and exceptions."""

from __future__ import annotations

import warnings

import pytest
import torch

from test.sweeps import fuzz


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs(first):
    for seed in range(first, first + 10):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = fuzz.check(seed)
        assert problem is None, f"seed {seed}: {problem}\n" + "\n".join(fuzz.program(seed))


# What the fuzzer has found, as small as possible.
FOUND = {
    "growing a shared storage": [
        "v0 = make(1, (3,), torch.float32, dev)",
        "v1 = v0.view(3)",
        "v0.resize_(2, 2).fill_(1)",
    ],
    "writing through a part of an expanded tensor": [
        "v0 = make(1, (2, 3), torch.float32, dev)",
        "v0.expand(2, 2, 3).diagonal().fill_(7)",
    ],
    "overlapping windows": [
        "v0 = make(1, (7,), torch.float32, dev)",
        "v0.unfold(0, 3, 1)[2].add_(1)",
        "v0.as_strided((3, 3), (1, 1))[1].mul_(2)",
    ],
    "masked fill of an expanded tensor": [
        "v0 = make(1, (3,), torch.float32, dev)",
        "v1 = v0.expand(2, 3)",
        "v1.masked_fill_(v1 > 0, 5)",
        "v1[v1 < 0] = 2",
        "v1.index_fill_(-1, torch.zeros(1, dtype=torch.long, device=dev), 9)",
        "v2 = v1.clone()",
        "v1.index_fill_(0, torch.zeros(0, dtype=torch.long, device=dev), 8)",
        "v3 = v1.clone()",
        "v1.index_fill_(0, torch.ones(1, dtype=torch.long, device=dev), 8)",
    ],
    "partial overlap": [
        "v0 = make(1, (), torch.float32, dev)",
        "v1 = v0.unsqueeze(0)",
        "v1.sub_(v0)",
    ],
    "dtypes": [
        "v0 = make(1, (2, 3), torch.bool, dev)",
        "v1 = make(2, (2, 3), torch.float32, dev)",
        "v0.addcmul_(v1, v1)",
        "v2 = v0.log_softmax(0)",
        "v3 = v0.std()",
        "torch._foreach_add_([v0], 1)",
        "v0.set_(v1)",
        "v0.mul_(2)",
        "v4 = v0.int().argmax(0)",
        "v5 = v0.relu()",
    ],
    "nothing": [
        "v0 = make(1, (0, 5), torch.bool, dev)",
        "v1 = v0.max()",
        "v2 = v0.softmax(0)",
        "v3 = v0.amax(0)",
        "v4 = v0.argmax(0)",
        "mark()",
    ],
    "strides of size 1": [
        "v0 = make(1, (7, 1), torch.float32, dev)",
        "v1 = v0.t() + 1.5",
        "v2 = torch.ones_like(v0.t())",
        "v3 = v0.t()[::2].flip(-1)",
    ],
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.filterwarnings("ignore")
def test_found(name, monkeypatch):
    monkeypatch.setattr(fuzz, "program", lambda seed: FOUND[name])
    assert fuzz.check(0) is None


def test_a_node_that_cannot_be_lowered_ends_one_step_only(monkeypatch):
    import torch_hlo
    from torch_hlo.lowering.core import registry

    def broken(*args):
        raise registry.LoweringError("broken")

    x = torch.ones(3).to("hlo")
    monkeypatch.setitem(registry.LOWERINGS, torch.ops.aten.erfinv.default, broken)
    bad, good = torch.erfinv(x), x + 1
    with pytest.raises(registry.LoweringError, match="broken"):
        torch_hlo.mark_step()
    torch_hlo.mark_step()
    assert good.tolist() == [2, 2, 2] and (x * 3).tolist() == [3, 3, 3]
    with pytest.raises(registry.LoweringError, match="broken"):
        bad.tolist()
    torch_hlo.mark_step()
