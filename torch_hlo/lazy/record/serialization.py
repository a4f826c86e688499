"""Pickling, torch.save and torch.load: a checkpoint of hlo tensors has the format of CUDA
checkpoints.

A tensor is saved as (storage, offset, size, stride); the storage is a CPU copy that is tagged
"hlo:0", so that `map_location` works in every form and tensors that share memory share it again
after loading."""

import collections
import functools
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from weakref import ref

import torch
from torch.utils import _pytree as pytree

from torch_hlo.device import multi_device
from torch_hlo.pytorch import tensors
from torch_hlo.pytorch.registration import PLACE

from . import meta as metas, session
from .tensor import HloTensor, StorageProxy, from_cpu, make, set_memory, to_cpu, user_attributes


class HostStorage(torch.UntypedStorage):
    """Bytes on the CPU that stand for a storage of the hlo device while a checkpoint is written or
    read."""

    device = property(lambda self: PLACE.device)
    is_hlo = property(lambda self: True)
    _loaded: dict[torch.dtype, HloTensor] | None = None


def reduce(tensor: HloTensor, protocol: int):
    """`__reduce_ex__` of an hlo tensor."""
    torch.utils.hooks.warn_if_has_hooks(tensor)
    hooks: collections.OrderedDict = collections.OrderedDict()
    state = user_attributes(tensor)
    if getattr(tensor, "_is_param", False):
        plain = make(tensor._meta, tensor._storage, tensor._view)
        if state:
            return tensors.rebuild_parameter_with_state, (
                plain,
                tensor.requires_grad,
                hooks,
                state,
            )
        return tensors.rebuild_parameter, (plain, tensor.requires_grad, hooks)
    storage, meta = _host_storage(tensor)
    rebuild, first, last = tensors.rebuilding(storage, meta.dtype)
    args = (first, meta.offset, meta.size, meta.stride, tensor.requires_grad, hooks, *last)
    if state:
        return tensors.rebuild_with_state, (rebuild, torch.Tensor, args, state)
    return rebuild, args


def _host_storage(tensor: HloTensor) -> tuple[torch.UntypedStorage, metas.Meta]:
    """The storage to save and where the tensor lies in it: the same one for all tensors of a
    checkpoint that share memory, and a new one for the next, since steps update memory in place."""
    base = tensor._storage
    if not _by_strides(tensor):
        copy = to_cpu([tensor])[0]
        return _tag(copy.untyped_storage()), metas.of(copy)
    value, known = session.current().saved.get(base, (None, None))
    storage = known() if value is base.value else None
    if storage is None:
        storage = _tag(to_cpu([make(base.meta, base)])[0].untyped_storage())
        session.current().saved[base] = base.value, ref(storage)
    return storage, tensor._meta


def _by_strides(tensor: HloTensor) -> bool:
    """True if strides and offset alone say how the tensor lies in its storage."""
    view = tensor._view
    while view is not None:
        if "conj" in view.op._schema.name or "neg" in view.op._schema.name:
            return False
        view = view.parent
    return True


def _tag(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    storage.__class__ = HostStorage
    return storage


def location(storage) -> str | None:
    """Location tag of a storage for torch.save; None if it is not ours."""
    return str(PLACE.device) if isinstance(storage, HostStorage) else None


def restore(storage: torch.UntypedStorage, where: str) -> HostStorage | None:
    """The storage for `map_location="hlo"` in torch.load; None for other places."""
    kind, _, index = where.partition(":")
    if kind not in PLACE.names:
        return None
    if int(index or 0) and not multi_device.is_own_index(int(index)):
        raise RuntimeError(
            f"Attempting to deserialize object on {where}, but this process has 1 hlo device"
        )
    return _tag(storage)


def set_storage(
    tensor: HloTensor,
    source: HostStorage | torch.Tensor | None = None,
    storage_offset=0,
    size: tuple[int, ...] | None = None,
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """`Tensor.set_` in all its forms."""
    source = getattr(source, "_untyped_storage", source)
    if source is None:
        return torch.ops.aten.set_.default(tensor)
    if isinstance(source, HostStorage):
        source = _load(source, tensor.dtype)
    elif isinstance(source, StorageProxy):
        source = make(source.storage.meta, source.storage)
    elif isinstance(source, torch.UntypedStorage):
        raise RuntimeError(
            f"set_: the storage is on {source.device}, the tensor on {tensor.device}"
        )
    elif size is None:
        return torch.ops.aten.set_.source_Tensor(tensor, source)
    if size is None:
        size = (metas.extent(source._meta),)
        stride = (1,)
    size = tuple(size)
    stride = tuple(stride) if stride is not None else metas.contiguous(size, tensor.dtype).stride
    with torch.no_grad():
        meta = metas.intern(size, stride, tensor.dtype, storage_offset)
        return set_memory(tensor, source, meta)


def _load(storage: HostStorage, dtype: torch.dtype) -> HloTensor:
    """The flat hlo tensor over a loaded storage; the same one for every tensor of the storage."""
    if storage._loaded is None:
        storage._loaded = {}
        first = dtype
    else:
        first = next(iter(storage._loaded))
    if first not in storage._loaded:
        plain = torch.empty(0, dtype=first, device="cpu")
        kind, storage.__class__ = storage.__class__, torch.UntypedStorage
        try:
            plain.set_(storage, 0, (storage.nbytes() // first.itemsize,), (1,))
            storage._loaded = {first: from_cpu(plain)}
        finally:
            storage.__class__ = kind
    return storage._loaded[first]


def _complete(save: Callable[..., None]) -> Callable[..., None]:
    """`torch.save` that has the values before it opens the file: a step may fail, and a process
    that waits there for others may be ended."""

    @functools.wraps(save)
    def complete(obj: object, *args: object, **kwargs: object) -> None:
        kept = [
            _host_storage(t)
            for x in pytree.tree_leaves(obj)
            for t in (x.state_dict().values() if isinstance(x, torch.nn.Module) else (x,))
            if isinstance(t, HloTensor)
        ]
        try:
            return save(obj, *args, **kwargs)
        finally:
            del kept
            session.current().saved.clear()

    return complete


def register() -> None:
    """Tell pickle, torch.save and torch.load about the device."""
    HloTensor.__reduce_ex__ = reduce
    # queues and arguments of processes would send memory that both share: they get a copy
    ForkingPickler.register(HloTensor, lambda tensor: (pickle.loads, (pickle.dumps(tensor),)))
    HloTensor.set_ = set_storage
    torch.save = torch.serialization.save = _complete(torch.save)
    torch.serialization.register_package(5, location, restore)
    torch.serialization.add_safe_globals([HloTensor])
