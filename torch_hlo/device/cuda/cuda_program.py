"""Programs on an NVIDIA GPU: the launches of a run become a CUDA graph, which later runs replay.

    program.run(inputs, outputs)            # on the device's own stream; see interfaces.Program
    program.launch(words, arena, stream)    # on anybody's stream and memory: what torch.compile
                                            # does with CUDA tensors

A run enqueues kernel by kernel, natively (cuda_launch.py), until it has addresses that an earlier
one had: then a graph is made for them. Small arrays that move in every run are copied to and from
places that stay (_Moved). A few graphs are kept, since batches and results take turns in some
buffers; a new one gives its arguments to the graph that was not used for longest. Steps that do not
depend on each other are branches of the graph (compiler/gpu/branches.py). Programs whose plan looks
at values (while, conditional, host calls) are always launched step by step.
"""

import ctypes
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch_hlo import metrics
from torch_hlo.compiler.codegen import HostCall
from torch_hlo.compiler.codegen.block import FIXED_WORDS
from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.gpu.gpu_program import CALLS
from torch_hlo.hlo.ir import Ints, Shape, substitute
from torch_hlo.hlo.sharding.collective import Collective, current, nothing

from ..gpu.device_memory import Block
from ..gpu.driver import DriverError
from ..gpu.gpu import GpuProgram
from ..memory import EXIT, Buffer
from .cuda_driver import Cuda, LaunchError
from .cuda_launch import Launcher
from .cuda_memory import CudaPool

GRAPHS = 8  # per program


