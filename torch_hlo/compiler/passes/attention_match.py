"""attention_match: attention written out as products and a softmax becomes the fusions that passes/attention.py describes, forward and backward.

    s = dot(q, k) * c + b, or where(mask, s, fill), or tanh(dot(q, k) / c) * c before that; w = exp(s - max(s)) / sum(...); y = dot(w * dropout, v)
 -> y = get-tuple-element(fusion(q, k, v, b, c), kind=custom, backend_config={"attention":"forward", …}), index=0
    and the products of its gradient -> a backward fusion that computes w again from the log-sum-exp

A program may be the forward or the backward half of it (dynamo/partition.py): one keeps m = max(s) / ln 2 and l = log(sum(exp(s - max(s)))) / ln 2, results of its fusion,
the other begins with w = exp((s / ln 2 - m - l) ln 2).

Recognized by structure, after the identities have brought every spelling into one form: what leads to the weights here, what is made of them by
attention_roles. Nothing else may read the scores, the weights or their gradients: attention whose weights are returned stays as it is. A row that sees nothing
is NaN, as softmax's is.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch_hlo.compiler.passes.attention import FLOATS, attention_of
from torch_hlo.compiler.passes.attention_roles import (
    ELEMENTWISE,
    Product,
    Role,
    Roles,
    Unknown,
    bare,
    is_view,
    scalar,
    sides,
    turned,
)
from torch_hlo.compiler.passes.base import hlo_pass, over_computations
from torch_hlo.hlo import build as b
from torch_hlo.hlo.dim import Size
from torch_hlo.hlo.ir import Computation, Instruction, Module, instr, postorder, users
from torch_hlo.hlo.match import carry_meta, splat, substituted

_HIDDEN = float("inf")  # in a bias: the score is the fill


@hlo_pass
def attention_match(module: Module) -> Module:
    """Products and a softmax -> fused attention."""
    return over_computations(module, _matched)


def _matched(c: Computation) -> Computation:
    if not any(x.op == "exponential" for x in postorder((c.root,))):
        return c
    c = _with_separate_sums(c)
    order = postorder((c.root,))
    reads, number = users((c.root,)), {x: i for i, x in enumerate(order)}
    table: dict[Instruction, Instruction] = {}
    for x in order:
        if (
            x.op == "divide"
            and x.operands[0].op == "exponential"
            or x.op == "exponential"
            and _is(x.operands[0], "multiply", math.log(2))
        ):
            try:
                table |= _Attention(x, reads, number, c.root).replacements()
            except Unknown:
                continue
    return Computation(c.name, c.params, substituted(c.root, table)) if table else c


def _with_separate_sums(c: Computation) -> Computation:
    """Sums over batch dimensions of added arrays of gradients -> added sums: a bias that layers share."""
    table = {}
    for x in postorder((c.root,)):
        if (
            x.op == "reduce"
            and x.shape.rank >= 2
            and x.shape.dims[-2:] == x.operands[0].shape.dims[-2:]
            and x["to_apply"].root.op == "add"
        ):
            leaves, stack = [], [x.operands[0]]
            while stack:
                y = stack.pop()
                if y.op == "add":
                    stack += y.operands
                elif is_view(y, 2):
                    stack.append(y.operands[0])
                else:
                    leaves.append(y)
            if (
                len(leaves) > 1
                and any(y.op == "subtract" for y in leaves)
                and splat(x.operands[1]) == 0
            ):
                dims = x.operands[0].shape.dims
                parts = [
                    b.reduce(
                        b.reshape(_as_f32(y), dims), b.constant(0.0, "f32"), x["dimensions"], "add"
                    )
                    for y in leaves
                ]
                total = parts[0]
                for part in parts[1:]:
                    total = b.add(total, part)
                table[x] = total if x.shape.dtype == "f32" else b.convert(total, x.shape.dtype)
    return Computation(c.name, c.params, substituted(c.root, table)) if table else c


def _need(condition: bool) -> None:
    if not condition:
        raise Unknown


def _is(x: Instruction, opcode: str, number: float) -> bool:
    """Whether `x` is `opcode`, of something and this number."""
    found = splat(x.operands[1]) if x.op == opcode else None
    return isinstance(found, (int, float)) and math.isclose(found, number, rel_tol=1e-6)


@dataclass(slots=True)
class _Scores:
    """What leads to the weights: `scale`: (opcode, scalar) applied to the products q k, first to last. `biases`: what is added, each with what is applied to
    it after that. `mask`: true where a score counts, with its reshapes, and `fill`, the score elsewhere. `inside`: the instructions. `rows`: maxima and sums, if
    they are computed here; else `given`: both as the backward fusion wants them. `cap`: what the tanh of scaled products, `bent`, is multiplied with; biases and masks come after it."""

    q: Instruction
    k: Instruction
    scale: list[tuple[str, Instruction]]
    biases: list[tuple[Instruction, list[tuple[str, Instruction]]]]
    mask: Instruction | None
    visible: bool  # where the mask is true
    fill: Instruction | None
    inside: set[Instruction]
    rows: tuple[Instruction, ...]
    given: tuple[Instruction, ...]
    cap: list[tuple[str, Instruction]] | None
    bent: Instruction | None

    @property
    def applied(self) -> list[tuple[str, Instruction]]:
        """What scores are multiplied with in all, and so their gradients, but for the derivative of the tanh."""
        return [*self.scale, *(self.cap or ())]


def _scores(weights: Instruction) -> _Scores:
    """The scores whose softmax `weights` is: exp(s - max(s)) / sum(exp(s - max(s))), or exp((s / ln 2 - m - l) ln 2)."""
    last, inside = weights.shape.dims[-2:], {weights}
    _need(weights.shape.dtype == "f32" and weights.shape.rank >= 3 and weights.shape.size != 0)

    def seen(y: Instruction, *opcodes: str) -> Instruction:
        """`y`, through reshapes of its leading dimensions and conversions."""
        while is_view(y, 2):
            inside.add(y)
            y = y.operands[0]
        _need(y.op in opcodes and y.shape.dims[-2:] == last)
        inside.add(y)
        return y

    def row(y: Instruction) -> Instruction:
        """What `y` repeats along rows."""
        _need(y.op == "broadcast" and y["dimensions"] == tuple(range(y.shape.rank - 1)))
        inside.add(y)
        return y.operands[0]

    def reduced(y: Instruction, opcode: str, of: Instruction) -> Instruction:
        """What `y` repeats along rows, a reduction of `of` along them."""
        r = row(y)
        _need(
            r.op == "reduce"
            and r.operands[0] is of
            and r["dimensions"] == (of.shape.rank - 1,)
            and r["to_apply"].root.op == opcode
        )
        _need(
            splat(r.operands[1]) == (0 if opcode == "add" else float("-inf"))
            and r["to_apply"].root.operands == r["to_apply"].params
        )
        inside.add(r)
        return r

    rows = given = ()
    if weights.op == "divide":
        e = seen(weights.operands[0], "exponential")
        total = reduced(weights.operands[1], "add", e)
        difference = seen(e.operands[0], "subtract")
        rows = reduced(difference.operands[1], "maximum", difference.operands[0]), total
        y = difference.operands[0]
    else:
        second = seen(seen(weights.operands[0], "multiply").operands[0], "subtract")
        first = seen(second.operands[0], "subtract")
        scaled = seen(first.operands[0], "multiply")
        _need(_is(scaled, "multiply", 1 / math.log(2)))
        given = row(first.operands[1]), row(second.operands[1])
        y = scaled.operands[0]
    mask = fill = None
    visible = True
    biases, outer, cap, bent = [], [], None, None
    y = seen(y, "select", "add", "multiply", "divide", "tanh", "dot")
    while y.op != "dot":
        if y.op == "select":
            _need(mask is None and not biases and not outer and cap is None)
            other = [i for i in (1, 2) if scalar(y.operands[i]) is not None]
            _need(len(other) == 1)
            mask, fill, visible = y.operands[0], scalar(y.operands[other[0]]), other[0] == 2
            y = y.operands[3 - other[0]]
        elif y.op == "add":
            i = next((i for i in (0, 1) if _leads_to_dot(y.operands[i])), None)
            _need(i is not None and cap is None)
            biases.append((y.operands[1 - i], outer[::-1]))
            y = y.operands[i]
        elif y.op == "tanh":
            _need(cap is None)
            cap, outer, bent, y = outer[::-1], [], y, y.operands[0]
        else:
            i = next((i for i in (1, 0) if scalar(y.operands[i]) is not None), None)
            _need(i == 1 or i == 0 and y.op == "multiply")
            outer.append((y.op, scalar(y.operands[i])))
            y = y.operands[1 - i]
        y = seen(y, "add", "multiply", "divide", "tanh", "dot")
    q, k = _rows(y, 0), _rows(y, 1)
    _need(q.shape.dtype == k.shape.dtype and q.shape.dtype in FLOATS)
    return _Scores(q, k, outer[::-1], biases, mask, visible, fill, inside, rows, given, cap, bent)


def _rows(x: Instruction, side: int) -> Instruction:
    """An operand of a dot as [batch…, free, contracted]."""
    batch, contracted, free = sides(x, side)
    _need(len(contracted) == len(free) == 1)
    return turned(x.operands[side], (*batch, *free, *contracted))


def _leads_to_dot(x: Instruction) -> bool:
    """Whether an array is scores: a product, times scalars, plus biases."""
    while True:
        if x.op in ("multiply", "divide"):
            i = next((i for i in (1, 0) if scalar(x.operands[i]) is not None), None)
            if i is None:
                return False
            x = x.operands[1 - i]
        elif x.op == "add":
            return any(_leads_to_dot(o) for o in x.operands)
        elif is_view(x, 2) or x.op == "tanh":
            x = x.operands[0]
        else:
            return x.op == "dot"


def _product(steps: list[tuple[str, Instruction]]) -> Instruction | None:
    """The f32 scalar that steps multiply with, None for 1."""
    total = None
    for opcode, number in steps:
        number = number if number.shape.dtype == "f32" else b.convert(number, "f32")
        total = (
            number
            if total is None and opcode == "multiply"
            else instr(opcode, (b.constant(1.0, "f32") if total is None else total, number))
        )
    return total


def _scaled(x: Instruction, number: Instruction | None) -> Instruction:
    return x if number is None else b.multiply(x, b.broadcast(number, x.shape.dims))


def _as_f32(x: Instruction) -> Instruction:
    return x if x.shape.dtype == "f32" else b.convert(x, "f32")


@dataclass(slots=True)
class _Attention:
    """One attention around its weights."""

    weights: Instruction
    reads: dict[Instruction, list[Instruction]]
    number: dict[Instruction, int]
    root: Instruction
    s: _Scores = field(init=False)
    roles: Roles = field(init=False)
    slopes: set[Instruction] = field(init=False)  # the derivative of the tanh of a cap: 1 - tanh^2
    anchor: Product = field(init=False)  # of the weights: it says what they are multiplied with

    def replacements(self) -> dict[Instruction, Instruction]:
        """New instructions for the products and sums of this attention. Raises Unknown."""
        self.s = _scores(self.weights)
        self.slopes = self._slopes()
        self.roles = self._followed()
        weighted = [p for p in self.roles.products if p.role.kind == "weights"]
        outs = [p for p in weighted if p.over == "columns"]
        _need(
            bool(weighted)
            and len(outs) == (not self.s.given)
            and all(p.role.factors == weighted[0].role.factors for p in self.roles.products)
        )
        self.anchor = (outs or weighted)[0]
        q, k = self.s.q, self.s.k
        rest = [p for p in self.roles.products if p not in outs]
        grads = [
            x for x, role in self.roles.roles.items() if role.kind == "grads" and x.op == "dot"
        ]
        _need(len(grads) == bool(rest or self.roles.sums))
        batch = self.roles.sums[0].array.shape.dims[:-2] if self.roles.sums else self._batch()
        common, config = self._operands(batch)
        table = {}
        if outs:
            v = outs[0].other
            forward = self._fusion("forward", (q, k, v), common, config, batch)
            rows = tuple(b.get_tuple_element(forward, i) for i in (1, 2))
            table = {outs[0].x: self._result(outs[0], forward, 0)}
            table |= {x: b.reshape(rows[i], x.shape.dims) for x, i in self._kept_rows().items()}
        self._check_private(table.keys())
        if not grads:
            return table
        grad, values = _rows(grads[0], 0), _rows(grads[0], 1)
        _need(grad.shape.dtype == q.shape.dtype and (not outs or values is v))
        if outs:
            out = b.get_tuple_element(forward, 0)
            out = out if q.shape.dtype == "f32" else b.convert(out, q.shape.dtype)
        else:
            out, rows = self._output_of(grad), self.s.given
        if self.roles.sums:
            config["bias_gradient"] = self._kept(batch)
        backward = self._fusion("backward", (grad, q, k, values, out, *rows), common, config, batch)
        for p in rest:
            index, operand = {
                ("weights", "rows"): (2, grad),
                ("scores", "columns"): (0, k),
                ("scores", "rows"): (1, q),
            }[p.role.kind, p.over]
            _need(p.other is operand)
            table[p.x] = self._result(
                p, backward, index, None if index == 2 else self._ratio(p.role)
            )
        for s in self.roles.sums:
            table[s.x] = b.reshape(b.get_tuple_element(backward, 3), s.x.shape.dims)
        return table

    def _slopes(self) -> set[Instruction]:
        """The arrays that are 1 - tanh(x)^2, of the tanh of a cap; what leads to them is part of the attention."""
        found: set[Instruction] = set()
        for square in self._viewed(self.s.bent) if self.s.bent is not None else ():
            if square.op == "multiply" and len({_seen(o) for o in square.operands}) == 1:
                found |= {
                    x
                    for x in self._viewed(square)
                    if x.op == "subtract" and splat(x.operands[0]) == 1
                }
        for x in found:
            self._viewed(x)
        return found

    def _viewed(self, x: Instruction) -> list[Instruction]:
        """What reads `x` or a view of it, which are part of the attention."""
        self.s.inside.add(x)
        return [u for y in self.reads[x] for u in (self._viewed(y) if is_view(y, 2) else (y,))]

    def _kept_rows(self) -> dict[Instruction, int]:
        """What the program keeps of maxima (0) and sums (1): both as the fusion returns them."""
        kept = {}
        for i, x in enumerate(self.s.rows):
            outer = [u for u in self.reads[x] if u not in self.s.inside]
            if i and outer:
                _need(len(outer) == 1 and outer[0].op == "log")
                self.s.inside.add(outer[0])
                outer = self.reads[outer[0]]
            _need(all(_is(u, "multiply", 1 / math.log(2)) for u in outer))
            kept |= dict.fromkeys(outer, i)
        return kept

    def _output_of(self, grad: Instruction) -> Instruction:
        """The output whose gradient is `grad`: their products' sums are what is subtracted from the gradients of weights."""
        (sums,) = {
            x.operands[1].operands[0]
            for x, role in self.roles.roles.items()
            if role.kind == "difference" and x.op == "subtract"
        } or {None}
        _need(sums is not None)
        while is_view(sums, 1):
            sums = sums.operands[0]
        _need(
            sums.op == "reduce"
            and sums["dimensions"] == (sums.operands[0].shape.rank - 1,)
            and sums["to_apply"].root.op == "add"
            and splat(sums.operands[1]) == 0
        )
        product = sums.operands[0]
        while is_view(product, 2):
            product = product.operands[0]
        _need(product.op == "multiply")
        sources = [_rearranged(x) for x in product.operands]
        _need(_rearranged(grad) in sources)
        out = product.operands[sources[0] == _rearranged(grad)]
        while is_view(out, 2):
            out = out.operands[0]
        return out if out.shape.dtype == grad.shape.dtype else b.convert(out, grad.shape.dtype)

    def _followed(self) -> Roles:
        candidates = self._gradients_of_weights()
        for x in (*candidates, None):
            roles = Roles(self.reads, self.number)
            roles.add(self.weights, Role("weights"))
            if x is not None:
                roles.add(x, Role("grads"))
            try:
                roles.follow()
            except Unknown:
                continue
            return roles
        raise Unknown

    def _gradients_of_weights(self) -> list[Instruction]:
        """Products of the size of the weights with what the weights are multiplied with, or that lead to what they are multiplied with."""
        last, seen, stack, found = self.weights.shape.dims[-2:], {self.weights}, [self.weights], []
        while stack:
            x = stack.pop()
            for u in self.reads[x]:
                if u.op == "dot":
                    values = u.operands[u.operands[0] is x]
                    found += [
                        y
                        for y in self.reads[values]
                        if y.op == "dot"
                        and y.operands[1] is values
                        and y.shape.dims[-2:] == last
                        and y not in self.s.inside
                    ]
                elif (
                    u not in seen
                    and not u.shape.is_tuple
                    and u.shape.dims[-2:] == last
                    and u.op in ELEMENTWISE
                ):
                    seen.add(u)
                    stack.append(u)
                    found += _dots_above(u, last, seen) if self.s.given else ()
        return found

    def _check_private(self, replaced: Iterable[Instruction]) -> None:
        """Only instructions of this attention read its scores."""
        known = self.s.inside | self.roles.roles.keys()
        ends = {p.x for p in self.roles.products} | {s.x for s in self.roles.sums} | set(replaced)
        for x in known:
            _need(x is not self.root and all(u in known or u in ends for u in self.reads[x]))

    def _batch(self) -> tuple[Size, ...]:
        """Batch dimensions, as fine as masks and biases have them: what they repeat is not written."""
        arrays = [
            self.s.mask,
            *(x for x, _ in self.s.biases),
            *(x for _, x in self.anchor.role.factors),
        ]
        dims = [self.weights.shape.dims]
        for x in arrays:
            if x is not None and x.shape.rank:
                while x.op == "reshape" and x.operands[0].shape.dims[-2:] == x.shape.dims[-2:]:
                    x = x.operands[0]
                if x.shape.dims[-2:] == dims[0][-2:]:
                    dims.append(x.shape.dims)
        return max(dims, key=len)[:-2]

    def _operands(self, batch: tuple[Size, ...]) -> tuple[list[Instruction], dict]:
        """The operands that forward and backward have in common, and the configuration."""
        s, full = self.s, (*batch, *self.weights.shape.dims[-2:])
        operands, config = [], {"causal": False, "scale": 1.0, "softmax": True}
        bias = None
        for x, steps in s.biases:
            x = _scaled(_as_f32(x), _product(steps))
            x = _small(x, full)
            bias = x if bias is None else b.add(*_wide((bias, x)))
        if s.mask is not None:
            mask = s.mask if s.visible else _not(s.mask)
            mask = _small(mask, full)
            if bias is not None:
                mask, bias = _wide((mask, bias))
                bias = b.select(mask, bias, b.full(_HIDDEN, "f32", bias.shape.dims))
            else:
                bias = mask
            config["fill"] = True
        if bias is not None:
            operands.append(bias)
        if s.fill is not None:
            operands.append(_as_f32(s.fill))
        if self.anchor.role.factors:
            operands.append(self._factors(full))
            config["factors"] = True
        cap = None if s.cap is None else _product(s.cap) or b.constant(1.0, "f32")
        for name, number in (("dynamic", _product(s.applied)), ("capped", cap)):
            if number is not None:
                operands.append(number)
                config[name] = True
        return operands, config

    def _factors(self, full: tuple[Size, ...]) -> Instruction:
        """What weights are multiplied with after the softmax, f32."""
        total = b.full(1.0, "f32", full)
        for opcode, x in sorted(self.anchor.role.factors, key=lambda s: s[0]):  # masks last
            if opcode in ("select", "unselect"):
                yes, no = (total, b.full(0.0, "f32", full))[:: 1 if opcode == "select" else -1]
                total = b.select(b.reshape(x, full), yes, no)
            else:
                x = _as_f32(x)
                total = instr(
                    opcode,
                    (total, b.broadcast(x, full) if not x.shape.rank else b.reshape(x, full)),
                )
        return total

    def _ratio(self, role: Role) -> Instruction | None:
        """The gradients of scores are scaled by the program's own numbers: those, divided by the scale that the kernel has applied."""
        steps = self._unmasked(role)
        if self.s.cap is not None:
            bends = [s for s in steps if _seen(s[1]) in self.slopes]
            _need(len(bends) == 1 and bends[0][0] == "multiply")
            steps.remove(bends[0])
        _need(all(not x.shape.rank for _, x in steps))
        if Counter(steps) == Counter(self.s.applied):
            return None
        chain, scale = _product(steps), _product(self.s.applied)
        chain = b.constant(1.0, "f32") if chain is None else chain
        if scale is None:
            return chain
        zero = b.constant(0.0, "f32")
        return b.select(b.compare(scale, zero, "EQ"), zero, b.divide(chain, scale))

    def _unmasked(self, role: Role) -> list[tuple[str, Instruction]]:
        """What a gradient of scores is scaled with; where scores were replaced it has to be 0."""
        selects = [
            (x, opcode == "select") for opcode, x in role.chain if opcode in ("select", "unselect")
        ]
        if self.s.mask is None:
            _need(not selects)
        else:
            same = (
                (bare(self.s.mask), self.s.visible),
                (bare(_not(self.s.mask)), not self.s.visible),
            )
            _need(len(selects) == 1 and selects[0] in same)
        return [(opcode, x) for opcode, x in role.chain if opcode in ("multiply", "divide")]

    def _kept(self, batch: tuple[Size, ...]) -> list[bool]:
        """Which batch dimensions the gradient of the bias has. There is one, of a bias as it was added."""
        (s,) = self.roles.sums if len(self.roles.sums) == 1 else (None,)
        _need(
            s is not None
            and len(self.s.biases) >= 1
            and not self.s.biases[0][1]
            and not self._unmasked(s.role)
        )
        return [d not in s.x["dimensions"] for d in range(len(batch))]

    def _fusion(
        self,
        kind: str,
        inputs: tuple[Instruction, ...],
        common: list[Instruction],
        config: dict,
        batch: tuple[Size, ...],
    ) -> Instruction:
        arrays = [
            b.reshape(x, (*batch, *x.shape.dims[-2:]))
            for x in inputs[: 4 if kind == "backward" else 3]
        ]
        if kind == "backward":
            rows = arrays[1].shape.dims[-2]
            arrays += [
                b.reshape(inputs[4], (*batch, rows, inputs[4].shape.dims[-1])),
                *(b.reshape(x, (*batch, rows)) for x in inputs[5:]),
            ]
        operands = (*arrays, *common)
        params = tuple(instr("parameter", (), o.shape, index=i) for i, o in enumerate(operands))
        results = _meaning(kind, params, config, batch)
        text = json.dumps({"attention": kind, **config}, separators=(",", ":"))
        made = instr(
            "fusion",
            operands,
            results.shape,
            kind="custom",
            calls=Computation("attention", params, results),
            backend_config=text,
        )
        _need(attention_of(made) is not None)
        carry_meta(self.anchor.x, made)
        return made

    def _result(
        self, p: Product, fused: Instruction, index: int, ratio: Instruction | None = None
    ) -> Instruction:
        """A result of the fusion in place of a product."""
        y = _scaled(b.get_tuple_element(fused, index), ratio)
        *batch, n, m = p.x.shape.dims
        y = b.reshape(y, (*batch, *((m, n) if p.turned else (n, m))))
        y = turned(y, (*range(len(batch)), len(batch) + 1, len(batch))) if p.turned else y
        return y if p.x.shape.dtype == "f32" else b.convert(y, p.x.shape.dtype)


