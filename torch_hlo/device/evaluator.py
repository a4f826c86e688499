"""The reference back end (TORCH_HLO_DEVICE=evaluator): runs a module with the NumPy meaning of every opcode."""

from __future__ import annotations

from collections.abc import Sequence

from torch_hlo.device.runtime import Buffer, Observe
from torch_hlo.hlo import ir
from torch_hlo.hlo.numeric import decode, encode


class EvaluatorProgram:
    """A module as a Program. Nothing is updated in place."""

    aliases: tuple[tuple[int, int], ...] = ()

    def __init__(self, module: ir.Module) -> None:
        self.name = module.name
        self.module = module
        self._results = ir.outputs(module)

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        from torch_hlo.hlo.evaluate import evaluate

        values = evaluate(
            self.module, [decode(b.bytes.tobytes(), b.shape.dtype, b.shape.dims) for b in inputs]
        )
        encoded = [encode(value, b.shape.dtype) for value, b in zip(values, outputs, strict=True)]
        for data, b in zip(encoded, outputs, strict=True):
            if len(data) != b.nbytes:
                raise RuntimeError(
                    f"{self.name}: the evaluator gave {len(data)} bytes for {b.shape}"
                )
        for data, b in zip(encoded, outputs, strict=True):
            b.bytes[:] = memoryview(data)


def compile_program(module: ir.Module, observe: Observe | None = None) -> EvaluatorProgram:
    return EvaluatorProgram(module)
