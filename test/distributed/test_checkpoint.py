"""Checkpoints of sharded tensors: other meshes, other numbers of processes, interrupted ones,
training that goes on after a rank was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import torch_hlo
from test.distributed.support import ROOT, finish, launch, run_group, start
from torch_hlo import config
from torch_hlo.distributed import Mesh, checkpoint, mark_sharding, sharding_of


@pytest.fixture(autouse=True)
def eight_devices():
    with config.override(CPU_DEVICES=8):
        yield


VALUES = torch.arange(9 * 21.0).reshape(9, 21)


def state(mesh: Mesh, spec, filled: bool) -> dict:
    values = VALUES if filled else torch.zeros_like(VALUES)
    return {
        "model": {
            "w": mark_sharding(values.to("hlo"), mesh, spec),
            "plain": values[0].to("hlo"),
            "host": values[1].clone(),
        },
        "rest": [1.5, "text", {3: values[2].clone()}] if filled else [0, "", {3: torch.zeros(21)}],
    }


@pytest.mark.parametrize("before, after", [((2, 4), (8, 1)), ((8, 1), (1, 2)), ((2, 2), (4, 2))])
def test_another_mesh(before, after, tmp_path):
    path = checkpoint.save(state(Mesh(before, ("x", "y")), ("x", "y"), True), tmp_path, 7)
    assert checkpoint.latest(tmp_path) == path and path.name == "step_00000007"
    empty = state(Mesh(after, ("x", "y")), ("y", "x"), False)
    found = checkpoint.load(empty, path)
    assert (
        torch.equal(found["model"]["w"].cpu(), VALUES)
        and found["model"]["w"] is empty["model"]["w"]
    )
    assert sharding_of(found["model"]["w"]).mesh == Mesh(after, ("x", "y")).hlo
    assert torch.equal(found["model"]["plain"].cpu(), VALUES[0]) and torch.equal(
        found["model"]["host"], VALUES[1]
    )
    assert found["rest"][:2] == [1.5, "text"] and torch.equal(found["rest"][2][3], VALUES[2])


def test_states_that_the_optimizer_does_not_have_yet(tmp_path):
    def make(shape):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8).to("hlo")
        mark_sharding(layer.weight, Mesh(shape, ("x", "y")), ("x", "y"))
        return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)

    def step(layer, optimizer):
        layer(torch.ones(4, 8).to("hlo")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_hlo.mark_step()

    layer, optimizer = make((2, 4))
    step(layer, optimizer)
    checkpoint.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path, 1)
    other, other_optimizer = make((4, 2))
    found = checkpoint.load(
        {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()},
        checkpoint.latest(tmp_path),
    )
    other_optimizer.load_state_dict(found["optimizer"])
    for pair in ((layer, optimizer), (other, other_optimizer)):
        step(*pair)
    torch.testing.assert_close(other.weight.cpu(), layer.weight.cpu())


def test_what_does_not_fit(tmp_path):
    path = checkpoint.save({"a": torch.ones(2)}, tmp_path, 1)
    with pytest.raises(KeyError, match="no tensor b"):
        checkpoint.load({"b": torch.ones(2)}, path)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load({}, tmp_path / "step_00000002")
    assert checkpoint.latest(tmp_path / "nothing") is None


def test_old_ones_go(tmp_path):
    for step in (1, 2, 2, 3):
        checkpoint.save({"a": torch.full((2,), float(step))}, tmp_path, step, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step_00000002", "step_00000003"]


KILLED = """
import os, signal, sys, torch, torch_hlo
from torch_hlo.distributed import checkpoint
checkpoint.save({"a": torch.full((4,), 1.0).hlo()}, sys.argv[1], 1)
real = os.rename
def die(source, target): os.kill(os.getpid(), signal.SIGKILL) if str(target).endswith(sys.argv[3]) else real(source, target)
os.rename = die
checkpoint.save({"a": torch.full((4,), 2.0).hlo()}, sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    "step, moment",
    [
        pytest.param(2, ".metadata", marks=pytest.mark.slow),
        pytest.param(2, "step_00000002", marks=pytest.mark.slow),
        (1, "step_00000001"),
    ],
)
def test_killed_while_saving(step, moment, tmp_path):
    """Also when the checkpoint of the same step is written once more."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(step), moment],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
    )
    assert process.returncode == -9
    left = checkpoint.latest(tmp_path)
    assert left is not None and left.name.startswith("step_00000001")
    assert checkpoint.load({"a": torch.zeros(4)}, left)["a"].tolist() == [1.0] * 4


PROCESSES = """
import os, sys, torch, torch_hlo, torch.distributed as dist
dist.init_process_group("cpu:gloo,hlo:gloo")
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_hlo.distributed import Mesh, checkpoint, mark_sharding
values = torch.arange(9 * 21.0).reshape(9, 21)
w = mark_sharding(values.hlo(), Mesh((2, 1), ("x", "y")), ("x", "y"))
torch.manual_seed(0); model = nn.Linear(8, 6).to("hlo"); fully_shard(model, mesh=init_device_mesh("hlo", (2,)))
checkpoint.save({"w": w, "fsdp": model.state_dict(), "n": 3}, sys.argv[1] + "/ours", 1)
save({"fsdp": model.state_dict()}, checkpoint_id=sys.argv[1] + "/theirs")        # PyTorch's own, unchanged
mark_sharding(w.mul_(0), Mesh((1, 2), ("x", "y")), ("x", "y"))
assert torch.equal(checkpoint.load({"w": w}, checkpoint.latest(sys.argv[1] + "/ours"))["w"].cpu(), values)
with torch.no_grad(): [p.zero_() for p in model.parameters()]
torch.distributed.checkpoint.load({"fsdp": model.state_dict()}, checkpoint_id=sys.argv[1] + "/theirs")
torch.manual_seed(0); want = nn.Linear(8, 6)
assert torch.equal(model.weight.full_tensor().cpu(), want.weight)
dist.destroy_process_group()
"""


def test_two_processes_then_one(tmp_path):
    launch(PROCESSES, 2, str(tmp_path))
    torch.manual_seed(0)
    layer = nn.Linear(8, 6)
    mine = {
        "w": mark_sharding(torch.zeros(9, 21).to("hlo"), Mesh((2, 4), ("x", "y")), ("x", "y")),
        "fsdp": nn.Linear(8, 6).state_dict(),
        "n": 0,
    }
    found = checkpoint.load(mine, checkpoint.latest(tmp_path / "ours"))
    assert (
        torch.equal(found["w"].cpu(), VALUES)
        and found["n"] == 3
        and torch.equal(found["fsdp"]["weight"], layer.weight)
    )
    theirs = {"fsdp": nn.Linear(8, 6).to("hlo").state_dict()}
    torch.distributed.checkpoint.load(theirs, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    assert torch.equal(theirs["fsdp"]["weight"].cpu(), layer.weight)


RESTARTED = """
import json, os, signal, sys, torch, torch_hlo, torch.distributed as dist
from torch import nn
from torch_hlo.distributed import Mesh, Plan, checkpoint, fsdp
root, die_at = sys.argv[1], int(sys.argv[2])
dist.init_process_group("cpu:gloo,hlo:gloo")
rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("hlo")
plan = Plan(model, Mesh((2,), ("data",)), [fsdp("data")]); plan.mark()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
first, found = 0, checkpoint.latest(root)
if found is not None:
    state = checkpoint.load({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}, found)
    optimizer.load_state_dict(state["optimizer"]); first = state["step"]
