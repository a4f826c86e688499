"""Arrays that are spread over the devices of a mesh, and programs that run on all of them.

    whole = shard_buffer(buffer, sharding)              # a ShardedBuffer: one block of memory per
                                                        # device of this process
    program = PartitionedProgram(per_device_module)     # a Program on such buffers
    program.run([whole, ...], [result, ...])
    array = gather(whole)       # uint8[nbytes]; with one process per device a collective: all
                                # processes call it

A process holds the blocks of its own devices: all of them with virtual devices, one under torchrun.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_hlo import log
from torch_hlo.compiler.cost import cost
from torch_hlo.hlo.ir import Module, Shape
from torch_hlo.hlo.sharding.sharding import Sharding, shard, unshard

from . import multi_device, runtime
from .interfaces import Observe, Program
from .memory import Buffer, Memory

_numbers = itertools.count(1)


class Blocks:
    """The memories of one array's blocks, one per device of this process. `readers`: as in
    memory.Memory."""

    __slots__ = ("blocks", "readers")

    def __init__(self, blocks: Sequence[Memory]) -> None:
        self.blocks = tuple(blocks)
        self.readers = 0

    def copy(self, nbytes: int) -> Blocks:
        """The same contents in other memory; `nbytes` of each block count."""
        return Blocks([block.copy(nbytes) for block in self.blocks])


class Placed:
    """What lives as `sharding` says, which was chosen, or follows from the user's `annotation`:
    that may have priorities."""

    __slots__ = ("sharding", "annotation")
    sharding: Sharding | None
    annotation: Sharding | None

    def note(self, annotation: Sharding | None) -> None:
        """Remember this annotation, if it is the reason."""
        if annotation is not None and annotation.closed() == self.sharding:
            self.annotation = annotation


class ShardedBuffer(Placed):
    """An array of `shape` as blocks over `sharding.mesh`; otherwise as memory.Buffer. `nbytes` is
    the size of one block."""

    __slots__ = ("shape", "block", "memory", "job", "__weakref__")
    sharding: Sharding

    def __init__(self, shape: Shape, sharding: Sharding, memory: Blocks, job: Any = None) -> None:
        self.shape, self.sharding, self.memory, self.job = (
            shape,
            sharding,
            memory,
            job,
        )
        self.block = block_shape(shape, sharding)
        self.annotation = sharding

    @property
    def nbytes(self) -> int:
        return self.block.nbytes

    def over(self, memory: Blocks) -> ShardedBuffer:
        """The same array in other memory."""
        return ShardedBuffer(self.shape, self.sharding, memory)

    def on(self, i: int) -> Buffer:
        """The block of this process's i-th device."""
        return Buffer(self.block, self.memory.blocks[i])

    def __repr__(self) -> str:
        return (
            f"ShardedBuffer({self.shape},"
            f" {self.sharding}{', pending' if self.job is not None else ''})"
        )


def block_shape(shape: Shape, sharding: Sharding) -> Shape:
    """Shape of one device's block."""
    return shape.with_dims(sharding.shard_dims(shape.dims))


def allocate(shape: Shape, sharding: Sharding) -> ShardedBuffer:
    """Uninitialised blocks. Raises MemoryError naming the shape."""
    block = block_shape(shape, sharding)
    return ShardedBuffer(
        shape,
        sharding,
        Blocks(
            [runtime.allocate(block).memory for _ in multi_device.local_devices(sharding.mesh.size)]
        ),
    )


def shard_buffer(buffer: Buffer, sharding: Sharding) -> ShardedBuffer:
    """The blocks of an array that every process has whole."""
    blocks = shard(_elements(buffer.bytes, buffer.shape), sharding)
    result = allocate(buffer.shape, sharding)
    for memory, device in zip(result.memory.blocks, multi_device.local_devices(sharding.mesh.size)):
        memory.array[: result.nbytes] = (
            np.ascontiguousarray(blocks[device]).reshape(-1).view(np.uint8)
        )
    return result


def reshard(buffer: Buffer | ShardedBuffer, sharding: Sharding) -> ShardedBuffer:
    """The array in the blocks that `sharding` wants; itself when it is so already. Goes through the
    host."""
    if isinstance(buffer, ShardedBuffer):
        if buffer.sharding == sharding:
            return buffer
        buffer = whole_buffer(buffer)
    return shard_buffer(buffer, sharding)


def whole_buffer(buffer: ShardedBuffer) -> Buffer:
    """The array in one piece, on one device."""
    return runtime.from_bytes(buffer.shape, gather(buffer))


def gather(buffer: ShardedBuffer) -> np.ndarray:
    """The whole array as uint8[shape.nbytes]."""
    shape = buffer.shape
    sharding = buffer.sharding
    blocks = [_elements(buffer.on(i).bytes, buffer.block) for i in range(len(buffer.memory.blocks))]
    if sharding.is_replicated:
        return blocks[0].reshape(-1).view(np.uint8)
    if len(blocks) < sharding.mesh.size:
        what = (
            f"reading a tensor {shape} that is sharded as {sharding}, which all ranks do together,"
        )
        block = blocks[0].reshape(-1).view(np.uint8)
        whole = multi_device.communicator().gather(block, what, log.source())
        blocks = [b.view(blocks[0].dtype).reshape(buffer.block.dims) for b in whole]
    return np.ascontiguousarray(unshard(blocks, sharding, shape.dims)).reshape(-1).view(np.uint8)


def _elements(data: np.ndarray, shape: Shape) -> np.ndarray:
    """Bytes as an array of opaque elements: what moves here needs no arithmetic."""
    size = shape.nbytes // max(shape.size, 1) or 1
    return data.view(f"V{size}" if size not in (1, 2, 4, 8) else f"u{size}").reshape(shape.dims)


class PartitionedProgram(Program):
    """A per-device module as a Program on ShardedBuffers. Arguments that are plain Buffers
    (numbers) are given to every device."""

    def __init__(self, module: Module, observe: Observe | None = None) -> None:
        self.program = runtime.compile_program(module, observe)
        self.name = self.program.name
        self.in_shardings, self.out_shardings = (
            module.in_shardings,
            module.out_shardings,
        )
        self.mesh, self.cost, self.runs, self.number = (
            module.mesh,
            cost(module),
            0,
            next(_numbers),
        )
        self.aliases = tuple(self.program.aliases)

    def allocate(
        self, shapes: Sequence[Shape], given: dict[int, ShardedBuffer]
    ) -> list[ShardedBuffer]:
        """Buffers for the results; result o takes the memory of `given[o]` if there is one."""
        return [
            given[o].over(given[o].memory) if o in given else allocate(shape, sharding)
            for o, (shape, sharding) in enumerate(zip(shapes, self.out_shardings, strict=True))
        ]

    def run(
        self,
        inputs: Sequence[ShardedBuffer | Buffer],
        outputs: Sequence[ShardedBuffer],
    ) -> None:
        self.runs += 1
        devices = range(len(outputs[0].memory.blocks))

        def on(i: int, buffers: Sequence[ShardedBuffer | Buffer]) -> list[Buffer]:
            return [b.on(i) if isinstance(b, ShardedBuffer) else b for b in buffers]

        multi_device.run_devices(
            self.program,
            [on(i, inputs) for i in devices],
            [on(i, outputs) for i in devices],
        )
