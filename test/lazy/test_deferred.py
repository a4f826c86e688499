"""What torch.compile imports for others is imported when they use it."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, torch_hlo

compiled = torch.compile(lambda x: x * 2 + 1, backend="hlo")
assert not {"torch._functorch.partitioners", "networkx", "torch._dynamo.testing"} & set(sys.modules)
x = torch.arange(4.0)
assert compiled(x).tolist() == [1, 3, 5, 7]
for backend in ("eager", "aot_eager"):
    assert torch.compile(lambda x: x + 1, backend=backend)(x).tolist() == [1, 2, 3, 4]
assert {"hlo", "inductor", "cudagraphs"} <= set(torch._dynamo.list_backends())

from torch._dynamo import debug_utils
assert debug_utils.rand_strided((2, 3), (1, 2), torch.float32, "cpu").stride() == (1, 2)
if torch.distributed.is_available():
    from torch.distributed.fsdp import fully_shard
"""


OTHERS = """
import sys, types, torch, torch_hlo
from torch_hlo.lazy import deferred

name = "torch._dynamo.testing"
stand_in = sys.modules[name] = deferred._StandIn(name, {"rand_strided": None})
from torch._dynamo.testing import CompileCounter, rand_strided  # what is asked for by others, too
import torch._dynamo.testing as testing
assert testing is sys.modules[name] is not stand_in and CompileCounter is testing.CompileCounter
"""


def test_stand_ins_answer_for_the_whole_module():
    done = subprocess.run([sys.executable, "-c", OTHERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
OPTIMIZER = """
import torch, torch_hlo

p = torch.nn.Parameter(torch.ones(4))
p.grad = torch.ones(4)
optimizer = torch.optim.SGD([p], lr=0.5)
torch.compile(optimizer.step, backend="hlo")()
assert p.tolist() == [0.5] * 4
"""


@pytest.mark.parametrize("script", [pytest.param(INDUCTOR, marks=pytest.mark.slow, id="inductor"), pytest.param(OPTIMIZER, id="optimizer")])
def test_the_rest_of_torch_compile_works(script, tmp_path):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_imports_come_when_they_are_used():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