for step in range(first, 6):
    g = torch.Generator().manual_seed(step)
    x, y = plan.mark_batch(torch.randn(8, 8, generator=g).hlo(), torch.randn(8, 4, generator=g).hlo())
    loss = (model(x) - y).square().mean(); loss.backward(); optimizer.step(); optimizer.zero_grad(); torch_hlo.mark_step()
    value = loss.item()
    if rank == 0:
        with open(f"{root}/losses", "a") as f: f.write(json.dumps([attempt, step, value]) + "\\n")
    if rank == 1 and attempt == 0 and step == die_at: os.kill(os.getpid(), signal.SIGKILL)
    if step % 2 == 1: checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, root, step + 1)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_training_goes_on_after_a_rank_was_killed(tmp_path):
    """torchrun starts the processes again; the losses are those of a run that nothing disturbed."""
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    losses = {}
    for name, die_at in (("undisturbed", -1), ("killed", 3)):
        root = tmp_path / name
        root.mkdir()
        # A store of its own for each start: torchrun's still has the addresses of the processes
        # before.
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "1",
            "--standalone",
        ]
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TORCH_HLO_COLLECTIVE_TIMEOUT": "20",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        run_group([*command, script, root, str(die_at)], env, timeout=200)
        losses[name] = [json.loads(line) for line in (root / "losses").read_text().splitlines()]
    assert {attempt for attempt, _, _ in losses["killed"]} == {0, 1}
    assert min(step for attempt, step, _ in losses["killed"] if attempt == 1) == 2, (
        "it did not go on from the checkpoint"
    )
    want = {step: loss for _, step, loss in losses["undisturbed"]}
    for _, step, loss in losses["killed"]:
        assert loss == pytest.approx(want[step], rel=1e-6)


def test_a_dead_rank_is_named():
    script = """
import os, signal, sys, time, torch, torch_hlo, torch.distributed as dist
dist.init_process_group("cpu:gloo,hlo:gloo")
x = torch.ones(4).hlo(); dist.all_reduce(x); torch_hlo.sync()
if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(x); x.tolist()
except Exception as error:
    print("error:", error); os._exit(0)
"""
    ranks = start(script, 2, env={"TORCH_HLO_COLLECTIVE_TIMEOUT": "10"})
    assert ranks[1].wait(120) == -9
    out = finish(ranks[:1], timeout=60)[0]
    assert out.startswith("error:") and "rank 1" in out and "all-reduce" in out
