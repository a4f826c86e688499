"""What tests of captured steps share."""

import torch
from torch import nn

from torch_hlo.lazy.aten import mutation
from torch_hlo.lazy.record import recording, views
from torch_hlo.lowering.core.graph import Node


def no_recording(monkeypatch):
    """From here on, recording an op is an error."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"recorded {next(x for x in args if not isinstance(x, Node))}")

    monkeypatch.setattr(Node, "__init__", refuse)
    for module in (recording, views, mutation):
        monkeypatch.setattr(module, "recorded", refuse)


def network(device, optimizer="AdamW", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, **options)
