"""Which values are computed where moving instructions (slice, transpose, pad, gather, …) pick them
up, instead of in memory.

    t = transpose(reshape(slice(add(dot, bias))))      # one kernel reads the dot's result: slice
                                                       # and add are inlined

An inlined value is not written and read back. It is allowed when that costs no more work: all
elements together are computed about once, or they are cheap.
"""

from collections.abc import Mapping, Sequence

from torch_hlo.hlo.ir import Instruction

from . import fusion_table as table
from .fusion_table import FREE, HEAVY, LIGHT, MOVE

MAX_SITES = 4  # places in the program that compute an inlined value
MAX_CHAIN = 24  # cost of what is inlined in one place
SAME_WORK = 1.25  # evaluations per element that count as "once"
CHEAP_WORK = 4
ROW = 8  # elements of a gathered run that are worth reading as vectors


def inlined(
    order: Sequence[Instruction],
    kinds: Sequence[int],
    users: Sequence[Sequence[int]],
    root: int,
) -> list[int]:
    """Numbers of the instructions to compute in place of their uses. `kinds` as in
    fusion_table.classify."""
    # number -> (sites, evaluations, cost of everything up to the uses)
    chosen: dict[int, tuple[int, float, float]] = {}
    picked = _picked_rows(order, kinds)
    for i in range(len(order) - 1, -1, -1):
        x = order[i]
        if kinds[i] not in (LIGHT, HEAVY, MOVE) or i == root or x.op == "get-tuple-element":
            continue
        if _is_rounded_product(x):
            # the product's kernel writes fewer bytes, once
            continue
        if picked[i] > 1 and _is_turned(i, order, users):
            # along another dimension every element of every row would be looked up by itself
            continue
        found = _uses(i, order, kinds, users, root, chosen)
        if found is None:
            continue
        sites, evaluations, chain = found
        own = table.cost(x)
        size = x.size
        work = evaluations / size if isinstance(size, int) and size else 1.0
        if (
            work > 1
            and x.op == "transpose"
            and x["dimensions"][-1] != x.rank - 1
            and _makes_rows(i, order, users, chosen)
        ):
            continue
        # which operand of a concatenation is read is chosen every time
        is_cheap = own <= 4 and x.op != "concatenate"
        affordable = work <= SAME_WORK or is_cheap and work <= CHEAP_WORK
        if 0 < sites <= MAX_SITES and chain + own <= MAX_CHAIN and affordable:
            chosen[i] = (sites, evaluations, chain + own)
    return list(chosen)


# of an instruction computed where it is read: see `_uses`
_Chosen = Mapping[int, tuple[int, float, float]]


def _is_row(x: Instruction) -> bool:
    """Whether a gather takes whole rows, and leaves them rows."""
    size = x.dims[-1] if x.rank else 0
    return (
        isinstance(size, int)
        and size >= ROW
        and x.rank - 1 in x["offset_dims"]
        and size == x["slice_sizes"][-1] == x.operand.dims[-1]
    )


def _makes_rows(
    i: int,
    order: Sequence[Instruction],
    users: Sequence[Sequence[int]],
    chosen: _Chosen,
) -> bool:
    """Whether `i` is read by gathers of rows that are computed as rows."""
    return any(
        y.op == "gather"
        and u not in chosen
        and _is_row(y)
        or y.op == "reshape"
        and _makes_rows(u, order, users, chosen)
        for u in users[i]
        for y in (order[u],)
    )


def _picked_rows(order: Sequence[Instruction], kinds: Sequence[int]) -> list[int]:
    """Per instruction: how many gathers of whole rows its elements are computed from, in place
    (samples of images are weighted sums of some)."""
    at = {x: i for i, x in enumerate(order)}
    found = [0] * len(order)
    for i, x in enumerate(order):
        if x.op == "gather":
            found[i] = int(_is_row(x))
        elif kinds[i] in (LIGHT, HEAVY):
            found[i] = sum(found[at[o]] for o in x.operands if o.dims == x.dims)
    return found


def _is_rounded_product(x: Instruction) -> bool:
    """Whether `x` makes sums of a product narrow, perhaps with a bias."""
    if x.op != "convert" or x.itemsize >= x.operand.itemsize:
        return False
    sums = x.operand.operands if x.operand.op == "add" else (x.operand,)
    return any(o.op == "dot" and o.size == x.size for o in sums)


def _is_turned(i: int, order: Sequence[Instruction], users: Sequence[Sequence[int]]) -> bool:
    """Whether a transpose that reads `i` has another dimension innermost."""
    return any(
        y.op == "transpose"
        and y["dimensions"][-1] != y.rank - 1
        or y.op == "reshape"
        and _is_turned(u, order, users)
        for u in users[i]
        for y in (order[u],)
    )


def _uses(
    i: int,
    order: Sequence[Instruction],
    kinds: Sequence[int],
    users: Sequence[Sequence[int]],
    root: int,
    chosen: _Chosen,
) -> tuple[int, float, float] | None:
    """(sites, evaluations, cost of the costliest chain) of the uses of `i`; None when one of them
    needs it in memory or at its own index."""
    sites = 0
    evaluations = 0.0
    chain = 0.0
    for u in users[i]:
        y = order[u]
        # loops are cut between the operands of a concatenation
        share = _size(order[i]) / _size(y) if y.op == "concatenate" and y.size else 1
        if u in chosen:
            n, count, cost = chosen[u]
            sites += n
            evaluations += count * share
            chain = max(chain, cost)
        elif kinds[u] == MOVE:
            size = y.size
            sites += 1
            evaluations += size * share if isinstance(size, int) else _size(order[i])
        elif kinds[u] == FREE and y.op in ("reshape", "broadcast") and u != root:
            found = _uses(u, order, kinds, users, root, chosen)
            if found is None:
                return None
            sites += found[0]
            evaluations += found[1]
            chain = max(chain, found[2])
        else:
            return None
    return sites, evaluations, chain


def _size(x: Instruction) -> float:
    """Elements of `x`; a moving use of a symbolic array counts as reading it once."""
    return x.size if isinstance(x.size, int) else 1.0