class CudaProgram(GpuProgram):
    """See the module's docstring."""

    driver: Cuda

    def __init__(
        self, executable: Executable, pool: CudaPool, profile: Profile | None = None
    ) -> None:
        # words of the block -> executable graph
        self._graphs: OrderedDict[Ints, object] = OrderedDict()
        super().__init__(executable, pool, profile)
        if self._constants is not None:
            pool.driver.synchronize()  # whatever stream reads them
        self._moved = _Moved(executable, pool)
        # sets of addresses of late, newest last
        self._seen: OrderedDict[Ints, bool] = OrderedDict()
        self._launcher: Launcher | None = None
        if executable.kernels:
            launch = CALLS.index("launch")
            self._launcher = Launcher(
                pool.driver.entry_point("cuLaunchKernel"),
                executable.kernels,
                self._handles,
                self._table[launch],
            )
            self._table[launch] = self._launcher.address
            self._table.append(self._launcher.state)
        self._tensors: Any = None  # an nccl.Tensors
        self._pending: dict[int, Callable[[], None]] = {}  # collectives under way, by number
        self._timers = pool.driver.timers(len(profile.steps) + 1) if profile is not None else []

    def __del__(self) -> None:
        if not EXIT.begun:
            for graph in self._graphs.values():
                self.driver.drop_graph(None, graph)

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        with self.driver:
            super().run(inputs, outputs)
            self.driver.mark()

    def launch(self, words: Sequence[int], arena: int, stream: int) -> None:
        """Enqueue a run on `stream` (a CUstream). `words`: sizes, then addresses of parameters and
        outputs; `arena`: address of `arena_bytes` bytes. Everything is used in the stream's order.
        A program whose host call raises may leave aliased parameters half written."""
        with self.driver.on(stream):
            self._start(arena, words)

    def _call(self, words: Ints, sizes: Sequence[int]) -> None:
        if self.executable.fetches or not self.executable.kernels or self.profile is not None:
            return self._enqueue(words, sizes)
        key = self._moved.settle(words)
        for block, address, nbytes in self._moved.before:
            self.driver.copy(block, address, nbytes)
        graph = self._graphs.get(key) or (
            self._capture(key, sizes) if self._seen_before(key) else None
        )
        if graph is not None:
            self._graphs.move_to_end(key)
            try:
                self.driver.run_graph(graph)
            except DriverError as error:
                self._error = LaunchError(f"{self.name}: {error}")
        elif self._error is None:
            self._enqueue(key, sizes)
        for address, block, nbytes in self._moved.after:
            self.driver.copy(address, block, nbytes)

    def _seen_before(self, key: Ints) -> bool:
        """Whether a run had these addresses not long ago: then others will, and a graph is worth
        its making."""
        known = self._seen.pop(key, False)
        self._seen[key] = True
        while len(self._seen) > 4 * GRAPHS:
            self._seen.popitem(last=False)
        return known

    def _enqueue(self, words: Sequence[int], sizes: Sequence[int]) -> None:
        launcher = self._launcher
        if launcher is None:
            return super()._call(words, sizes)
        launcher.stream = self.driver.stream.value
        super()._call(words, sizes)
        if launcher.last >= 0:
            self.driver.launched(self.executable.kernels[launcher.last])
        if (failure := launcher.failure) is not None and self._error is None:
            code, number = failure
            self._error = self.driver.launch_error(code, self.executable.kernels[number])

    def _capture(self, key: Ints, sizes: Sequence[int]) -> object | None:
        """An executable graph for these addresses; None when a call on the way failed."""
        driver = self.driver
        found = None
        with driver.captured() as graph:
            self._enqueue(key, sizes)
        if self._error is not None:
            driver.drop_graph(graph)
            return None
        if len(self._graphs) >= GRAPHS:
            _, found = self._graphs.popitem(last=False)
            if not driver.update(found, graph):
                driver.drop_graph(None, found)
                found = None
        if found is None:
            found = driver.instantiate(graph)
        driver.drop_graph(graph)
        self._graphs[key] = found
        return found

    # -- called by the plan
    def _branch(self, number: int, after: int) -> None:
        self.driver.branch(number, after)
        if self._launcher is not None:
            self._launcher.stream = self.driver.stream.value

    def _host_call(self, number: int, words: int) -> None:
        call = self.executable.host_calls[number]
        if not call.name.startswith("collective") or not current().own_process:
            return super()._host_call(number, words)
        attributes = json.loads(call.attrs)
        if call.name == "collective-done":
            return self._pending.pop(attributes["number"], nothing)()
        finish = self._start_collective(
            call, Collective.from_json(json.loads(attributes["text"])), words
        )
        if finish is None:
            metrics.count("HostCollective")
            super()._host_call(number, words)
        elif call.name == "collective":
            finish()
        else:
            self._pending[attributes["number"]] = finish

    def _start_collective(
        self, call: HostCall, c: Collective, words: int
    ) -> Callable[[], None] | None:
        """See nccl.start; on the arrays of a host call."""
        from . import nccl

        if self._tensors is None:
            self._tensors = nccl.Tensors(self.driver)
        shapes = [
            Shape(s.dtype, tuple(substitute(d, self._sizes) for d in s.dims))
            for s in (*call.outputs, *call.inputs)
        ]
        addresses = (ctypes.c_uint64 * len(shapes)).from_address(words)
        arrays = [self._tensors.at(a, s) for a, s in zip(addresses, shapes, strict=True)]
        n = len(call.outputs)
        return nccl.start(current(), c, arrays[n:], arrays[:n], self._tensors.stream)

    def _stamp(self) -> object:
        timer = self._timers[len(self._stamps)]
        self.driver.reach(timer)
        return timer

    def _elapsed(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        return self.driver.elapsed(start, end)


class _Moved:
    """Small arrays that lie elsewhere in every run (a batch, the loss that somebody keeps) get a
    block of the program's own and are copied, so that the addresses that a graph knows stay."""

    LARGEST = 4 << 20  # bytes of an array, arrays
    MOST = 8

    def __init__(self, executable: Executable, pool: CudaPool) -> None:
        self.pool = pool
        first = FIXED_WORDS + len(executable.symbols)
        self.outputs = first + len(executable.parameters)
        shared = {i for o, p in executable.aliases for i in (first + p, self.outputs + o)}
        sizes = [s.nbytes for s in (*executable.parameters, *executable.outputs)]
        self.nbytes = {
            i: n
            for i, n in enumerate(sizes, first)
            if isinstance(n, int) and 0 < n <= self.LARGEST and i not in shared
        }
        self.last: Ints = ()
        self.changes: Counter[int] = Counter()
        self.blocks: dict[int, Block] = {}
        # (target, source, bytes) of the copies that a run needs
        self.before: list[tuple[int, int, int]] = []
        self.after: list[tuple[int, int, int]] = []

    def settle(self, words: Ints) -> Ints:
        """The words to run with; fills `before` and `after`."""
        if self.last and len(self.blocks) < self.MOST and words != self.last:
            for i, n in self.nbytes.items():
                if words[i] != self.last[i] and i not in self.blocks:
                    self.changes[i] += 1
                    if self.changes[i] > 2 and len(self.blocks) < self.MOST:
                        self.blocks[i] = Block(self.pool, n)
        self.last = words
        self.before = []
        self.after = []
        settled = list(words)
        for i, b in self.blocks.items():
            settled[i] = b.address
            if i < self.outputs:
                self.before.append((b.address, words[i], self.nbytes[i]))
            else:
                self.after.append((words[i], b.address, self.nbytes[i]))
        return tuple(settled)
