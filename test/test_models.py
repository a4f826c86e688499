"""Whole models on "hlo" against the CPU: training steps, evaluation, generation, and the loops
around them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_hlo


class Block(nn.Module):
    """Transformer block: "pre" (GPT-2, ViT), "post" (BERT) or "rms" (LLaMA: rotary, gated, grouped
    heads)."""

    def __init__(self, style: str, width: int = 32, heads: int = 4, causal: bool = True) -> None:
        super().__init__()
        self.style, self.heads, self.causal = style, heads, causal
        self.kv = heads // 2 if style == "rms" else heads
        norm = nn.RMSNorm if style == "rms" else nn.LayerNorm
        self.first, self.second = norm(width), norm(width)
        self.qkv = nn.Linear(width, width + 2 * self.kv * (width // heads))
        self.out = nn.Linear(width, width)
        self.up, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(2 * width if style == "rms" else 4 * width, width),
        )

    def attend(self, x):
        n, t, width = x.shape
        size = width // self.heads
        q, k, v = self.qkv(x).split([width, self.kv * size, self.kv * size], -1)
        q, k, v = (y.view(n, t, -1, size).transpose(1, 2) for y in (q, k, v))
        if self.style == "rms":
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.kv != self.heads
        )
        return self.out(y.transpose(1, 2).reshape(n, t, width))

    def feed(self, x):
        if self.style == "rms":
            gate, value = self.up(x).chunk(2, -1)
            return self.down(F.silu(gate) * value)
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        if self.style == "post":
            x = self.first(x + self.attend(x))
            return self.second(x + self.feed(x))
        x = x + self.attend(self.first(x))
        return x + self.feed(self.second(x))


def rotate(x):
    size, t = x.shape[-1], x.shape[-2]
    angle = torch.outer(
        torch.arange(t, device=x.device),
        100.0 ** (-torch.arange(0, size, 2, device=x.device) / size),
    )
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack(
        [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1
    ).flatten(-2)


class Language(nn.Module):
    def __init__(self, style: str, causal: bool = True) -> None:
        super().__init__()
        self.token, self.place = (
            nn.Embedding(50, 32),
            nn.Parameter(torch.randn(12, 32) * 0.1),
        )
        self.blocks = nn.Sequential(*[Block(style, causal=causal) for _ in range(2)])
        self.head = nn.Linear(32, 50)

    def forward(self, ids):
        return self.head(self.blocks(self.token(ids) + self.place[: ids.shape[1]]))


class Patches(nn.Module):
    """ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls = (
            nn.Conv2d(3, 32, 4, 4),
            nn.Parameter(torch.zeros(1, 1, 32)),
        )
        self.blocks, self.head = (
            nn.Sequential(Block("pre", causal=False), Block("pre", causal=False)),
            nn.Linear(32, 10),
        )

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))[:, 0])


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skip = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.lstm, self.head = (
            nn.Embedding(50, 16),
            nn.LSTM(16, 24, num_layers=2, batch_first=True),
            nn.Linear(24, 50),
        )

    def forward(self, ids):
        return self.head(self.lstm(self.token(ids))[0])


def convolutional() -> nn.Module:
    # No bias before a batch norm: its gradient is zero but for rounding, and Adam steps by the sign
    # of it.
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


MODELS = {
    "gpt2": lambda: Language("pre"),
    "bert": lambda: Language("post", causal=False),
    "llama": lambda: Language("rms"),
    "vit": Patches,
    "resnet": convolutional,
    "lstm": Recurrent,
}


