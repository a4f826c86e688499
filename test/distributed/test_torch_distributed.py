"""torch.distributed with hlo tensors in real processes: equal to a single process, recorded in the
graph, compiled once."""

from __future__ import annotations

import pytest

from test.distributed.support import launch

HEADER = """
import os, sys, torch, torch_hlo, torch.distributed as dist, copy
import torch.distributed._functional_collectives as fc
from torch import nn
from torch_hlo import metrics
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group(sys.argv[1])
t = lambda *v: torch.tensor(v).hlo()
close = lambda a, b: torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=1e-4, atol=1e-5)
count = lambda name: metrics.counter_value(name) or 0
programs = lambda: (metrics.metric_data("CompileTime") or (0,))[0]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)
    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def train(model, batches, steps=4, device="cpu", lr=1e-2):
    "Losses; each rank gives its own."
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for i in range(steps):
        x, y = batches[i]
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        if device == "hlo": torch_hlo.mark_step()
        losses.append(loss.detach())
    return [l.item() for l in losses]

def data(seed, n=8):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 16, generator=g), torch.randn(n, 8, generator=g)) for _ in range(6)]

def reference(steps=4):
    torch.manual_seed(0); model = Net()
    batches = [tuple(torch.cat(p) for p in zip(*(data(r)[i] for r in range(world)))) for i in range(6)]
    return model, train(model, batches, steps)
"""

COLLECTIVES = (
    HEADER
    + """
cuts = count("MarkStep")
own = torch.device("hlo", rank); torch.hlo.set_device(own); assert torch.ones(2, device=own).to(own).tolist() == [1, 1]   # as CUDA scripts write
cuts = count("MarkStep")
x = t(1.0 + rank, 2.0); dist.all_reduce(x)
m = t(1.0 + rank, 2.0); dist.all_reduce(m, op=dist.ReduceOp.MAX)
i = torch.tensor([1, 2]).hlo() + rank; w = dist.all_reduce(i, async_op=True); w.wait()
h = torch.full((3,), 1.5, dtype=torch.bfloat16).hlo(); dist.all_reduce(h)
o = [t(0.0), t(0.0)]; dist.all_gather(o, t(float(rank)))
g = t(0.0, 0.0); dist.all_gather_into_tensor(g, t(float(rank)))
s = t(0.0); dist.reduce_scatter_tensor(s, t(1.0, 2.0))
b = t(float(rank)); dist.broadcast(b, 1)
a = t(0.0, 0.0); dist.all_to_all_single(a, t(rank * 2.0, rank * 2.0 + 1))
base = torch.arange(4.0).hlo() * (rank + 1); dist.all_reduce(base[1:3])
f = fc.all_reduce(t(1.0 + rank), "sum", dist.group.WORLD) + 0
v = fc.all_reduce(t(1.0 + rank), "avg", dist.group.WORLD) * 2
e = fc.all_gather_tensor(t(1.0 + rank), 0, dist.group.WORLD)
p = torch.ones(4, requires_grad=True).hlo(); p.retain_grad()
q = fc.reduce_scatter_tensor_autograd(p * (rank + 1), "sum", 0, dist.group.WORLD); (q * (rank + 2)).sum().backward()
assert count("MarkStep") == cuts, "a collective cut the graph"
torch_hlo.sync()
assert x.tolist() == [3, 4] and m.tolist() == [2, 2] and i.tolist() == [3, 5] and h.tolist() == [3, 3, 3]
assert [z.item() for z in o] == [0, 1] and g.tolist() == [0, 1] and s.item() == 2 * (1 + rank) and b.item() == 1
assert a.tolist() == [rank, rank + 2] and base.tolist() == [0, 3, 6, 3.0 * (rank + 1)]
assert f.item() == 3 and v.item() == 3 and e.tolist() == [1, 2]
assert q.tolist() == [3, 3] and p.grad.tolist() == [(rank + 1) * k for k in (2, 2, 3, 3)], (q, p.grad)
if rank == 0: dist.send(t(5.0), 1)
else:
    x = t(0.0); dist.recv(x, 0); assert x.item() == 5
big = t(1.0, 2.0, 3.0); out = torch.zeros(2 if rank == 0 else 4).hlo()     # unequal blocks: done at once
dist.all_to_all_single(out, big, [1, 1] if rank == 0 else [2, 2], [1, 2])
assert out.tolist() == ([1, 1] if rank == 0 else [2, 3, 2, 3])
# One rank alone looks at a value, or drops it: the others are not left waiting.
x = t(1.0 + rank); dist.all_reduce(x); y = x * 2
if rank == 0: assert y.item() == 6
del y
x = t(float(rank)); dist.all_reduce(x)
if rank == 0: assert x.item() == 1
del x
# While it waits for that, the others wait for it with tensors of the CPU.
for wait in (dist.barrier, lambda: dist.all_gather_object([None, None], rank), lambda: dist.broadcast(torch.ones(1), 0)):
    x = t(1.0 + rank); dist.all_reduce(x)
    if rank == 0: assert x.item() == 3
    wait()
torch_hlo.sync(); dist.barrier(); print("done"); dist.destroy_process_group()
"""
)

