"""A second set of workloads, `--workloads models`: models written as their users write them,
Hugging Face ones where `transformers` is installed.

They are not tuned for; they show what workloads.py does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import WORKLOADS, Workload, inference, training

MODELS: list[str] = []


def model(fn):
    WORKLOADS[fn.__name__] = fn
    MODELS.append(fn.__name__)
    return fn


def _transformers(name: str, config: str, **sizes) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def _ids(device: str, vocab: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1)).to(device)


class Call(nn.Module):
    """A model with its keyword arguments bound, and one of its results."""

    def __init__(self, inner: nn.Module, result: str, **kwargs) -> None:
        super().__init__()
        self.inner, self.result, self.kwargs = inner, result, kwargs

    def forward(self, *args):
        return getattr(self.inner(*args, **self.kwargs), self.result)


@model
def hf_bert_train(device: str) -> Workload:
    """BERT 4x256 with a padding mask and dropout, 8 x 128 tokens."""
    m = _transformers(
        "BertForMaskedLM",
        "BertConfig",
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=8192,
    )
    ids = _ids(device, 8192, 8, 128)
    mask = (
        (torch.arange(128)[None] < torch.tensor([128, 120, 100, 90, 80, 128, 64, 110])[:, None])
        .long()
        .to(device)
    )
    return training(
        Call(m.train(), "loss", attention_mask=mask, labels=ids).to(device),
        lambda m: m(ids),
    )


@model
def hf_gpt2_infer(device: str) -> Workload:
    """GPT-2 of 6x384, logits of 4 x 128 tokens."""
    m = _transformers(
        "GPT2LMHeadModel",
        "GPT2Config",
        n_embd=384,
        n_layer=6,
        n_head=6,
        n_positions=256,
    )
    return inference(Call(m, "logits", use_cache=False).to(device), _ids(device, 50257, 4, 128))


@model
def hf_t5_train(device: str) -> Workload:
    """T5 of 3+3 layers of 256: relative position bias, cross attention."""
    m = _transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=3,
        num_heads=8,
        vocab_size=8192,
        decoder_start_token_id=0,
    )
    ids, labels = _ids(device, 8192, 8, 96), _ids(device, 8192, 8, 64)
    return training(Call(m.train(), "loss", labels=labels).to(device), lambda m: m(ids))


@model
def hf_llama_train(device: str) -> Workload:
    """LLaMA 4x256 with 8 heads that share 4 keys, 4 x 128 tokens."""
    m = _transformers(
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
    )
    ids = _ids(device, 8192, 4, 128)
    return training(
        Call(m.train(), "loss", labels=ids, use_cache=False).to(device),
        lambda m: m(ids),
    )


@model
def hf_mixtral_infer(device: str) -> Workload:
    """A mixture of 8 experts, two per token, 2 x 64 tokens."""
    m = _transformers(
        "MixtralForCausalLM",
        "MixtralConfig",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
    )
    return inference(Call(m, "logits", use_cache=False).to(device), _ids(device, 8192, 2, 64))


@model
def hf_whisper_encoder(device: str) -> Workload:
    """Whisper tiny's encoder, 30 s of audio."""
    m = _transformers(
        "WhisperModel",
        "WhisperConfig",
        d_model=384,
        encoder_layers=4,
        decoder_layers=1,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        vocab_size=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return inference(
        Call(m.encoder, "last_hidden_state").to(device),
        torch.randn(1, 80, 3000).to(device),
    )


@model
def hf_convnext_infer(device: str) -> Workload:
    """ConvNeXt of tiny widths: depthwise 7x7, channels-last norms."""
    m = _transformers(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        hidden_sizes=[48, 96, 192, 384],
        depths=[2, 2, 4, 2],
    )
    return inference(Call(m, "logits").to(device), torch.randn(2, 3, 224, 224).to(device))


@model
def hf_mobilenet_infer(device: str) -> Workload:
    """MobileNetV2: depthwise convolutions and batch norms."""
    m = _transformers("MobileNetV2ForImageClassification", "MobileNetV2Config")
    return inference(Call(m, "logits").to(device), torch.randn(4, 3, 224, 224).to(device))


@model
def encoder_train(device: str) -> Workload:
    """nn.TransformerEncoder with dropout and a key padding mask."""
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5000, 256)
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(256, 8, 1024, 0.1, batch_first=True, norm_first=True),
                4,
                enable_nested_tensor=False,
            )
            self.head = nn.Linear(256, 32)

        def forward(self, ids, mask):
            return self.head(self.encoder(self.embed(ids), src_key_padding_mask=mask))

    ids, labels = _ids(device, 5000, 16, 64), _ids(device, 32, 16 * 64)
    mask = (torch.arange(64)[None] >= torch.arange(34, 66, 2)[:, None]).to(device)
    return training(
        Tagger().to(device),
        lambda m: F.cross_entropy(m(ids, mask).flatten(0, 1), labels),
    )


