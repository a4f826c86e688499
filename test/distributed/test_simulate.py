"""The simulator: numbers that can be computed by hand, tactics compared, nothing run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_hlo
from torch_hlo import metrics
from torch_hlo.distributed import (
    Link,
    Machine,
    Mesh,
    Plan,
    abstract,
    compare,
    data_parallel,
    fsdp,
    mark_sharding,
    megatron,
    sequence_parallel,
    sharding_of,
    simulate,
    zero1,
)

MACHINE = Machine(
    "test",
    flops=1e12,
    memory=1e9,
    bandwidth=1e11,
    link=Link(1e9, 1e-6),
    links={"data": Link(1e8, 1e-5)},
    efficiency=1.0,
)
MEGATRON_MLP = """
HloModule mlp, num_partitions=4
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
ENTRY main {
  x = f32[512,256] parameter(0)
  up = f32[256,256] parameter(1)
  down = f32[256,256] parameter(2)
  h = f32[512,256] dot(x, up), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  y = f32[512,256] dot(h, down), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT r = f32[512,256] all-reduce(y), replica_groups={{0,1,2,3}}, channel_id=1, use_global_device_ids=true, to_apply=add
}
"""


def test_a_program_by_hand():
    found = simulate(MEGATRON_MLP, MACHINE)
    size = 512 * 256 * 4
    assert found.devices == 4 and found.cost.collectives["all-reduce"] == 1
    assert found.cost.matrix_flops == 2 * 2 * 512 * 256 * 256
    assert found.cost.bytes == 2 * size * 3 / 4
    assert found.communication == pytest.approx(found.cost.bytes / 1e9 + 6 * 1e-6)
    assert found.compute == pytest.approx(2 * 2 * 512 * 256 * 256 / 1e12)
    assert found.seconds == pytest.approx(found.compute + found.communication)
    assert found.resident == size + 2 * 256 * 256 * 4 and found.memory >= found.resident + size
    assert "DOES NOT FIT" not in found.table()


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def loss(model, x, y):
    return (model(x) - y).square().mean()


def test_nothing_runs_and_real_tensors_stay_pending():
    mesh = Mesh((64, 16), ("data", "model"), check=False)  # far more devices than there are
    model = abstract(mlp())
    Plan(model, mesh, [megatron("model")]).mark()
    before = (metrics.metric_data("ExecuteTime") or (0,))[0]
    x = mark_sharding(abstract(torch.empty(256, 64)), mesh, ("data", None))
    found = simulate(lambda: model(x).square().mean().backward(), MACHINE)
    assert found.devices == 1024 and found.cost.collectives["all-reduce"] >= 1
    assert (metrics.metric_data("ExecuteTime") or (0,))[0] == before
    with pytest.raises(RuntimeError, match="has no memory"):
        (x + 1).tolist()
    with pytest.raises(RuntimeError, match="needs a value"):
        simulate(lambda: model(x).sum().item())
    with pytest.raises(ValueError, match="none of the step's tensors is sharded"):
        simulate(lambda: torch.ones(3, device="hlo") + 1)


def test_tactics_one_after_another():
    mesh = Mesh((8, 4), ("data", "model"), check=False)
    batch = (torch.empty(512, 64), torch.empty(512, 64))
    rows = compare(
        mlp(), loss, batch, mesh, [data_parallel("data"), megatron("model")], MACHINE
    ).rows
    (_, none), (_, data), (name, both) = rows
    assert name == "+ megatron('model')"
    assert none.cost.bytes == 0 and none.cost.matrix_flops == pytest.approx(
        8 * data.cost.matrix_flops
    )
    assert data.cost.matrix_flops == pytest.approx(4 * both.cost.matrix_flops)
    assert none.memory > data.memory > both.memory
    weights = 2 * 64 * 256 * 4 + 256 * 4 + 64 * 4
    # gradients are summed once
    assert data.cost.bytes == pytest.approx(2 * weights * 7 / 8, rel=0.01)
    # Slow links hurt data parallelism more than tensor parallelism here.
    assert data.seconds > both.seconds


def test_sharded_states_take_less_memory():
    mesh = Mesh((8,), ("data",), check=False)
    batch = (torch.empty(8, 64), torch.empty(8, 64))
    memory = {}
    for tactic in (data_parallel, zero1, fsdp):
        rows = compare(mlp(), loss, batch, mesh, [tactic("data")], MACHINE).rows
        memory[tactic] = rows[-1][1].resident
    weights = 2 * 64 * 256 * 4 + 256 * 4 + 64 * 4
    # parameters and two states of AdamW
    assert memory[data_parallel] == pytest.approx(3 * weights, rel=0.1)
    assert memory[zero1] == pytest.approx(weights + 2 * weights / 8, rel=0.1)
    assert memory[fsdp] == pytest.approx(3 * weights / 8, rel=0.2)


def test_sequence_parallel_marks_norms():
    mesh = Mesh((2, 4), ("data", "model"), check=False)
    model = nn.Sequential(nn.LayerNorm(16))
    plan = Plan(abstract(model), mesh, [data_parallel("data"), sequence_parallel("model")])
    plan.mark()
    (x,) = plan.mark_batch(abstract(torch.empty(8, 8, 16)))
    assert str(sharding_of(plan.model(x))) == "{[{data}, {model}, {}]}"


def test_a_plan_adds_axes_where_they_fit():
    mesh = Mesh((2, 4), ("data", "model"), check=False)
    plan = Plan(mlp(), mesh, [megatron("model"), fsdp("data")])
    assert plan.parameters["0.weight"] == [("model",), ("data",)] and plan.parameters[
        "2.weight"
    ] == [("data",), ("model",)]
    assert plan.parameters["0.bias"] == [("model", "data")] and plan.parameters["2.bias"] == [
        ("data",)
    ]
    assert not plan.shard("0.weight", 0, "data") and not plan.shard("nothing", 0, "data")
    torch_hlo.sync()
