"""What arrays of scores' size are in the gradient of an attention: found by following the weights W
= softmax(S) and G = dO V^T to their readers.

    weights(f)    W * f: f are factors of dropout, () for W itself             read by products: out
        = weights(f) V, dV = weights(f)^T dO
    grads(f)      G * f
    both(f)       W * G * f, and its sums over rows
    inner(f)      W * (those sums, repeated); G * f - sums
    scores(f, c)  W * (G * f - sums), the gradient of S, times the scalars c   read by products: dQ
        = scores K, dK = scores^T Q; and by sums: the bias's

Reshapes of leading dimensions and conversions between floating types change nothing. Whatever else
reads one of these arrays: `Unknown`, it has to be in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Ints, Users, build as b, splat

from .attention import FLOATS


class Unknown(Exception):
    """An array that attention computes is read in a way that is not understood."""


def need(condition: bool) -> None:
    """Raises Unknown unless `condition` holds."""
    if not condition:
        raise Unknown


@frozen
class Role:
    """`factors`: (opcode, operand) pairs, ("select", mask) or ("multiply" | "divide", array or
    scalar); `chain`: the same, applied to the gradient of scores."""

    kind: str
    factors: tuple[tuple[str, Instruction], ...] = ()
    chain: tuple[tuple[str, Instruction], ...] = ()

    def applied(self, step: tuple[str, Instruction]) -> Role:
        if self.kind == "scores":
            return Role(self.kind, self.factors, (*self.chain, step))
        if self.kind in ("weights", "grads"):
            return Role(
                self.kind,
                tuple(sorted((*self.factors, step), key=lambda s: (s[0], id(s[1])))),
            )
        raise Unknown


@frozen
class Product:
    """A product with an array of scores' size, `role`: `other` is [batch…, contracted, free].
    `over`: "rows" or "columns"; `turned`: the result is [batch…, free, rows or columns]."""

    x: Instruction
    role: Role
    other: Instruction
    over: str
    turned: bool


@frozen
class Sum:
    """A sum of gradients of scores over batch dimensions; `array`: what is summed, `role`: its."""

    x: Instruction
    role: Role
    array: Instruction


def turned(x: Instruction, dimensions: Ints) -> Instruction:
    """A transpose, if it is one."""
    return x if dimensions == tuple(range(x.rank)) else b.transpose(x, dimensions)


def sides(x: Instruction, side: int) -> tuple[Ints, Ints, Ints]:
    """(batch, contracted, free) dimensions of an operand of a dot."""
    batch, contracted = (
        x[("lhs", "rhs")[side] + name] for name in ("_batch_dims", "_contracting_dims")
    )
    return (
        batch,
        contracted,
        tuple(d for d in range(x.operands[side].rank) if d not in batch and d not in contracted),
    )


def other_operand(x: Instruction, side: int) -> Instruction:
    """An operand of a dot as [batch…, contracted, free]."""
    batch, contracted, free = sides(x, side)
    if len(contracted) != 1 or len(free) != 1:
        raise Unknown
    return turned(x.operands[side], (*batch, *contracted, *free))


def scalar(x: Instruction) -> Instruction | None:
    """The scalar that an array repeats."""
    return x.operand if x.op == "broadcast" and x.operand.rank == 0 else None


def bare(x: Instruction) -> Instruction:
    """`x` without reshapes and conversions of a mask."""
    while x.op == "reshape" or x.op == "convert" and x.operand.dtype == "pred":
        x = x.operand
    return x


def is_view(x: Instruction, kept: int) -> bool:
    """Whether `x` has the values of its operand, and its last `kept` dimensions."""
    if x.op == "convert":
        return x.dtype in FLOATS and x.operand.dtype in FLOATS
    return x.op == "reshape" and x.rank >= kept and x.operand.dims[-kept:] == x.dims[-kept:]


class Roles:
    """`roles`: of arrays. `products` and `sums`: what reads them and is not such an array."""

    def __init__(
        self,
        reads: Users,
        number: dict[Instruction, int],
    ) -> None:
        self.reads = reads
        self.number = number
        self.roles: dict[Instruction, Role] = {}
        self.products: list[Product] = []
        self.sums: list[Sum] = []
        self._queue: list[tuple[int, Instruction]] = []
        self._seen: set[Instruction] = set()

    def add(self, x: Instruction, role: Role) -> None:
        self.roles[x] = role
        for u in self.reads[x]:
            if u not in self._seen:
                self._seen.add(u)
                heappush(self._queue, (self.number[u], u))

    def follow(self) -> None:
        """All readers of the arrays added so far, operands first. Raises Unknown."""
        while self._queue:
            _, x = heappop(self._queue)
            if x in self.roles:
                continue
            if x.op == "dot":
                self._product(x)
                continue
            role = self._role(x)
            if role is not None:
                self.add(x, role)

    def _product(self, x: Instruction) -> None:
        mine = [i for i in (0, 1) if x.operands[i] in self.roles]
        if len(mine) != 1:
            raise Unknown
        (side,) = mine
        batch, contracted, _ = sides(x, side)
        rank = x.operands[side].rank
        role = self.roles[x.operands[side]]
        if (
            role.kind not in ("weights", "scores")
            or batch != tuple(range(rank - 2))
            or len(contracted) != 1
            or contracted[0] < rank - 2
        ):
            raise Unknown
        over = "columns" if contracted[0] == rank - 1 else "rows"
        self.products.append(Product(x, role, other_operand(x, 1 - side), over, side == 1))

    def _role(self, x: Instruction) -> Role | None:
        roles = [self.roles.get(o) for o in x.operands]
        if x.op == "reduce":
            return self._reduced(x, roles[0])
        if x.op in ("reshape", "convert"):
            role = roles[0]
            if role is not None and is_view(x, 1 if role.kind == "sums" else 2):
                return role
            raise Unknown
        rule = _RULES.get(x.op)
        if rule is None:
            raise Unknown
        return rule(x, roles)

    def _reduced(self, x: Instruction, role: Role | None) -> Role | None:
        dims = x["dimensions"]
        rank = x.operand.rank
        body = x["to_apply"]
        if (
            role is None
            or body.root.op != "add"
            or set(body.root.operands) != set(body.params)
            or splat(x.operands[1]) != 0
        ):
            raise Unknown
        if role.kind == "both" and dims == (rank - 1,):
            return Role("sums", role.factors)
        if role.kind == "scores" and max(dims) < rank - 2:
            self.sums.append(Sum(x, role, x.operand))
            return None
        raise Unknown


def _broadcast(x: Instruction, roles: list[Role | None]) -> Role:
    (role,) = roles
    if role is None:
        raise Unknown
    if role.kind == "sums" and x["dimensions"] == tuple(range(x.rank - 1)):
        return Role("repeated", role.factors)
    raise Unknown


def _multiply(x: Instruction, roles: list[Role | None]) -> Role:
    for i in (0, 1):
        mine = roles[i]
        its = roles[1 - i]
        array = x.operands[1 - i]
        if mine is None:
            continue
        if its is None:
            number = scalar(array)
            if number is not None:
                return mine.applied(("multiply", number))
            mask = bare(array)
            if mask.dtype == "pred":
                return mine.applied(("select", mask))
            return mine.applied(("multiply", array))
        if mine.kind == "weights" and not mine.factors and its.kind in _TIMES_WEIGHTS:
            return Role(_TIMES_WEIGHTS[its.kind], its.factors)
    raise Unknown


_TIMES_WEIGHTS = {"grads": "both", "repeated": "inner", "difference": "scores"}


def _divide(x: Instruction, roles: list[Role | None]) -> Role:
    number = scalar(x.operands[1])
    if roles[0] is None or number is None:
        raise Unknown
    return roles[0].applied(("divide", number))


def _subtract(x: Instruction, roles: list[Role | None]) -> Role:
    left, right = roles
    if left is None:
        raise Unknown
    if (
        left.kind == "grads"
        and right is None
        and x.operands[1].op == "broadcast"
        and x.operands[1]["dimensions"] == tuple(range(x.rank - 1))
    ):
        return Role("difference", left.factors)  # of sums that are not computed from weights
    if right is not None and left.factors == right.factors:
        if (left.kind, right.kind) == ("both", "inner"):
            return Role("scores", left.factors)
        if (left.kind, right.kind) == ("grads", "repeated"):
            return Role("difference", left.factors)
    raise Unknown


def _select(x: Instruction, roles: list[Role | None]) -> Role:
    mask = bare(x.operand)
    _, yes, no = roles
    if yes is not None and no is None and splat(x.operands[2]) == 0:
        return yes.applied(("select", mask))
    if no is not None and yes is None and splat(x.operands[1]) == 0:
        return no.applied(("unselect", mask))
    raise Unknown


_RULES: dict[str, Callable[[Instruction, list[Role | None]], Role]] = {
    "broadcast": _broadcast,
    "multiply": _multiply,
    "divide": _divide,
    "subtract": _subtract,
    "select": _select,
}
ELEMENTWISE = frozenset((*_RULES, "reshape", "convert")) - {"broadcast"}
