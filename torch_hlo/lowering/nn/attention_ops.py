"""PyTorch's operators of scaled dot-product attention.

There is one per kind of device: recording and torch.compile see the one that PyTorch chooses. All
mean the same. Arguments and results have the same names, and places of their own.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Shape
from torch_hlo.pytorch.operators import OpOverload

from ..core import (
    LoweringError,
    Operand,
    Results,
    aten,
    expected_shapes,
    finish_all,
    lowers,
    pad_dim,
    promote,
    reshape,
    select_dim,
    slice_dim,
    stack,
)
from .attention import attention, attention_backward

OPS = (
    aten._scaled_dot_product_fused_attention_overrideable,  # the device "hlo"
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,  # this one and the others: CUDA
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
BACKWARD = (
    aten._scaled_dot_product_fused_attention_overrideable_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
)


@frozen
class _Call:
    """Arguments by name."""

    given: dict[str, Any]

    @classmethod
    def of(cls, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> "_Call":
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        if given.get("return_debug_mask"):
            raise LoweringError(f"{op}: return_debug_mask=True is not supported; leave it out")
        return cls(given)

    @property
    def inputs(self) -> list[Instruction]:
        return [self.given[name] for name in ("query", "key", "value")]

    @property
    def bias(self) -> Instruction | None:
        return self.given.get("attn_bias", self.given.get("attn_mask"))

    @property
    def options(self) -> dict[str, Any]:
        names = ("dropout_p", "is_causal", "scale", "seed", "offset")
        return {name: self.given[name] for name in names if name in self.given}

    @property
    def kept(self) -> dict[str, Operand | None]:
        """The seed and the offset that the forward pass kept."""
        seed, offset = (self.given.get(f"philox_{name}") for name in ("seed", "offset"))
        if isinstance(seed, Instruction) and seed.rank:  # flash attention: both in one array
            seed, offset = select_dim(seed, 0, 0), select_dim(seed, 0, 1)
        return {"seed": seed, "offset": offset}


def _forward(op: OpOverload, *args: Any, **kwargs: Any) -> Results:
    names = [r.name for r in op._schema.returns]
    call = _Call.of(op, args, kwargs)
    out, rows = attention(*call.inputs, call.bias, **call.options)
    shapes = expected_shapes()
    state = [promote.scalar(kwargs.get(name) or 0, "s64") for name in ("seed", "offset")]
    found = {
        "output": out,
        "philox_seed": state[0],
        "philox_offset": state[1],
        "rng_state": stack(state, 0),
        "unused": state[1],
        "debug_attn_mask": promote.full(0, out.dtype, (0,)),
    }
    found["logsumexp"] = found["log_sumexp"] = _laid_out(rows, shapes[1])
    wanted = names if len(shapes) == len(names) else [n for n in names if n[:4] != "max_"]
    return finish_all(*map(found.get, wanted))


def _backward(op: OpOverload, *args: Any, **kwargs: Any) -> Results:
    call = _Call.of(op, args, kwargs)
    given = call.given
    bias = call.bias
    mask = given.get("grad_input_mask", (True, True, True, False))
    query = given["query"]
    wants_bias = bias is not None and mask[3] and bias.dtype != "pred"
    results: list[Instruction | None] = [
        *attention_backward(
            given.get("grad_out", given.get("grad_out_")),
            *call.inputs,
            bias,
            given["out"],
            _rows(given["logsumexp"], query),
            wants_bias,
            **call.options | call.kept,
        )
    ]
    if not wants_bias:
        results.append(promote.scalar(0, query.dtype))
    return finish_all(*results[: len(expected_shapes())])


def _laid_out(rows: Instruction, shape: Shape | None) -> Instruction:
    """The log-sum-exp of rows as an operator keeps it: with a last dimension of 1, or filled up."""
    if shape is None or shape.dims == rows.dims:
        return rows
    if shape.rank > rows.rank:
        return reshape(rows, shape.dims)
    return pad_dim(rows, rows.rank - 1, 0, shape.dims[-1] - rows.dims[-1])


def _rows(kept: Instruction, query: Instruction) -> Instruction:
    """What `_laid_out` was given."""
    if kept.rank == query.rank:
        return reshape(kept, query.dims[:-1])
    return slice_dim(kept, -1, 0, query.dims[-2])


for _packet, _gradient in zip(OPS, BACKWARD, strict=True):
    lowers(_packet.default)(partial(_forward, _packet.default))
    lowers(_gradient.default)(partial(_backward, _gradient.default))
