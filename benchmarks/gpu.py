"""Workloads of a size for GPUs; `python -m benchmarks --device cuda --workloads gpu`. Training and
inference in bf16, kernels that stream or multiply."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads import (
    GPT,
    WORKLOADS,
    Block,
    Decoder,
    Workload,
    inference,
    kernel,
    training,
    workload,
)

_BEFORE = set(WORKLOADS)


@workload
def gpt2_124m_bf16_train(device):
    """GPT-2 124M, batch 8 x 1024, bf16 weights, AdamW."""
    torch.manual_seed(0)
    vocab, block, batch, layers, width = 50304, 1024, 8, 12, 768
    model = GPT(vocab, block, layers, width, 12).to(device, torch.bfloat16)
    ids = torch.randint(vocab, (batch, block + 1)).to(device)
    matmul = sum(
        p.numel()
        for n, p in model.named_parameters()
        if p.dim() == 2 and "token" not in n and "position" not in n
    )
    flops = 6 * batch * block * matmul + layers * 12 * batch * block * block * width / 2
    return training(
        model,
        lambda m: F.cross_entropy(
            m(ids[:, :-1]).reshape(-1, vocab).float(), ids[:, 1:].reshape(-1)
        ),
        flops,
    )


@workload
def llama_1b_decode(device):
    """One decoding step of a 1.1 B LLaMA, bf16, batch 1, cache of 1024."""
    torch.manual_seed(0)
    model = Decoder(16, 2048, 16, 5632, 32000, 1024).to(device, torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters()) - model.token.weight.numel()
    w = inference(
        model,
        torch.tensor([[7]]).to(device),
        torch.tensor([100]).to(device),
        flops=2 * parameters,
    )
    w.bytes = 2 * parameters
    return w


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        sizes = ((inner, width, 1, 1), (width, width, 3, stride), (width, outer, 1, 1))
        self.body = nn.Sequential(
            *(
                layer
                for i, (a, b, k, s) in enumerate(sizes)
                for layer in (
                    nn.Conv2d(a, b, k, s, k // 2, bias=False),
                    nn.BatchNorm2d(b),
                    *([nn.ReLU()] if i < 2 else []),
                )
            )
        )
        self.skip = (
            nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
            if stride != 1 or inner != outer
            else nn.Identity()
        )

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inner = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            layers.append(Bottleneck(inner, width, stride if i == 0 else 1))
            inner = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


@workload
def resnet50_bf16_train(device):
    """ResNet-50, batch 64 of 224 x 224, bf16, AdamW; channels last where PyTorch computes."""
    torch.manual_seed(0)
    layout = torch.channels_last if device != "hlo" else torch.contiguous_format
    x = torch.randn(64, 3, 224, 224).to(device, torch.bfloat16).to(memory_format=layout)
    y = torch.randint(1000, (64,)).to(device)
    model = resnet50().to(device, torch.bfloat16).to(memory_format=layout)
    return training(model, lambda m: F.cross_entropy(m(x).float(), y), flops=64 * 3 * 2 * 4.09e9)


def _bert(device) -> tuple[nn.Module, torch.Tensor, float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(768, 12, causal=False) for _ in range(12)), nn.LayerNorm(768)).to(
        device, torch.bfloat16
    )
    return (
        model,
        torch.randn(32, 128, 768).to(device, torch.bfloat16),
        2 * 32 * 128 * 12 * 12 * 768**2,
    )


@workload
def bert_base_bf16_train(device):
    """BERT-base encoder, batch 32 x 128, bf16, AdamW."""
    model, x, flops = _bert(device)
    return training(model, lambda m: m(x).float().square().mean(), 3 * flops)


@workload
def bert_base_bf16_infer(device):
    """The same, inference."""
    model, x, flops = _bert(device)
    return inference(model, x, flops=flops)


@workload
def matmul_bf16_8k(device):
    """An 8192 x 8192 x 8192 product in bf16."""
    x, y = (torch.randn(8192, 8192).to(device, torch.bfloat16) for _ in range(2))
    return kernel(lambda x, y: x @ y, x, y, bytes=3 * 2 * 8192**2, flops=2 * 8192**3)


@workload
def linear_gelu_bf16(device):
    """gelu(x @ w + b), [8192, 4096] x [4096, 16384], bf16."""
    x, w, b = (
        torch.randn(8192, 4096).to(device, torch.bfloat16),
        torch.randn(16384, 4096).to(device, torch.bfloat16),
        torch.randn(16384).to(device, torch.bfloat16),
    )
    return kernel(
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        x,
        w,
        b,
        bytes=2 * (8192 * 4096 + 16384 * 4096 + 8192 * 16384),
        flops=2 * 8192 * 4096 * 16384,
    )


@workload
def attention_bf16(device):
    """Causal attention [8, 16, 2048, 64], bf16, forward and backward."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(8, 16, 2048, 64).to(device, torch.bfloat16).requires_grad_() for _ in range(3)
    )

    def build(compiler):
        forward = compiler(
            lambda q, k, v: (
                F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().mean()
            )
        )
        return lambda: torch.autograd.grad(forward(q, k, v), (q, k, v))

    return Workload(build(lambda f: f), build, flops=7 * 8 * 16 * 2048 * 2048 * 64)


@workload
def softmax_8k(device):
    """softmax of f32[8192, 8192]."""
    return kernel(
        lambda x: torch.softmax(x, -1),
        torch.randn(8192, 8192).to(device),
        bytes=2 * 4 * 8192**2,
    )


@workload
def layernorm_gelu_bf16(device):
    """gelu(layer_norm(x)), bf16[16384, 4096]."""
    w, b = (
        torch.randn(4096).to(device, torch.bfloat16),
        torch.randn(4096).to(device, torch.bfloat16),
    )
    return kernel(
        lambda x: F.gelu(F.layer_norm(x, (4096,), w, b)),
        torch.randn(16384, 4096).to(device, torch.bfloat16),
        bytes=2 * 2 * 16384 * 4096,
    )


@workload
def sum_x_yz_100m(device):
    """sum(x + y*z) over 100 million floats."""
    x, y, z = (torch.randn(100_000_000).to(device) for _ in range(3))
    return kernel(lambda x, y, z: (x + y * z).sum(), x, y, z, bytes=1.2e9)


@workload
def transposes_large(device):
    """[16,2048,16,64] -> [16,16,2048,64] in bf16 and an 8192 x 8192 transpose in f32."""
    x, y = (
        torch.randn(16, 2048, 16, 64).to(device, torch.bfloat16),
        torch.randn(8192, 8192).to(device),
    )
    return kernel(
        lambda x, y: (x.transpose(1, 2).contiguous(), y.t().contiguous()),
        x,
        y,
        bytes=2 * (x.nbytes + y.nbytes),
    )


CPU_TOO = ["adamw_124m", "cross_entropy_50k", "embedding"]
GPU = [name for name in WORKLOADS if name not in _BEFORE] + CPU_TOO
