"""What the first step must not wait for."""
from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, torch, torch_hlo
from torch.nn import functional as F
x = torch.randn(4, 8).to("hlo").requires_grad_()
F.cross_entropy(F.layer_norm(F.gelu(x) + 1, (8,)), torch.arange(4).to("hlo")).backward()
torch_hlo.sync()
assert x.grad.shape == x.shape
print([m for m in ("torch._dynamo", "torch.distributed.tensor") if m in sys.modules])
torch.compile(lambda y: y * 2, backend="eager")(torch.ones(2))
"""


DTENSOR = """
import torch, torch_hlo
x = torch.ones(2, 2, device="hlo") + 1
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
mesh = init_device_mesh("cpu", (1,))
a = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
b = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()]).requires_grad_()
(a @ b).sum().backward()
print(type(b.grad).__name__, b.grad.to_local().sum().item(), (x * 2).sum().item())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_recording_imports_neither_dynamo_nor_dtensor() -> None:
    assert run(CODE) == "[]"


def test_dtensor_works_when_imported_later() -> None:
    assert run(DTENSOR) == "DTensor 24.0 16.0"