def _seen(x: Instruction) -> Instruction:
    """What an array is a view of, its last two dimensions kept."""
    while is_view(x, 2):
        x = x.operands[0]
    return x


def _rearranged(x: Instruction) -> tuple:
    """What `x` has the elements of, converted, and how they are arranged: equal for equal arrays."""
    moves = []
    while x.op in ("reshape", "transpose", "convert"):
        if x.op == "convert":
            if not is_view(x, 0):
                break
        else:
            moves.append((x.shape.dims, x.get("dimensions")))
        x = x.operands[0]
    return x, tuple(moves)


def _dots_above(
    x: Instruction, last: tuple[Size, ...], seen: set[Instruction]
) -> list[Instruction]:
    """Products of these last dimensions that elementwise instructions lead to `x` from, but for what `seen` leads to."""
    found, stack = [], [o for o in x.operands if o not in seen]
    while stack:
        y = stack.pop()
        if y.op == "dot":
            found.append(y)
        elif y.op in ELEMENTWISE and y not in seen:
            stack += (o for o in y.operands if o.shape.dims[-2:] == last)
    return found


def _not(mask: Instruction) -> Instruction:
    """The opposite of a mask, taken before it is repeated."""
    if mask.op == "not":
        return mask.operands[0]
    if mask.op in ("broadcast", "reshape"):
        return instr(mask.op, (_not(mask.operands[0]),), mask.shape, **dict(mask.attrs))
    return b.not_(mask)


