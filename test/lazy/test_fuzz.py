"""A fast part of the fuzzer (test/sweeps/fuzz): random programs give the CPU's values, strides,
dtypes and exceptions."""

from __future__ import annotations

import pytest
import torch

from test.sweeps.fuzz.report import check_block
from test.sweeps.fuzz.run import Program, check


@pytest.mark.parametrize(
    ("mode", "first", "count"), [("together", 0, 64), ("recorded", 64, 96), ("threads", 160, 16)]
)
def test_random_programs(mode: str, first: int, count: int):
    for start in range(first, first + count, 16):
        seeds = list(range(start, start + 16))
        _, reports = check_block(seeds, mode, smaller=True)
        assert not reports, "\n".join(reports)


# What the fuzzer has found, as small as possible.
FOUND = {
    "growing a shared storage": [
        "v0 = make(1, (3,), torch.float32)",
        "v1 = v0.view(3)",
        "v0.resize_(2, 2).fill_(1)",
    ],
    "writing through a part of an expanded tensor": [
        "v0 = make(1, (2, 3), torch.float32)",
        "v0.expand(2, 2, 3).diagonal().fill_(7)",
    ],
    "overlapping windows": [
        "v0 = make(1, (7,), torch.float32)",
        "v0.unfold(0, 3, 1)[2].add_(1)",
        "v0.as_strided((3, 3), (1, 1))[1].mul_(2)",
    ],
    "masked fill of an expanded tensor": [
        "v0 = make(1, (3,), torch.float32)",
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
        "v0 = make(1, (), torch.float32)",
        "v1 = v0.unsqueeze(0)",
        "v1.sub_(v0)",
    ],
    "dtypes": [
        "v0 = make(1, (2, 3), torch.bool)",
        "v1 = make(2, (2, 3), torch.float32)",
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
        "v0 = make(1, (0, 5), torch.bool)",
        "v1 = v0.max()",
        "v2 = v0.softmax(0)",
        "v3 = v0.amax(0)",
        "v4 = v0.argmax(0)",
        "mark()",
    ],
    "a copy shares memory": [
        "v0 = make(1, (3,), torch.float32)",
        "v1 = copy.copy(v0)",
        "v1.mul_(2)",
    ],
    "numbers that do not fit": [
        "v0 = make(1, (3,), torch.bool)",
        "v0[:1] = 1j",
        "v0.masked_fill_(~v0, 1j)",
        "v1 = make(2, (3,), torch.float32)",
        "v1[None, 1:] = 1j",
        "v2 = make(3, (3,), torch.int32)",
        "v2[0] = float('nan')",
        "v3 = v2.to(torch.uint8).new_full((2,), -0.25)",
    ],
    "what is added to a product": [
        "v0 = make(1, (1, 3), torch.float32)",
        "v1 = torch.addmm(v0, v0, v0.mT)",
        "v2 = torch.baddbmm(v0[None], v0[None], v0.mT)",
    ],
    "out= of another dtype": [
        "v0 = make(1, (2, 2), torch.int64)",
        "v1 = make(2, (2, 2), torch.float32)",
        "torch.index_select(v0, 0, ints([0]), out=v1)",
    ],
    "out= that is clamped": [
        "v0 = make(1, (2, 2), torch.int64)",
        "torch.clamp(v0, 0, 1, out=make(2, (2, 2), torch.float32))",
    ],
    "out= for a sort of another dtype": [
        "v0 = make(1, (2, 2), torch.int64)",
        "torch.sort(v0, 1, out=(make(3, (2, 2), torch.complex64), empty(torch.int64)))",
    ],
    "out= shares memory": [
        "v0 = make(1, (0, 3), torch.bool)",
        "torch.index_select(v0, 1, ints([2]), out=v0)",
    ],
    "out= is an operand of another shape": [
        "v0 = make(1, (1, 3), torch.float32)",
        "v1 = make(2, (), torch.float32)",
        "torch.add(v0, v1, out=v1)",
    ],
    "out= takes strides": [
        "v0 = make(1, (1, 4, 2), torch.float16)",
        "v1 = make(2, (1, 4), torch.bool)",
        "torch.eq(v0.movedim(2, 1), v0.movedim(2, 1), out=v1)",
        "v2 = make(1, (4, 2), torch.bool)",
        "torch.sort(v2.mT, 0, out=(v2.clone(), empty(torch.int64)))",
    ],
    "the CPU's words": [
        "v0 = make(1, (2, 3), torch.int64)",
        "v1 = make(2, (2, 3), torch.bool)",
        "v2 = torch.nn.functional.layer_norm(v0, (3,))",
        "v3 = make(3, (2, 3), torch.complex64) // 2",
        "v4 = torch.nn.functional.embedding(ints([0]), v0[None])",
        "v5 = torch.complex(v0, v0)",
        "v6 = torch.complex(v0.bfloat16(), v0.bfloat16())",
        "v7 = v1.topk(1)[0]",
        "v8 = torch.rsub(v1, v0)",
        "v9 = torch.nn.functional.leaky_relu(v0)",
        "torch.stack([v0, v0], out=v1)",
    ],
    "what the CPU accepts": [
        "v0 = make(1, (3,), torch.float32)",
        "v1 = torch.nn.functional.cross_entropy(v0, ints([1]))",
    ],
    "copies of memory to itself": [
        "v0 = make(1, (2, 2), torch.int8)",
        "v0.permute(1, 0).copy_(v0)",
        "v1 = make(2, (1,), torch.int16).expand(2)",
        "v2 = v1.detach()",
        "v2.copy_(v1[-2:])",
    ],
    "comparison of memory with itself": [
        "v0 = make(1, (2, 1), torch.float32)",
        "v0.eq_(v0[:-1])",
    ],
    "bytes are left over": [
        "v0 = make(1, (2,), torch.int16)",
        "v1 = v0[1]",
        "torch.cumsum(v0.clone(), -1, out=v1)",
        "v2 = v0.view(torch.int32)",
        "v3 = v2.as_strided((0, 3), (2, 0), 0)",
    ],
    "nothing, seen from behind the end": [
        "v0 = make(1, (0, 3), torch.float32)",
        "v1 = v0.as_strided((3, 0), (1, 1), 6)",
        "v2 = make(2, (3, 0), torch.int64).view(torch.int32)",
        "v2[...] = 5",
    ],
    "a sum of three constants": [
        "v0 = make(1, (), torch.int64)",
        "v1 = v0.new_ones(v0.shape)",
        "torch._foreach_add_([v1], 1)",
        "v1.expand(2)[0].add_(1)",
    ],
    "strides of operands of several forms": [
        "v0 = make(1, (2, 2), torch.float32)",
        "v1 = v0.transpose(0, 1) // make(2, (2,), torch.float32)",
    ],
    "what is conjugated is copied before its memory is written": [
        "v0 = make(1, (2, 2), torch.complex64)",
        "v1 = v0.adjoint()",
        "v0.addcmul_(v1, v1)",
        "v1.add_(v0)",
        "v0.add_(v0.mT)",
    ],
    "a copy of a parameter has no gradient": [
        "v0 = torch.nn.Parameter(make(1, (2, 3), torch.float32))",
        "v0.sum().backward()",
        "v1 = copy.deepcopy(v0)",
        "v2 = make(1, (2,), torch.float32).requires_grad_()",
        "v2.sum().backward()",
        "v3 = copy.deepcopy(v2)",
    ],
    "strides of a clone that is filled": [
        "v0 = make(1, (3, 3), torch.int8)",
        "v1 = v0.unsqueeze(-2).unfold(0, 2, 1)",
        "v2 = v1.index_fill(1, ints([0]), 4)",
    ],
    "out= of a product of one matrix, with strides": [
        "v0 = make(1, (1, 4, 4), torch.float32).mT",
        "v1 = make(2, (1, 4, 4), torch.float32).mT.clone()",
        "torch.matmul(v1, v1.mT, out=v0)",
    ],
    "complex exponentials of large numbers": [
        "v0 = make(1, (3, 2), torch.complex64)",
        "v1 = (v0 * 300).logsumexp(-1)",
        "v2 = torch.logsumexp(v0 * 300, (0, 1), True)",
        "v3 = v0[0, 0].logsumexp(0)",
    ],
    "a small float's sign that a double had": [
        "v0 = make(1, (), torch.float16)",
        "v1 = (2 ** v0).tanh()",
        "v2 = (2 ** v0.bfloat16()).tanh()",
        "v3 = torch.copysign(v0, v0.double().exp().half())",
        "v4 = v0.double().exp().bfloat16().atan()",
    ],
    "filling beyond the end": [
        "v0 = make(1, (3, 2), torch.float32)",
        "v1 = v0.index_fill(0, ints([9, 1]), 1.5)",
        "v0.index_fill_(1, ints([-3]), 7)",
        "v2 = v0.index_fill(1, ints([-1]), 7)",
        "v3 = v0.byte().index_fill(1, ints([1]), 300)",
    ],
    "copies of what has gaps": [
        "v0 = make(1, (1, 3, 3), torch.float32).adjoint()[:, -2:]",
        "v1 = v0.to('cpu').mul(1).to(dev)",
        "v2 = (make(2, (3, 4), torch.float32).to('cpu').t()[:3] * 1).to(dev)",
    ],
    "complex numbers of nothing": [
        "v0 = make(1, (0, 5), torch.complex64)",
        "v1 = torch.view_as_real(v0)",
        "v1[...] = 5",
        "v2 = torch.view_as_complex(v1 + 1)",
    ],
    "out= and strides of conjugated views": [
        "v0 = make(1, (1, 2), torch.complex64)",
        "v1 = v0.conj()",
        "torch.cat([v0, v1], out=v1.detach())",
        "torch.cat([v0, v0], out=v0.detach())",
        "v2 = make(2, (6,), torch.complex64)",
        "v3 = v2.conj()",
        "v3.as_strided((3, 2), (2, 1)).mul_(2j)",
        "v3.as_strided((3, 2), (1, 1)).cumsum_(0)",
        "torch.cat([v3[:2], v3[1:2]], out=v2[:3])",
        "v4 = v3.resize_(9)[:6].clone()",
        "v5 = v0.expand(3, 1, 2).conj()",
        "v5.masked_fill_(v5 == 0, 5)",
        "v6 = make(3, (4,), torch.complex64)",
        "v7 = v6.conj()",
        "v7.set_(v6)",
        "v8 = v6.clone().set_(v6.conj())",
        "v9 = v6.conj().set_(v6.untyped_storage(), 1, (2,), (1,))",
    ],
    "strides of size 1": [
        "v0 = make(1, (7, 1), torch.float32)",
        "v1 = v0.t() + 1.5",
        "v2 = torch.ones_like(v0.t())",
        "v3 = v0.t()[::2].flip(-1)",
    ],
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str):
    assert check(Program(0, tuple(FOUND[name])), "lazy").mismatch is None


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


def test_growing_sees_tensors_that_the_collector_leaves_alone():
    import gc

    x = torch.arange(3.0).to("hlo")
    y = x.view(3)
    gc.freeze()
    x.resize_(5)
    gc.unfreeze()
    y.add_(10)
    assert y.tolist() == [10, 11, 12] and x[:3].tolist() == [10, 11, 12]


def test_a_view_of_another_type_is_resized_by_its_bytes():
    whole = torch.arange(4, dtype=torch.int32).to("hlo")
    assert whole.view(torch.float16).resize_(5).shape == (5,)
    half = torch.ones(4, dtype=torch.float16).to("hlo").view(torch.int32)
    assert half.resize_(1).shape == (1,)
    with pytest.raises(NotImplementedError, match="int32 view of a torch.float16 storage"):
        half.resize_(2, 2)
