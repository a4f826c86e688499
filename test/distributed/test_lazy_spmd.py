"""Training on sharded tensors equals training on one device: virtual devices in one process, then
real processes with the same code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_hlo
from test.distributed.support import launch
from torch_hlo import config, metrics
from torch_hlo.distributed import Mesh, ShardingError, mark_sharding, sharding_of


@pytest.fixture(autouse=True)
def eight_devices():
    with config.override(CPU_DEVICES=8):
        yield


class Block(nn.Module):
    """A transformer block with a causal attention."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = (
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(w, 2)
        )
        a = (
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(b, s, w)
        )
        x = x + self.dropout(self.out(a))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(
        self,
        vocabulary: int = 96,
        width: int = 32,
        layers: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data_parallel(model, mesh):
    pass


def tensor_parallel(model, mesh):
    for block in model.blocks:
        for layer in (block.qkv, block.up):
            mark_sharding(layer.weight, mesh, ("y", None))
        for layer in (block.out, block.down):
            mark_sharding(layer.weight, mesh, (None, "y"))


def fsdp(model, mesh):
    for p in model.parameters():
        mark_sharding(p, mesh, (("x", "y"), *[None] * (p.dim() - 1)))


def both(model, mesh):
    for block in model.blocks:
        for layer in (block.qkv, block.up):
            mark_sharding(layer.weight, mesh, ("y", "x"))
        for layer in (block.out, block.down):
            mark_sharding(layer.weight, mesh, ("x", "y"))


def train(model, mesh, steps=3, batch=8):
    """Losses, and how many programs were compiled in each step."""
    device = next(model.parameters()).device.type
    # Adam would amplify the noise of gradients that are zero
    o = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, compiles = [], []
    for i in range(steps):
        before = compiled()
        g = torch.Generator().manual_seed(i)
        tokens, labels = (torch.randint(96, (batch, 16), generator=g).to(device) for _ in range(2))
        if mesh is not None:
            for t in (tokens, labels):
                mark_sharding(t, mesh, ("x", None))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        o.step()
        o.zero_grad()
        if device == "hlo":
            torch_hlo.mark_step()
        losses.append(loss.item())
        compiles.append(compiled() - before)
    return losses, compiles


def compiled() -> int:
    return metric[0] if (metric := metrics.metric_data("CompileTime")) else 0


def check(strategy, shape: tuple[int, int], batch: int = 8) -> list[float]:
    """Losses of training over a mesh; fails unless they, the parameters and the number of compiles
    are as on one device."""
    torch.manual_seed(0)
    reference = Gpt()
    model = copy.deepcopy(reference).to("hlo")
    mesh = Mesh(shape, ("x", "y"))
    strategy(model, mesh)
    want, _ = train(reference, None, batch=batch)
    got, compiles = train(model, mesh, batch=batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters()):
        torch.testing.assert_close(
            p.cpu(), q[1], rtol=1e-3, atol=1e-5, msg=lambda m: f"{name}: {m}"
        )
    assert compiles[2:] == [0] * len(compiles[2:]), "the third step compiled something"
    return got


@pytest.mark.parametrize(
    "strategy, shape",
    [
        (data_parallel, (8, 1)),
        (fsdp, (2, 4)),
        (both, (4, 2)),
        # both (4, 2) has what they have
        pytest.param(tensor_parallel, (2, 4), marks=pytest.mark.slow),
        pytest.param(both, (2, 2), marks=pytest.mark.slow),
    ],
)
def test_gpt(strategy, shape):
    check(strategy, shape)


def test_batch_that_does_not_divide():
    check(tensor_parallel, (4, 2), batch=6)


def test_parameters_stay_sharded_and_optimizer_states_follow():
    mesh = Mesh((2, 4), ("x", "y"))
    layer = nn.Linear(16, 32).to("hlo")
    mark_sharding(layer.weight, mesh, ("y", None))
    o = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        x = mark_sharding(torch.randn(8, 16).to("hlo"), mesh, ("x", None))
        layer(x).square().mean().backward()
        o.step()
        torch_hlo.mark_step()
    states = o.state[layer.weight]
    assert {
        str(sharding_of(t))
        for t in (
            layer.weight,
            layer.weight.grad,
            states["exp_avg"],
            states["exp_avg_sq"],
        )
    } == {"{[{y}, {}]}"}
    assert layer.weight._storage.value.data.on(0).shape.dims == (8, 16)


def test_random_numbers_are_those_of_one_device():
    torch.manual_seed(0)
    plain = Gpt(dropout=0.3).to("hlo")
    model = copy.deepcopy(plain)
    mesh = Mesh((2, 4), ("x", "y"))
    tensor_parallel(model, mesh)
    torch.manual_seed(1)
    want, _ = train(plain, None, steps=1)
    torch.manual_seed(1)
    got, _ = train(model, mesh, steps=1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_two_meshes_in_one_step_are_an_error_and_in_two_steps_none():
    a = mark_sharding(torch.arange(8.0).to("hlo"), Mesh((8,), ("x",)), ("x",))
    b = mark_sharding(torch.arange(8.0).to("hlo") + 0, Mesh((2, 4), ("x", "y")), ("y",))
    c = mark_sharding(torch.arange(8.0).to("hlo") + 1, Mesh((8,), ("z",)), ("z",))
    with pytest.raises(ShardingError, match="different meshes: .*x=2,y=4.*z=8"):
        (b + c).tolist()
    del c
    torch_hlo.sync()
    assert (mark_sharding(a + b, Mesh((2, 4), ("x", "y")), ("x",)) * 2).tolist() == [
        4.0 * i for i in range(8)
    ]


PROCESSES = """
import sys, torch_hlo, torch.distributed as dist
dist.init_process_group("cpu:gloo,hlo:gloo")
import test.distributed.test_lazy_spmd as t
print("losses", [t.check(getattr(t, name), eval(shape)) for name, shape in zip(sys.argv[1::2], sys.argv[2::2])])
dist.destroy_process_group()
"""


def test_one_process_per_device_runs_the_same_code():
    outputs = launch(PROCESSES, 2, "both", "(2, 1)")
    assert all(out.startswith("losses") for out in outputs) and len(set(outputs)) == 1


@pytest.mark.slow
def test_four_processes():
    outputs = launch(PROCESSES, 4, "fsdp", "(2, 2)", "both", "(2, 2)", "tensor_parallel", "(1, 4)")
    assert all(out.startswith("losses") for out in outputs) and len(set(outputs)) == 1


@pytest.mark.parametrize("how", ["torch.compile", "torch_hlo.compile"])
def test_compiled_functions(how):
    torch.manual_seed(0)
    reference = Gpt()
    model = copy.deepcopy(reference).to("hlo")
    mesh = Mesh((2, 4), ("x", "y"))
    both(model, mesh)
    forward = torch.compile(model, backend="hlo") if how == "torch.compile" else model
    o, reference_o = (torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, reference))

    def step(f, optimizer, tokens):
        optimizer.zero_grad()
        loss = f(tokens).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = torch_hlo.compile(step) if how == "torch_hlo.compile" else step
    for i in range(4):
        tokens = torch.randint(96, (8, 16), generator=torch.Generator().manual_seed(i))
        got = captured(forward, o, mark_sharding(tokens.to("hlo"), mesh, ("x", None)))
        torch_hlo.mark_step()
        torch.testing.assert_close(
            got.cpu(), step(reference, reference_o, tokens), rtol=1e-4, atol=1e-5
        )


def test_an_index_out_of_range_is_an_error_also_when_it_is_sharded():
    mesh = Mesh((8,), ("x",))
    table = torch.randn(4, 2).to("hlo")
    with pytest.raises(IndexError):
        nn.functional.embedding(
            mark_sharding(torch.tensor([0, 9, 1, 2]).to("hlo"), mesh, ("x",)), table
        )


READ_ALONE = """
import os, torch, torch_hlo, torch.distributed as dist
dist.init_process_group("cpu:gloo,hlo:gloo")
from torch_hlo.distributed import Mesh, mark_sharding
t = mark_sharding(torch.arange(6.0).hlo(), Mesh((2,), ("x",)), ("x",))
assert t.tolist() == list(range(6)) and (t * 2).tolist() == [2.0 * i for i in range(6)]
if dist.get_rank() == 0:
    try: t.tolist()
    except Exception as error: print("error:", error, flush=True); os._exit(0)
import time; time.sleep(12)
"""


def test_a_sharded_tensor_is_read_by_all_or_none():
    out = launch(READ_ALONE, 2, env={"TORCH_HLO_COLLECTIVE_TIMEOUT": "6"})[0]
    assert (
        out.startswith(
            "error: reading a tensor f32[6] that is sharded as {[{x}]}, which all ranks do together"
        )
        and "rank 1" in out
    )
