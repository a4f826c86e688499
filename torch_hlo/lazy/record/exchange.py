"""Arrays shared with other libraries: DLPack, and tensors of torch.cuda when the hlo device is the
same GPU.

    y = from_dlpack(x)              # the memory of x, not copied
    torch.from_dlpack(y)            # and back: HloTensor.__dlpack__
    cuda_tensor.to("hlo")           # a copy on the device, in the order of both streams;
                                    # .to("cuda") likewise

Values on the hlo device never change, so shared memory is only read: writing to `y` gives it
another array, and whoever writes to `x` while `y` is in use changes what `y` shows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_hlo.device import dlpack, runtime
from torch_hlo.device.memory import EXIT, Buffer
from torch_hlo.lowering.core import HLO_TO_TORCH
from torch_hlo.pytorch.around import around

from . import meta as metas, session
from .handlers import call
from .meta import aten
from .storage import Array
from .tensor import HloTensor, fresh, to_cpu

LEGACY = 1  # DLPack's number of CUDA's default stream, and the driver's


def location() -> tuple[int, int]:
    """DLPack's (type, number) of the device that arrays live on. Raises BufferError where others
    cannot reach them."""
    place = runtime.backend().place()
    if place is not None:
        return place
    raise BufferError(
        f"TORCH_HLO_DEVICE={runtime.backend_name()}: its arrays are not in memory that DLPack can"
        " name; copy with .cpu()"
    )


def from_dlpack(x) -> torch.Tensor:
    """A tensor of the hlo device over the memory of `x`, which has `__dlpack__` and lies row by row
    on the same device.

    Raises BufferError for another device, for gaps between elements, and for types that HLO lacks.
    """
    place = location()
    found = tuple(map(int, x.__dlpack_device__()))
    if found != place:
        raise BufferError(
            f"the array is on DLPack device {found}, the hlo device computes on {place}; copy it"
            " there first, or use .to('hlo')"
        )
    driver = runtime.driver()
    stream = {"stream": driver.main.value} if driver is not None else {}
    array, owner = dlpack.take(x.__dlpack__(**stream))
    if driver is not None and array.address % 16:
        raise BufferError("the array does not start at a multiple of 16 bytes: copy it first")
    dtype = HLO_TO_TORCH.get(array.shape.dtype)
    if dtype is None:
        raise BufferError(f"PyTorch has no dtype for {array.shape}")
    return fresh(
        metas.contiguous(array.shape.dims, dtype),
        Array(array.shape, runtime.adopt(array.shape, array.address, owner)),
    )


def to_dlpack(x: HloTensor, stream: int | None = None) -> object:
    """A capsule with the value of `x`, evaluated; see the array API's `__dlpack__`. `stream`: the
    consumer's, None for CUDA's default stream, -1 for no order. Raises BufferError."""
    if x.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    place = location()
    lease = _lease(x)
    buffer = lease.buffer
    driver = runtime.driver()
    if x._view is None:
        x._storage.value.bounds = None  # whoever has the memory might write, and nobody knows
    stream = None if stream == -1 else stream or LEGACY
    if driver is None:
        address = buffer.address
        buffer.memory.copies = None  # packed ones
    else:
        address = buffer.memory.device_address
        if stream is not None:
            driver.precede(stream)

    def release() -> None:
        if driver is not None and not EXIT.begun:
            driver.follow(stream or LEGACY)  # its kernels may still be reading
        lease.close()

    try:
        return dlpack.export(dlpack.Array(address, buffer.shape, place), release)
    except BufferError:
        lease.close()
        raise


def _dlpack(
    x: HloTensor,
    *,
    stream: int | None = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> object:
    """`__dlpack__` of the array API."""
    place = location()
    if dl_device not in (None, place):
        raise BufferError(f"the tensor is on DLPack device {place}, not {dl_device}")
    return to_dlpack(x.clone() if copy else x, stream)


def register() -> None:
    """Let other libraries ask tensors for their memory."""
    HloTensor.__dlpack__ = _dlpack
    HloTensor.__dlpack_device__ = lambda x: location()

    def capsule(original: Callable, tensor: torch.Tensor) -> object:
        return to_dlpack(tensor) if isinstance(tensor, HloTensor) else original(tensor)

    for holder in (torch, torch.utils.dlpack):
        around(holder, "to_dlpack", capsule)


def _lease(x: HloTensor):
    """The array with the value of `x`, row by row, kept from being overwritten. Raises BufferError
    for one that is spread over devices."""
    if x._view is not None:
        with torch.no_grad():
            x = call(aten.clone.default, x, memory_format=torch.contiguous_format)
    lease = session.engine().base().lease(x._storage)
    if not isinstance(lease.buffer, Buffer):
        lease.close()
        raise BufferError(
            f"the tensor {list(x.shape)} is spread over several devices: copy it with .cpu()"
        )
    return lease


# ---- torch.cuda


def shares(device: torch.device) -> bool:
    """True if the hlo device computes on this device of torch.cuda."""
    if device.type != "cuda" or not runtime.backend_name().startswith("cuda"):
        return False
    return location()[1] == (
        device.index if device.index is not None else torch.cuda.current_device()
    )


def take_in(tensor: torch.Tensor) -> Buffer:
    """A copy of a contiguous tensor of torch.cuda (see `shares`), in the order of its current
    stream."""
    buffer = runtime.allocate(metas.contiguous(tuple(tensor.shape), tensor.dtype).hlo)
    if buffer.nbytes:
        _copy(tensor.device, buffer.memory.written(), tensor.data_ptr(), buffer.nbytes)
    return buffer


def fetch(x: HloTensor, device: torch.device) -> torch.Tensor:
    """The values of `x` in a plain tensor: on `device` if that is where they are computed, else on
    the CPU."""
    return hand_out(x, device) if shares(device) else to_cpu([x])[0]


def hand_out(x: HloTensor, device: torch.device) -> torch.Tensor:
    """A copy of `x` as a tensor of torch.cuda (see `shares`), in the order of its
    strides."""
    lease = _lease(x)
    buffer = lease.buffer
    try:
        result = torch.empty(x.shape, dtype=x.dtype, device=device)
        if buffer.nbytes:
            _copy(device, result.data_ptr(), buffer.memory.device_address, buffer.nbytes)
    finally:
        lease.close()
    stride = metas.copied(x._meta).stride
    if result.stride() != stride:
        return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=device).copy_(result)
    return result


def _copy(device: torch.device, target: int, source: int, nbytes: int) -> None:
    driver = runtime.driver()
    stream = torch.cuda.current_stream(device).cuda_stream
    driver.follow(stream)
    driver.copy(target, source, nbytes)
    driver.precede(stream)
