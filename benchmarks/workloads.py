"""The workloads. Each is a function `(device) -> Workload`: fixed seed, random weights, synthetic
data.

`step` is a plain PyTorch function of no arguments; engines decide whether it runs eagerly, compiled
or lazily. `flops` and `bytes` are the floor of one step: multiply-adds counted twice, and the bytes
that must move at least once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Workload:
    step: Callable[[], object]
    compiled: Callable[[Callable], Callable[[], object]]  # builds the step around torch.compile
    flops: float = 0
    bytes: float = 0


WORKLOADS: dict[str, Callable[[str], Workload]] = {}


def workload(fn: Callable[[str], Workload]) -> Callable[[str], Workload]:
    WORKLOADS[fn.__name__] = fn
    return fn


def inference(model: nn.Module, *inputs: torch.Tensor, flops: float = 0) -> Workload:
    model.eval()

    def build(compiler):
        run = compiler(model)

        def step():
            with torch.no_grad():
                return run(*inputs)

        return step

    return Workload(build(lambda m: m), build, flops, sum(p.nbytes for p in model.parameters()))


def adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """fused=True is the fastest AdamW that PyTorch has; PyTorch/XLA has none."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=parameters[0].device.type != "xla")


def training(
    model: nn.Module,
    loss_of: Callable[[nn.Module], torch.Tensor],
    flops: float = 0,
    optimizer=None,
) -> Workload:
    """Forward, backward and AdamW. torch.compile gets the forward (and so the backward); the
    optimizer stays as it is."""

    def build(compiler):
        compiled = compiler(model)
        opt = (optimizer or adamw)(list(model.parameters()))

        def step():
            loss = loss_of(compiled)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return step

    parameters = sum(p.nbytes for p in model.parameters())
    return Workload(build(lambda m: m), build, flops, 7 * parameters)


def kernel(fn: Callable, *inputs: torch.Tensor, bytes: float, flops: float = 0) -> Workload:
    def build(compiler):
        run = compiler(fn)
        return lambda: run(*inputs)

    return Workload(build(lambda f: f), build, flops, bytes)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab: int, block: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = (
            nn.Embedding(vocab, width),
            nn.Embedding(block, width),
        )
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        return self.head(
            self.norm(
                self.blocks(
                    self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
                )
            )
        )


def _gpt(
    device: str, vocab: int, block: int, layers: int, width: int, heads: int, batch: int
) -> Workload:
    torch.manual_seed(0)
    model = GPT(vocab, block, layers, width, heads).to(device)
    ids = torch.randint(vocab, (batch, block + 1)).to(device)
    matmul = sum(
        p.numel()
        for n, p in model.named_parameters()
        if p.dim() == 2 and "token" not in n and "position" not in n
    )
    flops = 6 * batch * block * matmul + layers * 12 * batch * block * block * width / 2
    return training(
        model,
        lambda m: F.cross_entropy(m(ids[:, :-1]).reshape(-1, vocab), ids[:, 1:].reshape(-1)),
        flops,
    )


@workload
def gpt_train(device):
    """GPT 6x384, vocabulary 50257, batch 4 x 128, AdamW."""
    return _gpt(device, 50257, 128, 6, 384, 6, 4)


@workload
def nanogpt_train(device):
    """Character GPT 4x128, context 64, batch 12: small ops."""
    return _gpt(device, 65, 64, 4, 128, 4, 12)


def _encoder(device, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(768, 12, causal=False) for _ in range(4)), nn.LayerNorm(768)).to(
        device, dtype
    )
    return inference(
        model,
        torch.randn(4, 128, 768).to(device, dtype),
        flops=2 * 512 * 4 * 12 * 768**2,
    )


@workload
def bert_f32(device):
    """4-layer encoder of width 768, batch 4 x 128, inference."""
    return _encoder(device, torch.float32)


@workload
def bert_bf16(device):
    """The same in bfloat16."""
    return _encoder(device, torch.bfloat16)


