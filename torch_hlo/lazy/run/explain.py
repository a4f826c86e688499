"""Why a program was compiled: its key against the nearest key in the cache, in words.

aten.mul.Tensor at model.py:31: argument 2 was 3, is 4
input 7 was f32[32,64], is f32[48,64] (first used by aten.mm.default at model.py:12)
"""

import re
from collections.abc import Collection, Sequence
from itertools import zip_longest
from operator import eq, ne

from .fingerprint import INDEX_BITS, OPS

# What a reason says: its kind, and what to do about it. The first that is found counts.
_KINDS = (
    (r"first program of this process", "first program", ""),
    (
        r"made longer by.*; for all sizes",
        "a tensor grows; all sizes from now on",
        "torch.cat makes it longer in each step. This program serves all lengths, but each step"
        " copies the tensor. Write into one of the full length instead: cache[:, t] = new.",
    ),
    (
        r"made longer by",
        "a tensor grows",
        "torch.cat makes it longer in each step, and lengths of their own compile anew. Write into"
        " one of the full length instead: cache[:, t] = new; or pad it to a few lengths"
        " (torch_hlo.pad_to_bucket).",
    ),
    (
        r"; for all sizes",
        "all sizes from now on",
        "A size changes. This program serves all sizes, so one is right; many mean that a size"
        " follows no rule. Programs of one size are faster: pad batches to a few lengths"
        " (torch_hlo.pad_to_bucket) if that matters.",
    ),
    (
        r": input \d+ was (\w+)\S* is \1\[",
        "size",
        "This size compiles anew. Let sizes repeat: pad batches to a few lengths"
        " (torch_hlo.pad_to_bucket) and drop the last, smaller batch.",
    ),
    (
        r": (the result|result|input) \S+ was sharded|the mesh was|for (many|one) device",
        "sharding",
        "Annotate tensors once, before the first step.",
    ),
    (
        r"now wanted|no longer wanted",
        "kept tensors",
        "Keep the same tensors in each step: delete what is not needed, and append"
        " `loss.detach()` to lists in every step or in none.",
    ),
    (
        r"dies in this step|stays alive|give their memory",
        "kept tensors",
        "A tensor is held over one step and not over the other. This is usual in the first two"
        " steps; later, look for what keeps it.",
    ),
    (
        r": input \d+ was|more ops|fewer ops|: was aten|: was an op",
        "other operations",
        "Python took another way: an if, a loop of another length, or a step that was cut at"
        " another place. Cut steps where the loop ends, with torch_hlo.mark_step().",
    ),
    (
        r" was .*, is .*a number that varies",
        "all numbers from now on",
        "A Python number changes. This program serves all its values.",
    ),
    (
        r" was .*, is ",
        "number",
        "A Python number is part of the program. Keep it the same, or make it a tensor:"
        " torch.tensor(value, device='hlo').",
    ),
    (r"threads|compiled for|passes left out", "settings", "Set it before the first step."),
    (r"dropped from the cache", "evicted", "Raise TORCH_HLO_PROGRAMS."),
)
# kinds of which one is worth telling
SETTLED = (
    "all sizes from now on",
    "all numbers from now on",
    "a tensor grows; all sizes from now on",
)
_RECENT = 32  # cached programs looked at, latest first


def reason(key: tuple, sources: Sequence[str], cached: Sequence) -> str:
    """One paragraph. `key` is the whole key (see program_cache.py); `sources` the nodes' Python
    lines; `cached` objects with .key and .name."""
    ops = len(key[0][0])
    if not cached:
        return f"{ops} ops, the first program of this process"
    nearest = max(list(cached)[: -_RECENT - 1 : -1], key=lambda c: _likeness(key, c.key))
    return (
        f"{ops} ops; nearest cached program {nearest.name}: {difference(key, nearest.key, sources)}"
    )


