"""Arrays on the device, and copies to and from them.

Memory is the host's: JAX reads an array where it is, without a copy.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from torch_hlo.device import runtime
from torch_hlo.device.memory import Memory
from torch_hlo.device.pjrt.pjrt_api import BUFFER_TYPES
from torch_hlo.device.pjrt.pjrt_structs import STRUCTURES
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import DTYPES, Ints, Shape

from .client import KINDS, client
from .functions import implements, table
from .launches import launches
from .objects import WORDS, Object, PluginError

_EVENT, _DELETED, _POINTER, _DEVICE_POINTER = (
    WORDS["buffer"][name] for name in ("event", "is_deleted", "buffer_pointer", "device_memory_ptr")
)
_IS_READY = 8 * WORDS["event"]["is_ready"]
TYPES = {number: name for name, number in BUFFER_TYPES.items()}


@cache
def layout(order: Ints) -> Object:
    """That of arrays whose dimensions lie in this order, from major to minor."""
    text = f"{{{','.join(map(str, reversed(order)))}}}"
    return Object("layout", serialized_bytes=text, serialized_layout_deleter=table().nothing)


@implements("Layouts_Client_GetDefaultLayout", "Layouts_Topology_GetDefaultLayout")
def _default_layout(args: Any) -> None:
    args.layout = layout(tuple(range(args.num_dims or 0))).address


class Form(Object):
    """What all arrays of this shape in this memory have in common. `order`: their dimensions from
    major to minor."""

    def __init__(self, shape: Shape, place: int, order: Ints) -> None:
        super().__init__("buffer")
        here = client()
        self.shape = shape
        self.place = place
        self.order = order
        self.stored = shape.with_dims(shape.dims[d] for d in order)
        dims = self.keep((ctypes.c_int64 * max(shape.rank, 1))(*shape.dims))
        self.set(
            type=BUFFER_TYPES[shape.dtype],
            dims=dims,
            num_dims=shape.rank,
            unpadded_dims=dims,
            minor_to_major=order[::-1],
            minor_to_major_size=shape.rank,
            on_device_size_in_bytes=shape.nbytes,
            device=here.devices[place // len(KINDS)].address,
            memory=here.memories[place].address,
            is_on_cpu=int([*order] == sorted(order)),  # JAX reads its bytes as row-major
            event=here.ready.address,
            layout=layout(order).address,
        )
        del Object.alive[self.address]


@lru_cache(maxsize=1024)
def form(shape: Shape, place: int, order: Ints | None = None) -> Form:
    return Form(shape, place, tuple(range(shape.rank)) if order is None else order)


class Array(Object):
    """A buffer. `event`: where the program that computes it has run, 0 when it is there."""

    def __init__(self, like: Form, memory: Memory, event: int = 0) -> None:
        self.kind, self.kept, self.words = "buffer", like.kept, like.words[:]
        self.address = self.words.buffer_info()[0]
        self.form = like
        self.shape = like.shape
        self.readers = 0
        self.memory: Memory | None = memory
        self.words[_POINTER] = self.words[_DEVICE_POINTER] = memory.address
        self.event = event
        if event:
            self.words[_EVENT] = event
            table().hold(event, 1)
        self.alive[self.address] = self

    def delete(self) -> None:
        """Its memory goes when nobody looks at it from outside any more."""
        self.words[_DELETED] = 1
        if not self.readers:
            self.memory = None

    def released(self) -> None:
        self.memory = None
        if self.event:
            table().hold(self.event, -1)

    def used(self) -> Memory:
        """Its memory, when the values are there."""
        memory = self.held()
        if self.event and not ctypes.c_uint64.from_address(self.event + _IS_READY).value:
            launches().drain()
        return memory

    def held(self) -> Memory:
        """Its memory, for programs: they run in order."""
        if self.memory is None or self.words[_DELETED]:
            raise PluginError(f"Array of {self.shape} has been deleted or donated.")
        return self.memory


def array(address: int) -> Array:
    found = Object.alive.get(address)
    if not isinstance(found, Array):
        raise PluginError("this buffer has been destroyed")
    return found


def fresh(like: Form) -> Array:
    return Array(like, runtime.allocate(like.shape).memory)


def shape_of(number: int, dims: int | None, rank: int) -> Shape:
    """That of a type number and an array of sizes."""
    dtype = TYPES.get(number, "")
    if dtype not in DTYPES or dtype == "token":
        raise PluginError(
            f"arrays of element type {dtype or number} are not supported", PluginError.UNIMPLEMENTED
        )
    sizes = tuple((ctypes.c_int64 * rank).from_address(dims)) if rank and dims else ()
    return Shape(dtype, sizes)


def _order(layout: int | None, rank: int) -> Ints:
    """That of a PJRT_Buffer_MemoryLayout."""
    given = _LAYOUT.from_address(layout) if layout else None
    if given is None or given.type or not given.minor_to_major_size:
        return tuple(range(rank))
    return tuple((ctypes.c_int64 * rank).from_address(given.minor_to_major))[::-1]


_LAYOUT = STRUCTURES["Buffer_MemoryLayout"]


def _asked(shape: Shape, args: Any, layout: int | None) -> Form:
    place = client().place(args.memory or args.device)
    return form(shape, place, _order(layout, shape.rank))


@implements("Client_BufferFromHostBuffer")
def _from_host(args: Any) -> None:
    shape = shape_of(args.type, args.dims, args.num_dims or 0)
    made = fresh(_asked(shape, args, args.device_layout))
    own = _strides(shape, made.form.order)
    rows = _strides(shape, range(shape.rank))
    if count := args.num_byte_strides:
        rows = [*(ctypes.c_int64 * count).from_address(args.byte_strides)]
    _copy(shape, made.used().address, own, args.data, rows)
    unused = 8 - DTYPES[shape.dtype].bits  # NumPy has anything there
    if unused > 0 and shape.size:
        pages = (ctypes.c_uint8 * shape.nbytes).from_address(made.memory.address)
        values = np.frombuffer(pages, f"{'i' if shape.kind == 's' else 'u'}1")
        np.right_shift(values << unused, unused, out=values)
    args.buffer = made.address
    args.done_with_host_buffer = client().ready.address


def in_order(source: Array, order: Sequence[int]) -> Array:
    """The array as a program wants it: a copy where its dimensions lie otherwise, as those of
    tensors that came through DLPack may."""
    wanted = tuple(order)
    here = source.form
    return source if wanted == here.order else _copied(source, here.place, wanted)


def _copied(source: Array, place: int, order: Ints) -> Array:
    made = fresh(form(source.shape, place, order))
    _copy_out(source, made.used().address, order)
    return made


def _copy_out(source: Array, target: int, order: Ints) -> None:
    shape = source.shape
    own = _strides(shape, source.form.order)
    _copy(shape, target, _strides(shape, order), source.used().address, own)


def _strides(shape: Shape, order: Sequence[int]) -> list[int]:
    """Bytes from one element to the next of each dimension, of a dense array."""
    found = [0] * shape.rank
    step = DTYPES[shape.dtype].itemsize
    for d in reversed(order):
        found[d] = step
        step *= shape.sizes[d]
    return found


def _copy(
    shape: Shape, target: int, own: Sequence[int], source: int, strides: Sequence[int]
) -> None:
    """To a dense array: bytes, unless the strides differ."""
    if not shape.size or all(n == 1 or s == r for n, s, r in zip(shape.sizes, strides, own)):
        ctypes.memmove(target, source, shape.nbytes)
    else:
        _elements(shape, target, own)[...] = _elements(shape, source, strides)


def _elements(shape: Shape, address: int, strides: Sequence[int]) -> Any:
    low = sum((n - 1) * s for n, s in zip(shape.sizes, strides) if s < 0)
    high = sum((n - 1) * s for n, s in zip(shape.sizes, strides) if s > 0)
    size = DTYPES[shape.dtype].itemsize
    pages = (ctypes.c_uint8 * (high - low + size)).from_address(address + low)
    return np.ndarray(shape.sizes, np.dtype((np.void, size)), pages, -low, strides)


@implements("Client_CreateUninitializedBuffer")
def _uninitialized(args: Any) -> None:
    shape = shape_of(args.shape_element_type, args.shape_dims, args.shape_num_dims or 0)
    args.buffer = fresh(_asked(shape, args, args.shape_layout)).address


@frozen
class _Owner:
    """Memory of another library: it is told when nobody here uses it."""

    call: int | None
    buffer: int
    argument: int | None

    def __del__(self) -> None:
        if self.call:
            kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
            kind(self.call)(self.buffer, self.argument)


@implements("Client_CreateViewOfDeviceBuffer")
def _view(args: Any) -> None:
    shape = shape_of(args.element_type, args.dims, args.num_dims or 0)
    owner = _Owner(args.on_delete_callback, args.device_buffer_ptr, args.on_delete_callback_arg)
    memory = Memory.adopt(args.device_buffer_ptr or 0, shape.nbytes, owner)
    args.buffer = Array(_asked(shape, args, args.layout), memory).address


@implements("Buffer_Delete")
def _delete(args: Any) -> None:
    array(args.buffer).delete()


@implements("Buffer_IncreaseExternalReferenceCount")
def _hold(args: Any) -> None:
    found = array(args.buffer)
    found.used()
    found.readers += 1


@implements("Buffer_DecreaseExternalReferenceCount")
def _release(args: Any) -> None:
    found = array(args.buffer)
    found.readers -= 1
    if found.words[_DELETED]:
        found.delete()


@implements("Buffer_ToHostBuffer")
def _to_host(args: Any) -> None:
    found = array(args.src)
    own = found.form.order
    if not args.dst:
        args.dst_size = found.shape.nbytes
        return
    _copy_out(found, args.dst, _order(args.host_layout, len(own)) if args.host_layout else own)
    args.event = client().ready.address


@implements("Buffer_CopyRawToHost")
def _raw_to_host(args: Any) -> None:
    memory = array(args.buffer).used()
    ctypes.memmove(args.dst, memory.address + (args.offset or 0), args.transfer_size or 0)
    args.event = client().ready.address


@implements("Buffer_CopyToDevice", "Buffer_CopyToMemory")
def _to_place(args: Any) -> None:
    source = array(args.buffer)
    args.dst_buffer = _copied(source, client().place(args.place), source.form.order).address
