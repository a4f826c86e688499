"""A libcuda without a GPU: memory is host memory, streams are queues, kernels run in the PTX
evaluator (or are only recorded).

    stub = StubCuda()                   # stub.launches: [(function name, grid, threads, argument
                                        # words)]
    stub.fail["cuLaunchKernel"] = 700   # what a function shall give
    StubCuda(execute=False)             # kernels are recorded and do nothing

Work waits in its stream's queue until somebody has to see it, so whatever is not ordered by the
stream, an event or a synchronization happens too late and shows as wrong numbers. A graph runs its
nodes in the latest order that their edges allow. Functions go through the C calling convention.
"""

from __future__ import annotations

import ctypes
import traceback
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from test.ptx.evaluate import GlobalMemory, Image
from test.ptx.tensor_map import encode_tiled
from torch_hlo.device.cuda import cuda_driver

ERRORS = {
    2: b"out of memory", 100: b"no CUDA-capable device is detected",
    218: b"a PTX JIT compilation failed", 700: b"an illegal memory access was encountered",
    900: b"operation not permitted when stream is capturing", 904: b"capture has unjoined work",
}  # fmt: skip
FREED, FRESH = 0xDD, 0xCD  # what freed and new memory holds


class Node:
    """Of a graph: what it does, and the nodes before it."""

    def __init__(self, what: tuple, action: Callable[[], None], before: frozenset[Node]) -> None:
        self.what, self.action, self.before = what, action, before


