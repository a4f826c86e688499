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


@pytest.mark.slow
def test_data_parallel_and_sharded(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = []
    for device in ("cpu", "hlo"):
        run = [*command, device]
        ended = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
        assert ended.returncode == 0, ended.stderr[-4000:]
        line = next(x for x in ended.stdout.splitlines() if x.startswith("found"))
        found.append([float(x) for x in line.split()[1:]])
    assert found[1] == pytest.approx(found[0], abs=1e-3)
