"""The reference back end (TORCH_HLO_DEVICE=evaluator): runs a module with the NumPy meaning of
every opcode."""

from collections.abc import Sequence

from torch_hlo.hlo.ir import decode, encode, instruction

from .interfaces import Backend, Observe, Program
from .memory import Buffer


class EvaluatorProgram(Program):
    """A module as a Program. Nothing is updated in place."""

    def __init__(self, module: instruction.Module) -> None:
        self.name = module.name
        self.module = module
        self._results = instruction.outputs(module)

    def run(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        from torch_hlo.hlo.evaluate.evaluate import evaluate

        values = evaluate(
            self.module,
            [decode(b.bytes.tobytes(), b.shape.dtype, b.shape.dims) for b in inputs],
        )
        encoded = [encode(value, b.shape.dtype) for value, b in zip(values, outputs, strict=True)]
        for data, b in zip(encoded, outputs, strict=True):
            if len(data) != b.nbytes:
                raise RuntimeError(
                    f"{self.name}: the evaluator gave {len(data)} bytes for {b.shape}"
                )
        for data, b in zip(encoded, outputs, strict=True):
            b.bytes[:] = memoryview(data)


class EvaluatorBackend(Backend):
    def compile_program(
        self, module: instruction.Module, observe: Observe | None = None
    ) -> EvaluatorProgram:
        return EvaluatorProgram(module)


backend = EvaluatorBackend
