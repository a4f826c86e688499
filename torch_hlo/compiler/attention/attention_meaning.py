"""What an attention fusion means: the computation that attention_match puts into it, of its
operands as compiler/attention/attention.py describes them."""

import math
from collections.abc import Mapping
from typing import Any

from torch_hlo.hlo.ir import Dims, Instruction, Instructions, build as b

HIDDEN = float("inf")  # in a bias: the score is the fill


def scaled(x: Instruction, number: Instruction | None) -> Instruction:
    return x if number is None else b.multiply(x, b.broadcast(number, x.dims))


def as_f32(x: Instruction) -> Instruction:
    return x if x.dtype == "f32" else b.convert(x, "f32")


def repeated(x: Instruction, dims: Dims) -> Instruction:
    if x.dims == dims:
        return x
    kept = tuple(d for d, n in enumerate(x.dims) if n == dims[d])
    return b.broadcast(b.reshape(x, tuple(dims[d] for d in kept)), dims, kept)


def _times(x: Instruction, number: float) -> Instruction:
    return b.multiply(x, b.full(number, "f32", x.dims))


def meaning(
    kind: str,
    params: Instructions,
    config: Mapping[str, Any],
    batch: Dims,
) -> Instruction:
    """What the fusion computes, of its parameters."""
    m = _Meaning(kind, params, config, batch)
    return m.forward() if kind == "forward" else m.backward(params[0], *params[4:7])


class _Meaning:
    def __init__(
        self,
        kind: str,
        params: Instructions,
        config: Mapping[str, Any],
        batch: Dims,
    ) -> None:
        self.config = config
        rest = list(params[3:] if kind == "forward" else params[7:])
        self.q, self.k, self.v = params[:3] if kind == "forward" else params[1:4]
        self.own = tuple(range(len(batch)))
        self.dims = (*batch, self.q.dims[-2], self.k.dims[-2])
        self.cap = rest.pop() if config.get("capped") else None
        self.scale = rest.pop() if config.get("dynamic") else None
        self.factors = rest.pop() if config.get("factors") else None
        self.fill = rest.pop() if config.get("fill") else None
        self.bias = repeated(rest[0], self.dims) if rest else None
        self.hidden: Instruction | None = None  # where scores are the fill
        self.bent: Instruction | None = None  # the tanh of scores
        self.s = self._scores()

    def _dot(self, x: Instruction, y: Instruction, lhs: int, rhs: int) -> Instruction:
        rank = len(self.dims)
        own = self.own
        return b.dot(as_f32(x), as_f32(y), (rank + lhs,), (rank + rhs,), own, own)

    def _along(self, x: Instruction) -> Instruction:
        """A number per row, repeated."""
        return b.broadcast(x, self.dims, tuple(range(len(self.dims) - 1)))

    def _folded(self, x: Instruction, start: float, opcode: str) -> Instruction:
        return b.reduce(x, b.constant(start, "f32"), (len(self.dims) - 1,), opcode)

    def _scores(self) -> Instruction:
        s = scaled(self._dot(self.q, self.k, -1, -1), self.scale)
        dims = self.dims
        bias = self.bias
        if self.cap is not None:
            caps = b.broadcast(self.cap, dims)
            self.bent = b.tanh(b.divide(s, caps))
            s = b.multiply(self.bent, caps)
        if bias is not None and bias.dtype != "pred":
            if self.fill is not None:
                self.hidden = b.compare(bias, b.full(HIDDEN, "f32", dims), "EQ")
            s = b.add(s, bias)
        elif bias is not None:
            self.hidden = b.not_(bias)
        if self.hidden is not None and self.fill is not None:
            s = b.select(self.hidden, b.broadcast(self.fill, dims), s)
        return s

    def forward(self) -> Instruction:
        s = self.s
        top = self._folded(s, float("-inf"), "maximum")
        e = b.exponential(b.subtract(s, self._along(top)))
        total = self._folded(e, 0.0, "add")
        p = b.divide(e, self._along(total))
        return b.tuple_(
            self._dot(p if self.factors is None else b.multiply(p, self.factors), self.v, -1, -2),
            *(_times(x, 1 / math.log(2)) for x in (top, b.log(total))),
        )

    def backward(
        self,
        grad: Instruction,
        out: Instruction,
        top: Instruction,
        total: Instruction,
    ) -> Instruction:
        relative = b.subtract(_times(self.s, 1 / math.log(2)), self._along(top))
        p = b.exponential(_times(b.subtract(relative, self._along(total)), math.log(2)))
        dp = self._dot(grad, self.v, -1, -1)
        delta = self._folded(b.multiply(as_f32(grad), as_f32(out)), 0.0, "add")
        used = p
        if self.factors is not None:
            used = b.multiply(p, self.factors)
            dp = b.multiply(dp, self.factors)
        ds = b.multiply(p, b.subtract(dp, self._along(delta)))
        if self.hidden is not None:
            ds = b.select(self.hidden, b.full(0.0, "f32", self.dims), ds)
        if self.bent is not None:
            slope = b.subtract(b.full(1.0, "f32", self.dims), b.multiply(self.bent, self.bent))
            ds = b.multiply(ds, slope)
        results = [
            scaled(self._dot(ds, self.k, -1, -2), self.scale),
            scaled(self._dot(ds, self.q, -2, -2), self.scale),
            self._dot(used, grad, -2, -2),
        ]
        if "bias_gradient" in self.config:
            summed = tuple(d for d, kept in enumerate(self.config["bias_gradient"]) if not kept)
            results.append(b.reduce(ds, b.constant(0.0, "f32"), summed, "add"))
        return b.tuple_(*results)