def _small(x: Instruction, full: tuple[Size, ...]) -> Instruction:
    """`x`, seen as [batch…, rows, columns], with 1 where it is repeated."""
    repeated = x
    while (
        repeated.op == "reshape"
        and repeated.shape.dims != full
        and repeated.operands[0].shape.dims[-2:] == full[-2:]
    ):
        repeated = repeated.operands[0]
    if repeated.op == "broadcast" and repeated.shape.dims == full:
        return b.reshape(
            repeated.operands[0],
            tuple(n if d in repeated["dimensions"] else 1 for d, n in enumerate(full)),
        )
    return b.reshape(x, full)


def _wide(arrays: tuple[Instruction, ...]) -> list[Instruction]:
    """Arrays of one rank, repeated to the same dimensions."""
    dims = tuple(
        next((n for n in sizes if n != 1), 1)
        for sizes in zip(*(x.shape.dims for x in arrays), strict=True)
    )
    return [_repeated(x, dims) for x in arrays]


def _repeated(x: Instruction, dims: tuple[Size, ...]) -> Instruction:
    if x.shape.dims == dims:
        return x
    kept = tuple(d for d, n in enumerate(x.shape.dims) if n == dims[d])
    return b.broadcast(b.reshape(x, tuple(dims[d] for d in kept)), dims, kept)


