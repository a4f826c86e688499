"""Sharded tensors in steps: where leaves and results live, and the programs that run on all devices
of a mesh.

A step is partitioned when one of its values is annotated (lowering/spmd/sharding.py), a leaf is
spread
over devices already, or a result belongs to a storage that stays spread. What nobody annotated is
decided by propagation. A storage keeps the sharding of its first result, so that parameters stay
where they are and the program of the second step is that of all later ones."""

from collections.abc import Sequence

from torch_hlo import progress
from torch_hlo.device import sharded
from torch_hlo.device.memory import Buffer
from torch_hlo.device.sharded import PartitionedProgram, Placed, ShardedBuffer, gather
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Module, Pairs
from torch_hlo.hlo.ir.numeric import decode as decode_array
from torch_hlo.hlo.sharding.sharding import Mesh, Sharding, ShardingError
from torch_hlo.lowering.core import lower
from torch_hlo.lowering.spmd.sharding import ANNOTATIONS, decode

from ..record import Array, Storage, session
from . import executor
from .fingerprint import Graph


@frozen
class Placement:
    """What is known of a step before it is compiled: a Sharding, or None where propagation may
    choose."""

    mesh: Mesh
    leaves: tuple[Sharding | None, ...]
    outputs: tuple[Sharding | None, ...]

    def allows(self, ins: Sequence[Sharding], outs: Sequence[Sharding]) -> bool:
        """True if a program with these shardings serves."""
        chosen = (*ins[: len(self.leaves)], *outs)
        return all(
            want is None or want.closed() == have
            for want, have in zip((*self.leaves, *self.outputs), chosen, strict=True)
        )


class Abstract(Placed):
    """The data of an array that has no memory: for programs that are looked at and never run
    (distributed/simulate.py)."""

    __slots__ = ("job",)

    def __init__(self, sharding: Sharding | None) -> None:
        self.sharding = self.annotation = sharding
        self.job = None


def placement(graph: Graph, outputs: Sequence[Sharding | None]) -> Placement | None:
    """How the step has to be placed; None for a step on one device. `outputs`: where its results
    are to live, as far as that is known.

    Raises ShardingError when annotations speak of different meshes.
    """
    annotated = list(
        dict.fromkeys(node.args[1] for node in graph.nodes if node.target in ANNOTATIONS)
    )
    meshes = dict.fromkeys(decode(text).mesh for text in annotated)
    for wanted in outputs:
        if wanted is not None:
            meshes.setdefault(wanted.mesh)
    leaves = [_leaf_sharding(leaf) for leaf in graph.leaves]
    if not meshes:
        meshes = dict.fromkeys(s.mesh for s in leaves if s is not None)
        if not meshes:
            return None
    if len(meshes) > 1:
        raise ShardingError(
            f"one step has values sharded over different meshes: {' and '.join(map(str, meshes))};"
            " use one mesh (an axis may have size 1), or torch_hlo.mark_step() between them"
        )
    (mesh,) = meshes
    return Placement(
        mesh,
        tuple(s if s is not None and s.mesh == mesh else None for s in leaves),
        tuple(outputs),
    )


def wanted(storages: Sequence[tuple[Storage, int]], count: int) -> list[Sharding | None]:
    """Where `count` results are to live, of which these storages get the i-th."""
    outputs: list[Sharding | None] = [None] * count
    for storage, i in storages:
        if outputs[i] is None:
            outputs[i] = getattr(storage, "sharding", None)
    return outputs


def _leaf_sharding(leaf: Array) -> Sharding | None:
    """Where a leaf lives; in the words of the annotation, which may have priorities, if there was
    one."""
    return leaf.data.annotation if isinstance(leaf.data, Placed) else None


def keep(
    storages: Sequence[tuple[Storage, int]],
    outputs: Sequence[ShardedBuffer],
    where: Placement,
) -> None:
    """Of these storages, which get the i-th result: as it lives, so will their next values."""
    for buffer, annotation in zip(outputs, where.outputs):
        buffer.note(annotation)
    for storage, i in storages:
        chosen = outputs[i].sharding
        if storage.sharding is None or storage.sharding.closed() != chosen:
            storage.sharding = chosen


def annotated(graph: Graph, where: Placement, aliases: Pairs) -> Module:
    """The program of the whole mesh, with all that is known of where things live."""
    return lower(
        graph.nodes,
        graph.outputs,
        [*graph.leaves, *graph.numbers],
        aliases,
        "step",
        placed=(where.mesh, where.leaves, where.outputs),
    )


def build(
    graph: Graph,
    where: Placement,
    aliases: Pairs,
    observe=None,
) -> PartitionedProgram:
    """Lower, propagate, partition, compile. `observe`: see device/runtime.py."""
    from torch_hlo.compiler.spmd.spmd_pipeline import spmd

    dump = None if observe is None else lambda name, module, ms: observe(f"hlo:{name}", module)
    with progress.shown("partitioning"):
        partitioned = spmd(annotated(graph, where, aliases), dump)
    program = PartitionedProgram(partitioned, observe)
    session.current().partitioned.add(program)
    return program


def alone(buffer: Buffer | ShardedBuffer) -> Buffer:
    """An array that this process has whole, for a program of its own."""
    return (
        buffer
        if isinstance(buffer, Buffer)
        else Buffer(buffer.shape, buffer.memory.blocks[0], buffer.job)
    )


def place(array: Array, sharding: Sharding) -> ShardedBuffer:
    """The leaf's blocks; an array that is in one piece, or on another mesh, is cut first, and stays
    so."""
    buffer = array.data
    if isinstance(buffer, Abstract):
        array.data = Abstract(sharding)
        return array.data
    if not isinstance(buffer, ShardedBuffer) or buffer.sharding != sharding:
        executor.wait(buffer)
        if array.bounds == () and isinstance(buffer, Buffer):
            array.bounds = _bounds(buffer)
        buffer = array.data = sharded.reshard(buffer, sharding)
    return buffer


def _bounds(buffer: Buffer) -> tuple[int, int]:
    """Smallest and largest value of an array of integers, while this process has it whole (see
    checks.bounds)."""
    values = (
        decode_array(buffer.bytes.tobytes(), buffer.shape.dtype, buffer.shape.dims)
        if buffer.shape.kind in "su" and buffer.nbytes
        else None
    )
    return (0, -1) if values is None else (int(values.min()), int(values.max()))


def unplace(array: Array) -> None:
    """Bring a spread array back to one device."""
    if isinstance(array.data, ShardedBuffer):
        executor.wait(array.data)
        array.data = sharded.whole_buffer(array.data)


__all__ = [
    "Abstract",
    "Placement",
    "annotated",
    "build",
    "gather",
    "place",
    "placement",
    "unplace",
]
