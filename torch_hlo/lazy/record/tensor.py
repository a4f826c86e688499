"""`HloTensor`, the tensor of the "hlo" device: metadata in C++, and in Python the storage it
aliases and the view of it.

    _storage: Storage    what it shares with its aliases
    _view: View | None   how its value follows from the storage's value
    _meta: Meta          size, strides, dtype, offset

No operation is implemented here: everything arrives in aten/dispatch.py. What needs more than this
file is given to the class where it is written: pickling and `set_` (serialization.py), DLPack
(exchange.py), torch.compile (traceable.py).
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torch_hlo.frozen import frozen
from torch_hlo.lowering.core import RECORDING, Node, Out
from torch_hlo.pytorch import participants, tensors
from torch_hlo.pytorch.registration import PLACE

from . import meta as metas, session, views
from .meta import Meta, aten
from .storage import Array, Storage, read
from .views import View, on_host

_data = tensors.tensor_data
_make = tensors.make_wrapper
in_inference_mode = torch.is_inference_mode_enabled
_session = session.current()
_identities: WeakKeyDictionary[Storage, torch.UntypedStorage] = WeakKeyDictionary()


class _Data:
    """`x.data = y` must move the Python payload too, not only the C++ metadata."""

    def __get__(self, tensor: Tensor | None, cls: type | None = None) -> Any:
        return _data if tensor is None else _data.__get__(tensor)

    def __set__(self, tensor, value) -> None:
        if isinstance(value, HloTensor):
            adopt(tensor, value)
        else:
            _data.__set__(tensor, value)


def _conversion(name: str, convert: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    original = getattr(Tensor, name)

    def converted(self: Tensor) -> Any:
        if participants.skips_python():
            if self.numel() != 1:
                raise ValueError("only one element tensors can be converted to Python scalars")
            return convert(handle(aten._local_scalar_dense.default, (), (self,)))
        return original(self)

    return converted


class HloTensor(Tensor):
    """A tensor of the "hlo" device. Users see it as a plain `torch.Tensor`."""

    # No __slots__: `torch.utils.swap_tensors`, which `module.to` uses, swaps only the __dict__.
    _storage: Storage
    _view: View | None
    _meta: Meta
    # Everything is done below autograd; the Python-level override protocol would only cost time.
    __torch_function__ = participants.disabled_torch_function
    data = _Data()

    def __new__(cls, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[misc]
        """`type(weight)(value, requires_grad=…)` makes a parameter: elsewhere that is its class."""
        return (torch.nn.Parameter if "requires_grad" in kwargs else Tensor)(*args, **kwargs)

    # `torch.tensor([loss, loss])` asks for numbers
    __float__ = _conversion("__float__", float)
    __index__ = _conversion("__index__", operator.index)
    __bool__ = _conversion("__bool__", bool)
    __complex__ = _conversion("__complex__", complex)

    @staticmethod
    def __torch_dispatch__(
        func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ):  # see `install`
        return handle(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents=None) -> str:
        return _text(self, tensor_contents)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return self.item().__format__(spec)
        return object.__format__(self, spec)

    def tolist(self) -> list[float | list[float]]:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False):
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the"
            " tensor to host memory first."
        )

    def __array__(self, dtype=None, copy=None):
        return self.numpy()

    def __deepcopy__(self, memo: dict) -> Tensor:
        return _deepcopy(self, memo)

    def __copy__(self) -> Tensor:
        new = alias(self)
        new.__dict__.update(self.__dict__)
        return new.requires_grad_(self.requires_grad)

    def __coerce_same_metadata_as_tangent__(self, metadata, kind=None):
        """AOTAutograd asks what a gradient has to become: its fake tensors are of class Tensor."""
        return self

    def untyped_storage(self):
        return storage_proxy(self._storage)

    def _typed_storage(self):
        return TypedProxy(self.untyped_storage(), self.dtype)

    def data_ptr(self) -> int:
        """A number that is equal for tensors which start at the same element of the same storage,
        and not an address."""
        return (
            self.untyped_storage().data_ptr() + self._meta.offset * self.element_size()
            if self.numel()
            else 0
        )

    def record_stream(self, stream: Any) -> None:
        """Nothing to do: an array lives until the programs that read it have run."""

    def share_memory_(self):
        raise NotImplementedError(
            f"share_memory_ of a tensor on {PLACE.device}: processes do not share its memory, each"
            " would train a copy. Share tensors of the CPU, or use torch.distributed"
        )

    def is_shared(self) -> bool:
        return False

    def is_pinned(self, device=None) -> bool:
        return False


def handle(
    func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
) -> Any:  # replaced by `install`
    raise RuntimeError("the device has not been installed")


def install(function: Callable) -> None:
    """`function(op, types, args, kwargs)` handles the ops on hlo tensors. C++ calls it without
    anything in between."""
    global handle
    handle = function
    HloTensor.__torch_dispatch__ = staticmethod(function)


def blank(meta: Meta) -> HloTensor:
    """A tensor that is no view and whose storage is still to be given."""
    spare = meta.spare[in_inference_mode()]
    tensor = spare.pop() if spare else _new(meta)
    _session.taken.append(meta)
    return tensor


def _new(meta: Meta) -> HloTensor:
    tensor = _make(HloTensor, *meta.wrapper)
    # Not one by one: Python would give it a dictionary that shares its keys with others, in which
    # it looks up attributes five times as long.
    tensor.__dict__ = {"_storage": None, "_view": None, "_meta": meta}
    return tensor


def make_ahead(enough: Callable[[], bool]) -> None:
    """Make the tensors that the next step will ask for if it is like the last one, until
    `enough()`: while the device computes it costs nothing, and in a row a fraction of what each
    costs between other things."""
    inference = in_inference_mode()
    wanted = Counter(_session.taken)
    _session.taken.clear()
    for meta in _session.stocked.keys() - wanted.keys():
        meta.spare[0].clear()
        meta.spare[1].clear()
    _session.stocked = wanted
    for meta, count in wanted.items():
        if enough():
            return
        spare = meta.spare[inference]
        del spare[count:]
        while len(spare) < count:
            spare.append(_new(meta))


def make(meta: Meta, storage: Storage, view: View | None = None) -> HloTensor:
    """A tensor over `storage`."""
    tensor = blank(meta)
    tensor._storage = storage
    tensor._view = view
    return tensor


def fresh(meta: Meta, value: Out | Array) -> HloTensor:
    """A tensor with a storage of its own, holding `value`."""
    tensor = blank(meta)
    tensor._storage = Storage(value, meta)
    return tensor


def alias(tensor: HloTensor) -> HloTensor:
    """Another tensor of the same storage, view and metadata."""
    return make(tensor._meta, tensor._storage, tensor._view)


def adopt(tensor: HloTensor, new: HloTensor) -> HloTensor:
    """Turn `tensor` in place into an alias of `new`; it keeps its autograd state and version
    counter."""
    _data.__set__(tensor, new)
    tensor._storage, tensor._view, tensor._meta = new._storage, new._view, new._meta
    return tensor


def upload(tensor: Tensor) -> Array:
    """The logical value of a tensor of the CPU, or of torch.cuda, as an array on the device (a
    copy)."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        dense = tensor.resolve_conj().resolve_neg()
        tensor = aten.clone.default(dense, memory_format=torch.contiguous_format)
    data = session.engine().upload(tensor)
    array = Array(metas.contiguous(tuple(tensor.shape), tensor.dtype).hlo, data)
    array.bounds = () if tensor.device.type == "cpu" else None
    return array


