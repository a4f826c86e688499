"""`mark_sharding` and its kin: notes on tensors of the hlo device about where their elements
live."""

from collections.abc import Sequence

from torch import Tensor

from torch_hlo.device import multi_device
from torch_hlo.device.sharded import ShardedBuffer
from torch_hlo.hlo.sharding.sharding import Sharding
from torch_hlo.lazy import traceable
from torch_hlo.lazy.aten import dispatch
from torch_hlo.lazy.record import Array, HloTensor, read, session, write
from torch_hlo.lazy.run import spmd
from torch_hlo.lazy.run.journal import Journal
from torch_hlo.lazy.run.launch import alone
from torch_hlo.lowering.core import RECORDING, Node, Out
from torch_hlo.lowering.spmd.sharding import SHARD, decode, encode
from torch_hlo.pytorch.registration import PLACE

from .mesh import Dim, Entry, Mesh, to_sharding


def mark_sharding(
    tensor: Tensor,
    mesh: Mesh,
    spec: Sequence[Entry],
    *,
    replicated: Sequence[str] = (),
    name: str | None = None,
) -> Tensor:
    """Spread `tensor` over `mesh` as `spec` says, one entry per dimension (see mesh.py), now and
    after every in-place write; returns it.

    Values that exist are cut into blocks, recorded ones are annotated. The values themselves do not
    change, so this is no operation for autograd; what the annotation means for other tensors,
    gradients and optimizer states among them, propagation finds out. Under torch.compile use the
    result. Raises ShardingError for a spec that does not fit, TypeError for a tensor of another
    device; `name` names the tensor in errors."""
    what = f"tensor {name}" if name else "tensor"
    if tensor.device.type not in PLACE.names:
        raise TypeError(
            f"mark_sharding: the {what} of shape {tuple(tensor.shape)} is on {tensor.device}, move"
            " it with .to('hlo') first"
        )
    sharding = to_sharding(mesh, spec, tensor.shape, replicated, what)
    if not isinstance(tensor, HloTensor):  # a fake tensor: being traced
        noted: Tensor = SHARD(tensor, encode(sharding))
        return noted
    annotate(tensor, sharding)
    return tensor


traceable.trace_through(mark_sharding, Mesh, Dim)


def begin() -> None:
    """From now on there may be sharded tensors."""
    state = session.current()
    state.sharded = True
    if state.journal is None and multi_device.process_count() > 1:
        state.journal = Journal()
        state.sources = True  # for errors: where ranks differ
        dispatch.install()


def annotate(tensor: HloTensor, sharding: Sharding) -> None:
    """`mark_sharding` with the compiler's own kind of sharding."""
    begin()
    storage = tensor._storage
    whole = tensor._view is None
    if whole:
        storage.sharding = sharding
    value = storage.value
    if (
        whole
        and type(value) is Array
        and value.data is not None
        and alone(value)  # a clone leaves its original where it is
        and not any(dim.open for dim in sharding.dims)
    ):
        session.engine().base().start_collectives()
        spmd.place(value, sharding.closed()).note(sharding)
    else:
        with RECORDING:
            write(
                tensor,
                Out(Node(SHARD, (read(tensor), encode(sharding)), {}, (tensor._meta.hlo,))),
            )


def sharding_of(tensor: Tensor) -> Sharding | None:
    """Where a tensor of the hlo device lives, or is to live; None for a tensor on one device."""
    if not isinstance(tensor, HloTensor):
        raise TypeError(
            f"the tensor of shape {tuple(tensor.shape)} is on {tensor.device}, not on the hlo"
            " device"
        )
    storage = tensor._storage
    if tensor._view is not None:
        return None
    value = storage.value
    if type(value) is Out and value.array is None and value.node.target is SHARD:
        return decode(value.node.args[1])
    data = getattr(value, "data", None)
    return data.sharding if isinstance(data, ShardedBuffer) else storage.sharding


def clear_sharding(tensor: Tensor) -> Tensor:
    """Bring the tensor to one device, and keep no annotation; returns it."""
    if not isinstance(tensor, HloTensor):
        raise TypeError(
            f"clear_sharding: the tensor of shape {tuple(tensor.shape)} is on {tensor.device}"
        )
    storage = tensor._storage
    if type(storage.value) is Out:
        session.engine().sync()
    storage.sharding = None
    if type(storage.value) is Array:
        session.engine().base().start_collectives()
        spmd.unplace(storage.value)
    return tensor