DDP = """
_, want = reference()
torch.manual_seed(0); model = Net().to("hlo")
ddp = nn.parallel.DistributedDataParallel(model)
losses = train(ddp, data(rank), device="hlo")
total = [fc.all_reduce(torch.tensor(l), "avg", dist.group.WORLD).item() for l in losses]
torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5)
before = programs(); train(ddp, data(rank), device="hlo")
print("done", programs() - before, flush=True)
"""

FSDP = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
_, want = reference()
torch.manual_seed(0); model = Net().to("hlo")
mesh = init_device_mesh("hlo", (world,))
for layer in (model.first, model.second): fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
losses = train(model, data(rank), device="hlo")
total = [fc.all_reduce(torch.tensor(l), "avg", dist.group.WORLD).item() for l in losses]
torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5)
assert type(model.first.weight).__name__ == "DTensor" and model.first.weight.to_local().shape[0] == 32 // world
before = programs(); train(model, data(rank), device="hlo")
print("done", programs() - before, flush=True)
"""

TENSOR_PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("hlo", (world,)); torch.manual_seed(0)
a, b = torch.randn(8, 8), torch.randn(8, 8)
da, db = distribute_tensor(a.hlo(), mesh, [Shard(0)]), distribute_tensor(b.hlo(), mesh, [Shard(1)])
close((da @ db).full_tensor(), a @ b)
close(da.redistribute(mesh, [Shard(1)]).to_local(), a.chunk(world, 1)[rank])
close((da * 2).sum().full_tensor(), (a * 2).sum())
close((da.redistribute(mesh, [Replicate()]) @ db).full_tensor(), a @ b)
torch.manual_seed(0); reference_model = Net(); torch.manual_seed(0); model = Net().to("hlo")
parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
batches = data(0)
want, got = train(reference_model, batches), train(model, batches, device="hlo")
torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
close(model.first.weight.full_tensor(), reference_model.first.weight)
before = programs(); train(model, batches, device="hlo")
print("done", programs() - before, flush=True)
"""

ATTENTION = """
from torch.distributed.tensor.experimental import context_parallel

def gradients(*given):
    given = [t.detach().clone().requires_grad_() for t in given]
    out = nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    out.pow(2).sum().backward()
    return out, *(t.grad for t in given)

torch.manual_seed(0); given = [torch.randn(2, 4, 8, 4) for _ in range(3)]
want = gradients(*given)
for place in (Shard(0), Shard(1)):
    for a, b in zip(gradients(*(distribute_tensor(t.hlo(), mesh, [place]) for t in given)), want):
        close(a.full_tensor(), b)
parts = [t.hlo() for t in given]
with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
    for a, b in zip(gradients(*parts), want):  # a process has the parts i and -1 - i
        rows = b.chunk(2 * world, 2)
        close(a, torch.cat([rows[rank], rows[-1 - rank]], 2))
print("done 0", flush=True)
"""


@pytest.mark.parametrize(
    "backend", ["cpu:gloo,hlo:gloo", pytest.param("gloo", marks=pytest.mark.slow)]
)
def test_collectives(backend):
    assert launch(COLLECTIVES, 2, backend) == ["done\n"] * 2


def test_training():
    """Data parallel, sharded parameters, tensor parallel, attention of parts; a second round of
    training compiles at most the step that finds gradients cleared."""
    for out in launch(
        HEADER + DDP + FSDP + TENSOR_PARALLEL + ATTENTION + "dist.destroy_process_group()",
        2,
        "cpu:gloo,hlo:gloo",
    ):
        words = out.split()
        assert words[::2] == ["done"] * 4 and all(int(n) <= 1 for n in words[1::2]), out


UNNAMED = """
import torch, torch_hlo, torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
own = torch.full((2,), rank + 1.0).hlo()
both = [torch.zeros(2).hlo() for _ in range(2)]
dist.barrier()
dist.gather(own, both if rank == 0 else None)
assert rank or [x.tolist() for x in both] == [[1, 1], [2, 2]]
part = torch.zeros(2).hlo()
dist.scatter(part, both if rank == 0 else None)
assert part.tolist() == own.tolist()
dist.send(own, 1) if rank == 0 else dist.recv(part, 0)
assert part.tolist() == [1, 1]
total = torch.ones(2) * (rank + 1)
dist.all_reduce(total)
assert total.tolist() == [3, 3]
"""


def test_a_group_that_names_no_back_end():
    launch(UNNAMED, 2)