def from_cpu(tensor: Tensor) -> HloTensor:
    """Copy a strided CPU tensor to the device, in the order of its strides. Raises TypeError for a
    dtype without an element type."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"a tensor of layout {tensor.layout} cannot go to the hlo device: use .to_dense(), or"
            " .to_sparse_coo()"
        )
    meta = metas.intern(tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return fresh(metas.copied(meta), upload(tensor))


def to_cpu(tensors: list[HloTensor]) -> list[Tensor]:
    """Copies on the CPU, in the order of the tensors' strides. Evaluates what is pending."""
    results = []
    for tensor, dense in zip(tensors, session.engine().materialize(tensors)):
        meta = tensor._meta
        stride = metas.copied(meta).stride
        if dense.stride() != stride:
            dense = aten.empty_strided.default(
                meta.size, stride, dtype=meta.dtype, device="cpu"
            ).copy_(dense)
        results.append(dense)
    return results


def peek(tensor: HloTensor) -> Tensor | None:
    """The tensor's value on the CPU if that takes no evaluation of recorded work, else None."""
    storage = tensor._storage
    if type(storage.value) is Out:
        return None
    # of the engine below, which is not told: who uses the value says so (Engine.looks)
    base = session.engine().base().materialize([make(storage.meta, storage)])[0]
    return on_host(base, tensor._view)


