"""Two processes of torchrun: the idioms of scripts for CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, torch, torch.distributed as dist
device = sys.argv[1]
if device == "hlo":
    import torch_hlo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
own = torch.device(device, rank) if device == "hlo" else torch.device("cpu")
dist.init_process_group("gloo", device_id=own if device == "hlo" else None)
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)).to(own)

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def train(net, given):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        loss = net(given).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return round(loss.item(), 4)

ids = [rank] if device == "hlo" else None
found = [train(DistributedDataParallel(make().to(own), device_ids=ids), x.cpu())]
sharded = make()  # on the CPU: it is moved
fully_shard(sharded, mesh=init_device_mesh(device, (2,)))
found.append(train(sharded, x))
if rank == 0:
    print("found", *found)
dist.destroy_process_group()
"""


FSDP1 = """
import sys, torch, torch.distributed as dist
from torch import nn
device = sys.argv[1]
if device == "hlo":
    import torch_hlo
from torch.distributed.fsdp import (
    FullStateDictConfig, FullyShardedDataParallel as FSDP, ShardingStrategy, StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
SIZES = (8, 16), (16, 17), (17, 4)

def make():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*s), nn.Tanh()) for s in SIZES))

def train(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for _ in range(3):
        loss = (net(torch.randn(6, 8).to(device)) - 1).square().mean()
        loss.backward()
        if isinstance(net, FSDP):
            norm = net.clip_grad_norm_(0.1)
        else:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [round(loss.item(), 4), round(norm.item(), 4)]

policy = ModuleWrapPolicy({nn.Linear})
options = [
    {}, {"auto_wrap_policy": policy}, {"auto_wrap_policy": policy, "use_orig_params": True},
    {"auto_wrap_policy": policy, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    {"device_id": torch.device(device, 0)},
]
found = []
for given in options:
    if device == "cpu":
        net = DistributedDataParallel(make())
    else:
        net = FSDP(make() if "device_id" in given else make().to(device), **given)
    found += train(net)
    if device == "cpu":
        state = net.module.state_dict()
    else:
        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT, config):
            state = net.state_dict()
    if rank == 0:
        assert {x.device.type for x in state.values()} == {"cpu"}
        found.append(round(sum(x.sum().item() for x in state.values()), 3))
if rank == 0:
    print("found", *found)
dist.destroy_process_group()
"""


TENSOR = """
import sys, torch, torch.distributed as dist
from torch import nn
device = sys.argv[1]
if device == "hlo":
    import torch_hlo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)

dist.init_process_group("gloo")
mesh = init_device_mesh(device, (2,))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

found = []
for kind, given in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), nn.LayerNorm(8)).to(device)
    for block in list(net)[:2] if device == "hlo" else ():  # on the CPU it is whole
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = kind(net.parameters(), lr=0.01, **given)  # its default implementation
    torch.manual_seed(1)
    x = torch.randn(4, 8).to(device)
    for _ in range(3):
        loss = (net(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found.append(round(loss.item(), 4))
if dist.get_rank() == 0:
    print("found", *found)
dist.destroy_process_group()
"""

IDIOMS = """
import sys, torch, torch.distributed as dist
from torch import nn
device = sys.argv[1]
if device == "hlo":
    import torch_hlo
import torch.distributed.checkpoint as checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(dist.get_default_backend_for_device(device))
rank = dist.get_rank()
own = torch.device(device, rank) if device == "hlo" else torch.device("cpu")
x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))

class Net(nn.Module):
    def __init__(self, kind=nn.BatchNorm1d):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b, self.unused = *(nn.Linear(4, 4), kind(4)), *make(2)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))

def make(n):
    return (nn.Linear(4, 4) for _ in range(n))

def train(net, rows, parameters=None):
    optimizer = torch.optim.SGD(parameters or net.parameters(), lr=0.5)
    for _ in range(3):
        loss = (net(rows) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return round(loss.item(), 4)

def parallel(net, **given):
    return DistributedDataParallel(net.to(own), **given)

found = [train(parallel(Net(), find_unused_parameters=True), x.to(own))]
found.append(train(parallel(Net(), static_graph=True), x.to(own)))
compressed = parallel(Net(), find_unused_parameters=True)
if device == "hlo":
    compressed.register_comm_hook(None, bf16_compress_hook)
found.append(round(train(compressed, x.to(own)), 2))
whole = torch.cat([torch.randn(6, 4, generator=torch.Generator().manual_seed(r)) for r in (0, 1)])
if device == "cpu":  # one batch of all rows
    loss = [train(Net(), whole)] * 2
    torch.manual_seed(0)
    sharded = [train(nn.Sequential(*make(2)), whole)] * 3
else:
    net = parallel(nn.SyncBatchNorm.convert_sync_batchnorm(Net()), find_unused_parameters=True)
    loss = [None, None]
    dist.all_gather_object(loss, train(net, x.to(own)))
    loss = [sum(loss) / 2] * 2
    sharded = []
    for given in ({"device_id": own}, {"device_id": rank}, {"cpu_offload": CPUOffload(True)}):
        torch.manual_seed(0)
        net = FullyShardedDataParallel(nn.Sequential(*make(2)), **given)
        losses = [None, None]
        dist.all_gather_object(losses, train(net, x.to(own)))
        sharded.append(sum(losses) / 2)
found += loss + sharded
got = torch.zeros(4).to(own)
sent = torch.arange(4.0).to(own) + rank
pairs = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
for work in dist.batch_isend_irecv(pairs):
    work.wait()
found.append(got.sum().item())
net = fully_shard(Net().to(own), mesh=dist.init_device_mesh(device, (2,)))
state = get_model_state_dict(net)
checkpoint.async_save(state, checkpoint_id=sys.argv[2] + device).result()
want = net.b.weight.full_tensor().sum().item()
with torch.no_grad():
    net.b.weight.zero_()
checkpoint.load(state, checkpoint_id=sys.argv[2] + device)
assert net.b.weight.full_tensor().sum().item() == want
if rank == 0:
    print("found", *found)
dist.destroy_process_group()
"""

MIXED = """
import torch, torch_hlo, torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel, _MixedPrecision

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
narrow = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
net = torch.nn.Linear(4, 2).to("hlo")
DistributedDataParallel(net, mixed_precision=narrow)(torch.ones(3, 4, device="hlo")).sum().backward()
assert net.weight.grad.dtype == torch.float32
assert net.weight.grad.tolist() == [[3.0] * 4] * 2
try:
    DistributedDataParallel(net, mixed_precision=narrow, find_unused_parameters=True)
except NotImplementedError:
    pass
else:
    raise SystemExit("it was not refused")
"""


def test_mixed_precision_has_gradients_in_the_first_step():
    ended = subprocess.run([sys.executable, "-c", MIXED], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


TEXTS = {"ddp and fsdp2": SCRIPT, "fsdp1": FSDP1, "tensor parallel": TENSOR, "idioms": IDIOMS}


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_data_parallel_and_sharded(tmp_path: Path, text: str):
    script = tmp_path / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = []
    for device in ("cpu", "hlo"):
        run = [*command, device, str(tmp_path)]
        ended = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
        assert ended.returncode == 0, ended.stderr[-4000:]
        line = next(x for x in ended.stdout.splitlines() if x.startswith("found"))
        found.append([float(x) for x in line.split()[1:]])
    assert found[1] == pytest.approx(found[0], abs=1e-3)
