"""What the first step must not wait for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from test.marks import needs
from torch_hlo.pytorch import version

# Before 2.13 PyTorch compares a tensor's type with DTensor, which nothing can stand in for: the
# first op imports it, and with it sympy.
asks_for_instances = pytest.mark.skipif(
    version.VERSION < (2, 13),
    reason="PyTorch before 2.13 imports DTensor at the first op",
)

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
print(type(b.grad).__name__, tuple(b.grad.to_local().shape), (x * 2).sum().item())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@needs("dtensor", "dynamo_unneeded", "plain_sizes")
@asks_for_instances
def test_recording_imports_neither_dynamo_nor_dtensor() -> None:
    assert run(CODE) == "[]"


def test_dtensor_works_when_imported_later() -> None:
    assert run(DTENSOR) == "DTensor (3, 4) 16.0"


SYMPY = """
import sys, torch, torch_hlo
from torch import nn
from torch.nn import functional as F
x, labels = torch.randn(4, 3, 8, 8).to("hlo"), torch.arange(4).to("hlo")
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 16), nn.LayerNorm(16), nn.GELU()).to("hlo")
table = torch.randn(10, 16).to("hlo").requires_grad_()
y = model(x) @ F.embedding(labels, table).t()
loss = F.cross_entropy(y, labels) + F.mse_loss(y.softmax(-1), y.log_softmax(-1)) + F.scaled_dot_product_attention(y, y, y).mean()
loss.backward()
cache = torch.zeros(4, 16).to("hlo")
cache.index_copy_(0, labels, model(x).detach())
torch.stack([cache, torch.where(cache > 0, cache, 0)]).cumsum(1).sort().values.cpu()
print("sympy" in sys.modules, bool(table.grad.cpu().isfinite().all()))
"""


@needs("dtensor", "dynamo_unneeded", "plain_sizes")
@asks_for_instances
def test_models_do_not_import_sympy() -> None:
    assert run(SYMPY) == "False True"


REAL = """
import sys, torch, torch_hlo
from torch_hlo.pytorch import plain_sizes

def ask():
    from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_eq
    import sympy
    assert guard_or_false(True) and sym_eq((2, 3), [2, 3]) and not sym_eq(torch.Size([2]), (2, 3)) and not isinstance(1, sympy.Basic)
    return guard_or_false, sym_eq, sympy

with plain_sizes.answers():
    guard_or_false, sym_eq, mine = ask()
assert not {"sympy", "torch.fx.experimental.symbolic_shapes"} & sys.modules.keys()
with plain_sizes.answers():
    import colorsys as module  # now one that keeps what it imports
    exec(compile("import sympy, torch.fx.experimental.symbolic_shapes\\nclass Mine(sympy.Basic): pass", "m", "exec"), vars(module))
    assert "ShapeEnv" in vars(torch.fx.experimental.symbolic_shapes)
import sympy
assert issubclass(module.Mine, sympy.Basic) and isinstance(sympy.Symbol("x"), mine.Basic) and mine.Symbol is sympy.Symbol
size = torch.fx.experimental.symbolic_shapes.ShapeEnv().create_unbacked_symint()
assert isinstance(sym_eq(size, 3), torch.SymBool) and guard_or_false(size == 3) is False
print("as always")
"""


@needs("dtensor", "plain_sizes")
@asks_for_instances
def test_stand_ins_give_way_to_the_real_modules() -> None:
    assert run(REAL) == "as always"


MEMORY = """
import torch, torch_hlo
from torch_hlo.device.cpu.trim import release_compiler

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


@needs("release_code")
def test_memory_of_the_compiler_is_given_back() -> None:
    assert run(MEMORY) == "still compiles"


MOVING = """
import torch, torch_hlo

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

start = resident()
kept = [torch.ones(600, 3072).to("hlo") for _ in range(40)]  # 281 MB, through the CPU's heap
assert resident() - start < 281 + 60, resident() - start
before = resident()
state = torch.optim.AdamW([p.requires_grad_() for p in kept], lr=0.1)
for p in kept:
    p.grad = torch.zeros(600, 3072, device="hlo")
state.step()
assert resident() - before < 200, resident() - before  # 562 MB of zeros that nobody has touched; PyTorch imports Dynamo here
assert not state.state[kept[0]]["exp_avg"].cpu().any() and kept[0].cpu().isfinite().all()
print("small")
"""


@needs("release_code")
def test_moving_a_model_and_new_optimizer_states_take_no_memory_twice() -> None:
    assert run(MOVING) == "small"


# On the evaluator: the CPU's back end loads them meanwhile, if nothing is compiled for long enough.
SMALL = """
import os, sys
os.environ["TORCH_HLO_DEVICE"] = "evaluator"
import torch_hlo
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.llvm import host
from torch_hlo.hlo.text.parser import parse_module
compile_module(parse_module("HloModule m\\nENTRY e { x = f32[3] parameter(0) ROOT y = f32[3] add(x, x) }"), host())
print([m for m in ("convolution.convolution", "matmul.dot", "attention.attention_step", "matmul.gpu.gpu_gemm") if f"torch_hlo.compiler.{m}" in sys.modules])
"""


def test_small_programs_load_no_emitters_of_products() -> None:
    assert run(SMALL) == "[]"


READY = """
import sys, time, torch_hlo
from torch_hlo.device.cpu.workers import WORKERS

end = time.monotonic() + 100
while time.monotonic() < end and not (WORKERS.functions and "torch_hlo.compiler.pipeline" in sys.modules):
    time.sleep(0.01)
print(WORKERS.functions is not None, "torch_hlo.compiler.pipeline" in sys.modules, torch_hlo.metrics.counter_value("UncachedCompile"))
"""


def test_the_compiler_is_ready_before_there_is_anything_to_compile() -> None:
    assert run(READY) == "True True None"


LEAVING = """
import os, torch_hlo
if not os.fork():
    import torch
    os._exit(int((torch.ones(3).to("hlo") + 1).sum().item()))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_process_may_fork_and_end_meanwhile() -> None:
    assert run(LEAVING) == "6"
