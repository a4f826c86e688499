"""Checkpoints that are there or not: written beside the last one and then renamed, by
torch.distributed.checkpoint.

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 10}
    save(state, "runs/a", step=10)
    found = latest("runs/a")             # runs/a/step_00000010, or None
    state = load(state, found)           # fills tensors in place; what `state` lacks is added
    optimizer.load_state_dict(state["optimizer"])   # of one that has not stepped yet, too

Tensors over a mesh (mark_sharding) and DTensors are written block by block, each by one process
that has it, and are read by whatever mesh and number of processes asks for them. A process that
dies while saving leaves the checkpoints before it as they were."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from torch_hlo.device import multi_device, sharded
from torch_hlo.device.sharded import ShardedBuffer
from torch_hlo.hlo.ir import Ints, Size
from torch_hlo.lazy.record import Array, HloTensor, session, to_cpu
from torch_hlo.lowering.core import HLO_TO_TORCH
from torch_hlo.pytorch import tensors

if TYPE_CHECKING:  # takes a second to import
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
    )
    from torch.distributed.checkpoint.planner import WriteItem

_NAME = re.compile(r"step_\d{8}(\.old)?")  # .old: until its replacement has taken its place


def save(state: dict[str, Any], root: str | os.PathLike[str], step: int, keep: int = 2) -> Path:
    """Write a checkpoint of `state` (nested dicts and lists of tensors and plain values) and return
    its directory. All processes call it.

    The `keep` newest checkpoints stay. Raises what torch.distributed.checkpoint raises; the
    checkpoint then does not exist."""
    from torch.distributed.checkpoint.state_dict_saver import save as write

    root = Path(root)
    final = at(root, step)
    temporary = root / f"step_{step:08d}.tmp"
    if first():
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
    _barrier()
    with _quiet():
        tensors: dict[str, Tensor] = {}
        structure = flatten(state, tensors)
        write(
            {
                _STRUCTURE: _pack(structure),
                **{k: to_write(t) for k, t in tensors.items()},
            },
            checkpoint_id=str(temporary),
            no_dist=not many(),
        )
    _barrier()
    if first():
        for file in temporary.iterdir():
            _to_disk(file)
        if final.exists():  # the same step once more: only now, when the new one is complete
            os.rename(final, old := root / f"step_{step:08d}.old")
            os.rename(temporary, final)
            shutil.rmtree(old)
        else:
            os.rename(temporary, final)
        _to_disk(root)
        for stale in _complete(root)[:-keep] if keep else []:
            shutil.rmtree(stale)
    _barrier()
    return final


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint under `root`; None when there is none."""
    found = _complete(Path(root))
    return found[-1] if found else None


