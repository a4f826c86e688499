"""Subclasses of tensors on the device: their class is kept, and what they do is what it says."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("recorded")


class Image(torch.Tensor):
    def brighter(self):
        return self + 1


class Mask(Image):
    pass


def image(device="hlo"):
    return torch.arange(6.0).view(2, 3).as_subclass(Image).to(device)


def test_results_keep_the_class():
    x = image()
    y = x.brighter()[0] * 2
    assert isinstance(y, Image) and y.is_hlo and y.tolist() == [2, 4, 6]
    assert type(y.cpu()) is Image and y.cpu().tolist() == [2, 4, 6]
    assert isinstance(torch.stack([x, x]), Image) and "device='hlo" in repr(x)
    assert isinstance(pickle.loads(pickle.dumps(x)), Image)
    mask = x[0].as_subclass(Mask)
    assert isinstance(mask, Mask) and isinstance(x + mask, Mask)
    assert {Image: 1, Mask: 2}[type(mask)] == 2  # as torchvision looks classes up
    plain = x.as_subclass(torch.Tensor)
    assert not isinstance(plain, Image) and plain.is_hlo


def test_memory_is_shared():
    base = torch.zeros(3).to("hlo")
    x = base.as_subclass(Image)
    x[0] = 5
    base += 1
    assert x.tolist() == base.tolist() == [6, 1, 1]
    with pytest.raises(NotImplementedError, match="unsqueeze_.*reshape"):
        x.unsqueeze_(0)


def test_gradients():
    def run(device):
        torch.manual_seed(0)
        layer, p = nn.Linear(3, 2).to(device), torch.ones(3, device=device, requires_grad=True)
        target = torch.tensor([0, 1]).to(device).as_subclass(Mask)
        loss = nn.functional.cross_entropy(layer(image(device) * p.as_subclass(Image)), target)
        loss.backward()
        return [loss.item(), *(g.cpu() for g in (p.grad, layer.weight.grad))]

    torch.testing.assert_close(run("hlo"), run("cpu"))


def test_parameters_and_copies():
    y = torch.zeros(2, 3).to("hlo")
    assert y.copy_(image("cpu")).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert nn.Parameter(image("cpu")).to("hlo", torch.float64).dtype is torch.float64
    with pytest.raises(RuntimeError, match="on the same device"):
        y + image("cpu")
