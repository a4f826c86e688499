"""torch.distributed over gloo with hlo tensors: two processes."""
from __future__ import annotations

import socket
import subprocess
import sys

SCRIPT = '''
import os, sys, torch, torch_hlo, torch.distributed as dist
from torch import nn
sys.path.insert(0, sys.argv[3])
from test.lazy.interpreter import Interpreter
from torch_hlo.lazy import engine
engine._current = Interpreter()
rank = int(sys.argv[1])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
dist.init_process_group("cpu:gloo,hlo:gloo")
t = lambda *v: torch.tensor(v).hlo()
x = t(1.0 + rank, 2.0); dist.all_reduce(x); assert x.tolist() == [3, 4]
x = t(1.0 + rank); w = dist.all_reduce(x, async_op=True); w.wait(); assert x.tolist() == [3]
o = [t(0.0), t(0.0)]; dist.all_gather(o, t(float(rank))); assert [v.item() for v in o] == [0, 1]
o = t(0.0, 0.0); dist.all_gather_into_tensor(o, t(float(rank))); assert o.tolist() == [0, 1]
o = t(0.0); dist.reduce_scatter_tensor(o, t(1.0, 2.0)); assert o.item() == 2 * (1 + rank)
x = t(float(rank)); dist.broadcast(x, 1); assert x.item() == 1
o = t(0.0, 0.0); dist.all_to_all_single(o, t(rank * 2.0, rank * 2.0 + 1)); assert o.tolist() == [rank, rank + 2]
if rank == 0: dist.send(t(5.0), 1)
else:
    x = t(0.0); dist.recv(x, 0); assert x.item() == 5
import torch.distributed._functional_collectives as fc
assert (fc.all_reduce(t(1.0 + rank), "sum", dist.group.WORLD) + 0).item() == 3
base = torch.arange(4.0).hlo() * (rank + 1); dist.all_reduce(base[1:3]); assert base.tolist() == [0, 3, 6, 3.0 * (rank + 1)]
torch.manual_seed(0); m = nn.Linear(3, 2); c = nn.Linear(3, 2); c.load_state_dict(m.state_dict())
d = nn.parallel.DistributedDataParallel(m.to("hlo")); e = nn.parallel.DistributedDataParallel(c)
torch.manual_seed(rank); v = torch.randn(4, 3)
d(v.hlo()).square().sum().backward(); e(v).square().sum().backward()
torch.testing.assert_close(m.weight.grad.cpu(), c.weight.grad)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("hlo", (2,)); torch.manual_seed(0); a, b = torch.randn(4, 4), torch.randn(4, 4)
r = distribute_tensor(a.hlo(), mesh, [Shard(0)]) @ distribute_tensor(b.hlo(), mesh, [Replicate()])
torch.testing.assert_close(r.full_tensor().cpu(), a @ b)
dist.barrier(); dist.destroy_process_group(); print("done")
'''


def test_two_processes():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    root = __file__.rsplit("/test/", 1)[0]
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(r), str(port), root], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in (0, 1)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and "done" in out, err[-3000:]
