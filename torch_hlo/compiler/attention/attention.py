"""attention: composite calls that say they are attention become one kernel where
compiler/attention/attention_step.py has one.

    c = (f32[4,8,512,64], f32[4,8,512]) call(q, k, v), to_apply=attention,
    backend_config={"attention":"forward","causal":true,"scale":0.125}

The called computation is the meaning; calls that do not fit (element types, tiny sizes, a symbolic
head size) are inlined by legalize and are ordinary products and row kernels.
  forward:  q [batch…, rows, size], k [batch…, columns, size], v [batch…, columns, width], bias? ->
  out, log-sum-exp [batch…, rows] backward: gradient of out, q, k, v, out, log-sum-exp, bias? ->
  gradients of q, k, v
q, k, v and the gradient have one type; results are f32, on GPUs also narrower. The heads (last
batch dimension) of k and v may be a divisor of q's. A bias broadcasts to [batch…, rows, columns];
true of a pred is "sees". Further operands, if the configuration says so: fill, then factors
[batch…, rows, columns] that weights are multiplied with after they have been divided by their sum
(dropout), then a scale, f32[], then a cap, f32[]: scores s, scaled and not yet biased, are cap
tanh(s / cap). With "bias_gradient" the backward has a fourth result, the gradient of the bias: true
in the configuration for the batch dimensions that it has, it is summed over the others.

Attention that a graph knows, but that is written out, has marked weights, of f32 scores [batch…,
rows, columns]; attention_match finds the products around them, or inlines the call:
  weights: scores -> weights, the largest score and the logarithm of the sum of weights relative to
  it, both [batch…, rows] in units of log 2. weights again: scores and these two -> weights

attention_operands computes what such operands are inside the kernel, where that reads less memory
than they take:
    c = fusion(q, k, v, seed), kind=custom, calls={… ROOT call(q, k, v, factors)}
"""

import json
import math
from dataclasses import replace
from typing import Generic, Literal, TypeVar, cast

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Dims,
    Instruction,
    Module,
    Shape,
    Size,
    inline,
    op,
    rewrite,
    row_major_strides,
    rules,
)
from torch_hlo.hlo.ir.build import kernel_of

from ..hlo_pass import Pass, hlo_pass

FLOATS = ("f32", "bf16", "f16")
# query rows and columns on a grid: below, products with few rows and a row kernel do as well
MIN_SIZE = 16
MAX_WIDTH = 1024
WEIGHTS = '{"attention":"weights","late":true}'
WEIGHTS_AGAIN = '{"attention":"weights again","late":true}'


# sizes in a program; in a kernel also the names of its arguments
N = TypeVar("N")


@frozen
class Bias(Generic[N]):
    """Strides of the bias in elements, 0 where it is broadcast. `batch`: (size, stride) per batch
    dimension."""

    batch: tuple[tuple[N, N], ...]
    row: N
    column: N