@model
def unet_train(device: str) -> Workload:
    """A U-Net: group norm, transposed convolutions, concatenations, 4 x 64 x 64."""
    torch.manual_seed(0)

    def block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(8, outer),
            nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.GroupNorm(8, outer),
            nn.SiLU(),
        )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (32, 64, 128)
            self.enter = block(3, 32)
            self.down = nn.ModuleList(block(a, b) for a, b in zip(widths, widths[1:]))
            self.up = nn.ModuleList(
                nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:])
            )
            self.join = nn.ModuleList(block(2 * a, a) for a in widths[:-1])
            self.leave = nn.Conv2d(32, 3, 1)

        def forward(self, x):
            kept = [self.enter(x)]
            for down in self.down:
                kept.append(down(F.max_pool2d(kept[-1], 2)))
            x = kept.pop()
            for up, join in zip(reversed(self.up), reversed(self.join)):
                x = join(torch.cat((up(x), kept.pop()), dim=1))
            return self.leave(x)

    x, noise = (
        torch.randn(4, 3, 64, 64).to(device),
        torch.randn(4, 3, 64, 64).to(device),
    )
    return training(UNet().to(device), lambda m: F.mse_loss(m(x + noise), noise))


@model
def autoencoder_train(device: str) -> Workload:
    """A convolutional variational autoencoder, 16 x 64 x 64."""
    torch.manual_seed(0)

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Sequential(
                nn.Conv2d(3, 32, 4, 2, 1),
                nn.ReLU(),
                nn.Conv2d(32, 64, 4, 2, 1),
                nn.ReLU(),
                nn.Conv2d(64, 128, 4, 2, 1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(8192, 128),
            )
            self.grow = nn.Linear(64, 8192)
            self.decode = nn.Sequential(
                nn.ConvTranspose2d(128, 64, 4, 2, 1),
                nn.ReLU(),
                nn.ConvTranspose2d(64, 32, 4, 2, 1),
                nn.ReLU(),
                nn.ConvTranspose2d(32, 3, 4, 2, 1),
                nn.Sigmoid(),
            )

        def forward(self, x):
            mean, log = self.encode(x).chunk(2, dim=1)
            z = mean + torch.randn_like(mean) * (0.5 * log).exp()
            y = self.decode(self.grow(z).view(-1, 128, 8, 8))
            return F.mse_loss(y, x) - 1e-3 * (1 + log - mean.square() - log.exp()).mean()

    x = torch.rand(16, 3, 64, 64).to(device)
    return training(Autoencoder().to(device), lambda m: m(x))


@model
def recommender_train(device: str) -> Workload:
    """Bags of embeddings, dot interactions and MLPs; a batch of 512."""
    torch.manual_seed(0)

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(20_000, 32, mode="sum") for _ in range(8))
            self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.top = nn.Sequential(nn.Linear(32 + 36, 128), nn.ReLU(), nn.Linear(128, 1))

        def forward(self, dense, sparse):
            x = self.bottom(dense)
            rows = torch.stack([x, *(bag(sparse[i]) for i, bag in enumerate(self.bags))], dim=1)
            i, j = torch.triu_indices(9, 9, 1, device=rows.device)
            return self.top(torch.cat((x, torch.bmm(rows, rows.mT)[:, i, j]), dim=1)).squeeze(1)

    dense, sparse, y = (
        torch.randn(512, 13).to(device),
        _ids(device, 20_000, 8, 512, 4),
        torch.randint(2, (512,)).float().to(device),
    )
    return training(
        Recommender().to(device),
        lambda m: F.binary_cross_entropy_with_logits(m(dense, sparse), y),
    )


@model
def graph_train(device: str) -> Workload:
    """Message passing over 20,000 edges of 2,000 nodes: gather, index_add, GRU cell."""
    torch.manual_seed(0)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.message, self.cell, self.leave = (
                nn.Linear(16, 64),
                nn.Linear(128, 64),
                nn.GRUCell(64, 64),
                nn.Linear(64, 7),
            )

        def forward(self, x, source, target):
            h = torch.relu(self.enter(x))
            for _ in range(3):
                m = torch.relu(self.message(torch.cat((h[source], h[target]), dim=1)))
                h = self.cell(torch.zeros_like(h).index_add(0, target, m), h)
            return self.leave(h)

    x, y = torch.randn(2000, 16).to(device), _ids(device, 7, 2000)
    source, target = _ids(device, 2000, 2, 20_000)
    return training(Graph().to(device), lambda m: F.cross_entropy(m(x, source, target), y))


