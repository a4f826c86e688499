"""attention_match: attention written out as products and a softmax becomes the fusion that passes/attention.py describes.

    s = dot(q, k) * c + b, or where(mask, s, fill); w = exp(s - max(s)); y = dot(w / sum(w), v)
 -> y = get-tuple-element(fusion(q * c, k, v, b), kind=custom, backend_config={"attention":"forward", …}), index=0

Recognized by structure, after the identities have brought every spelling into one form. Nothing but these instructions may read the scores and
the weights: attention whose weights are returned or saved for a gradient stays as it is. A row that sees nothing is NaN, as softmax's is.
"""
from __future__ import annotations

import json
from dataclasses import dataclass

from torch_hlo.compiler.passes.base import hlo_pass, over_computations
from torch_hlo.hlo import build as b
from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Computation, Instruction, Module, instr, postorder, rewrite_bottom_up, users
from torch_hlo.hlo.match import carry_meta, splat


@hlo_pass
def attention_match(module: Module) -> Module:
    """Products and a softmax -> fused attention."""
    return over_computations(module, _matched)


def _matched(c: Computation) -> Computation:
    reads: dict[Instruction, list[Instruction]] | None = None
    table: dict[Instruction, Instruction] = {}
    for x in postorder((c.root,)):
        if x.op == "dot":
            found = _Match.of(x)
            if found is not None:
                reads = users((c.root,)) if reads is None else reads
                if found.is_private(reads, c.root):
                    table[x] = found.fused()
    return c if not table else Computation(c.name, c.params, rewrite_bottom_up(c.root, lambda x: table.get(x, x)))


class _NoMatch(Exception):
    pass


def _need(condition: bool) -> None:
    if not condition:
        raise _NoMatch


def _scalar(x: Instruction) -> Instruction | None:
    """The f32 scalar that an array repeats."""
    return x.operands[0] if x.op == "broadcast" and x.operands[0].shape.rank == 0 else None


@dataclass(slots=True)
class _Match:
    """`factors`: (opcode, scalar) applied to the scores, first to last. `bias`: what is added, or with `fill` the mask, true where a score counts."""

    root: Instruction
    q: Instruction
    k: Instruction
    v: Instruction
    factors: list[tuple[str, Instruction]]
    bias: Instruction | None
    fill: Instruction | None
    inside: set[Instruction]

    @classmethod
    def of(cls, x: Instruction) -> _Match | None:
        try:
            return cls._of(x)
        except _NoMatch:
            return None

    @classmethod
    def _of(cls, x: Instruction) -> _Match:
        weights, v = x.operands
        rank = x.shape.rank
        batch = tuple(range(rank - 2))
        _need(rank >= 3 and x.shape.dtype == weights.shape.dtype == v.shape.dtype == "f32" and all(isinstance(n, int) for n in (*weights.shape.dims, *v.shape.dims)))
        _need(weights.shape.rank == rank and v.shape.rank == rank and x["lhs_batch_dims"] == x["rhs_batch_dims"] == batch)
        _need(x["lhs_contracting_dims"] == (rank - 1,) and x["rhs_contracting_dims"] == (rank - 2,) and x.shape.size != 0)
        size = weights.shape.size
        inside: set[Instruction] = set()

        def step(y: Instruction, *opcodes: str) -> Instruction:
            """`y`, seen through reshapes that leave the last two dimensions alone."""
            while y.op == "reshape" and y.operands[0].shape.dims[-2:] == y.shape.dims[-2:] == weights.shape.dims[-2:]:
                inside.add(y)
                y = y.operands[0]
            _need(y.op in opcodes and y.shape.size == size)
            inside.add(y)
            return y

        def row(y: Instruction, opcode: str, of: Instruction) -> None:
            """`y` repeats along rows a reduction of `of` along them."""
            _need(y.op == "broadcast" and y["dimensions"] == tuple(range(y.shape.rank - 1)))
            r = y.operands[0]
            _need(r.op == "reduce" and r.operands[0] is of and r["dimensions"] == (of.shape.rank - 1,) and r["to_apply"].root.op == opcode)
            _need(splat(r.operands[1]) == (0 if opcode == "add" else float("-inf")) and r["to_apply"].root.operands == r["to_apply"].params)
            inside.update((y, r))

        quotient = step(weights, "divide")
        e = step(quotient.operands[0], "exponential")
        row(quotient.operands[1], "add", e)
        difference = step(e.operands[0], "subtract")
        s = difference.operands[0]
        row(difference.operands[1], "maximum", s)
        bias = fill = None
        factors: list[tuple[str, Instruction]] = []
        y = step(s, "select", "add", "multiply", "divide", "dot")
        if y.op == "select":
            mask, *cases = y.operands
            other = [i for i in (0, 1) if _scalar(cases[i]) is not None]
            _need(len(other) == 1)
            fill = _scalar(cases[other[0]])
            bias = mask if other[0] == 1 else _not(mask)
            y = step(cases[1 - other[0]], "multiply", "divide", "dot")
        elif y.op == "add":
            i = next((i for i in (0, 1) if _scores(y.operands[i])), None)
            _need(i is not None)
            bias, y = y.operands[1 - i], step(y.operands[i], "multiply", "divide", "dot")
            _need(bias.shape.dtype == "f32")
        while y.op != "dot":
            i = next((i for i in (1, 0) if _scalar(y.operands[i]) is not None), None)
            _need(i == 1 or i == 0 and y.op == "multiply")
            factors.append((y.op, _scalar(y.operands[i])))
            y = step(y.operands[1 - i], "multiply", "divide", "dot")
        q, k = y.operands
        rank = y.shape.rank
        batch = tuple(range(rank - 2))
        _need(q.shape.dtype == k.shape.dtype == "f32" and q.shape.rank == k.shape.rank == rank and y["lhs_batch_dims"] == y["rhs_batch_dims"] == batch)
        _need(y["lhs_contracting_dims"] == y["rhs_contracting_dims"] == (rank - 1,) and y.shape.dims[-2:] == weights.shape.dims[-2:])
        return cls(x, q, k, v, factors[::-1], bias, fill, inside)

    def is_private(self, reads: dict[Instruction, list[Instruction]], root: Instruction) -> bool:
        return root not in self.inside and all(u in self.inside or u is self.root for y in self.inside for u in reads[y])

    def fused(self) -> Instruction:
        x = self.root
        q = self.q
        for opcode, scalar in self.factors:
            q = instr(opcode, (q, b.broadcast(scalar, q.shape.dims)))
        rows, columns = self.q.shape.dims[-2], self.k.shape.dims[-2]
        batch, bias = x.shape.dims[:-2], self.bias
        if bias is not None:
            batch, bias = _small(bias, batch)
        operands = [b.reshape(y, (*batch, *y.shape.dims[-2:])) for y in (q, self.k, self.v)]
        operands += [y for y in (bias, self.fill) if y is not None]
        params = tuple(instr("parameter", (), o.shape, index=i) for i, o in enumerate(operands))
        results = _meaning(params, bias is not None, self.fill is not None, (*batch, rows, columns))
        config = json.dumps({"attention": "forward", "causal": False, "scale": 1.0, "softmax": True, "fill": self.fill is not None}, separators=(",", ":"))
        made = instr("fusion", tuple(operands), results.shape, kind="custom", calls=Computation("attention", params, results), backend_config=config)
        carry_meta(x, made)
        return b.reshape(b.get_tuple_element(made, 0), x.shape.dims)


