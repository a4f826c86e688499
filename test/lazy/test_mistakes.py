"""What users get wrong: the error has PyTorch's type and words, comes from the call, and nothing is
broken afterwards."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_hlo.lowering.core.registry import TORCH_TO_HLO

pytestmark = pytest.mark.usefixtures("recorded")


def h(*size):
    return torch.ones(*size).to("hlo")


def long(*values):
    return torch.tensor(values).to("hlo")


# The same call on CPU tensors must raise the same type (and, with a pattern, similar words).
SAME = {
    "matmul": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    "broadcast": lambda d: torch.ones(2, 3, device=d) + torch.ones(4, device=d),
    "shape before dtype": (
        lambda d: torch.ones(4, dtype=torch.long, device=d).lerp_(
            torch.ones(3, 2, dtype=torch.long, device=d), 0.5
        )
    ),
    "linear": lambda d: nn.Linear(3, 4).to(d)(torch.ones(2, 5, device=d)),
    "conv": lambda d: nn.Conv2d(3, 4, 3).to(d)(torch.ones(1, 2, 8, 8, device=d)),
    "cat": lambda d: torch.cat([torch.ones(2, 3, device=d), torch.ones(2, 4, device=d)]),
    "index_put: indices": lambda d: torch.ones(5, 5, device=d).index_put_(
        (torch.tensor([0, 1]).to(d), torch.tensor([0, 1, 2]).to(d)), torch.tensor(0.0).to(d)
    ),
    "index_put: values": lambda d: torch.ones(4, device=d).index_put_(
        (torch.tensor([0, 1]).to(d),), torch.ones(3, device=d)
    ),
    "index_put: dtypes": lambda d: torch.ones(4, device=d).index_put_(
        (torch.tensor([0, 1]).to(d),), torch.ones(2, device=d).long()
    ),
    "in place": lambda d: torch.ones(3, device=d).eq_(torch.ones(2, 3, device=d)),
    "in place, one": lambda d: torch.ones(1, device=d).lt_(torch.ones(3, device=d)),
    "randperm: too many": lambda d: torch.randperm(257, dtype=torch.uint8, device=d),
    "scales of a bag: dtype": lambda d: F.embedding_bag(
        torch.tensor([0]).to(d),
        torch.ones(2, 2, device=d),
        torch.tensor([0]).to(d),
        mode="sum",
        per_sample_weights=torch.ones(1, dtype=torch.float64, device=d),
    ),
    "embedding_bag: sizes": lambda d: torch.embedding_bag(
        torch.ones(2, 2, device=d), torch.ones(2, 1, 1).long().to(d), torch.tensor([0]).to(d)
    ),
    "empty_strided": lambda d: torch.empty_strided((-2, 3), (1, 2), device=d),
    "gradient of elu_": lambda d: (
        F.elu_(torch.ones(2, device=d, requires_grad=True) * -1, -2.0).sum().backward()
    ),
    "gradient of leaky_relu_": lambda d: (
        F.leaky_relu_(torch.ones(2, device=d, requires_grad=True) * -1, -2.0).sum().backward()
    ),
    "interpolate: dtype": lambda d: F.interpolate(
        torch.ones(1, 1, 2, 2, device=d).int(), size=3, mode="bilinear"
    ),
    "adaptive pooling: dtype": lambda d: F.adaptive_avg_pool2d(
        torch.ones(1, 1, 2, 2, device=d).int(), 1
    ),
    "masked_scatter_": lambda d: torch.ones(3, device=d).masked_scatter_(
        torch.ones(2, 3, device=d) > 0, torch.ones(6, device=d)
    ),
    "nonzero: out": lambda d: torch.nonzero(torch.ones(4, device=d), out=torch.empty(0, device=d)),
    "masked_select: out": lambda d: torch.masked_select(
        torch.ones(4, device=d), torch.ones(4, device=d) > 0, out=torch.empty(0, device=d).long()
    ),
    "view": lambda d: torch.ones(2, 3, device=d).view(4, 2),
    "view of transpose": lambda d: torch.ones(2, 3, device=d).t().view(6),
    "reshape": lambda d: torch.ones(2, 3, device=d).reshape(-1, 4),
    "index dim": lambda d: torch.ones(2, device=d)[0, 0],
    "index range": lambda d: torch.ones(2, device=d)[5],
    "dim range": lambda d: torch.ones(2, 3, device=d).sum(4),
    "in-place broadcast": lambda d: torch.ones(3, device=d).add_(torch.ones(2, 3, device=d)),
    "in-place cast": lambda d: torch.ones(3, dtype=torch.long, device=d).add_(0.5),
    "expand": lambda d: torch.ones(2, 3, device=d).expand(4, 3),
    "mask shape": lambda d: torch.ones(3, device=d)[torch.ones(4, dtype=torch.bool, device=d)],
    "index put dtype": (
        lambda d: torch.ones(3, device=d).index_put_(
            (torch.tensor([0], device=d),), torch.ones(1, dtype=torch.double, device=d)
        )
    ),
    "stack": lambda d: torch.stack([torch.ones(2, device=d), torch.ones(3, device=d)]),
    "embedding": lambda d: F.embedding(torch.tensor([1, 7]).to(d), torch.ones(3, 2, device=d)),
    "embedding negative": lambda d: F.embedding(
        torch.tensor([-1]).to(d), torch.ones(3, 2, device=d)
    ),
    "index_select": lambda d: torch.ones(3, device=d).index_select(0, torch.tensor([3]).to(d)),
    "gather": lambda d: torch.ones(3, device=d).gather(0, torch.tensor([5]).to(d)),
    "scatter": (
        lambda d: torch.zeros(3, device=d).scatter_(
            0, torch.tensor([5]).to(d), torch.ones(1, device=d)
        )
    ),
    "advanced index": lambda d: torch.ones(3, device=d)[torch.tensor([0, 4]).to(d)],
    "advanced index negative": lambda d: torch.ones(3, device=d)[torch.tensor([-4]).to(d)],
    "advanced index list": lambda d: torch.ones(3, device=d)[[0, 3]],
    "index_put range": (
        lambda d: torch.ones(3, device=d).index_put_(
            (torch.tensor([3]).to(d),), torch.ones(1, device=d)
        )
    ),
    "take": lambda d: torch.take(torch.ones(3, device=d), torch.tensor([3]).to(d)),
    "target": lambda d: F.cross_entropy(torch.ones(2, 3, device=d), torch.tensor([0, 3]).to(d)),
    "target size": lambda d: F.cross_entropy(torch.ones(2, 3, device=d), torch.tensor([0]).to(d)),
    "target dtype": lambda d: F.nll_loss(
        torch.ones(2, 3, device=d), torch.tensor([0.0, 1.0]).to(d)
    ),
    "integer mean": lambda d: torch.ones(3, dtype=torch.long, device=d).mean(),
    "integer gradient": lambda d: torch.ones(3, dtype=torch.long, device=d).requires_grad_(),
    "matmul dtypes": lambda d: (
        torch.ones(2, 2, device=d) @ torch.ones(2, 2, dtype=torch.double, device=d)
    ),
    "linear dtypes": lambda d: F.linear(
        torch.ones(2, 2, device=d), torch.ones(2, 2, dtype=torch.half, device=d)
    ),
    "no gradient": lambda d: torch.ones(3, device=d).sum().backward(),
    "vector backward": lambda d: (torch.ones(3, device=d).requires_grad_() * 2).backward(),
    "negative power": lambda d: torch.ones(3, dtype=torch.long, device=d) ** -1,
    "squeeze assignment": (
        lambda d: torch.ones(2, 3, device=d).__setitem__(0, torch.ones(4, device=d))
    ),
    "split": lambda d: torch.ones(4, device=d).split([1, 2]),
    "pad": lambda d: F.pad(torch.ones(1, 1, 2, device=d), (3, 3), mode="reflect"),
    "softmax dim": lambda d: torch.ones(2, device=d).softmax(3),
    "too many dims": lambda d: torch.ones(2, device=d).transpose(0, 2),
    "one_hot": lambda d: F.one_hot(torch.tensor([3]).to(d), 2),
    "multinomial": lambda d: torch.multinomial(torch.tensor([0.5, 0.5]).to(d), 3),
    "out dtype": lambda d: torch.add(
        torch.ones(2, device=d), 1.5, out=torch.ones(2, dtype=torch.long, device=d)
    ),
    "resize with grad": lambda d: torch.ones(2, device=d).requires_grad_().resize_(3),
    "set data": lambda d: setattr(torch.ones(2, device=d), "grad", torch.ones(3, device=d)),
    "batch of one": lambda d: nn.BatchNorm1d(2).to(d)(torch.ones(1, 2, device=d)),
    "attention": lambda d: F.scaled_dot_product_attention(
        torch.ones(1, 2, 3, 4, device=d),
        torch.ones(1, 2, 3, 5, device=d),
        torch.ones(1, 2, 3, 4, device=d),
    ),
    "unknown dtype op": lambda d: torch.bitwise_and(torch.ones(2, device=d), 1),
    "arange": lambda d: torch.arange(0, 10, -1, device=d),
    "negative size": lambda d: torch.zeros(-1, device=d),
}


@pytest.mark.parametrize("name", SAME)
def test_same_error_as_on_the_cpu(name):
    fn = SAME[name]
    with pytest.raises(Exception) as expected:
        fn("cpu")
    with pytest.raises(Exception) as got:
        fn("hlo")
    assert type(got.value) is type(expected.value), f"{got.value!r} instead of {expected.value!r}"
    assert "INTERNAL ASSERT" not in str(got.value)
    assert (h(2) + 1).tolist() == [2, 2]


def ones(d, *sizes, dtype=torch.float32):
    return [torch.ones(size, dtype=dtype, device=d) for size in sizes]


NOTHING = (3, 0)
IMAGE, FILTERS = (2, 4, 7, 7), (6, 4, 3, 3)
# The same call on CPU tensors must raise the same type and words.
SAME_WORDS = {
    "mm": lambda d: torch.mm(*ones(d, (2, 7), (8, 4))),
    "linear": lambda d: F.linear(*ones(d, (2, 7), (4, 8), (4,))),
    "linear with a batch": lambda d: F.linear(*ones(d, (3, 2, 7), (4, 8))),
    "linear bias": lambda d: F.linear(*ones(d, (2, 8), (4, 8), (5,))),
    "linear bias with a batch": lambda d: F.linear(*ones(d, (3, 2, 8), (4, 8), (5,))),
    "one_hot of floats": lambda d: F.one_hot(*ones(d, (2,))),
    "one_hot of nothing": lambda d: F.one_hot(*ones(d, (0,), dtype=torch.long), 0),
    "one_hot of negatives": lambda d: F.one_hot(-ones(d, (2,), dtype=torch.long)[0]),
    "one_hot of no classes": lambda d: F.one_hot(*ones(d, (2,), dtype=torch.long), 0),
    "rms_norm": lambda d: F.rms_norm(*ones(d, (2, 2, 3)), (2, 2)),
    "rms_norm of nothing": lambda d: F.rms_norm(*ones(d, (2, 3)), ()),
    "rms_norm weight": lambda d: F.rms_norm(*ones(d, (1, 2, 3)), (1, 2, 3), *ones(d, (1, 2))),
    "matmul with a batch": lambda d: torch.matmul(*ones(d, (2, 3, 4), (5, 6))),
    "matmul of batches": lambda d: torch.matmul(*ones(d, (2, 3, 4), (2, 5, 6))),
    "matmul with a vector": lambda d: torch.matmul(*ones(d, (2, 3, 4), (5,))),
    "vector with a matrix": lambda d: torch.matmul(*ones(d, (8,), (7, 3))),
    "matmul dtypes": lambda d: torch.matmul(
        *ones(d, (2, 8, 8)), *ones(d, (2, 8, 7), dtype=torch.long)
    ),
    "mv": lambda d: torch.mv(*ones(d, (8, 7), (8,))),
    "dot": lambda d: torch.dot(*ones(d, (8,), (7,))),
    "bmm": lambda d: torch.bmm(*ones(d, (2, 3, 4), (3, 4, 6))),
    "addmm": lambda d: torch.addmm(*ones(d, (4,), (2, 7), (8, 4))),
    "addmm bias": lambda d: torch.addmm(*ones(d, (5,), (2, 8), (8, 4))),
    "addmm bias rank": lambda d: torch.addmm(*ones(d, (1, 2, 4), (2, 8), (8, 4))),
    "addmm_": lambda d: ones(d, (4,))[0].addmm_(*ones(d, (2, 8), (8, 4))),
    "addmv": lambda d: torch.addmv(*ones(d, (9,), (8, 7), (7,))),
    "baddbmm": lambda d: torch.baddbmm(*ones(d, (4,), (2, 2, 8), (2, 7, 4))),
    "kthvalue of nothing": lambda d: torch.kthvalue(*ones(d, NOTHING), 1),
    "kthvalue": lambda d: torch.kthvalue(*ones(d, (3, 2)), 3),
    "topk": lambda d: torch.topk(*ones(d, (3, 2)), 3),
    "median of nothing": lambda d: torch.median(*ones(d, NOTHING), 1),
    "mode of nothing": lambda d: torch.mode(*ones(d, NOTHING)),
    "quantile of nothing": lambda d: torch.quantile(*ones(d, NOTHING), 0.5),
    "kthvalue of truth values": lambda d: torch.kthvalue(*ones(d, (3,), dtype=torch.bool), 1),
    "topk of truth values": lambda d: torch.topk(*ones(d, (3,), dtype=torch.bool), 1),
    "nansum of complex numbers": lambda d: torch.nansum(*ones(d, (3,), dtype=torch.cfloat)),
    "topk of complex numbers": lambda d: torch.topk(*ones(d, (3,), dtype=torch.cfloat), 1),
    "histc of no truth values": lambda d: torch.histc(*ones(d, (0,), dtype=torch.bool)),
    "histc of no bins": lambda d: torch.histc(*ones(d, (3,)), 0),
    "_int_mm": lambda d: torch._int_mm(*ones(d, (32, 32), (16, 32), dtype=torch.int8)),
    "_int_mm dtypes": lambda d: torch._int_mm(*ones(d, (32, 32), (32, 32))),
    "complex dtypes": lambda d: torch.complex(*ones(d, (2,)), *ones(d, (2,), dtype=torch.double)),
    "complex integers": lambda d: torch.complex(*ones(d, (2,)), *ones(d, (2,), dtype=torch.int)),
    "embedding_bag": lambda d: F.embedding_bag(
        torch.tensor([5]).to(d), *ones(d, (3, 2)), torch.tensor([0]).to(d)
    ),
    "embedding rank": lambda d: F.embedding(torch.tensor([1]).to(d), torch.ones(3, device=d)),
    "boundaries": lambda d: torch.bucketize(*ones(d, (2,), (2, 2))),
    "out of another dtype": lambda d: torch.aminmax(
        *ones(d, (3,)), dim=0, out=ones(d, (), (), dtype=torch.double)
    ),
    "numbers that do not fit": lambda d: torch.full((3,), 300, dtype=torch.int8, device=d),
    "floats that do not fit": lambda d: torch.full((3,), 1e300, device=d),
    "fill_ that does not fit": lambda d: ones(d, (3,), dtype=torch.int8)[0].fill_(300),
    "fill_ with a complex number": lambda d: ones(d, (3,))[0].fill_(1j),
    "linspace that does not fit": lambda d: torch.linspace(0, 300, 5, dtype=torch.int8, device=d),
    "linspace of truth values": lambda d: torch.linspace(0, 1, 3, dtype=torch.bool, device=d),
    "randperm that does not fit": lambda d: torch.randperm(300, dtype=torch.int8, device=d),
    "scatter into a slice": lambda d: torch.as_strided_scatter(
        *ones(d, (4, 4), (2, 2)), (2, 2), (200, 200), 0
    ),
    "uniform_": lambda d: ones(d, (3,))[0].uniform_(3, -1),
    "uniform_ of integers": lambda d: ones(d, (3,), dtype=torch.long)[0].uniform_(),
    "normal_": lambda d: ones(d, (3,))[0].normal_(0, -1),
    "exponential_": lambda d: ones(d, (3,))[0].exponential_(-1),
    "random_": lambda d: ones(d, (3,))[0].random_(3, 1),
    "randint": lambda d: torch.randint(3, 3, (2,), device=d),
    "bernoulli_": lambda d: ones(d, (3,))[0].bernoulli_(1.5),
    "bernoulli of integers": lambda d: torch.bernoulli(*ones(d, (3,), dtype=torch.long)),
    "multinomial of integers": lambda d: torch.multinomial(*ones(d, (3,), dtype=torch.long), 1),
    "multinomial rank": lambda d: torch.multinomial(*ones(d, (1, 1, 2)), 1),
    "native_dropout": lambda d: torch.native_dropout(*ones(d, (3,)), 1.5, True),
    "conv1d": lambda d: F.conv1d(*ones(d, (2, 4, 7), (5, 3, 3))),
    "conv2d": lambda d: F.conv2d(*ones(d, IMAGE, (5, 3, 3, 3))),
    "conv2d of one image": lambda d: F.conv2d(*ones(d, (4, 7, 7), (5, 3, 3, 3))),
    "conv groups": lambda d: F.conv2d(*ones(d, IMAGE, (5, 2, 3, 3)), groups=2),
    "conv channels of groups": lambda d: F.conv2d(*ones(d, IMAGE, (6, 3, 3, 3)), groups=2),
    "conv no groups": lambda d: F.conv2d(*ones(d, IMAGE, FILTERS), groups=0),
    "conv bias": lambda d: F.conv2d(*ones(d, IMAGE, FILTERS, (5,))),
    "conv rank": lambda d: F.conv2d(*ones(d, IMAGE, (6, 4, 3))),
    "conv stride": lambda d: F.conv2d(*ones(d, IMAGE, FILTERS), stride=0),
    "conv strides": lambda d: F.conv2d(*ones(d, IMAGE, FILTERS), stride=(1, 1, 1)),
    "conv padding": lambda d: F.conv2d(*ones(d, IMAGE, FILTERS), padding=-1),
    "conv dilation": lambda d: F.conv2d(*ones(d, IMAGE, FILTERS), dilation=0),
    "conv dtypes": lambda d: F.conv2d(*ones(d, IMAGE), *ones(d, FILTERS, dtype=torch.float64)),
    "conv_transpose": lambda d: F.conv_transpose2d(*ones(d, IMAGE, (3, 5, 3, 3))),
    "conv_transpose bias": lambda d: F.conv_transpose2d(*ones(d, IMAGE, (4, 5, 3, 3), (4,))),
    "conv_transpose groups": lambda d: F.conv_transpose2d(*ones(d, IMAGE, (4, 5, 3, 3)), groups=3),
    "conv_transpose output": lambda d: F.conv_transpose2d(
        *ones(d, IMAGE, (4, 5, 3, 3)), output_padding=3
    ),
}

# Calls with an index, which has a type that the CPU refuses for at least one of them.
INDEXED = {
    "index": lambda x, i: x[i],
    "index columns": lambda x, i: x[:, i],
    "index_put": lambda x, i: x.index_put((i,), x[0]),
    "assignment": lambda x, i: x.__setitem__(i, x[0].clone()),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x, "amax"),
    "take": lambda x, i: x.take(i),
    "put": lambda x, i: x.put(i, x[0, :2]),
    "embedding": lambda x, i: F.embedding(i, x),
    "nll_loss": lambda x, i: F.nll_loss(x, i),
    "masked_scatter": lambda x, i: x[:, :2].masked_scatter(i, x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int16, torch.uint16])
@pytest.mark.parametrize("name", INDEXED)
def test_index_types(name, dtype):
    def call(d):
        index = torch.tensor([1, 0]).to(dtype).to(d)
        return INDEXED[name](torch.ones(2, 3, device=d), index)

    with pytest.raises(Exception) as expected:
        call("cpu")
    with pytest.raises(type(expected.value)) as got:
        call("hlo")
    assert str(got.value) == str(expected.value)


def test_judging_draws_no_numbers_from_the_generator_of_the_cpu():
    state = torch.get_rng_state()
    torch.rand(2, 3, device="hlo") + h(2, 3).bernoulli_(0.25)
    assert state.equal(torch.get_rng_state())


@pytest.mark.parametrize("number", [2.0, 1e30, float("-inf")])
def test_large_numbers_are_judged_at_each_call(number):
    for dtype in torch.half, torch.float:
        outcomes = []
        for device in "cpu", "hlo":
            torch.full((3,), 1.0, dtype=dtype, device=device)
            try:
                outcomes.append(torch.full((3,), number, dtype=dtype, device=device).tolist())
            except RuntimeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_bytes_as_classes_and_conditions():
    found = []
    for d in "cpu", "hlo":
        x = torch.arange(6.0).reshape(2, 3).to(d).requires_grad_()
        targets = torch.tensor([2, 1], dtype=torch.uint8).to(d)
        loss = F.cross_entropy(x, targets, label_smoothing=0.1) + F.nll_loss(x, targets)
        chosen = torch.where(torch.tensor([2, 0, 1], dtype=torch.uint8).to(d), x, -x)
        (loss + chosen.sum()).backward()
        found.append((loss.detach().cpu(), chosen.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(*found)


def test_indices_that_do_not_broadcast():
    with pytest.raises(IndexError, match=r"could not be broadcast together .* \[2\], \[3\]"):
        h(2, 3)[long(1, 0), long(0, 1, 0)]


@pytest.mark.parametrize("name", SAME_WORDS)
def test_same_words_as_on_the_cpu(name):
    fn = SAME_WORDS[name]
    with pytest.raises(Exception) as expected:
        fn("cpu")
    with pytest.raises(Exception) as got:
        fn("hlo")
    assert type(got.value) is type(expected.value), f"{got.value!r} instead of {expected.value!r}"
    assert str(got.value) == str(expected.value)


MIXED = {
    "add": lambda: h(3) + torch.ones(3),
    "add reversed": lambda: torch.ones(3) + h(3),
    "matmul": lambda: h(2, 2) @ torch.ones(2, 2),
    "linear": lambda: nn.Linear(3, 3).to("hlo")(torch.ones(1, 3)),
    "linear weights": lambda: nn.Linear(3, 3)(h(1, 3)),
    "conv": lambda: nn.Conv2d(1, 1, 3)(h(1, 1, 4, 4)),
    "cat": lambda: torch.cat([h(2), torch.ones(2)]),
    "where": lambda: torch.where(h(2) > 0, h(2), torch.ones(2)),
    "in-place": lambda: h(3).add_(torch.ones(3)),
    "in-place on cpu": lambda: torch.ones(3).add_(h(3)),
    "out": lambda: torch.add(h(3), 1, out=torch.ones(3)),
    "loss": lambda: F.cross_entropy(h(2, 3), torch.tensor([0, 1])),
    "embedding": lambda: nn.Embedding(3, 2).to("hlo")(torch.tensor([1])),
    "stack": lambda: torch.stack([h(2), torch.ones(2)]),
    "bmm": lambda: torch.bmm(torch.ones(1, 2, 2), h(1, 2, 2)),
    "mse": lambda: F.mse_loss(h(2), torch.ones(2)),
    "foreach": lambda: torch._foreach_add([h(2)], [torch.ones(2)]),
    "cpu indexed": lambda: torch.ones(3)[long(1, 2)],
    "gradient": lambda: torch.autograd.grad(
        h(3).requires_grad_() * 2, [h(3).requires_grad_()], torch.ones(3)
    ),
    "fallback": lambda: torch.linalg.solve(h(2, 2), torch.ones(2, 2)),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices(name):
    with pytest.raises(RuntimeError) as caught:
        MIXED[name]()
    if name != "gradient":
        assert "Expected all tensors to be on the same device" in str(caught.value), caught.value


def test_scalars_of_the_cpu_may_take_part():
    x = h(3)
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3] and (
        torch.tensor(2) * x
    ).dtype == torch.float32
    assert (x * torch.tensor(2.0, dtype=torch.double)).dtype == torch.float32
    assert (h(3).int() * torch.tensor(2.0, dtype=torch.double)).dtype == torch.float64
    assert torch.where(x > 0, x, torch.tensor(0.0)).tolist() == [1, 1, 1]
    x[torch.tensor([0, 2])] = torch.tensor(5.0)
    assert x.tolist() == [5, 1, 5] and x[torch.tensor(1)].item() == 1


@pytest.mark.parametrize(
    "lengths", [torch.Tensor.clone, lambda n: n.to("hlo"), torch.Tensor.tolist]
)
def test_lengths_of_the_cpu_may_take_part(lengths):
    x, targets = (
        torch.randn(12, 2, 5, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[1, 2, 3], [4, 1, 2]]),
    )
    found = []
    for device in ("cpu", "hlo"):
        y = x.detach().to(device).requires_grad_()
        numbers = (torch.tensor([12, 9]), torch.tensor([3, 2]))
        loss = F.ctc_loss(
            y.log_softmax(-1),
            targets.to(device),
            *(numbers if device == "cpu" else map(lengths, numbers)),
        )
        loss.backward()
        found.append((loss.detach().cpu(), y.grad.cpu()))
    torch.testing.assert_close(*found)
    with pytest.raises(RuntimeError, match="input_lengths to have value at most 12"):
        F.ctc_loss(
            y.log_softmax(-1),
            targets.to("hlo"),
            *map(lengths, (torch.tensor([13, 9]), torch.tensor([3, 2]))),
        )


def test_data_assignment_between_devices():
    x = torch.ones(3)
    with pytest.raises(RuntimeError):
        x.data = h(3)
    assert x.tolist() == [1, 1, 1]
    y = h(3)
    with pytest.raises((RuntimeError, TypeError)):
        y.data = torch.ones(3)
    with pytest.raises(RuntimeError):
        h(3).grad = torch.ones(3)


DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
MAKERS = {
    "empty": lambda dtype: torch.empty(4, dtype=dtype, device="hlo"),
    "zeros": lambda dtype: torch.zeros(4, dtype=dtype, device="hlo"),
    "copy": lambda dtype: torch.zeros(4).to("hlo", dtype),
    "conversion": lambda dtype: h(4).mul_(0).to(dtype),
    "bytes": lambda dtype: torch.zeros(4 * dtype.itemsize, dtype=torch.uint8).to("hlo").view(dtype),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_works_or_is_refused(dtype):
    works = dtype in TORCH_TO_HLO
    for make in MAKERS.values():
        if works:
            x = make(dtype).cpu()
            assert x.dtype == dtype and not x.view(torch.uint8).any()
            continue
        with pytest.raises(RuntimeError, match=f"no element type {dtype}: convert|on quantized"):
            make(dtype)


def test_operators_say_that_a_dtype_is_missing():
    with pytest.raises(RuntimeError, match=r"no element type torch.complex32: .*complex64"):
        h(2).half() * 1j
    with pytest.raises(RuntimeError, match="no element type torch.qint8"):
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).to("hlo")
    with pytest.raises(RuntimeError, match="no element type torch.qint8"):
        torch.quantize_per_tensor(h(3), 0.1, 0, torch.qint8)


def test_unsupported_kinds():
    with pytest.raises(NotImplementedError, match="sparse_bsr"):
        torch.eye(2).to_sparse_bsr((1, 1)).to("hlo")
    with pytest.raises(NotImplementedError, match="sparse_coo"):
        h(2, 2).to_sparse().exp()
    with pytest.raises(TypeError, match="convert"):
        h(2).numpy()
    with pytest.raises(RuntimeError, match="pin"):
        h(2).pin_memory()


def test_ignored_targets_are_no_error():
    x = torch.randn(3, 4)
    t = torch.tensor([0, -100, 3])
    assert F.cross_entropy(x.to("hlo"), t.to("hlo")).item() == pytest.approx(
        F.cross_entropy(x, t).item(), rel=1e-5
    )
    assert F.embedding(long(0, 2), h(3, 2), padding_idx=0).shape == (2, 2)


def test_data_dependent_results():
    x = torch.tensor([3.0, 0.0, 1.0, 3.0, 0.0])
    y = x.to("hlo")
    for fn in (
        lambda t: t.nonzero(),
        lambda t: t.unique(),
        lambda t: t.unique(return_inverse=True, return_counts=True),
        lambda t: t[t > 0],
        lambda t: torch.masked_select(t, t > 1),
        lambda t: t.nonzero(as_tuple=True),
        lambda t: torch.bincount(t.long()),
        lambda t: torch.repeat_interleave(t, t.long()),
        lambda t: torch.unique_consecutive(t),
        lambda t: torch.argwhere(t),
        lambda t: torch.where(t > 0),
        lambda t: torch.histc(t, 4),
    ):
        e, a = fn(x), fn(y)
        for u, v in zip(e if isinstance(e, tuple) else (e,), a if isinstance(a, tuple) else (a,)):
            assert v.is_hlo and v.cpu().equal(u)
    assert torch.equal(y, y.clone()) and not torch.equal(y, y + 1) and torch.allclose(y, y)
    assert bool((y > 2).any()) and (y.max() == 3).item() is True and not torch.is_nonzero(y[1])
    torch.testing.assert_close(y, x.to("hlo"))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(y, y + 1)


def test_spreads_warn_of_one_number_only():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spread in (torch.std, torch.var, torch.std_mean, torch.var_mean):
            spread(h(3, 5), 0)
            spread(h(7))
    with pytest.warns(UserWarning, match="degrees of freedom"):
        h(1, 9).std(0)