@model
def physics_train(device: str) -> Workload:
    """A network that solves u'' = f: second derivatives by autograd inside the loss."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    ).to(device)
    points = torch.linspace(0, 1, 1024)[:, None].to(device)

    def loss(m):
        x = points.detach().requires_grad_()
        u = m(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        return (ddu + torch.sin(x)).square().mean() + u[0].square().sum() + u[-1].square().sum()

    return training(net, loss)


@model
def policy_infer(device: str) -> Workload:
    """A policy of three layers for one observation: nothing but overhead."""
    torch.manual_seed(0)
    return inference(
        nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6)
        ).to(device),
        torch.randn(1, 32).to(device),
    )


@model
def gru_translate_train(device: str) -> Workload:
    """Two GRU layers and attention over 24 steps."""
    torch.manual_seed(0)

    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(4000, 128), nn.Embedding(4000, 128)
            self.encoder, self.decoder = (
                nn.GRU(128, 192, 2, batch_first=True),
                nn.GRU(128, 192, 2, batch_first=True),
            )
            self.head = nn.Linear(384, 4000)

        def forward(self, a, b):
            keys, state = self.encoder(self.source(a))
            queries, _ = self.decoder(self.target(b), state)
            found = torch.softmax(queries @ keys.mT / 14, dim=-1) @ keys
            return self.head(torch.cat((queries, found), dim=-1))

    a, b, y = (
        _ids(device, 4000, 16, 24),
        _ids(device, 4000, 16, 24),
        _ids(device, 4000, 16 * 24),
    )
    return training(Translate().to(device), lambda m: F.cross_entropy(m(a, b).flatten(0, 1), y))


@model
def ppo_train(device: str) -> Workload:
    """A clipped policy update over 256 observations: distributions with their checks, many tiny
    ops."""
    torch.manual_seed(0)

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.value = (
                nn.Sequential(
                    nn.Linear(17, 64),
                    nn.Tanh(),
                    nn.Linear(64, 64),
                    nn.Tanh(),
                    nn.Linear(64, n),
                )
                for n in (6, 1)
            )
            self.scale = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return self.policy(x), self.scale.exp(), self.value(x).squeeze(1)

    x, action, before, advantage, target = (
        torch.randn(*s).to(device) for s in ((256, 17), (256, 6), (256,), (256,), (256,))
    )

    def loss(m):
        mean, scale, value = m(x)
        policy = torch.distributions.Normal(mean, scale)
        ratio = (policy.log_prob(action).sum(1) - before + 8).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return F.mse_loss(value, target) - gain - 0.01 * policy.entropy().sum(1).mean()

    return training(Agent().to(device), loss)


@model
def transformer_train(device: str) -> Workload:
    """nn.Transformer, 2+2 layers of 64, causal and padding masks, 8 x 20 tokens."""
    torch.manual_seed(0)

    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.head = (
                nn.Embedding(300, 64),
                nn.Transformer(64, 4, 2, 2, 128, 0.0, batch_first=True),
                nn.Linear(64, 300),
            )

        def forward(self, a, b):
            mask, padding = (
                self.inner.generate_square_subsequent_mask(b.shape[1], device=a.device),
                a == 0,
            )
            return self.head(
                self.inner(
                    self.embed(a),
                    self.embed(b),
                    tgt_mask=mask,
                    src_key_padding_mask=padding,
                    memory_key_padding_mask=padding,
                )
            )

    a, b, y = (
        _ids(device, 300, 8, 20),
        _ids(device, 300, 8, 18),
        _ids(device, 300, 8 * 18),
    )
    return training(
        Translate().to(device),
        lambda m: F.cross_entropy(m(a, b).flatten(0, 1), y, label_smoothing=0.1),
    )


@model
def operator_train(device: str) -> Workload:
    """A Fourier neural operator in one dimension: three spectral layers of 32 channels, 16 x 128
    points."""
    torch.manual_seed(0)

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.skip = (
                nn.Parameter(torch.randn(32, 32, 12, 2) / 1024),
                nn.Conv1d(32, 32, 1),
            )

        def forward(self, x):
            modes = torch.einsum(
                "bix,iox->box",
                torch.fft.rfft(x)[..., :12],
                torch.view_as_complex(self.weight),
            )
            return F.gelu(
                torch.fft.irfft(F.pad(modes, (0, x.shape[-1] // 2 - 11)), n=x.shape[-1])
                + self.skip(x)
            )

    net = nn.Sequential(
        nn.Conv1d(2, 32, 1), *(Spectral() for _ in range(3)), nn.Conv1d(32, 1, 1)
    ).to(device)
    x, y = torch.randn(16, 2, 128).to(device), torch.randn(16, 1, 128).to(device)
    return training(net, lambda m: F.mse_loss(m(x), y))


@model
def ode_train(device: str) -> Workload:
    """A neural differential equation, 20 steps of Runge-Kutta unrolled: a thousand tiny ops."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2)).to(device)
    start, path = torch.randn(20, 2).to(device), torch.randn(20, 20, 2).to(device)

    def loss(m):
        y, found = start, []
        for _ in range(20):
            a = m(y)
            b = m(y + 0.025 * a)
            c = m(y + 0.025 * b)
            y = y + 0.05 / 6 * (a + 2 * b + 2 * c + m(y + 0.05 * c))
            found.append(y)
        return (torch.stack(found) - path).abs().mean()

    return training(net, loss)