@frozen
class Attention(Generic[N]):
    """`dynamic`: the scale is an operand. `bias_gradient`: the batch dimensions, and which of them
    it has. `heads`: all batch dimensions of q; `group`: heads of q per head of k and v. `fill`:
    scores have this (f32[], the last operand) where the mask is false, instead of -inf. `softmax`:
    rows that see nothing are NaN, as softmax's are, and not 0; and in place of the log-sum-exp
    there are two arrays, the largest score and the logarithm of the sum of weights relative to it,
    both in units of log 2: rows whose scores are all -1e9 have weights, too."""

    kind: str
    dtypes: tuple[str, ...]  # of the operands
    results: tuple[str, ...]  # of the results: f32, what narrow_arrays has made narrower
    causal: bool
    scale: float
    heads: Size
    group: int
    rows: N
    columns: N
    size: int
    width: int
    bias: Bias[N] | None
    fill: bool = False
    softmax: bool = False
    factors: bool = False
    dynamic: bool = False
    capped: bool = False
    bias_gradient: tuple[tuple[N, bool], ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """What the operands are."""
        inputs = (
            ("q", "k", "v")
            if self.kind == "forward"
            else ("grad", "q", "k", "v", "out", "lse", *["total"] * self.softmax)
        )
        return (
            *inputs,
            *["bias"] * (self.bias is not None),
            *["fill"] * self.fill,
            *["factors"] * self.factors,
            *["scale"] * self.dynamic,
            *["cap"] * self.capped,
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        return (
            ("out", "lse", *["total"] * self.softmax)
            if self.kind == "forward"
            else ("dq", "dk", "dv", *["dbias"] * bool(self.bias_gradient))
        )


def inner(x: Instruction) -> Instruction:
    """The call inside of a fusion that computes operands itself; else the fusion or call, whose
    operands are in memory."""
    if x.op == "fusion":
        root = x["calls"].root
        if root.op == "call" and '"attention"' in (root.get("backend_config") or ""):
            return cast(Instruction, root)
    return x


def marked_weights(x: Instruction) -> bool:
    """Whether `x` is a call that says it computes the weights of an attention."""
    return x.op == "call" and x.get("backend_config") in (WEIGHTS, WEIGHTS_AGAIN)


def attention_of(x: Instruction) -> Attention[Size] | None:
    """What a call or fusion computes, when its backend_config says it is attention and there is a
    kernel for its shapes."""
    x = inner(x)
    config = x.get("backend_config")
    if not config or '"attention"' not in config or marked_weights(x):
        return None
    config = json.loads(config)
    first = 0 if config["attention"] == "forward" else 1
    q, k, v = (o.shape for o in x.operands[first : first + 3])
    softmax = config.get("softmax", False)
    flags = [config.get(name, False) for name in ("fill", "factors", "dynamic", "capped")]
    extra = [o.shape for o in x.operands[3 if first == 0 else 6 + softmax :]]
    bias = _bias_shape(extra, *flags)
    types = {q.dtype, k.dtype, v.dtype, x.operand.dtype}
    if bias is False or len(types) > 1 or not _have_kernels(x, first + 3):
        return None
    *batch, rows, size = q.dims
    columns, width = v.dims[-2:]
    group = _group(tuple(batch), k.dims)
    if group is None or 0 in (*batch, rows, columns):
        return None
    if not isinstance(size, int) or not isinstance(width, int):
        return None
    if not (0 < size <= MAX_WIDTH and 0 < width <= MAX_WIDTH):
        return None
    gradient = tuple(zip(batch, config.get("bias_gradient", ()), strict=False))
    if gradient and (
        flags[-1]
        or config["causal"]
        or group > 1
        or len(gradient) != len(batch)
        or bias is None
        or bias.dims[-2:] != (rows, columns)
    ):
        return None
    return Attention(
        config["attention"],
        tuple(o.dtype for o in x.operands),
        tuple(s.dtype for s in x.elements),
        config["causal"],
        config["scale"],
        math.prod(batch),
        group,
        rows,
        columns,
        size,
        width,
        None if bias is None else _bias(bias, (*batch, rows, columns)),
        fill=flags[0],
        softmax=softmax,
        factors=flags[1],
        dynamic=flags[2],
        capped=flags[3],
        bias_gradient=gradient,
    )


def known_attention(x: Instruction) -> Attention[Size]:
    """What a fusion computes that is attention."""
    a = attention_of(x)
    assert a is not None, x
    return a


def _have_kernels(x: Instruction, inputs: int) -> bool:
    """Whether kernels compute with the types of the first operands and of the results."""
    return all(o.dtype in FLOATS for o in x.operands[:inputs]) and all(
        s.dtype == "f32" or s.dtype in FLOATS and x.op == "fusion" for s in x.elements
    )


def _bias_shape(
    extra: list[Shape], fill: bool, factors: bool, dynamic: bool, capped: bool
) -> Shape | Literal[False] | None:
    """The shape of the bias, first of the operands that follow; False for types without a
    kernel."""
    extra = extra[: len(extra) - capped - dynamic]
    if factors and extra.pop().dtype not in FLOATS:
        return False
    extra = extra[: len(extra) - fill]
    if not all(s.dtype in (*FLOATS, "pred") for s in extra):
        return False
    return extra[0] if extra else None


def _group(batch: Dims, key: Dims) -> int | None:
    """Heads of q per head of k."""
    if batch == key[:-2]:
        return 1
    if not (isinstance(batch[-1], int) and isinstance(key[-3], int)):
        return None
    return batch[-1] // max(1, key[-3])


def merged(a: Attention[Size]) -> Attention[Size]:
    """`a` with the heads that share keys as rows of one head, where a head has few: its keys are
    read once. The arrays are the same."""
    if (
        a.kind != "forward"
        or a.group == 1
        or a.causal
        or not isinstance(a.rows, int)
        or a.rows >= MIN_SIZE
    ):
        return a
    # 0 only if all heads have the same row
    bias = a.bias and replace(a.bias, row=a.bias.row or a.bias.batch[-1][1])
    return replace(a, heads=a.heads // a.group, group=1, rows=a.rows * a.group, bias=bias)


def _bias(shape: Shape, dims: Dims) -> Bias[Size]:
    missing = len(dims) - shape.rank
    strides = [0] * missing + [
        0 if n == 1 else s for n, s in zip(shape.dims, row_major_strides(shape.dims), strict=True)
    ]
    return Bias(tuple(zip(dims[:-2], strides[:-2], strict=True)), strides[-2], strides[-1])


def _fused(out: Instruction) -> Instruction | None:
    return None if attention_of(out) is None else kernel_of(out)


def _fused_on_grid(out: Instruction) -> Instruction | None:
    if marked_weights(out):
        return inline(out["to_apply"], out.operands)
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
    attention.name,
    lambda module: rewrite(module, GRID_RULES),
    "The same for a grid of threads.",
)
