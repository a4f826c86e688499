"""attention_match: attention written out as products and a softmax becomes the fusions that
compiler/attention/attention.py describes, forward and backward.

    s = dot(q, k) * c + b, or where(mask, s, fill), or tanh(dot(q, k) / c) * c before that; w =
    exp(s - max(s)) / sum(...); y = dot(w * dropout, v)
 -> y = get-tuple-element(fusion(q, k, v, b, c), kind=custom, backend_config={"attention":"forward",
 …}), index=0
    and the products of its gradient -> a backward fusion that computes w again from the log-sum-exp

A program may be the forward or the backward half of it, in which the weights are marked calls: one
returns two numbers per row, results of its fusion, the other begins with them.

Recognized by structure, after the identities have brought every spelling into one form: what leads
to the weights here, what is made of them by attention_roles. Nothing else may read the scores, the
weights or their gradients: attention whose weights are returned stays as it is. A row that sees
nothing is NaN, as softmax's is.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch_hlo.hlo.ir import (
    Computation,
    Dims,
    Instruction,
    Instructions,
    Module,
    Replacements,
    Users,
    build as b,
    carry_meta,
    inline,
    instr,
    parameters_of,
    postorder,
    replace,
    splat,
    substituted,
    users,
)

from ..hlo_pass import hlo_pass, over_computations
from .attention import attention_of, marked_weights
from .attention_meaning import HIDDEN, as_f32, meaning, repeated, scaled
from .attention_roles import ELEMENTWISE, Product, Role, Roles, Unknown, bare, is_view, need, turned
from .attention_scores import Scores, rows_of, scores_of


@hlo_pass
def attention_match(module: Module) -> Module:
    """Products and a softmax -> fused attention."""
    return over_computations(module, _matched)


def _matched(c: Computation) -> Computation:
    if not any(x.op == "exponential" or marked_weights(x) for x in c.instructions()):
        return c
    c = _with_separate_sums(c)
    order = postorder((c.root,))
    reads = users((c.root,))
    number = {x: i for i, x in enumerate(order)}
    table: Replacements = {}
    calls: Replacements = {}
    for x in order:
        calls |= _inlined(x, reads)
        if _may_be_weights(x):
            try:
                table |= _Attention(x, reads, number, c.root).replacements()
            except Unknown:
                continue
    table = calls | table
    return Computation(c.name, c.params, substituted(c.root, table)) if table else c


def _may_be_weights(x: Instruction) -> bool:
    if x.op == "get-tuple-element":
        return marked_weights(x.operand) and x["index"] == 0
    return marked_weights(x) or x.op == "divide" and x.operand.op == "exponential"


def _inlined(x: Instruction, reads: Users) -> Replacements:
    """What replaces marked weights that are in no attention."""
    if not marked_weights(x):
        return {}
    found = inline(x["to_apply"], x.operands)
    return {u: found.operands[u["index"]] for u in reads[x]} if x.is_tuple else {x: found}


def _with_separate_sums(c: Computation) -> Computation:
    """Sums over batch dimensions of added arrays of gradients -> added sums: a bias that layers
    share."""
    table = {}
    for x in postorder((c.root,)):
        if (
            x.op == "reduce"
            and x.rank >= 2
            and x.dims[-2:] == x.operand.dims[-2:]
            and x["to_apply"].root.op == "add"
        ):
            leaves = []
            stack = [x.operand]
            while stack:
                y = stack.pop()
                if y.op == "add":
                    stack += y.operands
                elif is_view(y, 2):
                    stack.append(y.operand)
                else:
                    leaves.append(y)
            if (
                len(leaves) > 1
                and any(y.op == "subtract" for y in leaves)
                and splat(x.operands[1]) == 0
            ):
                dims = x.operand.dims
                parts = [
                    b.reduce(
                        b.reshape(as_f32(y), dims),
                        b.constant(0.0, "f32"),
                        x["dimensions"],
                        "add",
                    )
                    for y in leaves
                ]
                total = parts[0]
                for part in parts[1:]:
                    total = b.add(total, part)
                table[x] = total if x.dtype == "f32" else b.convert(total, x.dtype)
    return Computation(c.name, c.params, substituted(c.root, table)) if table else c


def _product(steps: list[tuple[str, Instruction]]) -> Instruction | None:
    """The f32 scalar that steps multiply with, None for 1."""
    total = None
    for opcode, number in steps:
        number = number if number.dtype == "f32" else b.convert(number, "f32")
        total = (
            number
            if total is None and opcode == "multiply"
            else instr(opcode, (b.constant(1.0, "f32") if total is None else total, number))
        )
    return total


@dataclass(slots=True)
class _Attention:
    """One attention around its weights."""

    weights: Instruction
    reads: Users
    number: dict[Instruction, int]
    root: Instruction
    s: Scores = field(init=False)
    roles: Roles = field(init=False)
    slopes: set[Instruction] = field(init=False)  # the derivative of the tanh of a cap: 1 - tanh^2
    anchor: Product = field(init=False)  # of the weights: it says what they are multiplied with

    def replacements(self) -> Replacements:
        """New instructions for the products and sums of this attention. Raises Unknown."""
        self.s = scores_of(self.weights, self.reads)
        self.slopes = self._slopes()
        self.roles = self._followed()
        weighted = [p for p in self.roles.products if p.role.kind == "weights"]
        outs = [p for p in weighted if p.over == "columns"]
        need(
            bool(weighted)
            and len(outs) == (not self.s.given)
            and all(p.role.factors == weighted[0].role.factors for p in self.roles.products)
        )
        self.anchor = (outs or weighted)[0]
        q = self.s.q
        k = self.s.k
        rest = [p for p in self.roles.products if p not in outs]
        grads = [
            x for x, role in self.roles.roles.items() if role.kind == "grads" and x.op == "dot"
        ]
        need(len(grads) == bool(rest or self.roles.sums))
        batch = self.roles.sums[0].array.dims[:-2] if self.roles.sums else self._batch()
        common, config = self._operands(batch)
        table = {}
        if outs:
            v = outs[0].other
            forward = self._fusion("forward", (q, k, v), common, config, batch)
            rows = tuple(b.get_tuple_element(forward, i) for i in (1, 2))
            table = {outs[0].x: self._result(outs[0], forward, 0)}
            table |= {x: b.reshape(rows[i], x.dims) for x, i in self.s.saved.items()}
        self._check_private(table.keys())
        if not grads:
            return table
        grad = rows_of(grads[0], 0)
        values = rows_of(grads[0], 1)
        need(grad.dtype == q.dtype and (not outs or values is v))
        if outs:
            out = b.get_tuple_element(forward, 0)
            out = out if q.dtype == "f32" else b.convert(out, q.dtype)
        else:
            out = self._output_of(grad)
            rows = tuple(self.s.given)
        if self.roles.sums:
            config["bias_gradient"] = self._kept(batch)
        backward = self._fusion("backward", (grad, q, k, values, out, *rows), common, config, batch)
        for p in rest:
            index, operand = {
                ("weights", "rows"): (2, grad),
                ("scores", "columns"): (0, k),
                ("scores", "rows"): (1, q),
            }[p.role.kind, p.over]
            need(p.other is operand)
            table[p.x] = self._result(
                p, backward, index, None if index == 2 else self._ratio(p.role)
            )
        for s in self.roles.sums:
            table[s.x] = b.reshape(b.get_tuple_element(backward, 3), s.x.dims)
        return table

    def _slopes(self) -> set[Instruction]:
        """The arrays that are 1 - tanh(x)^2, of the tanh of a cap; what leads to them is part of
        the attention."""
        found: set[Instruction] = set()
        for square in self._viewed(self.s.bent) if self.s.bent is not None else ():
            if square.op == "multiply" and len({_seen(o) for o in square.operands}) == 1:
                found |= {
                    x for x in self._viewed(square) if x.op == "subtract" and splat(x.operand) == 1
                }
        for x in found:
            self._viewed(x)
        return found

    def _viewed(self, x: Instruction) -> list[Instruction]:
        """What reads `x` or a view of it, which are part of the attention."""
        self.s.inside.add(x)
        return [u for y in self.reads[x] for u in (self._viewed(y) if is_view(y, 2) else (y,))]

    def _output_of(self, grad: Instruction) -> Instruction:
        """The output whose gradient is `grad`: their products' sums are what is subtracted from the
        gradients of weights."""
        found = {
            x.operands[1].operand
            for x, role in self.roles.roles.items()
            if role.kind == "difference" and x.op == "subtract"
        }
        need(len(found) == 1)
        (sums,) = found
        while is_view(sums, 1):
            sums = sums.operand
        need(
            sums.op == "reduce"
            and sums["dimensions"] == (sums.operand.rank - 1,)
            and sums["to_apply"].root.op == "add"
            and splat(sums.operands[1]) == 0
        )
        product = _seen(sums.operand)
        need(product.op == "multiply")
        sources = [_rearranged(x) for x in product.operands]
        need(_rearranged(grad) in sources)
        out = _seen(product.operands[sources[0] == _rearranged(grad)])
        return out if out.dtype == grad.dtype else b.convert(out, grad.dtype)

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
        """Products of the size of the weights with what the weights are multiplied with, or that
        lead to what they are multiplied with."""
        last = self.weights.dims[-2:]
        seen = {self.weights}
        stack = [self.weights]
        found = []
        while stack:
            x = stack.pop()
            for u in self.reads[x]:
                if u.op == "dot":
                    values = u.operands[u.operand is x]
                    found += [
                        y
                        for y in self.reads[values]
                        if y.op == "dot"
                        and y.operands[1] is values
                        and y.dims[-2:] == last
                        and y not in self.s.inside
                    ]
                elif (
                    u not in seen and not u.is_tuple and u.dims[-2:] == last and u.op in ELEMENTWISE
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
            need(x is not self.root and all(u in known or u in ends for u in self.reads[x]))

    def _batch(self) -> Dims:
        """Batch dimensions, as fine as masks and biases have them: what they repeat is not
        written."""
        arrays = [
            self.s.mask,
            *(x for x, _ in self.s.biases),
            *(x for _, x in self.anchor.role.factors),
        ]
        dims = [self.weights.dims]
        for x in arrays:
            if x is not None and x.rank:
                while x.op == "reshape" and x.operand.dims[-2:] == x.dims[-2:]:
                    x = x.operand
                if x.dims[-2:] == dims[0][-2:]:
                    dims.append(x.dims)
        return max(dims, key=len)[:-2]

    def _operands(self, batch: Dims) -> tuple[list[Instruction], dict[str, Any]]:
        """The operands that forward and backward have in common, and the configuration."""
        s = self.s
        full = (*batch, *self.weights.dims[-2:])
        operands = []
        config = {"causal": False, "scale": 1.0, "softmax": True}
        bias = None
        for x, steps in s.biases:
            x = scaled(as_f32(x), _product(steps))
            x = _small(x, full)
            bias = x if bias is None else b.add(*_wide((bias, x)))
        if s.mask is not None:
            mask = s.mask if s.visible else _not(s.mask)
            mask = _small(mask, full)
            if bias is not None:
                mask, bias = _wide((mask, bias))
                bias = b.select(mask, bias, b.full(HIDDEN, "f32", bias.dims))
            else:
                bias = mask
            config["fill"] = True
        if bias is not None:
            operands.append(bias)
        if s.fill is not None:
            operands.append(as_f32(s.fill))
        if self.anchor.role.factors:
            operands.append(self._factors(full))
            config["factors"] = True
        cap = None if s.cap is None else _product(s.cap) or b.constant(1.0, "f32")
        for name, number in (("dynamic", _product(s.applied)), ("capped", cap)):
            if number is not None:
                operands.append(number)
                config[name] = True
        return operands, config

    def _factors(self, full: Dims) -> Instruction:
        """What weights are multiplied with after the softmax, f32."""
        total = b.full(1.0, "f32", full)
        for opcode, x in sorted(self.anchor.role.factors, key=lambda s: s[0]):  # masks last
            if opcode in ("select", "unselect"):
                yes, no = (total, b.full(0.0, "f32", full))[:: 1 if opcode == "select" else -1]
                total = b.select(b.reshape(x, full), yes, no)
            else:
                x = as_f32(x)
                total = instr(
                    opcode,
                    (
                        total,
                        b.broadcast(x, full) if not x.rank else b.reshape(x, full),
                    ),
                )
        return total

    def _ratio(self, role: Role) -> Instruction | None:
        """The gradients of scores are scaled by the program's own numbers: those, divided by the
        scale that the kernel has applied."""
        steps = self._unmasked(role)
        if self.s.cap is not None:
            bends = [s for s in steps if _seen(s[1]) in self.slopes]
            need(len(bends) == 1 and bends[0][0] == "multiply")
            steps.remove(bends[0])
        need(all(not x.rank for _, x in steps))
        if Counter(steps) == Counter(self.s.applied):
            return None
        chain = _product(steps)
        scale = _product(self.s.applied)
        chain = b.constant(1.0, "f32") if chain is None else chain
        if scale is None:
            return chain
        zero = b.constant(0.0, "f32")
        return b.select(b.compare(scale, zero, "EQ"), zero, b.divide(chain, scale))

    def _unmasked(self, role: Role) -> list[tuple[str, Instruction]]:
        """What a gradient of scores is scaled with; where scores were replaced it has to be 0."""
        selects = [
            (_of_batch(x), opcode == "select")
            for opcode, x in role.chain
            if opcode in ("select", "unselect")
        ]
        if self.s.mask is None:
            need(not selects)
        else:
            same = (
                (_of_batch(self.s.mask), self.s.visible),
                (_of_batch(_not(self.s.mask)), not self.s.visible),
            )
            need(len(selects) == 1 and selects[0] in same)
        return [(opcode, x) for opcode, x in role.chain if opcode in ("multiply", "divide")]

    def _kept(self, batch: Dims) -> list[bool]:
        """Which batch dimensions the gradient of the bias has. There is one, of a bias as it was
        added."""
        sums = self.roles.sums
        s = sums[0]
        need(
            len(sums) == 1
            and len(self.s.biases) >= 1
            and not self.s.biases[0][1]
            and not self._unmasked(s.role)
        )
        return [d not in s.x["dimensions"] for d in range(len(batch))]

    def _fusion(
        self,
        kind: str,
        inputs: Instructions,
        common: list[Instruction],
        config: dict[str, Any],
        batch: Dims,
    ) -> Instruction:
        arrays = [
            b.reshape(x, (*batch, *x.dims[-2:])) for x in inputs[: 4 if kind == "backward" else 3]
        ]
        if kind == "backward":
            rows = arrays[1].dims[-2]
            arrays += [
                b.reshape(inputs[4], (*batch, rows, inputs[4].dims[-1])),
                *(b.reshape(x, (*batch, rows)) for x in inputs[5:]),
            ]
        operands = (*arrays, *common)
        params = parameters_of(o.shape for o in operands)
        results = meaning(kind, params, config, batch)
        text = json.dumps({"attention": kind, **config}, separators=(",", ":"))
        made = b.kernel(operands, Computation("attention", params, results), text)
        need(attention_of(made) is not None)
        carry_meta(self.anchor.x, made)
        return made

    def _result(
        self,
        p: Product,
        fused: Instruction,
        index: int,
        ratio: Instruction | None = None,
    ) -> Instruction:
        """A result of the fusion in place of a product."""
        y = scaled(b.get_tuple_element(fused, index), ratio)
        *batch, n, m = p.x.dims
        y = b.reshape(y, (*batch, *((m, n) if p.turned else (n, m))))
        y = turned(y, (*range(len(batch)), len(batch) + 1, len(batch))) if p.turned else y
        return y if p.x.dtype == "f32" else b.convert(y, p.x.dtype)


def _seen(x: Instruction) -> Instruction:
    """What an array is a view of, its last two dimensions kept."""
    while is_view(x, 2):
        x = x.operand
    return x


def _rearranged(x: Instruction) -> tuple[object, ...]:
    """What `x` has the elements of, converted, and how they are arranged: equal for equal
    arrays."""
    moves = []
    while x.op in ("reshape", "transpose", "convert"):
        if x.op == "convert":
            if not is_view(x, 0):
                break
        else:
            moves.append((x.dims, x.get("dimensions")))
        x = x.operand
    return x, tuple(moves)


def _dots_above(x: Instruction, last: Dims, seen: set[Instruction]) -> list[Instruction]:
    """Products of these last dimensions that elementwise instructions lead to `x` from, but for
    what `seen` leads to."""
    found = []
    stack = [o for o in x.operands if o not in seen]
    while stack:
        y = stack.pop()
        if y.op == "dot":
            found.append(y)
        elif y.op in ELEMENTWISE and y not in seen:
            stack += (o for o in y.operands if o.dims[-2:] == last)
    return found


def _not(mask: Instruction) -> Instruction:
    """The opposite of a mask, taken before it is repeated."""
    if mask.op == "not":
        return mask.operand
    if mask.op in ("broadcast", "reshape"):
        return replace(mask, (_not(mask.operand),), mask.shape)
    return b.not_(mask)


def _of_batch(mask: Instruction) -> Instruction:
    """A mask as it is however the batch is divided into dimensions: equal for equal ones."""
    mask = bare(mask)
    batch = mask.rank - 2
    if mask.op != "broadcast" or any(d < batch for d in mask["dimensions"]):
        return mask
    along = tuple(d - batch for d in mask["dimensions"])
    return b.broadcast(mask.operand, mask.dims[batch:], along)


def _small(x: Instruction, full: Dims) -> Instruction:
    """`x`, seen as [batch…, rows, columns], with 1 where it is repeated."""
    repeated = x
    while (
        repeated.op == "reshape"
        and repeated.dims != full
        and repeated.operand.dims[-2:] == full[-2:]
    ):
        repeated = repeated.operand
    if repeated.op == "broadcast" and repeated.dims == full:
        return b.reshape(
            repeated.operand,
            tuple(n if d in repeated["dimensions"] else 1 for d, n in enumerate(full)),
        )
    return b.reshape(x, full)


def _wide(arrays: Instructions) -> list[Instruction]:
    """Arrays of one rank, repeated to the same dimensions."""
    dims = tuple(
        next((n for n in sizes if n != 1), 1)
        for sizes in zip(*(x.dims for x in arrays), strict=True)
    )
    return [repeated(x, dims) for x in arrays]
