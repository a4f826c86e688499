"""Where the tensors of a graph live, and what a call does about it: on the CPU, or on a GPU of
torch.cuda.

    place = place_of(graph_module)          # Raises LoweringError for several GPUs in one graph
    program = place.compile(module, observe)
On a GPU everything is PyTorch's: outputs and working memory come from its allocator, the program is
enqueued on its current stream, in place. Tensors of the CPU in such a graph (numbers, mostly) are
copied there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import fx

from torch_hlo.device import host_tensor, report
from torch_hlo.device.interfaces import Observe, Program
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Ints, Module
from torch_hlo.lowering.core import LoweringError
from torch_hlo.pytorch import tensors

_CPU = torch.device("cpu")


def place_of(graph_module: fx.GraphModule) -> Host | Gpu:
    """By the fake tensors that the graph's nodes carry."""
    inputs = [_device(n) for n in graph_module.graph.find_nodes(op="placeholder")]
    (output,) = graph_module.graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    outputs = [_device(n) for n in results]
    gpus = sorted({str(d) for d in (*inputs, *outputs) if d.type == "cuda"})
    if not gpus:
        return Host()
    if len(gpus) > 1:
        raise LoweringError(
            f"torch.compile(backend='hlo'): a graph with tensors of {' and '.join(gpus)}; a program"
            " runs on one GPU: move the model, or let the graph break between them"
        )
    return Gpu(torch.device(gpus[0]), inputs, outputs)


def _device(n: object) -> torch.device:
    value = n.meta.get("val") if isinstance(n, fx.Node) else None
    return value.device if isinstance(value, torch.Tensor) else _CPU


class Host:
    """Tensors of the CPU, for the back end in use."""

    alignment = 64  # of memory that a program writes; it reads any
    reads_any = True
    # what Inductor's code calls: 0.3 us instead of 1.5
    empty = staticmethod(tensors.empty_strided_cpu)
    large = staticmethod(host_tensor.empty_strided)
    # for PyTorch's own arrays, in memory that is kept for programs
    make_room = staticmethod(host_tensor.make_room)

    def compile(self, module: Module, observe: Observe | None) -> Program:
        return report.compiled(module, observe)

    def is_away(self, placeholder: int) -> bool:
        """Whether a placeholder's tensor has to be brought here."""
        return False

    def leaves(self, output: int) -> bool:
        """Whether an output has to go to the CPU."""
        return False

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor here."""
        return tensor

    def starter(self, program: Program) -> Callable | None:
        """A function of a tuple of sizes and addresses that runs the program; None where buffers
        are wanted."""
        return program.starter()


@frozen
class Gpu:
    """Tensors of a GPU of torch.cuda: where the graph has its inputs and outputs."""

    alignment: ClassVar = 16  # of all memory: threads move as much at a time
    reads_any: ClassVar = False

    device: torch.device
    inputs: Sequence[torch.device]
    outputs: Sequence[torch.device]

    def empty(self, size: Ints, stride: Ints, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=self.device)

    # PyTorch's allocator keeps blocks of any size, for programs and its own ops alike
    large = empty

    def make_room(self, nbytes: int) -> None:
        """Nothing is kept from PyTorch."""

    def compile(self, module: Module, observe: Observe | None) -> Program:
        from torch_hlo.device.cuda.cuda import CudaBackend

        other = CudaBackend(str(self.device.index or 0))
        return report.compiled(module, observe, other)

    def is_away(self, placeholder: int) -> bool:
        return self.inputs[placeholder].type != "cuda"

    def leaves(self, output: int) -> bool:
        return self.outputs[output].type != "cuda"

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def starter(self, program: Program) -> Callable:
        symbols, device, empty = (
            len(program.executable.symbols),
            self.device,
            self.empty,
        )
        stream = tensors.cuda_stream_finder()

        def start(words: Ints) -> None:
            nbytes = program.arena_bytes(*words[:symbols])
            # freed in the stream's order
            arena = empty((nbytes,), (1,), torch.uint8) if nbytes else None
            program.launch(words, arena.data_ptr() if nbytes else 0, stream(device.index or 0))

        return start
