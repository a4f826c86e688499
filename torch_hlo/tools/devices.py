"""Run a Module on several devices, with whole arrays in and out: compiled or by the evaluator.

    results = run_on_devices(module, inputs, 8)

An annotated program (`sharding` attributes) is propagated and partitioned first. A per-device
program runs as it is; its inputs and outputs are cut by its in_shardings and out_shardings. Where
it has none, an input is one array for all devices or a list of one array per device, and an output
is a list of one array per device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from typing import Any

import numpy as np

from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.device import multi_device, runtime
from torch_hlo.device.interfaces import Program
from torch_hlo.device.memory import Buffer
from torch_hlo.hlo.evaluate.communication import arrangement, collectives
from torch_hlo.hlo.evaluate.interpreter import EvaluateError
from torch_hlo.hlo.evaluate.multi_device import evaluate_spmd
from torch_hlo.hlo.ir import Ints, Module, Shape, decode, encode, outputs
from torch_hlo.hlo.sharding.sharding import Sharding, shard, unshard
from torch_hlo.hlo.text.printer import computations

from .execute import Results, flat, flat_inputs, prepared

Blocks = list[np.ndarray]  # one array per device


def is_annotated(module: Module) -> bool:
    """Whether the program is one for all devices, with shardings still to be carried out. What
    XLA's partitioner printed is not: it left shardings on parameters only, and collectives."""
    where = {
        x.op
        for c in computations(module.entry)
        for x in c.instructions()
        if x.get("sharding") is not None
    }
    return bool(where) and not (where == {"parameter"} and collectives(module.entry))


class OnDevices:
    """A program made ready for some devices: `runner(inputs)` and `evaluate(inputs)`, on whole
    arrays.

    Raises EvaluateError for a number of devices that the program is not for, and what propagation,
    partitioning and compiling raise."""

    def __init__(self, module: Module, devices: int) -> None:
        self.devices = devices
        whole = flat(module)
        annotated = whole if is_annotated(whole) else None
        if annotated is not None:
            whole = partitioned(whole)
        elif not whole.in_shardings and any(
            p.get("sharding") is not None for p in whole.entry.params
        ):
            whole = with_fields(
                whole,
                in_shardings=tuple(p.get("sharding") for p in whole.entry.params),
            )
        self.module = whole
        self.annotated = annotated
        self.replicas, self.partitions = arrangement(whole, devices)
        self.dtypes = tuple(x.dtype for x in outputs(whole))

    def random_inputs(self, seed: int = 0) -> list:
        """Inputs for `cut`: whole arrays where it is known how they are cut, else another array for
        every device."""
        if self.annotated is not None:
            return random_inputs(self.annotated, seed)
        rows = [random_inputs(self.module, seed + device) for device in range(self.devices)]
        shardings = self.module.in_shardings or (None,) * len(self.module.entry.params)
        return [
            list(c) if s is None else unshard(c[: s.mesh.size], s, _whole(c[0].shape, s))
            for c, s in zip(zip(*rows), shardings, strict=True)
        ]

    def cut(self, inputs: Sequence) -> list[list[np.ndarray]]:
        """The inputs of each device. Raises EvaluateError for inputs that do not fit."""
        shardings = self.module.in_shardings or (None,) * len(self.module.entry.params)
        given = list(inputs) if len(inputs) == len(shardings) else flat_inputs(inputs)
        if len(given) != len(shardings):
            raise EvaluateError(
                f"{self.module.name} takes {len(shardings)} arrays, got {len(given)}"
            )
        columns = [
            self._blocks(i, value, s)
            for i, (value, s) in enumerate(zip(given, shardings, strict=True))
        ]
        return [prepared(self.module, row)[1] for row in zip(*columns, strict=True)] or [
            [] for _ in range(self.devices)
        ]

    def _blocks(self, i: int, value: Any, sharding: Sharding | None) -> Blocks:
        if sharding is not None:
            return shard(np.asarray(value), sharding) * (self.devices // sharding.mesh.size)
        if not isinstance(value, (list, tuple)):
            return [value] * self.devices
        if len(value) != self.devices:
            raise EvaluateError(
                f"parameter {i} of {self.module.name}: {len(value)} arrays for {self.devices}"
                " devices"
            )
        return list(value)

    def join(self, rows: Sequence[Blocks]) -> list:
        """The program's results from those of each device."""
        shardings = self.module.out_shardings or (None,) * len(self.dtypes)
        dims = self.module.out_dims or (None,) * len(self.dtypes)
        return [
            self._joined([row[k] for row in rows], s, d)
            for k, (s, d) in enumerate(zip(shardings, dims, strict=True))
        ]

    def _joined(
        self,
        blocks: Blocks,
        sharding: Sharding | None,
        dims: Ints | None,
    ) -> np.ndarray | Blocks:
        if sharding is None:
            return blocks
        blocks = blocks[: sharding.mesh.size]  # replicas are equal
        return unshard(blocks, sharding, dims or _whole(blocks[0].shape, sharding))

    def evaluate(self, inputs: Sequence) -> Results:
        """The reference values of the per-device program."""
        return list(
            zip(self.join(evaluate_spmd(self.module, self.cut(inputs))), self.dtypes, strict=True)
        )

    def runner(self, inputs: Sequence) -> Callable[[], Results]:
        """Compile; the function runs the program once, on the devices of this process, and gives
        the results of all."""
        run = self._compiled(self.cut(inputs))
        return lambda: list(zip(self.join(run()), self.dtypes, strict=True))

    def _compiled(self, rows: Sequence[Blocks]) -> Callable[[], list[Blocks]]:
        program = runtime.compile_program(self.module)
        mine = multi_device.local_devices(self.devices)
        params = self.module.entry.params
        shapes = [x.shape for x in outputs(self.module)]

        def run() -> list[Blocks]:
            inputs = [
                [
                    runtime.from_bytes(p.shape, encode(a, p.shape.dtype))
                    for p, a in zip(params, rows[d], strict=True)
                ]
                for d in mine
            ]
            results = [
                [self._output(program, i, s, given) for i, s in enumerate(shapes)]
                for given in inputs
            ]
            multi_device.run_devices(program, inputs, results, self.replicas)
            return multi_device.gathered(
                [
                    [decode(o.bytes.tobytes(), o.shape.dtype, o.shape.dims) for o in row]
                    for row in results
                ]
            )

        return run

    @staticmethod
    def _output(program: Program, i: int, shape: Shape, inputs: list[Buffer]) -> Buffer:
        shared = dict(program.aliases).get(i)
        return runtime.allocate(shape) if shared is None else inputs[shared]


def _whole(block: Ints, sharding: Sharding) -> Ints:
    """Sizes of the array that has these blocks, with the padding of the last ones."""
    return tuple(n * k for n, k in zip(block, sharding.tiles, strict=True))


def partitioned(module: Module) -> Module:
    """The per-device program of an annotated one."""
    from torch_hlo.compiler.spmd.spmd_pipeline import spmd

    return spmd(module)


def run_on_devices(module: Module, inputs: Sequence, devices: int) -> Results:
    """Compile and run once."""
    return OnDevices(module, devices).runner(inputs)()


def evaluate_on_devices(module: Module, inputs: Sequence, devices: int) -> Results:
    """The reference values of the per-device program."""
    return OnDevices(module, devices).evaluate(inputs)