def example(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if name in ("vit", "resnet"):
        return torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    ids = torch.randint(50, (2, 12))
    return ids, ids.roll(-1, 1)


def loss_of(model, x, y):
    out = model(x)
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def train(
    model: nn.Module, x, y, device: str, steps: int = 3
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the final state: two accumulated halves, clipping, a schedule and an average copy,
    as training loops have them."""
    model = copy.deepcopy(model).to(device)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    x, y = x.to(device), y.to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for a, b in zip(x.chunk(2), y.chunk(2)):
            loss = loss_of(model, a, b) / 2
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        losses.append(total)
        if device == "hlo":
            torch_hlo.mark_step()
    return [v.item() for v in losses], {k: v.cpu() for k, v in average.state_dict().items()}


QUICK = ("gpt2", "lstm")  # the others are in the sweep of Hugging Face models, too


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS]
)
def test_training(name):
    torch.manual_seed(0)
    model, (x, y) = MODELS[name](), example(name)
    want, state = train(model, x, y, "cpu")
    got, found = train(model, x, y, "hlo")
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert want[-1] < want[0]
    for key, value in state.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-2, atol=1e-2, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_evaluation_and_state_dict():
    """Dropout is off, running statistics are used, and a state that went through the device is the
    same model."""
    torch.manual_seed(0)
    model = nn.Sequential(convolutional(), nn.Dropout(0.5), nn.Linear(10, 3)).eval()
    x = torch.randn(4, 3, 16, 16)
    device_model = copy.deepcopy(model).to("hlo")
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(
                device_model(x.to("hlo")).cpu(), model(x), rtol=1e-4, atol=1e-5
            )
    back = nn.Sequential(convolutional(), nn.Dropout(0.5), nn.Linear(10, 3)).eval()
    back.load_state_dict(device_model.state_dict())
    torch.testing.assert_close(back(x), model(x), rtol=0, atol=0)


def test_dropout_statistics():
    torch.manual_seed(0)
    x = torch.ones(200, 500, device="hlo", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    kept = (y != 0).float().mean().item()
    assert abs(kept - 0.75) < 0.01 and abs(y.mean().item() - 1) < 0.02
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert not torch.equal(F.dropout(x, 0.25).cpu(), y.cpu())


def test_autocast_training():
    torch.manual_seed(0)
    model, (x, y) = Language("pre").to("hlo"), example("gpt2")
    x, y = x.to("hlo"), y.to("hlo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("hlo", dtype=torch.bfloat16):
            assert model.head(torch.randn(2, 32, device="hlo")).dtype == torch.bfloat16
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        torch_hlo.mark_step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_repeated_steps_compile_once():
    torch.manual_seed(0)
    model, (x, y) = Language("rms"), example("llama")
    train(model, x, y, "hlo", steps=4)
    before = torch_hlo.metrics.counter_value("UncachedCompile") or 0
    train(model, x, y, "hlo", steps=4)
    assert (torch_hlo.metrics.counter_value("UncachedCompile") or 0) - before <= 1


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_with_a_boolean_mask(kv_heads):
    """Also where keys are broadcast over the heads, which is not the fused op."""
    torch.manual_seed(0)
    q, k, mask = (
        torch.randn(2, 4, 6, 8),
        torch.randn(2, kv_heads, 6, 8),
        torch.ones(6, 6).tril() > 0,
    )
    got = F.scaled_dot_product_attention(q.to("hlo"), k.to("hlo"), k.to("hlo"), mask.to("hlo"))
    torch.testing.assert_close(
        got.cpu(), F.scaled_dot_product_attention(q, k, k, mask), rtol=1e-4, atol=1e-5
    )


GROUPED = [
    ((16, 8), (4, 8, 8)),
    ((4, 8, 8), (8, 16)),
    ((8, 16), (16, 8)),
    ((4, 8, 8), (4, 8, 8)),
]


@pytest.mark.parametrize("a,b", GROUPED)
def test_experts(a, b):
    """Grouped products of a mixture of experts, one group empty; sizes from histc of integers."""
    torch.manual_seed(0)
    a, b = torch.randn(a), torch.randn(b)
    ids = torch.tensor([0] * 5 + [2] * 7 + [3] * 4)

    def run(device):
        x, y = (t.to(device).requires_grad_() for t in (a, b))
        chosen = ids.to(device)
        ends = torch.histc(
            chosen.float() if device == "cpu" else chosen.int(), bins=4, min=0, max=3
        ).cumsum(0, dtype=torch.int32)
        out = F.grouped_mm(x, y, offs=None if a.dim() == b.dim() == 3 else ends)
        return [t.detach().cpu() for t in (out, *torch.autograd.grad(out.square().sum(), (x, y)))]

    torch.testing.assert_close(run("hlo"), run("cpu"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_hugging_face(kind):
    """A training step and greedy generation with a cache of keys and values."""
    pytest.importorskip("transformers")
    from test.sweeps import huggingface

    row = next(a for a in huggingface.architectures() if a[0] == kind)
    assert huggingface.check(*row)["status"] == "pass"
    model = huggingface.build(*row).eval()
    settings = model.generation_config
    settings.pad_token_id, settings.eos_token_id, settings.decoder_start_token_id = (
        0,
        None,
        0,
    )
    ids = torch.randint(3, 90, (2, 5))
    options = dict(
        max_new_tokens=4,
        do_sample=False,
        use_cache=True,
        attention_mask=torch.ones_like(ids),
    )
    want = model.generate(ids, **options)
    device_model = copy.deepcopy(model).to("hlo")
    options["attention_mask"] = options["attention_mask"].to("hlo")
    assert torch.equal(device_model.generate(ids.to("hlo"), **options).cpu(), want)