def judged(reason: str) -> dict[str, str]:
    """What `metrics.Compile` says of a reason: its `kind`, `advice` and `line`."""
    line = re.search(r" at (\S+:\d+)", reason)
    kind, advice = next(
        (found for pattern, *found in _KINDS if re.search(pattern, reason)), ("other", "")
    )
    return {"kind": kind, "advice": advice, "line": line[1] if line else ""}


def _likeness(a: tuple, b: tuple) -> float:
    nodes = a[0][0]
    others = b[0][0]
    same = sum(map(eq, nodes, others))
    # Nodes after an inserted or removed op differ only by position: count ops as well.
    ops = sum(map(eq, (n[0] for n in nodes), (n[0] for n in others)))
    tail = sum(map(eq, (n[0] for n in reversed(nodes)), (n[0] for n in reversed(others))))
    shapes = sum(map(eq, a[0][1], b[0][1]))
    return same + max(ops, tail) + shapes - abs(len(nodes) - len(others))


def difference(new: tuple, old: tuple, sources: Sequence[str] = ()) -> str:
    """The first thing in which two whole keys differ."""
    (nodes, shapes, roots), aliases, backend, disabled, threads, *where = new
    (
        (old_nodes, old_shapes, old_roots),
        old_aliases,
        old_backend,
        old_disabled,
        old_threads,
        *old_where,
    ) = old
    if backend != old_backend:
        return f"it was compiled for {old_backend}, this one is for {backend}"
    if disabled != old_disabled:
        return f"passes left out were {old_disabled or 'none'!r}, are {disabled or 'none'!r}"
    if threads != old_threads:
        return f"it was compiled for {old_threads} threads, there are {threads}"
    first = next((i for i, differs in enumerate(map(ne, nodes, old_nodes)) if differs), None)
    leaf = next((i for i, differs in enumerate(map(ne, shapes, old_shapes)) if differs), None)
    user = None if leaf is None else _first_user(nodes, ~leaf)
    # numbers that differ follow from the sizes
    alike = first is None or len(nodes) == len(old_nodes) and nodes[first][0] == old_nodes[first][0]
    if leaf is not None and (alike or user is not None and user <= first):
        how = "first used"
        kept = {*roots}  # which may be the next step's input
        for i, node in enumerate(nodes):
            if i << INDEX_BITS in kept and _mentions(node[1:], (~leaf,)) and "cat." in _op(node):
                how = "made longer"
                user = i
        by = (
            ""
            if user is None
            else f" ({how} by {_op(nodes[user])}{_users_line(nodes, user, sources)})"
        )
        return f"input {leaf} was {old_shapes[leaf]}, is {shapes[leaf]}{by}"
    if first is not None:
        where = f"op {first}, {_op(nodes[first])}{_users_line(nodes, first, sources)}"
        return _node_difference(where, nodes[first], old_nodes[first])
    if len(nodes) != len(old_nodes):
        if len(nodes) > len(old_nodes):
            at = len(old_nodes)
            return (
                f"{len(nodes) - at} more ops, the first of them {_op(nodes[at])}{_at(at, sources)}"
            )
        return (
            f"{len(old_nodes) - len(nodes)} fewer ops, the first that is missing is"
            f" {_op(old_nodes[len(nodes)])}"
        )
    if len(shapes) != len(old_shapes):
        return f"it had {len(old_shapes)} inputs, this one has {len(shapes)}"
    if roots != old_roots:
        return _roots_difference(roots, old_roots, nodes, sources)
    if aliases != old_aliases:
        return _aliases_difference(aliases, old_aliases, shapes)
    if where != old_where:
        return _placement_difference(where, old_where)
    return "nothing differs (it was dropped from the cache)"


def _placement_difference(new: list, old: list) -> str:
    if not new or not old:
        return (
            f"it was for {'many devices' if old else 'one device'}, this one is for"
            f" {'many devices' if new else 'one device'}"
        )
    for kind in ("leaves", "outputs"):
        for i, (a, b) in enumerate(zip(getattr(new[0], kind), getattr(old[0], kind))):
            if a != b:
                return (
                    f"{'input' if kind == 'leaves' else 'result'} {i} was sharded {b or 'freely'},"
                    f" is {a or 'free'}"
                )
    return f"the mesh was {old[0].mesh}, is {new[0].mesh}"


