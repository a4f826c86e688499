"""torch.compile on tensors of the hlo device: few programs for many sizes, and what eager PyTorch
does with views, writes, hooks, random numbers and graph breaks."""

import copy
import gc

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_hlo
from torch_hlo import config, metrics
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run import imagine


@pytest.fixture(autouse=True)
def fresh():
    dynamo.reset()
    torch_hlo.sync()
    session.engine().clear_cache()
    torch.manual_seed(0)
    with config.override(CACHE=""):  # what is counted is compiled
        yield


# ---- how much is compiled


def programs() -> int:
    return metrics.counter_value("UncachedCompile") or 0


class Block(nn.Module):
    """Attention and two linear layers; `past`: keys and values of the tokens before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)
        )

    def forward(self, x, mask=None, past=None, causal=False):
        batch, rows, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, rows, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, rows, width))
        return x + self.mlp(x), (k, v)


class Text(nn.Module):
    """A masked language model, or one that predicts the next token from a growing cache."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(99, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.head = nn.Linear(width, 99)

    def forward(self, ids, mask=None, labels=None, past=None):
        before = past[0][0].shape[2] if past is not None else 0
        places = torch.arange(ids.shape[1], device=ids.device) + before
        x = self.tokens(ids) + self.positions(places)
        if mask is not None:
            mask = mask[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        kept = []
        for i, block in enumerate(self.blocks):
            x, keys = block(x, mask, past and past[i], causal=past is None and labels is None)
            kept.append(keys)
        logits = self.head(x)
        if labels is None:
            return logits[:, -1:].argmax(-1), kept
        return F.cross_entropy(logits.reshape(-1, 99), labels.reshape(-1))


LENGTHS = (16, 20, 12, 33, 7, 9, 41, 28)


def train(model, step, device: str, masks: bool = False) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    torch.manual_seed(1)
    for i, n in enumerate(LENGTHS):
        ids, mask = torch.randint(99, (2, n)), torch.ones(2, n, dtype=torch.bool)
        if masks and i % 2:
            mask[1, n // 2 :] = False
        loss = step(ids.to(device), mask.to(device), ids.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_hlo.mark_step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("dynamic", "most"), [(None, 2), (True, 1)])
def test_programs_of_training_on_texts_of_any_length(dynamic, most):
    model = Text()
    twin = copy.deepcopy(model).to("hlo")
    before = programs()
    losses = train(twin, torch.compile(twin, backend="hlo", dynamic=dynamic), "hlo")
    assert programs() - before <= most
    torch.testing.assert_close(losses, train(model, model, "cpu"), rtol=1e-3, atol=1e-3)


def test_programs_of_texts_that_take_two_ways():
    """Without torch.compile. Sizes that have varied one way are taken to vary the other way."""

    def step(ids, mask, labels):
        return twin(ids, None if mask.all() else mask, labels)

    twin = Text().to("hlo")
    before = programs()
    with config.override(CPU_NUMBERS=True):
        train(twin, step, "hlo", masks=True)
    assert programs() - before <= 3


def decode(step, ids: torch.Tensor, device: str) -> list[int]:
    ids, past, found = ids.to(device), None, []
    with torch.no_grad():
        for _ in range(8):
            ids, past = step(ids, past=past)
            torch_hlo.mark_step()
            found.append(ids.item())
    return found


@pytest.mark.parametrize(("dynamic", "most"), [(None, 5), (True, 3)])
def test_programs_of_a_growing_cache(dynamic, most):
    model = Text().eval()
    twin = copy.deepcopy(model).to("hlo")
    fast = torch.compile(twin, backend="hlo", dynamic=dynamic)
    before = programs()
    for n in (5, 9):
        ids = torch.randint(99, (1, n))
        assert decode(fast, ids, "hlo") == decode(model, ids, "cpu")
    assert programs() - before <= most


# ---- what eager PyTorch does


def leaves(tree) -> list:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def same(got, want, tol: float = 1e-5) -> None:
    for g, w in zip(leaves(got), leaves(want), strict=True):
        assert g.device.type == "hlo"
        torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=tol, atol=tol)


def like_eager(fn, *make, tol: float = 1e-5, breaks: bool = False, **options) -> None:
    """Results, gradients, and what is written to arguments, for two calls of each compiled function
    and one of eager PyTorch on the CPU."""
    fast = torch.compile(fn, backend="hlo", fullgraph=not breaks, **options)
    for _ in range(2):
        mine = [x.detach().to("hlo").requires_grad_(x.requires_grad) for x in make]
        theirs = [x.detach().clone().requires_grad_(x.requires_grad) for x in make]
        ends = []
        for function, args in ((fast, mine), (fn, theirs)):
            # arguments that a function may write to
            results = function(*[x * 1 if x.requires_grad else x for x in args])
            total = sum(r.square().sum() for r in leaves(results) if r.requires_grad)
            if isinstance(total, torch.Tensor):
                total.backward()
            ends.append((results, [*args], [x.grad for x in args]))
        same(*ends, tol)


def views(x, y):
    return x.t(), x[0], y * 2, x.view(-1), x


def writes(x, y):
    x.mul_(2)
    y[0].add_(1)
    return x, x[0] + y.sum(), y.t()


def writes_through_views(x, y):
    part = x[:, 1:3]
    part.add_(y[:, :2])
    part.mul_(2)
    x[1] = 3
    return part, x * y


def exchanges(x, y):
    a = x.clone()
    x.copy_(y)
    y.copy_(a)
    return x + y


def detaches(x, y):
    z = x.detach()
    with torch.no_grad():
        y = y * z
    return y, (x * z).sum(), x.t().contiguous()


def inner(x, y):
    return torch.compile(lambda x: x.exp(), backend="hlo")(x) * y


def recomputes(x, y):
    return checkpoint(lambda x, y: (x.sin() * y).exp(), x, y, use_reentrant=False)


def casts(x, y):
    with torch.autocast("hlo" if x.device.type == "hlo" else "cpu", torch.bfloat16):
        z = x @ y.t()
        with torch.autocast("hlo" if x.device.type == "hlo" else "cpu", enabled=False):
            return z, z.float() @ x


def differentiates(x, y):
    return torch.func.grad(lambda x: (x.sin() * y).sum())(x) + torch.func.vmap(torch.dot)(
        x, y
    ).unsqueeze(1)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "fn",
    [views, writes, writes_through_views, exchanges, detaches, inner, recomputes, differentiates],
)
def test_like_eager(fn, gradients, dynamic):
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    if gradients:
        x, y = x.requires_grad_(), y.requires_grad_()
    like_eager(fn, x, y, dynamic=dynamic)


