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


INFERENCE = """
import sys, torch, torch_hlo
from torch.nn import functional as F
x, w = torch.randn(4, 8).to("hlo"), torch.randn(8, 8).to("hlo")
y = torch.softmax(F.gelu(x @ w + 1) * 2 - torch.relu(x), -1)
y.cpu()
print("sympy" in sys.modules)
"""


def test_inference_does_not_import_sympy() -> None:
    assert run(INFERENCE) == "False"


MEMORY = """
import torch, torch_hlo
from torch_hlo.device.trim import release_compiler

def resident():
    found = inside = 0
    for line in open("/proc/self/smaps"):
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            inside = "libllvmlite" in line
        elif inside and name == "Rss:":
            found += int(rest.split()[0])
    return found

x = torch.randn(16, 16).to("hlo")
for i in range(3):
    y = (x @ x + i).softmax(-1)[i:].sum()
    assert y.cpu().isfinite()
    before = resident()
    release_compiler()
    assert resident() <= before and resident() < 60_000, (before, resident())
print("still compiles")
"""


def test_memory_of_the_compiler_is_given_back() -> None:
    assert run(MEMORY) == "still compiles"