def _node_difference(where: str, new: tuple, old: tuple) -> str:
    if new[0] != old[0]:
        return f"{where}: was {_op(old)}"
    names = argument_names(OPS.get(new[0]))
    for i, (a, b) in enumerate(zip_longest(new[1:], old[1:], fillvalue=_MISSING)):
        if a != b:
            name = names[i] if i < len(names) else f"argument {i}"
            return f"{where}: {name} was {_argument(b)}, is {_argument(a)}"
    return f"{where} differs"


_MISSING = ("missing",)


def _argument(x: int | tuple[int | str, ...]) -> str:
    """An argument of a node's key, readable."""
    if type(x) is int:
        return f"input {~x}" if x < 0 else f"the result of op {x >> INDEX_BITS}"
    if type(x) is not tuple or not x:
        return str(x)
    tag, *rest = x
    if tag in ("int", "bool"):
        return str(rest[0])
    if tag == "float":
        return repr(float.fromhex(rest[0]))
    if tag == "complex":
        return repr(complex(*map(float.fromhex, rest)))
    if tag == "ints":
        return str(rest)
    if tag == "list":
        return "[" + ", ".join(map(_argument, rest)) + "]"
    if tag == "name":
        return f"{rest[0]}={_argument(rest[1])}"
    return {"lift": "a number that varies", "graph": "another function"}.get(tag, "absent")


def _roots_difference(roots: tuple, old: tuple, nodes: tuple, sources: Sequence[str]) -> str:
    for at, verb in (
        (set(roots) - set(old), "is now wanted"),
        (set(old) - set(roots), "is no longer wanted"),
    ):
        if at:
            node = min(at) >> INDEX_BITS
            more = f" (and {len(at) - 1} more)" if len(at) > 1 else ""
            return (
                f"the result of op {node}, {_op(nodes[node])}{_at(node, sources)}, {verb}{more}: a"
                " tensor is or was kept alive"
            )
    return "the results are wanted in another order"


def _aliases_difference(aliases: tuple, old: tuple, shapes: tuple) -> str:
    freed = sorted({i for _, i in aliases} - {i for _, i in old})
    kept = sorted({i for _, i in old} - {i for _, i in aliases})
    if freed:
        return (
            f"input {freed[0]} ({shapes[freed[0]]}) dies in this step and gives its memory to a"
            " result; before, it stayed alive"
        )
    if kept:
        return (
            f"input {kept[0]} ({shapes[kept[0]]}) stays alive after this step; before, it gave its"
            " memory to a result"
        )
    return "inputs give their memory to other results"


def _first_user(nodes: tuple, wanted: int) -> int | None:
    return next((i for i, node in enumerate(nodes) if _mentions(node[1:], (wanted,))), None)


def _users_line(nodes: tuple, at: int | None, sources: Sequence[str]) -> str:
    """Views have no line: then that of the first op that uses the view."""
    made: set[int] = set()
    for i in range(len(nodes) if at is None else at, len(nodes)):
        if i == at or _mentions(nodes[i][1:], made):
            if line := _at(i, sources):
                return line
            made.add(i << INDEX_BITS)
    return ""


def _mentions(arguments: tuple, wanted: Collection[int]) -> bool:
    for x in arguments:
        if type(x) is int:
            if x in wanted:
                return True
        elif type(x) is tuple and x and x[0] in ("list", "name") and _mentions(x[1:], wanted):
            return True
    return False


def _op(node_key: tuple) -> str:
    return str(OPS.get(node_key[0], "an op"))


def argument_names(op) -> list[str]:
    schema = getattr(op, "_schema", None)
    return [a.name for a in schema.arguments] if schema is not None else []


def _at(node: int, sources: Sequence[str]) -> str:
    return f" at {sources[node]}" if node < len(sources) and sources[node] else ""