def _not(mask: Instruction) -> Instruction:
    """The opposite of a mask, taken before it is repeated."""
    if mask.op == "not":
        return mask.operands[0]
    if mask.op in ("broadcast", "reshape"):
        return instr(mask.op, (_not(mask.operands[0]),), mask.shape, **dict(mask.attrs))
    return b.not_(mask)


def _scores(x: Instruction) -> bool:
    """Whether an array is scaled scores."""
    while x.op in ("reshape", "multiply", "divide"):
        x = x.operands[1] if x.op == "multiply" and _scalar(x.operands[0]) is not None else x.operands[0]
    return x.op == "dot"


def _small(bias: Instruction, batch: tuple[Size, ...]) -> tuple[tuple[Size, ...], Instruction]:
    """(batch dimensions, a bias for them): not repeated where it was, its repeated dimensions 1."""
    repeated = bias
    if bias.op == "reshape" and bias.operands[0].op == "broadcast" and bias.operands[0].shape.dims[-2:] == bias.shape.dims[-2:]:
        repeated = bias.operands[0]
    if repeated.op != "broadcast":
        return batch, b.reshape(bias, (*batch, *bias.shape.dims[-2:]))
    dims = repeated.shape.dims
    small = tuple(n if d in repeated["dimensions"] else 1 for d, n in enumerate(dims))
    return dims[:-2], b.reshape(repeated.operands[0], small)


def _meaning(params: tuple[Instruction, ...], biased: bool, filled: bool, dims: tuple[Size, ...]) -> Instruction:
    """(attention, log-sum-exp) of the fusion's parameters."""
    q, k, v, *rest = params
    rank = len(dims)
    batch, rows = tuple(range(rank - 2)), tuple(range(rank - 1))
    s = b.dot(q, k, (rank - 1,), (rank - 1,), batch, batch)
    if biased:
        kept = tuple(d for d, n in enumerate(rest[0].shape.dims) if n == dims[d])
        wide = b.broadcast(b.reshape(rest[0], tuple(dims[d] for d in kept)), dims, kept)
        s = b.select(wide, s, b.broadcast(rest[1], dims)) if filled else b.add(s, wide)
    top = b.reduce(s, b.constant(float("-inf"), "f32"), (rank - 1,), "maximum")
    e = b.exponential(b.subtract(s, b.broadcast(top, dims, rows)))
    total = b.reduce(e, b.constant(0.0, "f32"), (rank - 1,), "add")
    out = b.dot(b.divide(e, b.broadcast(total, dims, rows)), v, (rank - 1,), (rank - 2,), batch, batch)
    return b.tuple_(out, b.add(top, b.log(total)))