def _times(x: Instruction, number: float) -> Instruction:
    return b.multiply(x, b.full(number, "f32", x.shape.dims))


def _meaning(
    kind: str, params: tuple[Instruction, ...], config: dict, batch: tuple[Size, ...]
) -> Instruction:
    """What the fusion computes, of its parameters."""
    rest = list(params[3:] if kind == "forward" else params[7:])
    q, k, v = params[:3] if kind == "forward" else params[1:4]
    rank, own = len(batch) + 2, tuple(range(len(batch)))
    dims, rows = (*batch, q.shape.dims[-2], k.shape.dims[-2]), tuple(range(rank - 1))

    def dot(x: Instruction, y: Instruction, lhs: int, rhs: int) -> Instruction:
        return b.dot(_as_f32(x), _as_f32(y), (rank + lhs,), (rank + rhs,), own, own)

    cap = rest.pop() if config.get("capped") else None
    scale = rest.pop() if config.get("dynamic") else None
    factors = rest.pop() if config.get("factors") else None
    fill = rest.pop() if config.get("fill") else None
    bias = _repeated(rest[0], dims) if rest else None
    s = _scaled(dot(q, k, -1, -1), scale)
    if cap is not None:
        caps = b.broadcast(cap, dims)
        bent = b.tanh(b.divide(s, caps))
        s = b.multiply(bent, caps)
    hidden = None
    if bias is not None and bias.shape.dtype != "pred":
        hidden = b.compare(bias, b.full(_HIDDEN, "f32", dims), "EQ") if fill is not None else None
        s = b.add(s, bias)
    elif bias is not None:
        hidden = b.not_(bias)
    if hidden is not None:
        s = b.select(hidden, b.broadcast(fill, dims), s)
    if kind == "forward":
        top = b.reduce(s, b.constant(float("-inf"), "f32"), (rank - 1,), "maximum")
        e = b.exponential(b.subtract(s, b.broadcast(top, dims, rows)))
        total = b.reduce(e, b.constant(0.0, "f32"), (rank - 1,), "add")
        p = b.divide(e, b.broadcast(total, dims, rows))
        return b.tuple_(
            dot(p if factors is None else b.multiply(p, factors), v, -1, -2),
            *(_times(x, 1 / math.log(2)) for x in (top, b.log(total))),
        )
    grad, out, top, total = params[0], *params[4:7]
    zero = b.constant(0.0, "f32")
    relative = b.subtract(_times(s, 1 / math.log(2)), b.broadcast(top, dims, rows))
    p = b.exponential(_times(b.subtract(relative, b.broadcast(total, dims, rows)), math.log(2)))
    dp = dot(grad, v, -1, -1)
    delta = b.reduce(b.multiply(_as_f32(grad), _as_f32(out)), zero, (rank - 1,), "add")
    used, dp = (p, dp) if factors is None else (b.multiply(p, factors), b.multiply(dp, factors))
    ds = b.multiply(p, b.subtract(dp, b.broadcast(delta, dims, rows)))
    if hidden is not None:
        ds = b.select(hidden, b.full(0.0, "f32", dims), ds)
    if cap is not None:
        ds = b.multiply(ds, b.subtract(b.full(1.0, "f32", dims), b.multiply(bent, bent)))
    results = [
        _scaled(dot(ds, k, -1, -2), scale),
        _scaled(dot(ds, q, -2, -2), scale),
        dot(used, grad, -2, -2),
    ]
    if "bias_gradient" in config:
        results.append(
            b.reduce(
                ds,
                zero,
                tuple(d for d, kept in enumerate(config["bias_gradient"]) if not kept),
                "add",
            )
        )
    return b.tuple_(*results)