class Decoder(nn.Module):
    """LLaMA-style: RMSNorm, rotary positions, grouped heads, SwiGLU; one token against a cache of
    `length` keys."""

    def __init__(self, layers=8, width=768, heads=12, hidden=2048, vocab=16000, length=256) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.token = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    n1=nn.RMSNorm(width),
                    n2=nn.RMSNorm(width),
                    qkv=nn.Linear(width, 3 * width, bias=False),
                    out=nn.Linear(width, width, bias=False),
                    gate=nn.Linear(width, hidden, bias=False),
                    up=nn.Linear(width, hidden, bias=False),
                    down=nn.Linear(hidden, width, bias=False),
                )
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)
        for i in range(layers):
            self.register_buffer(f"k{i}", torch.zeros(1, heads, length, width // heads))
            self.register_buffer(f"v{i}", torch.zeros(1, heads, length, width // heads))
        angle = torch.arange(length)[:, None] / 10000 ** (
            torch.arange(0, width // heads, 2) / (width // heads)
        )
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def rotate(self, x, position):
        a, b = x.chunk(2, dim=-1)
        return x * self.cos[position] + torch.cat((-b, a), dim=-1) * self.sin[position]

    def forward(self, ids, position):
        x = self.token(ids)
        mask = torch.arange(self.length, device=ids.device) <= position
        for i, layer in enumerate(self.layers):
            q, k, v = (
                t.view(1, 1, self.heads, -1).transpose(1, 2)
                for t in layer["qkv"](layer["n1"](x)).chunk(3, dim=-1)
            )
            keys, values = getattr(self, f"k{i}"), getattr(self, f"v{i}")
            keys.index_copy_(2, position, self.rotate(k, position))
            values.index_copy_(2, position, v)
            y = F.scaled_dot_product_attention(
                self.rotate(q, position), keys, values, attn_mask=mask[None]
            )
            x = x + layer["out"](y.transpose(1, 2).reshape(1, 1, -1))
            h = layer["n2"](x)
            x = x + layer["down"](F.silu(layer["gate"](h)) * layer["up"](h))
        return self.head(self.norm(x))


class QuantizedLinear(nn.Module):
    """A linear layer without bias whose weights have `bits` bits: 8 with a scale per row, 4 with a
    scale and an offset per row and group of 32."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        w, self.bits, self.group = linear.weight.detach().float(), bits, 32
        n, k = w.shape
        top = 2 ** (bits - 1) - 1
        rows = w.view(n, -1, k if bits == 8 else self.group)
        scales = rows.abs().amax(2, keepdim=True).clamp(min=1e-9) / top
        q = (rows / scales).round().view(n, k)
        if bits == 8:
            q, scales = q.to(torch.int8), scales.view(n)
        else:
            q = torch._convert_weight_to_int4pack_for_cpu((q + 8).int(), 1)
            scales = scales.squeeze(2).t()
            scales = torch.stack((scales, torch.zeros_like(scales)), 2)
        self.register_buffer("weight", q)
        self.register_buffer("scales", scales.bfloat16().contiguous())

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        y = (
            torch._weight_int8pack_mm(flat, self.weight, self.scales)
            if self.bits == 8
            else torch._weight_int4pack_mm_for_cpu(flat, self.weight, self.group, self.scales)
        )
        return y.view(*x.shape[:-1], -1)


def quantized(model: nn.Module, bits: int) -> nn.Module:
    """`model` with weights of `bits` bits in its linear layers."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                module._modules[name] = QuantizedLinear(child, bits)
    return model


def _decode(device, dtype=torch.float32, bits=0):
    torch.manual_seed(0)
    model = Decoder().to(dtype)
    parameters = sum(p.numel() for p in model.parameters()) - model.token.weight.numel()
    if bits:
        model = quantized(model, bits)
    model.to(device)
    w = inference(
        model,
        torch.tensor([[7]]).to(device),
        torch.tensor([100]).to(device),
        flops=2 * parameters,
    )
    w.bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    w.bytes -= model.token.weight.nbytes + model.cos.nbytes + model.sin.nbytes
    return w


@workload
def llama_decode(device):
    """One decoding step, batch 1, f32, key/value cache of 256."""
    return _decode(device)


@workload
def llama_decode_bf16(device):
    """The same in bfloat16."""
    return _decode(device, torch.bfloat16)


@workload
def llama_decode_int8(device):
    """The same in bfloat16, with weights of 8 bits and a scale per row."""
    return _decode(device, torch.bfloat16, 8)


@workload
def llama_decode_int4(device):
    """The same in bfloat16, with weights of 4 bits and a scale per 32."""
    return _decode(device, torch.bfloat16, 4)


class Residual(nn.Module):
    def __init__(self, inner, outer, stride) -> None:
        super().__init__()
        self.a, self.n1 = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.b, self.n2 = (
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.skip = (
            nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
            if stride != 1 or inner != outer
            else nn.Identity()
        )

    def forward(self, x):
        return F.relu(self.n2(self.b(F.relu(self.n1(self.a(x))))) + self.skip(x))


def resnet18() -> nn.Module:
    layers = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    for inner, outer, stride in (
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
        (512, 512, 1),
    ):
        layers.append(Residual(inner, outer, stride))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


@workload
def resnet18_train(device):
    """ResNet-18, batch 4 of 224 x 224, AdamW."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, 224, 224).to(device), torch.randint(1000, (4,)).to(device)
    return training(
        resnet18().to(device),
        lambda m: F.cross_entropy(m(x), y),
        flops=4 * 3 * 2 * 1.81e9,
    )


@workload
def resnet18_infer(device):
    """ResNet-18 inference, batch 4."""
    torch.manual_seed(0)
    return inference(
        resnet18().to(device),
        torch.randn(4, 3, 224, 224).to(device),
        flops=4 * 2 * 1.81e9,
    )


class ViT(nn.Module):
    def __init__(self, width=192, layers=6, heads=3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.cls, self.position = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.zeros(1, 197, width)),
        )
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


@workload
def vit_infer(device):
    """ViT 6x192, patches of 16, batch 4."""
    torch.manual_seed(0)
    return inference(
        ViT().to(device),
        torch.randn(4, 3, 224, 224).to(device),
        flops=2 * 4 * 197 * 6 * 12 * 192**2,
    )


@workload
def mlp_train(device):
    """784-256-128-10, batch 64, AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ).to(device)
    x, y = torch.randn(64, 784).to(device), torch.randint(10, (64,)).to(device)
    return training(
        model,
        lambda m: F.cross_entropy(m(x), y),
        flops=6 * 64 * (784 * 256 + 256 * 128 + 1280),
    )


@workload
def lstm_train(device):
    """LSTM 128 -> 256, 32 steps, batch 16, AdamW."""
    torch.manual_seed(0)
    cell, head = (
        nn.LSTM(128, 256, batch_first=True).to(device),
        nn.Linear(256, 10).to(device),
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = cell, head

        def forward(self, x):
            return self.head(self.cell(x)[0][:, -1])

    x, y = torch.randn(16, 32, 128).to(device), torch.randint(10, (16,)).to(device)
    return training(Model(), lambda m: F.cross_entropy(m(x), y), flops=6 * 16 * 32 * 4 * 256 * 384)


@workload
def sum_x_yz(device):
    """sum(x + y*z) over 10 million floats."""
    torch.manual_seed(0)
    x, y, z = (torch.randn(10_000_000).to(device) for _ in range(3))
    return kernel(lambda x, y, z: (x + y * z).sum(), x, y, z, bytes=120e6)


@workload
def softmax(device):
    """softmax of [4096, 2048]."""
    torch.manual_seed(0)
    return kernel(
        lambda x: torch.softmax(x, -1),
        torch.randn(4096, 2048).to(device),
        bytes=2 * 4 * 4096 * 2048,
    )


@workload
def layernorm_gelu(device):
    """gelu(layer_norm(x)), [8192, 1024]."""
    torch.manual_seed(0)
    w, b = torch.randn(1024).to(device), torch.randn(1024).to(device)
    return kernel(
        lambda x: F.gelu(F.layer_norm(x, (1024,), w, b)),
        torch.randn(8192, 1024).to(device),
        bytes=2 * 4 * 8192 * 1024,
    )


@workload
def cross_entropy_50k(device):
    """Cross-entropy of [512, 50257] and the gradient of the logits."""
    torch.manual_seed(0)
    logits, target = (
        torch.randn(512, 50257).to(device).requires_grad_(),
        torch.randint(50257, (512,)).to(device),
    )

    def run(logits, target):
        loss = F.cross_entropy(logits, target)
        return loss, torch.autograd.grad(loss, logits)[0]

    def build(compiler):
        forward = compiler(lambda logits, target: F.cross_entropy(logits, target))

        def step():
            loss = forward(logits, target)
            return torch.autograd.grad(loss, logits)[0]

        return step

    return Workload(lambda: run(logits, target), build, bytes=2 * 4 * 512 * 50257)


@workload
def attention(device):
    """Causal attention [4, 8, 512, 64], forward and backward."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 8, 512, 64).to(device).requires_grad_() for _ in range(3))

    def build(compiler):
        forward = compiler(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()
        )
        return lambda: torch.autograd.grad(forward(q, k, v), (q, k, v))

    return Workload(build(lambda f: f), build, flops=7 * 4 * 8 * 512 * 512 * 64)


@workload
def adamw_124m(device):
    """AdamW over the 148 parameters of a 124 M GPT-2."""
    torch.manual_seed(0)
    shapes = (
        [(50257, 768), (1024, 768)]
        + 12
        * [
            (768,),
            (768,),
            (768, 2304),
            (2304,),
            (768, 768),
            (768,),
            (768,),
            (768,),
            (768, 3072),
            (3072,),
            (3072, 768),
            (768,),
        ]
        + [(768,), (768,)]
    )
    params = [torch.randn(s).to(device).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape).to(device)
    optimizer = adamw(params)

    def build(compiler):
        # The optimizer's own fused kernel is the best PyTorch has: every engine but hlo runs it as
        # it is.
        def step():
            optimizer.step()
            return params[-1].detach()

        return step

    return Workload(build(None), build, bytes=7 * 4 * sum(math.prod(s) for s in shapes))


@workload
def transposes(device):
    """[8,1024,12,64] -> [8,12,1024,64] and a 4096 x 4096 transpose."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 1024, 12, 64).to(device), torch.randn(4096, 4096).to(device)
    return kernel(
        lambda x, y: (x.transpose(1, 2).contiguous(), y.t().contiguous()),
        x,
        y,
        bytes=2 * (x.nbytes + y.nbytes),
    )


@workload
def embedding(device):
    """Gather of 8192 rows from [50257, 768] and the scatter-add of its gradient."""
    torch.manual_seed(0)
    table, ids = (
        torch.randn(50257, 768).to(device).requires_grad_(),
        torch.randint(50257, (8192,)).to(device),
    )

    def build(compiler):
        forward = compiler(lambda t, i: F.embedding(i, t))
        return lambda: torch.autograd.grad(forward(table, ids).sum(), table)

    return Workload(build(lambda f: f), build, bytes=4 * 768 * (3 * 8192 + 50257))
