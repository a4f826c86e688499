"""The rest of torch.compile works beside this package, in processes that have imported it first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INDUCTOR = """
import torch, torch_hlo

assert torch.compile(lambda x: x.sin() + 1)(torch.zeros(4)).tolist() == [1, 1, 1, 1]
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
compiled, step = torch.compile(model), torch.compile(optimizer.step)
for _ in range(2):
    before = model.weight.detach().clone()
    compiled(torch.ones(2, 4)).sum().backward()
    step()
    assert not torch.equal(before, model.weight)
    optimizer.zero_grad()
exported = torch.export.export(model, (torch.ones(2, 4),))
assert torch.equal(exported.module()(torch.ones(2, 4)), model(torch.ones(2, 4)))
"""
DEVICE = """
import torch, torch_hlo

step = torch.compile(lambda x: x * torch.full((3,), 2.0, device=x.device), fullgraph=True)
assert step(torch.ones(3, device="hlo")).tolist() == [2, 2, 2]
"""
OPTIMIZER = """
import torch, torch_hlo

p = torch.nn.Parameter(torch.ones(4))
p.grad = torch.ones(4)
optimizer = torch.optim.SGD([p], lr=0.5)
torch.compile(optimizer.step, backend="hlo")()
assert p.tolist() == [0.5] * 4
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(INDUCTOR, marks=pytest.mark.slow, id="inductor"),
        pytest.param(DEVICE, id="device"),
        pytest.param(OPTIMIZER, id="optimizer"),
    ],
)
def test_the_rest_of_torch_compile_works(script, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
