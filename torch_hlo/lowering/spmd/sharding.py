"""`torch_hlo::shard(x, text)`: x itself, with a note where its elements live. The note is
`mesh|rank|sharding`, for example `x=2,y=4|2|{[{x}, {y, ?}]}`.

A recorded value that is annotated, and `mark_sharding` under torch.compile, become this operation;
it is lowered to XLA's annotation, a custom-call with target "Sharding". Its gradient has the same
sharding.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torch_hlo.hlo.ir import Instruction, Shape, Size, instr
from torch_hlo.hlo.sharding.sharding import DimSharding, Sharding, sharding_text
from torch_hlo.hlo.sharding.sharding_text import mesh_from_text, parse_sharding

from ..core import lowers


@torch.library.custom_op("torch_hlo::shard", mutates_args=())
def shard(x: Tensor, sharding: str) -> Tensor:
    return x.clone()


@shard.register_fake
def _(x: Tensor, sharding: str) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.sharding = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return SHARD(gradient, ctx.sharding), None


shard.register_autograd(_backward, setup_context=_save)
SHARD = torch.ops.torch_hlo.shard.default


def encode(sharding: Sharding) -> str:
    """The note: everything needed to read it back."""
    return f"{sharding.mesh}|{sharding.rank}|{sharding_text(sharding)}"


@lru_cache(4096)
def decode(text: str) -> Sharding:
    """Inverse of `encode`. Raises ShardingError."""
    mesh, rank, sharding = text.split("|")
    return parse_sharding(sharding, Shape("f32", (1,) * int(rank)), mesh_from_text(mesh))


def annotated(x: Instruction, sharding: Sharding) -> Instruction:
    """XLA's annotation of a value."""
    return instr("custom-call", (x,), x.shape, custom_call_target="Sharding", sharding=sharding)


@lowers(SHARD)
def _shard(x: Instruction, text: str) -> Instruction:
    return annotated(x, decode(text))


# Regions that are written per device: between these two a tensor is one device's block, along all
# axes of the mesh.


@torch.library.custom_op("torch_hlo::to_blocks", mutates_args=())
def to_blocks(x: Tensor, sharding: str) -> Tensor:
    raise NotImplementedError("enable_manual_sharding works on tensors of the hlo device")


@to_blocks.register_fake
def _(x: Tensor, sharding: str) -> Tensor:
    return x.new_empty(decode(sharding).shard_dims(x.shape))


@torch.library.custom_op("torch_hlo::from_blocks", mutates_args=())
def from_blocks(x: Tensor, sharding: str, dims: list[int]) -> Tensor:
    raise NotImplementedError("disable_manual_sharding works on tensors of the hlo device")


@from_blocks.register_fake
def _(x: Tensor, sharding: str, dims: list[int]) -> Tensor:
    return x.new_empty(dims)


def _manual(sharding: Sharding) -> Sharding:
    mesh = sharding.mesh
    return Sharding(
        mesh,
        (DimSharding(),) * sharding.rank,
        manual=tuple(mesh.axis(name) for name in mesh.names),
    )


def _boundary(target: str, x: Instruction, sharding: Sharding, shape: Shape) -> Instruction:
    return instr("custom-call", (x,), shape, custom_call_target=target, sharding=sharding)


@lowers(torch.ops.torch_hlo.to_blocks.default)
def _to_blocks(x: Instruction, text: str) -> Instruction:
    whole = decode(text)
    return _boundary(
        "SPMDFullToShardShape",
        annotated(x, whole),
        _manual(whole),
        x.shape.with_dims(whole.shard_dims(x.dims)),
    )


@lowers(torch.ops.torch_hlo.from_blocks.default)
def _from_blocks(x: Instruction, text: str, dims: Sequence[Size]) -> Instruction:
    whole = decode(text)
    return _boundary(
        "SPMDShardToFullShape",
        annotated(x, _manual(whole)),
        whole,
        x.shape.with_dims(tuple(dims)),
    )


# Operations whose second argument is the note.
ANNOTATIONS = frozenset(
    (
        SHARD,
        torch.ops.torch_hlo.to_blocks.default,
        torch.ops.torch_hlo.from_blocks.default,
    )
)
