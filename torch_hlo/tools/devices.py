"""Run a Module on several devices, with whole arrays in and out: compiled or by the evaluator.

    results = run_on_devices(module, inputs, 8)

An annotated program (`sharding` attributes) is propagated and partitioned first. A per-device program runs as it is; its inputs and outputs are
cut by its in_shardings and out_shardings. Where it has none, an input is one array for all devices or a list of one array per device,
and an output is a list of one array per device.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields

import numpy as np

from torch_hlo.device import collective, runtime
from torch_hlo.hlo.evaluate_collective import arrangement, collectives, evaluate_spmd
from torch_hlo.hlo.evaluate_core import EvaluateError
from torch_hlo.hlo.ir import Module, outputs
from torch_hlo.hlo.numeric import decode, encode
from torch_hlo.hlo.shape import Shape
from torch_hlo.hlo.sharding import Sharding, shard, unshard
from torch_hlo.tools.execute import Results, flat, flat_inputs, prepared

Blocks = list[np.ndarray]  # one array per device


def is_annotated(module: Module) -> bool:
    """Whether the program is one for all devices, with shardings still to be carried out. What XLA's partitioner printed is not: it left shardings
    on parameters only, and collectives."""
    where = {x.op for x in module.entry.instructions() if x.get("sharding") is not None}
    return bool(where) and not (where == {"parameter"} and collectives(module.entry))


class OnDevices:
    """A program made ready for some devices: `cut(inputs)`, `run(blocks)`, `join(blocks)`.

    Raises EvaluateError for a number of devices that the program is not for, and what propagation, partitioning and compiling raise.
    """

    def __init__(self, module: Module, devices: int) -> None:
        self.devices = devices
        whole = flat(module)
        self.dims: tuple[tuple[int, ...] | None, ...] = (None,) * len(outputs(whole))
        if is_annotated(whole):
            self.dims = tuple(x.shape.dims for x in outputs(whole))
            whole = partitioned(whole)
        elif not whole.in_shardings and any(p.get("sharding") is not None for p in whole.entry.params):
            whole = with_fields(whole, in_shardings=tuple(p.get("sharding") for p in whole.entry.params))
        self.module = whole
        self.replicas, self.partitions = arrangement(whole, devices)
        self.dtypes = tuple(x.shape.dtype for x in outputs(whole))

    def cut(self, inputs: Sequence) -> list[list[np.ndarray]]:
        """The inputs of each device. Raises EvaluateError for inputs that do not fit."""
        shardings = self.module.in_shardings or (None,) * len(self.module.entry.params)
        given = list(inputs) if len(inputs) == len(shardings) else flat_inputs(inputs)
        if len(given) != len(shardings):
            raise EvaluateError(f"{self.module.name} takes {len(shardings)} arrays, got {len(given)}")
        columns = [self._blocks(i, value, s) for i, (value, s) in enumerate(zip(given, shardings, strict=True))]
        return [prepared(self.module, row)[1] for row in zip(*columns, strict=True)] or [[] for _ in range(self.devices)]

    def _blocks(self, i: int, value, sharding: Sharding | None) -> Blocks:
        if sharding is not None:
            return shard(np.asarray(value), sharding) * self.replicas
        if not isinstance(value, (list, tuple)):
            return [value] * self.devices
        if len(value) != self.devices:
            raise EvaluateError(f"parameter {i} of {self.module.name}: {len(value)} arrays for {self.devices} devices")
        return list(value)

    def join(self, rows: Sequence[Blocks]) -> list:
        """The program's results from those of each device."""
        shardings = self.module.out_shardings or (None,) * len(self.dtypes)
        return [self._joined([row[k] for row in rows], s, dims) for k, (s, dims) in enumerate(zip(shardings, self.dims, strict=True))]

    def _joined(self, blocks: Blocks, sharding: Sharding | None, dims: tuple[int, ...] | None):
        if sharding is None:
            return blocks
        blocks = blocks[: sharding.mesh.size]  # replicas are equal
        return unshard(blocks, sharding, dims or tuple(n * k for n, k in zip(blocks[0].shape, sharding.tiles)))

    def evaluate(self, rows: Sequence[Blocks]) -> list[Blocks]:
        """The reference values."""
        return evaluate_spmd(self.module, rows)

    def compiled(self, rows: Sequence[Blocks]) -> Callable[[], list[Blocks]]:
        """Compile; the function runs the program once on the devices of this process, and gives the results of all devices."""
        program = runtime.compile_program(self.module)
        mine = collective.local_devices(self.devices)
        params = self.module.entry.params
        shapes = [x.shape for x in outputs(self.module)]

        def run() -> list[Blocks]:
            inputs = [[runtime.from_bytes(p.shape, encode(a, p.shape.dtype)) for p, a in zip(params, rows[d], strict=True)] for d in mine]
            results = [[self._output(program, i, s, given) for i, s in enumerate(shapes)] for given in inputs]
            collective.run_devices(program, inputs, results, self.replicas)
            return collective.gathered([[decode(o.bytes.tobytes(), o.shape.dtype, o.shape.dims) for o in row] for row in results])

        return run

    @staticmethod
    def _output(program: runtime.Program, i: int, shape: Shape, inputs: list[runtime.Buffer]) -> runtime.Buffer:
        shared = dict(program.aliases).get(i)
        return runtime.allocate(shape) if shared is None else inputs[shared]


def partitioned(module: Module) -> Module:
    """The per-device program of an annotated one."""
    from torch_hlo.compiler.partition import partition
    from torch_hlo.compiler.passes.propagate import propagate

    return partition(propagate(module))


def runner_on_devices(module: Module, inputs: Sequence, devices: int) -> Callable[[], Results]:
    """Compile for these inputs; the function runs the program once."""
    prepared_program = OnDevices(module, devices)
    run = prepared_program.compiled(prepared_program.cut(inputs))
    return lambda: list(zip(prepared_program.join(run()), prepared_program.dtypes, strict=True))


def run_on_devices(module: Module, inputs: Sequence, devices: int) -> Results:
    """Compile and run once."""
    return runner_on_devices(module, inputs, devices)()


def evaluate_on_devices(module: Module, inputs: Sequence, devices: int) -> Results:
    """The reference values of the per-device program."""
    p = OnDevices(module, devices)
    return list(zip(p.join(p.evaluate(p.cut(inputs))), p.dtypes, strict=True))