def load(state: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fill the tensors of `state` from a checkpoint, in place and wherever they live; returns
    `state` with its plain values read too, and with what the checkpoint holds besides (tensors on
    the CPU).

    All processes call it. Raises FileNotFoundError, and what torch.distributed.checkpoint raises
    when names or shapes do not fit."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as read

    if not (Path(path) / ".metadata").exists():
        raise FileNotFoundError(f"{path} is no complete checkpoint")
    there = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    mine: dict[str, Tensor] = {}
    flatten(state, mine)
    missing = [name for name in mine if name not in there]
    if missing:
        raise KeyError(
            f"{path} has no tensor {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    rest = {
        k: torch.empty(m.size, dtype=m.properties.dtype, device="cpu")
        for k, m in there.items()
        if k not in mine and isinstance(m, TensorStorageMetadata)
    }
    readable = {**{k: to_read(t) for k, t in mine.items()}, **rest}
    with _quiet():
        read(readable, checkpoint_id=str(path), no_dist=not many())
    found = {**rest, **{k: take(t, readable[k]) for k, t in mine.items()}}
    result: dict[str, Any] = _unflatten(_unpack(rest[_STRUCTURE]), found)
    return result


_STRUCTURE = "__structure__"
_TENSOR = "__tensor__"


def _pack(structure: object) -> Tensor:
    """Plain values as bytes in a tensor."""
    stream = io.BytesIO()
    torch.save(structure, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8).clone()


def _unpack(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


def flatten(state: Any, tensors: dict[str, Tensor], place: str = "") -> Any:
    """`state` with {_TENSOR: name} in the place of its tensors, which go to `tensors`."""
    if isinstance(state, Tensor):
        if place in tensors:
            raise ValueError(f"two tensors of the state are called {place}")
        tensors[place] = state
        return {_TENSOR: place}
    if isinstance(state, dict):
        return {
            k: flatten(v, tensors, f"{place}.{k}" if place else str(k)) for k, v in state.items()
        }
    if isinstance(state, (list, tuple)):
        return type(state)([flatten(v, tensors, f"{place}.{i}") for i, v in enumerate(state)])
    return state


def _unflatten(structure: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(structure, dict):
        if structure.keys() == {_TENSOR}:
            return tensors[structure[_TENSOR]]
        return {k: _unflatten(v, tensors) for k, v in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)([_unflatten(v, tensors) for v in structure])
    return structure


class Spread(Tensor):
    """Stands for a sharded tensor in a checkpoint: the blocks of this process on the CPU, by their
    offsets in the whole."""

    blocks: dict[Ints, Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        blocks: dict[Ints, Tensor],
    ) -> Self:
        self = tensors.make_wrapper(cls, shape, dtype=dtype, device=torch.device("cpu"))
        self.blocks = blocks
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch declares no arguments of it
        cls,
        func: object,
        types: object,
        args: object = (),
        kwargs: object = None,
    ) -> NoReturn:
        raise TypeError(f"{func} on a tensor of a checkpoint")

    def __repr__(self) -> str:  # type: ignore[override]  # PyTorch has an argument of its own
        return f"Spread({tuple(self.shape)}, {self.dtype}, blocks at {list(self.blocks)})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(at), block.shape) for at, block in self.blocks.items()
        ]

    def __create_write_items__(self, name: str, tensor: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import (
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets, i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk,
                    TensorProperties.create_from_tensor(self.blocks[tuple(chunk.offsets)]),
                    self.shape,
                ),
            )
            for i, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.blocks[tuple(index.offset)]


def _buffer(tensor: Tensor) -> ShardedBuffer | None:
    """The blocks of a tensor of the hlo device that is spread, and no view."""
    if type(tensor) is not HloTensor or tensor._view is not None:
        return None
    value = tensor._storage.value
    return value.data if type(value) is Array and isinstance(value.data, ShardedBuffer) else None


def _blocks(buffer: ShardedBuffer) -> dict[Ints, Tensor]:
    """Offset -> block, without padding, as views of the device's memory; each block once, empty
    ones not at all."""
    shape = buffer.shape
    found = {}
    block_dims = _fixed(buffer.block.dims)
    for i, device in enumerate(multi_device.local_devices(buffer.sharding.mesh.size)):
        at = tuple(t * n for t, n in zip(buffer.sharding.tile(device), block_dims))
        extent = [min(n, whole - o) for n, whole, o in zip(block_dims, _fixed(shape.dims), at)]
        if at not in found and all(n > 0 for n in extent):
            block = (
                torch.from_numpy(buffer.on(i).bytes)
                .view(HLO_TO_TORCH[shape.dtype])
                .view(block_dims)
            )
            found[at] = block[tuple(slice(0, n) for n in extent)]
    return found


def _spread(x: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor | None:
    """`x` by copies of its blocks; None where it does not lie on devices."""
    if isinstance(x, HloTensor):
        session.engine().sync()
    buffer = _buffer(x)
    if buffer is None or 0 in x.shape:
        return None
    return Spread(x.shape, x.dtype, {at: copy(block) for at, block in _blocks(buffer).items()})


def to_write(x: Tensor) -> Tensor:
    """What of a tensor is written: its values or blocks on the CPU."""
    found = _spread(x, torch.clone)
    if found is not None:
        return found
    return to_cpu([x])[0] if type(x) is HloTensor else x


def to_read(x: Tensor) -> Tensor:
    """Where the values of a tensor are read to, on the CPU."""
    found = _spread(x, partial(torch.empty_like, memory_format=torch.contiguous_format))
    if found is not None:
        return found
    return torch.empty(x.shape, dtype=x.dtype, device="cpu") if type(x) is HloTensor else x


def _fixed(dims: Sequence[Size]) -> Ints:
    """Sizes of an array that exists."""
    return tuple(n for n in dims if isinstance(n, int))


def take(x: Any, read: Tensor) -> Tensor:
    """`x` with the values that were read; what is not on the hlo device has them already."""
    mine: Tensor = x
    if isinstance(read, Spread):
        old = x._storage.value.data
        new = sharded.allocate(old.shape, old.sharding)
        for i, device in enumerate(multi_device.local_devices(old.sharding.mesh.size)):
            at = tuple(t * n for t, n in zip(old.sharding.tile(device), old.block.dims))
            if at in read.blocks:
                target = (
                    torch.from_numpy(new.on(i).bytes).view(x.dtype).view(_fixed(new.block.dims))
                )
                target[tuple(slice(0, n) for n in read.blocks[at].shape)] = read.blocks[at]
        x._storage.replace(Array(old.shape, new))
        return mine
    if type(x) is HloTensor:
        with torch.no_grad():
            x.copy_(read)
        return mine
    return read


# ---- files and processes


def steps(root: str | os.PathLike[str]) -> list[int]:
    """The steps that have a complete checkpoint, in order."""
    return [int(d.name[5:13]) for d in _complete(Path(root))]


def at(root: str | os.PathLike[str], step: int) -> Path:
    """The directory of the checkpoint of a step."""
    return Path(root) / f"step_{step:08d}"


def _complete(root: Path) -> list[Path]:
    found = (
        [d for d in root.iterdir() if _NAME.fullmatch(d.name) and (d / ".metadata").exists()]
        if root.is_dir()
        else []
    )
    return sorted(found, key=lambda d: (d.name.removesuffix(".old"), d.suffix == ""))


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def many() -> bool:
    """Whether there are several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def first() -> bool:
    """Whether this process does what one does for all."""
    return not many() or dist.get_rank() == 0


def _barrier() -> None:
    if many():
        dist.barrier()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message=".*(single process|torch.distributed is (unavailable|disabled)|TypedStorage).*",
        )
        yield