class StubCuda:
    """The functions that device/cuda/cuda_driver.py calls, as C functions in its attributes."""

    def __init__(
        self,
        version: int = 13000,
        devices: int = 1,
        capability: tuple[int, int] = (9, 0),
        memory: int = 1 << 30,
        execute: bool = True,
    ) -> None:
        self.version, self.devices, self.capability, self.memory, self.execute = (
            version,
            devices,
            capability,
            memory,
            execute,
        )
        self.fail: dict[str, int] = {}
        self.launches: list[tuple[str, int, int, list[int]]] = []
        self.calls: list[str] = []
        # what went wrong in kernels and copies; the next synchronization fails
        self.problems: list[str] = []
        self.blocks: dict[int, np.ndarray] = {}
        self.global_memory = GlobalMemory()
        self.pinned: dict[int, np.ndarray] = {}
        self.queues: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self.done: dict[int, int] = defaultdict(int)  # items of each queue that have run
        # where it was recorded: (stream, items before), or nodes of a capture
        self.events: dict[int, tuple[int, int] | frozenset[Node]] = {}
        self.reached: dict[int, int] = {}
        # streams that take part -> their last nodes
        self.capture: dict[int, frozenset[Node]] | None = None
        self.origin = 0
        self.nodes: list[Node] = []
        self.graphs: dict[int, list[Node]] = {}
        self.images: list[bytes] = []
        self.shared: dict[int, int] = {}
        self._kernels: dict[int, tuple[str, bytes, Image | None]] = {}
        self._next, self._clock = 1000, 0
        for name, arguments in cuda_driver._FUNCTIONS.items():
            setattr(
                self,
                name,
                ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._function(name)),
            )

    def _function(self, name: str):
        method = getattr(self, f"_{name}")

        def call(*arguments):
            self.calls.append(name)
            try:
                return self.fail.get(name) or method(*arguments) or 0
            except Exception:  # an exception cannot go through C
                traceback.print_exc()
                self.problems.append(traceback.format_exc(limit=-1))
                return 999

        return call

    def _number(self) -> int:
        self._next += 1
        return self._next

    @staticmethod
    def _put(address: int, value: int, kind=ctypes.c_uint64) -> None:
        kind.from_address(address).value = value

    def own(self, address: int, nbytes: int) -> None:
        """Memory of another library on this device, such as PyTorch's."""
        self.global_memory.add(address, nbytes)

    # -- order
    # ------------------------------------------------------------------------------------------------------
    def _enqueue(self, stream: int | None, what: tuple, action: Callable[[], None]) -> None:
        stream = stream or 0
        if self.capture is not None and stream in self.capture:
            node = Node(what, action, self.capture[stream])
            self.nodes.append(node)
            self.capture[stream] = frozenset([node])
        else:
            self.queues[stream].append(action)

    def _advance(self, stream: int, count: int | None = None) -> None:
        """Run the first `count` items of a queue, if they have not run."""
        queue = self.queues[stream]
        while self.done[stream] < (len(queue) if count is None else count):
            self.done[stream] += 1
            self._guarded(queue[self.done[stream] - 1])

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        # A failure of the device shows when somebody waits
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")

    def _cuStreamCreate(self, out, flags):
        self._put(out, self._number())

    def _cuStreamSynchronize(self, stream):
        if self.capture is not None and (stream or 0) in self.capture:
            return 900
        self._advance(stream or 0)
        return 700 if self.problems else 0

    def _cuEventCreate(self, out, flags):
        self._put(out, number := self._number())
        self.events[number] = (0, 0)

    def _cuEventRecord(self, event, stream):
        stream = stream or 0
        if self.capture is not None and stream in self.capture:
            self.events[event] = self.capture[stream]
        else:
            self.events[event] = (stream, len(self.queues[stream]) + 1)
            self.queues[stream].append(lambda: self._reach(event))

    def _reach(self, event: int) -> None:
        self._clock += 1000
        self.reached[event] = self._clock

    def _cuStreamWaitEvent(self, stream, event, flags):
        stream, at = stream or 0, self.events[event]
        if isinstance(at, frozenset):  # the stream takes part in the capture from now on
            if self.capture is None:
                return 901
            self.capture[stream] = self.capture.get(stream, frozenset()) | at
        elif self.capture is not None and stream in self.capture:
            return 905  # a capture cannot depend on what is outside
        else:
            self.queues[stream].append(lambda: self._advance(*at))

    def _cuEventQuery(self, event):
        stream, count = self.events[event]
        return 0 if self.done[stream] >= count else cuda_driver.NOT_READY

    def _cuEventElapsedTime(self, out, start, end):
        self._put(out, (self.reached[end] - self.reached[start]) * 1e-3, ctypes.c_float)

    # -- the device
    # -------------------------------------------------------------------------------------------------
    def _cuInit(self, flags): ...
    def _cuDriverGetVersion(self, out):
        self._put(out, self.version, ctypes.c_int)

    def _cuDeviceGetCount(self, out):
        self._put(out, self.devices, ctypes.c_int)

    def _cuDeviceGet(self, out, number):
        self._put(out, number, ctypes.c_int)

    def _cuDeviceGetName(self, out, size, device):
        ctypes.memmove(out, b"Stub\0", 5)

    def _cuDeviceGetAttribute(self, out, what, device):
        self._put(out, self.capability[what - 75], ctypes.c_int)

    def _cuDevicePrimaryCtxRetain(self, out, device):
        self._put(out, 7)

    def _cuCtxPushCurrent_v2(self, context):
        return 0 if context == 7 else 201

    def _cuCtxPopCurrent_v2(self, out):
        self._put(out, 7)

    def _cuGetErrorString(self, code, out):
        self._text = ctypes.c_char_p(ERRORS.get(code, b"error"))
        self._put(out, ctypes.cast(self._text, ctypes.c_void_p).value)

    # -- memory
    # -----------------------------------------------------------------------------------------------------
    def _cuDeviceGetDefaultMemPool(self, out, device):
        self._put(out, 9)

    def _cuMemPoolSetAttribute(self, pool, what, value):
        assert (pool, what) == (9, 4)

    def _cuMemPoolTrimTo(self, pool, size): ...

    def _cuMemAllocAsync(self, out, size, stream):
        if self.capture is not None:
            return 900
        if sum(b.size for b in self.blocks.values()) + size > self.memory:
            return 2
        block = np.full(size + 256, FRESH, np.uint8)
        address = block.ctypes.data + -block.ctypes.data % 256
        self.blocks[address] = block
        self.global_memory.add(address, size)
        self._put(out, address)

    def _cuMemFreeAsync(self, address, stream):
        if self.capture is not None:
            return 900
        if address not in self.blocks:
            return 1
        self._enqueue(stream, ("free",), lambda: self._free(address))
        # The driver counts what is freed in order; nothing here waits for the queue to be empty.
        self.blocks[address] = self.blocks[address][:0]

    def _free(self, address: int) -> None:
        self.global_memory.remove(address)
        block = self.blocks.pop(address)
        (block.base if block.base is not None else block)[:] = FREED

    def _cuMemHostAlloc(self, out, size, flags):
        block = np.full(size + 256, FRESH, np.uint8)
        address = block.ctypes.data + -block.ctypes.data % 256
        self.pinned[address] = block
        self._put(out, address)

    def _cuMemFreeHost(self, address):
        self.pinned.pop(address)[:] = FREED

    def _is_pinned(self, address: int) -> bool:
        return any(a <= address < a + b.size for a, b in self.pinned.items())

    def _cuMemGetInfo_v2(self, free, total):
        self._put(free, self.memory - sum(b.size for b in self.blocks.values()))
        self._put(total, self.memory)

    def _cuMemcpyHtoDAsync_v2(self, target, source, size, stream):
        if self._is_pinned(source):
            self._enqueue(stream, ("upload", size), lambda: ctypes.memmove(target, source, size))
        else:
            data = ctypes.string_at(source, size)
            self._enqueue(stream, ("upload", size), lambda: ctypes.memmove(target, data, size))

    def _cuMemcpyDtoHAsync_v2(self, target, source, size, stream):
        self._enqueue(stream, ("download", size), lambda: ctypes.memmove(target, source, size))
        if not self._is_pinned(target):
            self._advance(stream or 0)

    def _cuMemcpyDtoDAsync_v2(self, target, source, size, stream):
        self._enqueue(stream, ("copy", size), lambda: ctypes.memmove(target, source, size))

    def _cuMemsetD32Async(self, target, value, count, stream):
        self._enqueue(
            stream,
            ("fill", count),
            lambda: ctypes.memmove(target, np.full(count, value, np.uint32).tobytes(), 4 * count),
        )

    # -- kernels
    # ----------------------------------------------------------------------------------------------------
    def _cuModuleLoadDataEx(self, out, image, count, options, values):
        self.images.append(ctypes.string_at(image))
        number = self._number()
        self._kernels[number] = (
            "",
            self.images[-1],
            Image(self.images[-1].decode()) if self.execute else None,
        )
        self._put(out, number)

    def _cuModuleGetFunction(self, out, module, name):
        _, text, image = self._kernels[module]
        if f".entry {name.decode()}(".encode() not in text:
            return 500
        number = self._number()
        self._kernels[number] = name.decode(), text, image
        self._put(out, number)

    def _cuFuncSetAttribute(self, function, what, value):
        assert what == 8
        self.shared[function] = value

    def _cuTensorMapEncodeTiled(
        self,
        out,
        dtype,
        rank,
        address,
        sizes,
        strides,
        box,
        steps,
        interleave,
        swizzle,
        promotion,
        fill,
    ):
        assert out % 64 == 0
        sizes, strides = (
            (ctypes.c_uint64 * n).from_address(a) for n, a in ((rank, sizes), (rank - 1, strides))
        )
        box, steps = ((ctypes.c_uint32 * rank).from_address(a) for a in (box, steps))
        try:
            made = encode_tiled(
                dtype,
                address,
                sizes,
                strides,
                box,
                steps,
                interleave,
                swizzle,
                promotion,
                fill,
            )
        except ValueError:
            return 1
        ctypes.memmove(out, made, len(made))

    def _cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        assert (gy, gz, by, bz) == (1, 1, 1, 1)
        if shared > self.shared.get(function, 48 << 10):
            return 1
        name, text, image = self._kernels[function]
        start = text.decode().split(f".entry {name}(", 1)[1].split(")", 1)[0]
        kinds = start.split(",")
        addresses = (ctypes.c_void_p * len(kinds)).from_address(pointers)
        words = [
            ctypes.string_at(a, 128) if "[128]" in kind else ctypes.c_uint64.from_address(a).value
            for a, kind in zip(addresses, kinds, strict=True)
        ]

        def run() -> None:
            self.launches.append((name, gx, bx, words))
            if image is not None:
                image.launch(name, gx, bx, words, self.global_memory, shared_bytes=shared)

        self._enqueue(stream, ("kernel", function, gx, bx), run)

    # -- graphs
    # -----------------------------------------------------------------------------------------------------
    def _cuStreamBeginCapture_v2(self, stream, mode):
        if self.capture is not None or not stream:
            return 900
        self.capture, self.origin, self.nodes = {stream: frozenset()}, stream, []

    def _cuStreamEndCapture(self, stream, out):
        capture, self.capture = self.capture, None
        assert stream == self.origin
        seen, stack = set(), list(capture[stream])
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += node.before
        if len(seen) != len(self.nodes):
            return 904
        number = self._number()
        self.graphs[number] = self.nodes
        self._put(out, number)

    def _cuGraphInstantiateWithFlags(self, out, graph, flags):
        number = self._number()
        self.graphs[number] = self.graphs[graph]
        self._put(out, number)

    def _cuGraphExecUpdate_v2(self, executable, graph, result):
        if self._form(executable) != self._form(graph):
            return 910
        self.graphs[executable] = self.graphs[graph]

    def _form(self, graph: int) -> list:
        place = {n: i for i, n in enumerate(self.graphs[graph])}
        return [(n.what[:2], sorted(place[b] for b in n.before)) for n in self.graphs[graph]]

    def _cuGraphLaunch(self, executable, stream):
        nodes = self.graphs[executable]

        def run() -> None:
            left = list(nodes)
            while left:
                ready = next(n for n in reversed(left) if not any(b in left for b in n.before))
                left.remove(ready)
                self._guarded(ready.action)

        self._enqueue(stream, ("graph", executable), run)

    def _cuGraphDestroy(self, graph):
        del self.graphs[graph]

    def _cuGraphExecDestroy(self, graph):
        del self.graphs[graph]