def test_autocast():
    like_eager(casts, torch.randn(3, 4), torch.randn(3, 4), tol=2e-2)


@pytest.mark.parametrize("options", [{"mode": "max-autotune"}, {"options": {"fallback": "error"}}])
def test_options(options):
    like_eager(lambda x: x.exp() + 1, torch.randn(3, requires_grad=True), **options)


def test_graph_breaks():
    @torch.compiler.disable
    def outside(x):
        assert not torch.compiler.is_compiling()
        return x.cos()

    def fn(x, y):
        z = outside(x * 2) + y
        dynamo.graph_break()
        if z.sum() > 0:
            z = z * 2
        y.add_(1)
        return z, y

    like_eager(fn, torch.randn(4, requires_grad=True), torch.randn(4), breaks=True)


def test_hooks():
    """On arguments, on what is computed, and on saved tensors."""
    seen = []

    def fn(x):
        y = x.sin()
        y.register_hook(lambda g: g * 3)
        return y * x

    def double(x):
        x.grad.mul_(2)

    def run(function, device):
        x = torch.arange(3.0, device=device, requires_grad=True)
        x.register_hook(lambda g: seen.append(device) or g + 1)
        x.register_post_accumulate_grad_hook(double)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            y = function(x)
        y.sum().backward()
        return x.grad

    same([run(torch.compile(fn, backend="hlo"), "hlo")], [run(fn, "cpu")])
    assert seen == ["hlo", "cpu"]


def test_random_numbers():
    """Those of the device without torch.compile; the backward pass has the same mask."""

    def fn(x):
        y = F.dropout(x, 0.5)
        return y, torch.rand_like(x), torch.randn(3, device=x.device)

    fast = torch.compile(fn, backend="hlo", fullgraph=True)
    results = []
    for function in (fn, fast, fast):
        torch.manual_seed(7)
        x = torch.ones(64, device="hlo", requires_grad=True)
        y, *rest = function(x)
        y.sum().backward()
        assert torch.equal(x.grad.cpu(), y.detach().cpu())
        results.append([t.detach().cpu() for t in (y, *rest)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_mark_dynamic():
    before = programs()
    fast = torch.compile(lambda x: x.softmax(0).sum(1), backend="hlo", fullgraph=True)
    for n in (5, 6, 9):
        x = torch.randn(n, 4)
        there = x.to("hlo")
        dynamo.mark_dynamic(there, 0)
        same([fast(there)], [x.softmax(0).sum(1)])
    assert programs() - before == 1


@pytest.mark.parametrize("error", [AssertionError, RuntimeError])
def test_sizes_that_no_op_takes(error, monkeypatch):
    """PyTorch's shape functions refuse sizes that are imagined with errors of any class."""

    def refuses(*args):
        raise error("no such sizes")

    fast = torch.compile(lambda x: x.exp().sum(0), backend="hlo", dynamic=True)
    x = torch.randn(5, 3)
    there = fast(x.to("hlo"))
    monkeypatch.setattr(imagine.inference, "unchecked", refuses)
    torch_hlo.mark_step()
    same([there], [x.exp().sum(0)])


def test_the_default_back_end():
    """Inductor writes no code for the device: constants in the graph ended in its passes."""

    @torch.compile(fullgraph=True)
    def step(x):
        return x * torch.full((3,), 2.0, device=x.device) + torch.zeros(3, device=x.device)

    x = torch.randn(3)
    there = x.to("hlo").requires_grad_()
    result = step(there)
    result.sum().backward()
    same([result, there.grad], [x * 2, torch.full((3,), 2.0)])


def test_autograd_cache():
    """AOTAutograd's cache of graphs on disk leaves graphs of the device alone."""
    from torch._functorch import config as settings

    with settings.patch(enable_autograd_cache=True):
        like_eager(lambda x: x.exp() @ x, torch.randn(3, 3, requires_grad=True))


# ---- outside of torch.compile


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
def test_tensors_made_under_modes(make):
    with Seen():
        assert make([1.0, 2.0], device="hlo").tolist() == [1, 2]
    with FakeTensorMode():
        fake = make([1.0, 2.0], device="hlo") + 1
    assert isinstance(fake, FakeTensor) and fake.device.type == "hlo"


def test_weak_references_to_storages():
    """Those of PyTorch's graph passes: equal for views, expired after the last tensor."""
    x = torch.ones(3, device="hlo")
    first, second = (StorageWeakRef(y.untyped_storage()) for y in (x, x[1:]))
    other = StorageWeakRef(torch.ones(3, device="hlo").untyped_storage())
    assert first == second and first != other and not first.expired()
    torch_hlo.sync()
    del x
    gc.collect()
    assert first.expired() and other.expired()