def strided(x: HloTensor, meta: Meta) -> HloTensor:
    """A view of x's storage by strides. Raises RuntimeError if it leaves the storage."""
    base = x._storage
    size = base.meta.dtype.itemsize * metas.numel(base.meta.size)
    needed = metas.extent(meta) * meta.dtype.itemsize
    if needed > size and metas.numel(meta.size):
        raise RuntimeError(
            f"setStorage: sizes {list(meta.size)}, strides {list(meta.stride)}, storage offset"
            f" {meta.offset}, and itemsize {meta.dtype.itemsize} requiring a storage size of"
            f" {needed} are out of bounds for storage of size {size}"
        )
    if meta is x._meta:
        return alias(x)
    return make(meta, base, views.restrided(x._view, base.meta, meta))


def set_memory(x: HloTensor, source: HloTensor, meta: Meta) -> HloTensor:
    """Let `x` show a part of source's storage. Whether it is conjugated or negated stays."""
    shown = strided(source, meta)
    if views.has_lazy_bits(x._view) or views.has_lazy_bits(source._view):
        shown._view = views.restrided(x._view, source._storage.meta, meta)
    return adopt(x, shown)


class StorageProxy:
    """What `untyped_storage()` returns: enough for code that compares, measures, frees and
    reallocates storages."""

    __slots__ = ("storage", "__weakref__")

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def size(self) -> int:
        return 0 if self.storage.freed else self.storage.shape.nbytes

    nbytes = __len__ = size

    def resize_(self, size: int) -> StorageProxy:
        """Free (size 0) or reallocate (undefined contents). Raises RuntimeError for another
        size."""
        storage = self.storage
        if size == 0:
            storage.freed = True
        elif size == storage.shape.nbytes:
            storage.freed = False
        else:
            raise RuntimeError(
                f"an hlo storage of {storage.shape.nbytes} bytes can be resized to 0 and back, not"
                f" to {size}"
            )
        meta = storage.meta
        with RECORDING:
            storage.replace(
                Out(
                    Node(
                        aten.empty.memory_format,
                        (list(meta.size),),
                        {"dtype": meta.dtype},
                        (meta.hlo,),
                    )
                )
            )
        return self

    _resize_ = resize_

    def data_ptr(self) -> int:
        return 0 if self.storage.freed else id(self.storage)

    def cpu(self) -> torch.UntypedStorage:
        """A copy of its bytes."""
        return to_cpu([make(self.storage.meta, self.storage)])[0].untyped_storage()

    def tolist(self) -> list[int]:
        return self.cpu().tolist()

    def _weak_ref(self) -> int:
        """PyTorch's weak reference to a storage, which is a pointer that it counts and frees: to an
        empty one that lives as long as this."""
        identity = _identities.get(self.storage)
        if identity is None:
            identity = _identities[self.storage] = torch.UntypedStorage(0)
        return tensors.weak_reference(identity)

    _cdata = property(lambda self: id(self.storage))
    device = property(lambda self: PLACE.device)
    is_hlo = property(lambda self: True)
    is_cuda = property(lambda self: False)

    def is_pinned(self, device=None) -> bool:
        return False

    def is_shared(self) -> bool:
        return False

    def __eq__(self, other) -> bool:
        return isinstance(other, StorageProxy) and other.storage is self.storage

    def __hash__(self) -> int:
        return id(self.storage)


