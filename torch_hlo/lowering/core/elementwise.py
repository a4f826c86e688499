"""The decorator of lowerings that work element by element: operands promoted, broadcast, computed
in opmath, rounded once.

    @pointwise(aten.xlogy, arity=2)
    def xlogy(x, y): return …                     # x, y: Expr of the compute type and of the
                                                  # result's dims
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch_hlo.hlo.ir import Instruction
from torch_hlo.pytorch.operators import OpOverload, OpOverloadPacket

from . import promote
from .expr import Expr, bare, scalar
from .promote import Operand
from .registry import POINTWISE, Results, Weak, expected, expected_shapes, lowers

F = TypeVar("F", bound=Callable[..., Expr])


def pointwise(
    *targets: OpOverloadPacket | OpOverload,
    arity: int = 1,
    operands: bool = False,
    round_scalars: bool = False,
) -> Callable[[F], F]:
    """Register an elementwise kernel for `targets`.

    The first `arity` positional arguments are operands (None stays None); the rest and the keyword
    arguments are passed as they are. They are computed in the result's dtype, or with
    `operands=True` in the operands' common dtype (comparisons, predicates).
    `round_scalars`: Python numbers are first rounded to the common dtype, as ops without opmath do
      in bf16.
    """

    def register(kernel: F) -> F:
        def lowering(*args: Operand | None, **kwargs: Any) -> Instruction:
            return apply(kernel, args, kwargs, arity, operands, round_scalars)

        lowering.__name__ = getattr(kernel, "__name__", "kernel")
        lowers(*targets)(lowering)
        POINTWISE.update(getattr(target, "overloadpacket", target) for target in targets)
        return kernel

    return register


def apply(
    kernel: Callable[..., Expr],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arity: int = 1,
    operands: bool = False,
    round_scalars: bool = False,
) -> Instruction:
    """Run `kernel` on promoted operands; the result has the shape and dtype PyTorch expects."""
    shape = expected()
    terms = args[:arity]
    rest = args[arity:]
    common = promote.result_type(*(t for t in terms if t is not None)) if operands else shape.dtype
    compute = promote.compute_type(common)
    via = common if round_scalars and compute != common else None
    exprs = [
        None if t is None else Expr(promote.operand(t, compute, shape.dims, via)) for t in terms
    ]
    result = kernel(
        *exprs,
        *(scalar(r, compute) if isinstance(r, Weak) else r for r in rest),
        **kwargs,
    )
    return finish(result)


def compute(x: Instruction) -> Expr:
    """`x` in its compute type."""
    return Expr(promote.cast(x, promote.compute_type(x.dtype)))


def finish(value: Expr | Instruction, index: int = 0) -> Instruction:
    """`value` in the dtype and dims that PyTorch expects of result `index`."""
    shape = expected(index)
    return promote.broadcast_to(promote.cast(bare(value), shape.dtype), shape.dims)


def finish_all(*values: Expr | Instruction | None) -> Results:
    """The same for every result; None stays None, and is what PyTorch does not expect."""
    return tuple(
        None if value is None or shape is None else finish(value, i)
        for i, (value, shape) in enumerate(zip(values, expected_shapes(), strict=True))
    )
