"""torch.export programs as HLO and StableHLO text."""

import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo import export

TEXTS = [export.to_hlo_text, export.to_stablehlo_text, export.to_portable_artifact]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Linear(4, 3),
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.linear(x), x.argmax(1)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("train", [False, True])
def test_a_network_and_its_buffers(text, train):
    torch.manual_seed(0)
    net = Net().train(train)
    x = torch.randn(2, 1, 6, 6)
    ep = torch.export.export(net, (x,))
    for results in (
        torch_hlo.run_text(text(ep), *export.inputs(ep, x)),
        torch_hlo.run_text(text(ep, embed=True), x),
    ):
        before = net.norm.running_mean.clone()
        want = net(x)
        torch.testing.assert_close(results[-2], want[0])
        assert torch.equal(results[-1], want[1])
        if train:
            assert len(results) == 6
            assert any(
                torch.allclose(r, net.norm.running_mean, atol=1e-6)
                for r in results
                if r.shape == (4,)
            )
            net.norm.running_mean.copy_(before)


def test_dynamic_dimension_is_a_symbol():
    linear = nn.Linear(3, 2)
    ep = torch.export.export(
        linear,
        (torch.randn(4, 3),),
        dynamic_shapes={"input": {0: torch.export.Dim("batch", max=64)}},
    )
    for text in [form(ep, embed=True) for form in TEXTS]:
        for n in (1, 7):
            x = torch.randn(n, 3)
            torch.testing.assert_close(torch_hlo.run_text(text, x)[0], linear(x))


def test_strides_of_the_example_do_not_matter():
    class Rows(nn.Module):
        def forward(self, x):
            return x.cumsum(1) * 2

    ep = torch.export.export(Rows(), (torch.randn(4, 3).T,))
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch_hlo.run_text(export.to_hlo_text(ep), x)[0], x.cumsum(1) * 2)


def test_random_numbers_take_a_seed():
    ep = torch.export.export(nn.Dropout(0.5), (torch.ones(1000),))
    text = export.to_hlo_text(ep)
    one, two, three = (
        torch_hlo.run_text(text, torch.ones(1000), torch.tensor(seed))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(one, two) and not torch.equal(one, three)
    assert 0.4 < one.ne(0).float().mean() < 0.6


@pytest.mark.parametrize("text", TEXTS)
def test_transformer(text):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    ep = torch.export.export(layer, (x,))
    torch.testing.assert_close(
        torch_hlo.run_text(text(ep, embed=True), x)[0], layer(x), rtol=1e-4, atol=1e-5
    )


def test_recorded_graphs_have_texts():
    from torch_hlo import debug

    x = torch.arange(4.0).to("hlo")
    torch_hlo.sync()
    y = (x + 1).relu()
    text = debug.hlo_text([y])
    results = torch_hlo.run_text(
        text, torch.arange(4.0), *([1.0] if text.count("parameter(") > 1 else [])
    )
    torch.testing.assert_close(results[0], torch.arange(4.0) + 1)
    assert "aten.add" in debug.graph_text([y])
    torch_hlo.sync()
    with pytest.raises(ValueError, match="pending"):
        debug.hlo_text([y])


def test_operators_of_transformers():
    """A loop over values in Python, which is an opcode here."""
    pytest.importorskip("transformers.integrations.moe")
    op = torch.ops.transformers.grouped_mm_fallback

    class Experts(nn.Module):
        def forward(self, x, weight, ends):
            return op(x, weight, ends)

    x, weight, ends = (
        torch.randn(10, 4),
        torch.randn(3, 4, 5),
        torch.tensor([3, 3, 8], dtype=torch.int32),
    )
    text = export.to_hlo_text(torch.export.export(Experts(), (x, weight, ends)))
    assert "ragged-dot" in text and "custom-call" not in text
    torch.testing.assert_close(torch_hlo.run_text(text, x, weight, ends)[0], op(x, weight, ends))
    x.requires_grad_()
    weight.requires_grad_()
    want = torch.autograd.grad(op(x, weight, ends).square().sum(), (x, weight))
    compiled = torch.compile(op, backend="hlo", options={"fallback": "error"})
    for g, w in zip(
        torch.autograd.grad(compiled(x, weight, ends).square().sum(), (x, weight)), want
    ):
        torch.testing.assert_close(g, w)
