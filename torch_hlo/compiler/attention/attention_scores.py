"""The scores that attention written out makes weights of: q, k and what is applied to their
products, found by going back from the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_hlo.hlo.ir import Instruction, Users, splat

from .attention import FLOATS
from .attention_roles import Unknown, is_view, need, scalar, sides, turned

Steps = list[tuple[str, Instruction]]  # (opcode, scalar)


@dataclass(slots=True)
class Scores:
    """What leads to the weights: `scale`: (opcode, scalar) applied to the products q k, first to
    last. `biases`: what is added, each with what is applied to it after that. `mask`: true where a
    score counts, with its reshapes, and `fill`, the score elsewhere. `inside`: the instructions.
    `saved`: what the program has saved of the rows' maxima (0) and sums (1); `given`: both, in the
    program that begins with them. `cap`: what the tanh of scaled products, `bent`, is multiplied
    with; biases and masks come after it."""

    q: Instruction
    k: Instruction
    scale: Steps
    biases: list[tuple[Instruction, Steps]]
    mask: Instruction | None
    visible: bool  # where the mask is true
    fill: Instruction | None
    inside: set[Instruction]
    saved: dict[Instruction, int]
    given: Sequence[Instruction]
    cap: Steps | None
    bent: Instruction | None

    @property
    def applied(self) -> Steps:
        """What scores are multiplied with in all, and so their gradients, but for the derivative of
        the tanh."""
        return [*self.scale, *(self.cap or ())]


def scores_of(weights: Instruction, reads: Users) -> Scores:
    """The scores whose softmax `weights` is: exp(s - max(s)) / sum(exp(s - max(s))), or a marked
    call. Raises Unknown."""
    return _Way(weights, reads).found()


class _Way:
    """From weights back to the products of q and k."""

    def __init__(self, weights: Instruction, reads: Users) -> None:
        need(weights.dtype == "f32" and weights.rank >= 3 and weights.size != 0)
        self.weights = weights
        self.last = weights.dims[-2:]
        self.inside = {weights}
        self.given: Sequence[Instruction] = ()
        self.saved: dict[Instruction, int] = {}
        self.mask: Instruction | None = None
        self.fill: Instruction | None = None
        self.visible = True
        self.biases: list[tuple[Instruction, Steps]] = []
        self.outer: Steps = []
        self.cap: Steps | None = None
        self.bent: Instruction | None = None
        self.start = self._softmax(reads)

    def found(self) -> Scores:
        y = self._seen(self.start, "select", "add", "multiply", "divide", "tanh", "dot")
        while y.op != "dot":
            y = self._seen(self._before(y), "add", "multiply", "divide", "tanh", "dot")
        q = rows_of(y, 0)
        k = rows_of(y, 1)
        need(q.dtype == k.dtype and q.dtype in FLOATS)
        return Scores(
            q,
            k,
            self.outer[::-1],
            self.biases,
            self.mask,
            self.visible,
            self.fill,
            self.inside,
            self.saved,
            self.given,
            self.cap,
            self.bent,
        )

    def _seen(self, y: Instruction, *opcodes: str) -> Instruction:
        """`y`, through reshapes of its leading dimensions and conversions."""
        while is_view(y, 2):
            self.inside.add(y)
            y = y.operand
        need(y.op in opcodes and y.dims[-2:] == self.last)
        self.inside.add(y)
        return y

    def _reduced(self, y: Instruction, opcode: str, of: Instruction) -> None:
        """`y` has to repeat along rows a reduction of `of` along them."""
        need(y.op == "broadcast" and y["dimensions"] == tuple(range(y.rank - 1)))
        r = y.operand
        need(
            r.op == "reduce"
            and r.operand is of
            and r["dimensions"] == (of.rank - 1,)
            and r["to_apply"].root.op == opcode
        )
        need(
            splat(r.operands[1]) == (0 if opcode == "add" else float("-inf"))
            and r["to_apply"].root.operands == r["to_apply"].params
        )
        self.inside |= {y, r}

    def _softmax(self, reads: Users) -> Instruction:
        """What the weights are the softmax of."""
        weights = self.weights
        if weights.op == "divide":
            e = self._seen(weights.operand, "exponential")
            self._reduced(weights.operands[1], "add", e)
            difference = self._seen(e.operand, "subtract")
            self._reduced(difference.operands[1], "maximum", difference.operand)
            return difference.operand
        if weights.op == "call":
            scores, *self.given = weights.operands
            return scores
        (call,) = weights.operands
        self.inside.add(call)
        self.saved = {u: u["index"] - 1 for u in reads[call] if u is not weights}
        return call.operand

    def _before(self, y: Instruction) -> Instruction:
        """What `y` is made of, one step nearer to the products."""
        if y.op == "select":
            need(self.mask is None and not self.biases and not self.outer and self.cap is None)
            other = [i for i in (1, 2) if scalar(y.operands[i]) is not None]
            need(len(other) == 1)
            self.mask = y.operand
            self.fill = scalar(y.operands[other[0]])
            self.visible = other[0] == 2
            return y.operands[3 - other[0]]
        if y.op == "add":
            i = next((i for i in (0, 1) if _leads_to_dot(y.operands[i])), -1)
            need(i >= 0 and self.cap is None)
            self.biases.append((y.operands[1 - i], self.outer[::-1]))
            return y.operands[i]
        if y.op == "tanh":
            need(self.cap is None)
            self.cap = self.outer[::-1]
            self.outer = []
            self.bent = y
            return y.operand
        for i in (1, 0) if y.op == "multiply" else (1,):
            number = scalar(y.operands[i])
            if number is not None:
                self.outer.append((y.op, number))
                return y.operands[1 - i]
        raise Unknown


def rows_of(x: Instruction, side: int) -> Instruction:
    """An operand of a dot as [batch…, free, contracted]."""
    batch, contracted, free = sides(x, side)
    need(len(contracted) == len(free) == 1)
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
            x = x.operand
        else:
            return x.op == "dot"
