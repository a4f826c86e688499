"""Models for the tests of ahead-of-time compilation: name -> function of nothing giving (module,
args, dynamic_shapes)."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim


class Cnn(nn.Module):
    """A small residual network with what convolutional models have: strides, groups, pooling, batch
    norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 1),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        x = self.stem(images)
        x = torch.relu(x + self.block(x))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = (
            nn.Embedding(20, 8),
            nn.LSTM(8, 12, batch_first=True, bidirectional=True),
            nn.Linear(24, 20),
        )

    def forward(self, tokens):
        y, (h, _) = self.lstm(self.embed(tokens))
        return {"logits": self.out(y), "state": h}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu"),
            2,
            enable_nested_tensor=False,
        )
        self.out = nn.Linear(16, 30)

    def forward(self, tokens, mask):
        position = torch.arange(tokens.shape[1])
        angle = position[:, None] * torch.exp(-torch.arange(0, 16, 2) / 4.0)
        x = self.embed(tokens) + torch.cat([torch.sin(angle), torch.cos(angle)], -1)
        return self.out(self.layers(x, src_key_padding_mask=~mask)), mask.sum(1)


class Types(nn.Module):
    """Several element types, rank 0, an input given through."""

    def forward(self, x, n, flags):
        half = x.bfloat16() * 2
        return (
            half,
            (x > 0) & flags,
            n * 3,
            x,
            (x.double().abs() ** 2.5).sum(),
            torch.fmod(x, 0.7).half(),
            torch.remainder(n, 7).to(torch.int8),
        )


class Spectral(nn.Module):
    """Fourier transforms: filtered lines, rows of images, an odd length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 33, dtype=torch.complex64))

    def forward(self, x):
        y = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=64)
        return y, torch.fft.fft2(y).abs(), torch.fft.rfft(y[..., :9]).real


def spectral():
    return Spectral().eval(), (torch.randn(3, 4, 64),), ({0: Dim("batch", max=64)},)


def cnn():
    return Cnn().eval(), (torch.randn(2, 3, 32, 32),), ({0: Dim("batch", max=64)},)


def lstm():
    return Lstm().eval(), (torch.randint(0, 20, (3, 7)),), None


def transformer():
    batch, length = Dim("batch", max=64), Dim("length", max=128)
    tokens = torch.randint(0, 30, (2, 9))
    return (
        Transformer().eval(),
        (tokens, torch.arange(9)[None] < torch.tensor([[9], [4]])),
        ({0: batch, 1: length}, {0: batch, 1: length}),
    )


def types():
    return Types(), (torch.randn(6, 5), torch.tensor(17), torch.rand(6, 5) > 0.3), None


MODELS = {
    "cnn": cnn,
    "lstm": lstm,
    "transformer": transformer,
    "types": types,
    "spectral": spectral,
}
