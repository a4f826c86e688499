"""nn.TransformerEncoder and nn.MultiheadAttention in evaluation, where PyTorch calls ops of its own
for them."""

import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo import metrics

PADDING = torch.arange(5)[None] >= torch.tensor([5, 3, 4])[:, None]
FUTURE = torch.ones(5, 5).triu(1).bool()


def both(run) -> None:
    """`run(device)` gives the same on the CPU and on hlo, where no op falls back."""
    metrics.clear_counters()
    torch.manual_seed(0)
    expected = run("cpu")
    torch.manual_seed(0)
    got = run("hlo")
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g.cpu(), e, rtol=1e-4, atol=1e-5)
    assert not metrics.executed_fallback_ops()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"mask": FUTURE},
        {"src_key_padding_mask": PADDING},
        {"mask": FUTURE, "src_key_padding_mask": PADDING},
        {"mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True},
    ],
    ids=["plain", "mask", "padding", "both", "causal"],
)
@pytest.mark.parametrize("activation, norm_first", [("relu", False), ("gelu", True)])
def test_encoder(activation, norm_first, masks, context):
    def run(device):
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, activation=activation, batch_first=True, norm_first=norm_first
        )
        model = (
            nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=not norm_first)
            .to(device)
            .eval()
        )
        x = torch.randn(3, 5, 16).to(device)
        with context():
            return [
                model(
                    x,
                    **{
                        k: v.to(device) if isinstance(v, torch.Tensor) else v
                        for k, v in masks.items()
                    },
                )
            ]

    both(run)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("mask", [None, FUTURE])
@pytest.mark.parametrize("need_weights, average", [(False, True), (True, True), (True, False)])
def test_multihead_attention(padding, mask, need_weights, average):
    def run(device):
        model = nn.MultiheadAttention(16, 2, batch_first=True).to(device).eval()
        x = torch.randn(3, 5, 16).to(device)
        masks = [m if m is None else m.to(device) for m in (padding, mask)]
        with torch.no_grad():
            found = model(x, x, x, masks[0], need_weights, masks[1], average)
        return [f for f in found if f is not None]

    both(run)


def test_who_sees_nothing_is_nan():
    nothing = torch.tensor([[False, True], [True, True]])

    def run(device):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device).eval()
        attention = nn.MultiheadAttention(8, 2, batch_first=True).to(device).eval()
        x = torch.randn(2, 2, 8).to(device)
        with torch.no_grad():
            seen = attention(x, x, x, attn_mask=nothing.to(device), need_weights=False)[0]
            return layer(x, src_key_padding_mask=nothing.to(device)), seen, layer(x[:0])

    def same(device):
        return [t.nan_to_num(99.0) for t in run(device)]

    both(same)


def test_padding_is_not_waited_for():
    model = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        .to("hlo")
        .eval()
    )
    x, padding = torch.randn(3, 5, 16, device="hlo"), PADDING.to("hlo")

    @torch_hlo.compile(full_graph=True)
    def run(x, padding):
        with torch.no_grad():
            return model(x, src_key_padding_mask=padding)

    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding).cpu()
    for _ in range(3):
        # traced, PyTorch does not write zeros where there is padding
        torch.testing.assert_close(run(x, padding).cpu()[~PADDING], expected[~PADDING])
    assert not expected[PADDING].any()


def test_torch_compile():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    heads = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(3, 5, 16)

    def run(x):
        x = model(x)
        return heads(x, x, x)

    metrics.clear_counters()
    with torch.no_grad():
        for got, expected in zip(torch.compile(run, backend="hlo")(x), run(x), strict=True):
            torch.testing.assert_close(got, expected)
    assert not metrics.executed_fallback_ops()


def test_other_uses_of_nested_tensors_say_so():
    x = torch.randn(3, 5, 16, device="hlo")
    nested = torch._nested_tensor_from_mask(x, ~PADDING.to("hlo"))
    with pytest.raises(NotImplementedError, match="enable_nested_tensor=False"):
        nested + 1
    with pytest.raises(RuntimeError, match="mask of the first two"):
        torch._nested_tensor_from_mask(x, torch.ones(3, 4, dtype=torch.bool, device="hlo"))