@frozen
class TypedProxy:
    """A storage counted in elements, as `x.storage()` gives it; FSDP1 frees and reallocates it."""

    _untyped_storage: StorageProxy
    dtype: torch.dtype

    def untyped(self) -> StorageProxy:
        return self._untyped_storage

    def size(self) -> int:
        return self._untyped_storage.size() // self.dtype.itemsize

    __len__ = _size = size

    def _resize_(self, count: int) -> None:
        self._untyped_storage.resize_(count * self.dtype.itemsize)

    def data_ptr(self) -> int:
        return self._untyped_storage.data_ptr()

    _data_ptr = data_ptr

    def tolist(self) -> list:
        flat = torch.empty(0, dtype=self.dtype, device="cpu")
        return flat.set_(self._untyped_storage.cpu()).tolist()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._untyped_storage, name)


def storage_proxy(storage: Storage) -> StorageProxy:
    """The one proxy of a storage, as long as somebody holds it: PyTorch's tracing keeps tables of
    them by identity."""
    proxy = _session.proxies.get(id(storage))
    if proxy is None or proxy.storage is not storage:
        proxy = _session.proxies[id(storage)] = StorageProxy(storage)
    return proxy


def _text(tensor: HloTensor, contents: str | None) -> str:
    if contents is None:
        values = tensor.detach().cpu()
        if values.numel() or tensor.dim() == 1:
            contents = tensors.values_text(values) if values.numel() else "[]"
    text = tensors.tensor_text(tensor, contents)
    # Print as for a plain tensor, or a plain Parameter.
    wrapped = "Parameter("
    name = type(tensor).__name__ + "("
    if text.startswith(wrapped):
        text = text[len(wrapped) : -1]
    if text.startswith(name):
        text = "tensor(" + text[len(name) :]
    return "Parameter containing:\n" + text if getattr(tensor, "_is_param", False) else text


def user_attributes(tensor: HloTensor) -> dict:
    """Python attributes of a tensor without those of this class."""
    return {
        k: v
        for k, v in tensor.__dict__.items()
        if k not in ("_storage", "_view", "_meta", "_is_param")
    }


def _deepcopy(tensor: HloTensor, memo: dict) -> HloTensor:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy"
            " protocol at the moment.  If you were attempting to deepcopy a module, this may be"
            " because of a torch.nn.utils.weight_norm usage, see"
            " https://github.com/pytorch/pytorch/pull/103001"
        )
    old = tensor._storage
    storage = memo.get(("hlo storage", id(old)))
    if storage is None:
        # Values are immutable: the copy shares the value until either is written to. No step is cut
        # between reading it and holding it.
        with RECORDING:
            storage = memo["hlo storage", id(old)] = Storage(old.value, old.meta)
        storage.sharding = old.sharding
    new = memo[id(tensor)] = make(tensor._meta, storage, tensor._view)
    if tensor.requires_grad:
        new.requires_grad_()
    if getattr(tensor, "_is_param", False):  # PyTorch copies no gradients of parameters
        new._is_param = True
    elif tensor.grad is not None:
        new.grad = copy.deepcopy(tensor.grad, memo)
    new.__dict__.update(copy.deepcopy(user_attributes(tensor), memo))
    return new


__all__ = [
    "HloTensor",
    "adopt",
    "alias",
    "fresh",
    "from_cpu",
    "make",
    "peek",
    "read",
    "to_cpu",
    "upload",
]
