"""torch.compile on tensors of the hlo device: few programs for many sizes, and what eager PyTorch
does with views, writes, hooks, random numbers and graph breaks."""

import copy

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn

import torch_hlo
from torch_hlo import config, metrics
from torch_hlo.lazy.record import session


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
