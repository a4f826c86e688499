"""attention: composite calls that say they are attention become one kernel where codegen/attention.py has one.

    c = (f32[4,8,512,64], f32[4,8,512]) call(q, k, v), to_apply=attention, backend_config={"attention":"forward","causal":true,"scale":0.125}

The called computation is the meaning; calls that do not fit (element types, tiny sizes, a symbolic head size) are inlined by legalize and
are ordinary products and row kernels.
  forward:  q [batch…, rows, size], k [batch…, columns, size], v [batch…, columns, width], bias? -> out, log-sum-exp [batch…, rows]
  backward: gradient of out, q, k, v, out, log-sum-exp, bias? -> gradients of q, k, v
q, k, v and the gradient have one type; results are f32. The heads (last batch dimension) of k and v may be a divisor of q's. A bias broadcasts to [batch…, rows, columns]; true of a
pred is "sees". Further operands, if the configuration says so: fill, then factors [batch…, rows, columns] that weights are multiplied with after they have been
divided by their sum (dropout), then a scale, f32[], then a cap, f32[]: scores s, scaled and not yet biased, are cap tanh(s / cap). With "bias_gradient" the backward has a fourth result, the gradient of the bias: true in the
configuration for the batch dimensions that it has, it is summed over the others.

attention_operands computes what such operands are inside the kernel, where that reads less memory than they take:
    c = fusion(q, k, v, seed), kind=custom, calls={… ROOT call(q, k, v, factors)}
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

from torch_hlo.compiler.passes.base import Pass, hlo_pass
from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Instruction, Module, instr
from torch_hlo.hlo.match import op, rewrite, rules
from torch_hlo.hlo.shape import Shape, row_major_strides

FLOATS = ("f32", "bf16", "f16")
MIN_SIZE = 16  # query rows and columns on a grid: below, products with few rows and a row kernel do as well
MAX_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class Bias:
    """Strides of the bias in elements, 0 where it is broadcast. `batch`: (size, stride) per batch dimension."""

    batch: tuple[tuple[Size, Size], ...]
    row: Size
    column: Size


@dataclass(frozen=True, slots=True)
class Attention:
    """`dynamic`: the scale is an operand. `bias_gradient`: the batch dimensions, and which of them it has. `heads`: all batch dimensions of q; `group`: heads of q per head of k and v. `fill`: scores have this (f32[], the last operand) where the mask
    is false, instead of -inf. `softmax`: rows that see nothing are NaN, as softmax's are, and not 0; and in place of the log-sum-exp there are two arrays, the
    largest score and the logarithm of the sum of weights relative to it, both in units of log 2: rows whose scores are all -1e9 have weights, too."""

    kind: str
    dtypes: tuple[str, ...]  # of the operands
    causal: bool
    scale: float
    heads: Size
    group: int
    rows: Size
    columns: Size
    size: int
    width: int
    bias: Bias | None
    fill: bool = False
    softmax: bool = False
    factors: bool = False
    dynamic: bool = False
    capped: bool = False
    bias_gradient: tuple[tuple[Size, bool], ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """What the operands are."""
        inputs = (
            ("q", "k", "v")
            if self.kind == "forward"
            else ("grad", "q", "k", "v", "out", "lse", *["total"] * self.softmax)
        )
        return (*inputs, *["bias"] * (self.bias is not None), *["fill"] * self.fill, *["factors"] * self.factors,
                *["scale"] * self.dynamic, *["cap"] * self.capped)  # fmt: skip

    @property
    def outputs(self) -> tuple[str, ...]:
        return (
            ("out", "lse", *["total"] * self.softmax)
            if self.kind == "forward"
            else ("dq", "dk", "dv", *["dbias"] * bool(self.bias_gradient))
        )


def inner(x: Instruction) -> Instruction:
    """The call inside of a fusion that computes operands itself; else the fusion or call, whose operands are in memory."""
    if x.op == "fusion":
        root = x["calls"].root
        if root.op == "call" and '"attention"' in (root.get("backend_config") or ""):
            return root
    return x


def attention_of(x: Instruction) -> Attention | None:
    """What a call or fusion computes, when its backend_config says it is attention and there is a kernel for its shapes."""
    x = inner(x)
    config = x.get("backend_config")
    if not config or '"attention"' not in config:
        return None
    config = json.loads(config)
    first = 0 if config["attention"] == "forward" else 1
    q, k, v = (o.shape for o in x.operands[first : first + 3])
    softmax = config.get("softmax", False)
    extra = [o.shape for o in x.operands[3 if first == 0 else 6 + softmax :]]
    if not all(o.shape.dtype in FLOATS for o in x.operands[: first + 3]):
        return None
    fill, factors, dynamic, capped = (
        config.get(name, False) for name in ("fill", "factors", "dynamic", "capped")
    )
    gradient = tuple(zip(q.dims[:-2], config.get("bias_gradient", ()), strict=False))
    if capped:
        extra.pop()
    if dynamic:
        extra.pop()
    if factors and extra.pop().dtype not in FLOATS:
        return None
    if fill:
        extra.pop()
    if not all(s.dtype in (*FLOATS, "pred") for s in extra) or any(
        s.dtype != "f32" for s in x.shape.elements
    ):
        return None
    if k.dtype != q.dtype or v.dtype != q.dtype or x.operands[0].shape.dtype != q.dtype:
        return None
    *batch, rows, size = q.dims
    columns, width = v.dims[-2:]
    group = 1
    if tuple(batch) != k.dims[:-2]:
        if not (isinstance(batch[-1], int) and isinstance(k.dims[-3], int)):
            return None
        group = batch[-1] // max(1, k.dims[-3])
    if 0 in (*batch, rows, columns):
        return None
    if not all(isinstance(n, int) and 0 < n <= MAX_WIDTH for n in (size, width)):
        return None
    bias = _bias(extra[0], (*batch, rows, columns)) if extra else None
    if gradient and (
        capped
        or config["causal"]
        or group > 1
        or len(gradient) != len(batch)
        or extra[0].dims[-2:] != (rows, columns)
    ):
        return None
    dtypes = tuple(o.shape.dtype for o in x.operands)
    return Attention(config["attention"], dtypes, config["causal"], config["scale"], math.prod(batch), group, rows, columns, size, width, bias, fill,
                     softmax, factors, dynamic, capped, gradient)  # fmt: skip


def merged(a: Attention) -> Attention:
    """`a` with the heads that share keys as rows of one head, where a head has few: its keys are read once. The arrays are the same."""
    if (
        a.kind != "forward"
        or a.group == 1
        or a.causal
        or not isinstance(a.rows, int)
        or a.rows >= MIN_SIZE
    ):
        return a
    bias = a.bias and replace(
        a.bias, row=a.bias.row or a.bias.batch[-1][1]
    )  # 0 only if all heads have the same row
    return replace(a, heads=a.heads // a.group, group=1, rows=a.rows * a.group, bias=bias)


def _bias(shape: Shape, dims: tuple[int, ...]) -> Bias:
    missing = len(dims) - shape.rank
    strides = [0] * missing + [
        0 if n == 1 else s for n, s in zip(shape.dims, row_major_strides(shape.dims), strict=True)
    ]
    return Bias(tuple(zip(dims[:-2], strides[:-2], strict=True)), strides[-2], strides[-1])


def _fused(out: Instruction) -> Instruction | None:
    if attention_of(out) is None:
        return None
    return instr(
        "fusion",
        out.operands,
        out.shape,
        kind="custom",
        calls=out["to_apply"],
        backend_config=out["backend_config"],
    )


def _fused_on_grid(out: Instruction) -> Instruction | None:
    a = attention_of(out)
    if (
        a is None
        or a.factors
        or a.dynamic
        or a.capped
        or a.bias_gradient
        or a.kind == "backward"
        and a.group > 1
    ):
        return None
    return (
        None
        if any(isinstance(n, int) and n < MIN_SIZE for n in (a.rows, a.columns))
        else _fused(out)
    )


RULES = rules((op("call"), _fused))
GRID_RULES = rules((op("call"), _fused_on_grid))


@hlo_pass
def attention(module: Module) -> Module:
    """Composite calls -> fused attention, where there is a kernel for it."""
    return rewrite(module, RULES)


on_grid = Pass(
    attention.name, lambda module: rewrite(module, GRID_RULES), "The same for a grid of threads."
)
