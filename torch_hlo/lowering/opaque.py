"""Any operator without a lowering as a custom-call that runs it on the CPU: custom ops (torch.library), rare aten ops.

The call has target "torch_op" and its `opaque` is JSON: the overload's name and its arguments with {"t": i} for operand i.
Only operators whose result shapes do not depend on values can be called this way.
"""
from __future__ import annotations

import json

import numpy as np
import torch
from torch._ops import OpOverload

from torch_hlo import metrics
from torch_hlo.compiler.codegen.registry import host_call
from torch_hlo.hlo import build
from torch_hlo.hlo.evaluate import CUSTOM_CALLS
from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.shape import Shape, tuple_shape
from torch_hlo.lowering.registry import HLO_TO_TORCH, LoweringError, Weak

TARGET = "torch_op"


def opaque(target: OpOverload, args: tuple | list, kwargs: dict, outs: tuple[Shape | None, ...]) -> tuple[Instruction, ...]:
    """Results of `target` as get-tuple-elements of one custom-call. Raises LoweringError when an argument has no text form."""
    if any(a.alias_info and a.alias_info.is_write for a in target._schema.arguments):
        raise LoweringError(f"{target} writes to its arguments and has no functional form; register one with torch.library")
    if not outs or any(s is None for s in outs):
        raise LoweringError(f"{target}: results of unknown shape cannot be computed inside a compiled program")
    operands: list[Instruction] = []

    def encode_argument(x):
        if isinstance(x, Weak):
            x = x.value
            operands.append(x)
            return {"n": len(operands) - 1}
        if isinstance(x, Instruction):
            operands.append(x)
            return {"t": len(operands) - 1}
        if isinstance(x, (list, tuple)):
            return [encode_argument(v) for v in x]
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(x).removeprefix("torch.")}
        if isinstance(x, torch.device):
            return {"device": "cpu"}
        if isinstance(x, complex):
            return {"complex": [x.real, x.imag]}
        raise LoweringError(f"{target}: argument {x!r} of type {type(x).__name__} cannot be passed to a custom call")

    spec = {"op": target.name(), "args": [encode_argument(a) for a in args], "kwargs": {k: encode_argument(v) for k, v in kwargs.items()}}
    call = build.custom_call(TARGET, operands, tuple_shape(*outs), opaque=json.dumps(spec))
    return tuple(build.get_tuple_element(call, i) for i in range(len(outs)))


def overload(name: str) -> OpOverload:
    """`mylib::foo.out` -> the overload. Raises LookupError when the library that defines it is not loaded."""
    qualified, _, which = name.partition(".")
    namespace, _, op = qualified.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), which or "default")
    except AttributeError:
        raise LookupError(f"operator {name} is not registered: import the library that defines it") from None


def run(opaque_text: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Execute the call on CPU tensors."""
    spec = json.loads(opaque_text)
    op = overload(spec["op"])
    metrics.count(op._schema.name)

    def decode_argument(x):
        if isinstance(x, list):
            return [decode_argument(v) for v in x]
        if not isinstance(x, dict):
            return x
        ((kind, value),) = x.items()
        if kind == "t":
            return tensors[value]
        if kind == "n":
            return tensors[value].item()
        return {"torch": lambda: getattr(torch, value), "device": lambda: torch.device(value), "complex": lambda: complex(*value)}[kind]()

    with torch.no_grad():
        result = op(*[decode_argument(a) for a in spec["args"]], **{k: decode_argument(v) for k, v in spec["kwargs"].items()})
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _tensor(array: np.ndarray, shape: Shape) -> torch.Tensor:
    dtype = HLO_TO_TORCH[shape.dtype]
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(dtype) if tensor.dtype.itemsize == dtype.itemsize and tensor.dtype != dtype else tensor.to(dtype)


def _evaluate(x: Instruction, *operands: np.ndarray):
    results = run(x["opaque"], [_tensor(np.array(v), o.shape) if o.shape.dtype != "bf16" else torch.from_numpy(np.array(v)).bfloat16() for v, o in zip(operands, x.operands)])
    values = tuple((r.float() if r.dtype == torch.bfloat16 else r).contiguous().numpy() for r in results)
    return values if x.shape.is_tuple else values[0]


CUSTOM_CALLS[TARGET] = _evaluate


@host_call(TARGET)
def _native(outputs: list[np.ndarray], inputs: list[np.ndarray], opaque: str, input_types: list[str] = (), **_) -> None:
    """Called from compiled code: arrays view the program's buffers; bf16 appears as uint16."""
    tensors = []
    for array, name in zip(inputs, input_types or [None] * len(inputs)):
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        tensors.append(tensor.view(HLO_TO_TORCH[name]) if name else tensor)
    for out, result in zip(outputs, run(opaque, tensors)):
        target = torch.from_numpy(out)
        (target.view(result.dtype) if target.dtype != result.dtype else target).copy_(result)

