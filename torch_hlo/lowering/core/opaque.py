"""Any operator without a lowering as a custom-call that runs it on the CPU: custom ops
(torch.library), rare aten ops.

The call has target "torch_op" and its `opaque` is JSON: the overload's name and its arguments with
{"t": i} for operand i. Only operators whose result shapes do not depend on values can be called
this way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_hlo import metrics
from torch_hlo.compiler.codegen.registry import host_call
from torch_hlo.hlo.evaluate.evaluate import CUSTOM_CALLS
from torch_hlo.hlo.ir import Dim, Instruction, Shape, build, tuple_shape
from torch_hlo.pytorch.operators import HigherOrderOperator, OpOverload

from . import promote
from .registry import HLO_TO_TORCH, LoweringError, Results, Weak

TARGET = "torch_op"


class _Arguments:
    """Arguments of a call as JSON; the instructions among them become its `operands`."""

    def __init__(self, target: OpOverload | HigherOrderOperator) -> None:
        self.target = target
        self.operands: list[Instruction] = []

    def encode(self, x: object) -> object:
        if isinstance(x, Weak):
            x = x.value
            self.operands.append(x)
            return {"n": len(self.operands) - 1}
        if isinstance(x, Instruction):
            self.operands.append(x)
            return {"t": len(self.operands) - 1}
        if isinstance(x, (list, tuple)):
            return [self.encode(v) for v in x]
        if isinstance(x, Dim):
            self.operands.append(promote.size_value(x))
            return {"n": len(self.operands) - 1}
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, OpOverload):
            return {"op": x.name()}
        if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(x).removeprefix("torch.")}
        if isinstance(x, torch.device):
            return {"device": "cpu"}
        if isinstance(x, complex):
            return {"complex": [x.real, x.imag]}
        raise LoweringError(
            f"{self.target}: argument {x!r} of type {type(x).__name__} cannot be passed to a custom"
            " call"
        )


def opaque(
    target: OpOverload | HigherOrderOperator,
    args: Sequence[object],
    kwargs: dict[str, Any],
    outs: tuple[Shape | None, ...],
    library: bool = False,
    **more: object,
) -> Results:
    """Results of `target` as get-tuple-elements of one custom-call, counted as a fallback when it
    runs unless it is a `library` routine. `more`: what else the compiler is to know. Raises
    LoweringError when an argument has no text form."""
    if isinstance(target, OpOverload) and any(
        a.alias_info and a.alias_info.is_write for a in target._schema.arguments
    ):
        raise LoweringError(
            f"{target} writes to its arguments and has no functional form; register one with"
            " torch.library"
        )
    shapes = [s for s in outs if s is not None]
    if not shapes:
        raise LoweringError(
            f"{target}: an operator without results of known shapes cannot be called inside a"
            " compiled program"
        )
    arguments = _Arguments(target)
    encode_argument = arguments.encode
    operands = arguments.operands
    random = (
        [encode_argument(kwargs.pop(name)) for name in ("seed", "offset")]
        if "seed" in kwargs
        else None
    )
    spec = {
        "op": target.name() if isinstance(target, OpOverload) else f"higher_order::{target.name()}",
        "random": random,
        "args": [encode_argument(a) for a in args],
        "kwargs": {k: encode_argument(v) for k, v in kwargs.items()},
    }
    spec["dtypes"] = [str(HLO_TO_TORCH[x.dtype]).removeprefix("torch.") for x in operands]
    if library:
        spec["library"] = True
    spec |= more
    call = build.custom_call(TARGET, operands, tuple_shape(*shapes), opaque=json.dumps(spec))
    results = iter(range(len(shapes)))
    return tuple(None if s is None else build.get_tuple_element(call, next(results)) for s in outs)


def overload(name: str) -> OpOverload:
    """`mylib::foo.out` -> the overload. Raises LookupError when the library that defines it is not
    loaded."""
    qualified, _, which = name.partition(".")
    namespace, _, op = qualified.partition("::")
    try:
        if namespace == "higher_order":
            return getattr(torch.ops.higher_order, op)
        return getattr(getattr(getattr(torch.ops, namespace), op), which or "default")
    except AttributeError:
        raise LookupError(
            f"operator {name} is not registered: import the library that defines it"
        ) from None


_DECODE = {
    "torch": lambda name: getattr(torch, name),
    "device": torch.device,
    "complex": lambda parts: complex(*parts),
    "op": overload,
}


def run(opaque_text: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Execute the call on CPU tensors."""
    spec = json.loads(opaque_text)
    op = overload(spec["op"])
    if not spec.get("library"):
        metrics.count(spec["op"])

    def decode_argument(x: Any) -> Any:
        if isinstance(x, list):
            return [decode_argument(v) for v in x]
        if not isinstance(x, dict):
            return x
        ((kind, value),) = x.items()
        if kind == "t":
            return tensors[value]
        if kind == "n":
            return tensors[value].item()
        return _DECODE[kind](value)

    # tells OpenMP and MKL on this thread, which may be ours, what torch.set_num_threads said on
    # another
    torch.get_num_threads()
    with (
        torch.no_grad(),
        _seeded([decode_argument(x) for x in spec["random"] or ()]),
    ):
        result = op(
            *[decode_argument(a) for a in spec["args"]],
            **{k: decode_argument(v) for k, v in spec["kwargs"].items()},
        )
    return [r for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]


@contextlib.contextmanager
def _seeded(pair: list) -> Iterator[None]:
    """PyTorch's CPU generator as (seed, offset) say, within the block; untouched without a pair."""
    if not pair:
        yield
        return
    seed, offset = (int(x) for x in pair)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9) & (1 << 63) - 1)
        yield


def _tensor(array: np.ndarray, shape: Shape) -> torch.Tensor:
    dtype = HLO_TO_TORCH[shape.dtype]
    tensor = torch.from_numpy(array if array.flags.c_contiguous else array.copy())
    return tensor.to(dtype)


def _evaluate(x: Instruction, *operands: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
    results = run(
        x["opaque"],
        [_tensor(np.array(v), o.shape) for v, o in zip(operands, x.operands)],
    )
    values = tuple(
        (r.float() if r.dtype == torch.bfloat16 else r).contiguous().numpy() for r in results
    )
    return values if x.is_tuple else values[0]


CUSTOM_CALLS[TARGET] = _evaluate


@host_call(TARGET)
def _native(outputs: list[np.ndarray], inputs: list[np.ndarray], opaque: str, **_: object) -> None:
    """Called from compiled code: arrays view the program's buffers; types that NumPy lacks appear
    as unsigned integers."""
    tensors = [
        torch.from_numpy(array).view(getattr(torch, name))
        for array, name in zip(inputs, json.loads(opaque)["dtypes"], strict=True)
    ]
    for out, result in zip(outputs, run(opaque, tensors), strict=True):
        target = torch.from_numpy(out)
        (target.view(result.dtype) if target.dtype != result.dtype else target).copy_(result)
