"""Jagged nested tensors: as on the CPU, and attention as on each sequence alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_hlo

OFFSETS = [0, 3, 8, 10]
JAGGED = {"layout": torch.jagged}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*runs on the CPU"),
]


def jagged(device, width=8, lengths=None):
    values = torch.randn(OFFSETS[-1], width, generator=torch.Generator().manual_seed(0))
    values = values.to(device).requires_grad_()
    offsets = torch.tensor(OFFSETS, device=device)
    if lengths is not None:
        lengths = torch.tensor(lengths, device=device)
    return values, torch.nested.nested_tensor_from_jagged(values, offsets, lengths)


def weighted(values):
    return (values * torch.arange(values.numel(), device=values.device).view(values.shape)).sum()


FUNCTIONS = {
    "linear": lambda x: nn.Linear(8, 4),
    "layer_norm": lambda x: nn.LayerNorm(8),
    "pointwise": lambda x: lambda x: F.gelu(x) * 2 + x.sin(),
    "product": lambda x: lambda x: x @ torch.ones(8, 3, device=x.device),
    "softmax": lambda x: lambda x: x.softmax(-1),
    "sum": lambda x: lambda x: x.sum(1),
    "mean": lambda x: lambda x: x.mean(1),
    "padded": lambda x: lambda x: x.to_padded_tensor(0.0),
    "padded with ones": lambda x: lambda x: torch.nested.to_padded_tensor(x, 1.0),
    "cut": lambda x: lambda x: x.to_padded_tensor(0.0, (3, 7, 8)),
    "cat": lambda x: lambda x: torch.cat([x, x], -1),
    "first": lambda x: lambda x: x.unbind()[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_on_the_cpu(name):
    results = []
    for device in ("cpu", "hlo"):
        torch.manual_seed(0)
        values, x = jagged(device)
        function = FUNCTIONS[name](x)
        if isinstance(function, nn.Module):
            function = function.to(device)
        y = function(x)
        y = y.values() if y.is_nested else y
        assert y.device.type == device
        results.append([y.detach().cpu()])
        if name not in ("sum", "mean"):  # PyTorch has no gradients of these
            weighted(y).backward()
            results[-1].append(values.grad.cpu())
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-5)


def test_made_of_a_list():
    parts = [torch.ones(2, 3), torch.full((4, 3), 2.0)]
    for make in (torch.nested.nested_tensor, torch.nested.as_nested_tensor):
        x = make([p.to("hlo") for p in parts], **JAGGED)
        assert x.device.type == "hlo" and x.offsets().tolist() == [0, 2, 6]
        assert [p.tolist() for p in x.unbind()] == [p.tolist() for p in parts]


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    """Of each sequence with itself, forward and backward, through the layers around it."""
    torch.manual_seed(0)
    inputs, outputs = nn.Linear(8, 24), nn.Linear(8, 8)
    values, _ = jagged("cpu")
    wanted = []
    for start, end in zip(OFFSETS, OFFSETS[1:]):
        parts = inputs(values[start:end]).chunk(3, -1)
        parts = (p.unflatten(-1, (2, 4)).transpose(0, 1) for p in parts)
        found = F.scaled_dot_product_attention(*parts, is_causal=causal)
        wanted.append(outputs(found.transpose(0, 1).flatten(1)))
    weighted(torch.cat(wanted)).backward()
    gradients = [values.grad, inputs.weight.grad.clone()]
    inputs.zero_grad()

    inputs, outputs = inputs.to("hlo"), outputs.to("hlo")
    values, x = jagged("hlo")
    parts = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in inputs(x).chunk(3, -1))
    found = F.scaled_dot_product_attention(*parts, is_causal=causal)
    found = outputs(found.transpose(1, 2).flatten(2))
    rows = torch.cat(list(found.unbind()))
    weighted(rows).backward()
    torch.testing.assert_close(rows.cpu(), torch.cat(wanted), rtol=1e-4, atol=1e-4)
    found = [values.grad.cpu(), inputs.weight.grad.cpu()]
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-3)


def test_attention_with_gaps():
    x = jagged("hlo", lengths=[2, 5, 1])[1].unflatten(-1, (2, 4)).transpose(1, 2)
    for y, part in zip(F.scaled_dot_product_attention(x, x, x).unbind(), x.unbind()):
        wanted = F.scaled_dot_product_attention(*[part.cpu()] * 3)
        torch.testing.assert_close(y.cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_attention_of_another_length():
    query = jagged("hlo")[1].unflatten(-1, (2, 4)).transpose(1, 2)
    values = torch.randn(7, 8, device="hlo")
    offsets = torch.tensor([0, 4, 5, 7], device="hlo")
    key = torch.nested.nested_tensor_from_jagged(values, offsets)
    key = key.unflatten(-1, (2, 4)).transpose(1, 2)
    found = F.scaled_dot_product_attention(query, key, key).unbind()
    for q, k, y in zip(query.unbind(), key.unbind(), found):
        wanted = F.scaled_dot_product_attention(q.cpu(), k.cpu(), k.cpu())
        torch.testing.assert_close(y.cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_refusals():
    with pytest.raises(NotImplementedError, match="layout=torch.jagged"):
        torch.nested.nested_tensor([torch.ones(2, 3, device="hlo")])
    x = jagged("hlo")[1].unflatten(-1, (2, 4)).transpose(1, 2)
    with pytest.raises(RuntimeError, match="to_padded_tensor"):
        F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(3, 3, device="hlo"))
    assert torch_hlo
