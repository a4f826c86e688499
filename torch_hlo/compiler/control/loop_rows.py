"""Loops over time whose rows do not meet: each thread runs the whole loop on rows of its own.

    while (i, h[16,256], x[32,16,256], w, y[32,16,256]) { h = tanh(x[i] + h·w); y[i] = h }      ->
    while (part, h, x, w, y) independent=2 { while (i, h[8,256], x, w, y, 8 * part) { …rows [8 *
        part, 8 * part + 8) … } }

A recurrent network's products are small, and a turn has a few: cut by kernel, threads would meet
several times per turn. The turns of the outer loop read and write nothing that another one writes
(compiler/control/control_flow.py runs them at the same time); inner loops that only go through
slices of an array, a turn at a time, take their rows from it and put them there. Which dimension
holds the rows of what is found with the factors of hlo/sharding/factors.py, from the left operand
of a product on: every instruction that has them has to be free along them.
"""

from collections.abc import Iterator

from torch_hlo.hlo.ir import (
    OPCODES,
    Computation,
    Instruction,
    Module,
    Replacements,
    Shape,
    build as h,
    carry_meta,
    fixed,
    instr,
    on_operands,
    postorder,
    replace,
    tuple_shape,
    users,
)
from torch_hlo.hlo.sharding.factors import Factors, factors

from ..hlo_pass import Pass

# bytes that are read in every turn and still stay in a core's own cache: of cores with vectors of
# 512 bits, whose caches hold 1 MB or more; of others
NEAR = 5 << 18
LESS_NEAR = 3 << 17
ROWS = 64  # of a part, which pay for reading what does not stay there
LEAST = 4  # rows of a part: fewer take products as long as all of them do
_MOVES = frozenset(
    "get-tuple-element broadcast reshape slice dynamic-slice dynamic-update-slice concatenate"
    " transpose dot convert reduce copy".split()
)

Rows = dict[Instruction, int]  # instruction -> which dimension is the rows'


def loop_rows(cores: int, vector_bytes: int = 64) -> Pass:
    """The pass for so many cores: loops whose rows are independent are cut into loops that run at
    the same time."""
    return Pass(
        "loop_rows",
        lambda module: _apart(module, cores, NEAR if vector_bytes >= 64 else LESS_NEAR),
        "Loops whose rows are independent are cut into loops that run at the same time.",
    )


def _apart(module: Module, cores: int, near: int) -> Module:
    reads = users((module.entry.root,))
    if cores < 2 or not any(x.op == "while" for x in reads):
        return module
    new: Replacements = {}
    for x, readers in reads.items():
        y = on_operands(x, new)
        if x.op == "get-tuple-element":
            y = h.get_tuple_element(new[x.operand], x["index"])
        elif x.op == "while" and all(r.op == "get-tuple-element" for r in readers):
            y = _cut(y, cores, near, {r["index"] for r in readers})
        carry_meta(x, y)
        new[x] = y
    return module.with_root(new[module.entry.root])


def _cut(x: Instruction, cores: int, near: int, read: set[int]) -> Instruction:
    """The loop over parts, of which the elements `read` are used; the loop itself where it cannot
    be cut, or that does not pay."""
    body = x["body"]
    state = x.operand
    if (
        body.root.op != "tuple"
        or x.get("independent")
        or not all(e.is_static and not e.is_tuple for e in state.elements)
    ):
        return x
    order = body.instructions()
    if not all(
        y.op in _MOVES
        or "pointwise" in OPCODES[y.op].traits
        or y.op in ("parameter", "constant", "tuple")
        for y in order
    ):
        return x
    for seed, dim in _seeds(order):
        rows = _rows(order, body, seed, dim)
        if rows is not None and _counts_alike(x, rows, read):
            count = fixed(seed.dims[dim])
            parts = max(n for n in range(1, cores + 1) if count % n == 0)
            if (
                parts > 1
                and count // parts >= LEAST
                and (_read_whole(body, rows) <= near or count // parts >= ROWS)
            ):
                return _Cutter(x, rows, count, parts).loop()
    return x


def _seeds(order: list[Instruction]) -> Iterator[tuple[Instruction, int]]:
    """Left operands of products, and their dimensions that the products keep."""
    for y in order:
        if y.op == "dot":
            used = (*y["lhs_batch_dims"], *y["lhs_contracting_dims"])
            for d, n in enumerate(y.operand.dims):
                if d not in used and fixed(n) > 1:
                    yield y.operand, d


def _elements(c: Computation) -> list[Instruction]:
    return [
        instr("get-tuple-element", (c.params[0],), index=k)
        for k in range(len(c.params[0].elements))
    ]


def _counts_alike(x: Instruction, rows: Rows, read: set[int]) -> bool:
    """Whether each part takes as many turns as the whole, and nobody asks for the end of what has
    no rows (a counter)."""
    elements = _elements(x["body"])
    condition = x["condition"]
    tested = users((condition.root,))
    if any(y.op != "get-tuple-element" for y in tested.get(condition.params[0], ())):
        return False
    with_rows = {k for k, e in enumerate(elements) if e in rows}
    if any(y["index"] in with_rows for y in tested if y.op == "get-tuple-element"):
        return False
    return all(
        k in with_rows or r is e or k not in read
        for k, (e, r) in enumerate(zip(elements, x["body"].root.operands, strict=True))
    )


def _read_whole(body: Computation, rows: Rows) -> int:
    """Bytes of arrays without rows that products read: weights."""
    read = {o for y in body.instructions() if y.op == "dot" for o in y.operands if o not in rows}
    return sum(fixed(o.nbytes) for o in read)


def _rows(order: list[Instruction], body: Computation, seed: Instruction, dim: int) -> Rows | None:
    """Which dimension of what holds the rows, if `seed` has them in `dim`; None when they meet
    somewhere."""
    (param,) = body.params
    results = body.root.operands
    reads = users((body.root,))
    rules = {
        y: factors(y) for y in order if y.op not in ("parameter", "tuple", "get-tuple-element")
    }
    elements = _elements(body)
    rows: Rows = {}
    pending = [(seed, dim)]
    while pending:
        y, d = pending.pop()
        if y in rows:
            if rows[y] != d:
                return None
            continue
        rows[y] = d
        for z, at in _alike(y, d, reads.get(y, []), rules):
            if at is None:
                return None
            pending.append((z, at))
        numbers = [k for k, r in enumerate(results) if r is y] + (
            [y["index"]] if y.op == "get-tuple-element" else []
        )
        for k in numbers:  # what a turn leaves is what the next one has
            pending += [(results[k], d), (elements[k], d)]
    if any(
        y.op == "get-tuple-element" and y.operand is not param or y.op == "constant" for y in rows
    ):
        return None
    return rows


def _alike(
    y: Instruction,
    d: int,
    readers: list[Instruction],
    rules: dict[Instruction, Factors],
) -> Iterator[tuple[Instruction, int | None]]:
    """What shares dimension `d` of `y` with it, and as which dimension; None where the rows
    meet."""
    for x in {y, *readers}:
        rule = rules.get(x)
        if rule is None:
            continue
        uses = (
            [(rule.results[0][d], x)]
            if x is y
            else [(rule.operands[j][d], o) for j, o in enumerate(x.operands) if o is y]
        )
        for factor, _ in uses:
            if (
                len(factor) != 1
                or rule.roles[factor[0]] != "free"
                or rule.sizes[factor[0]] != y.dims[d]
            ):
                yield x, None
                return
            for dims, z in (
                (rule.results[0], x),
                *zip(rule.operands, x.operands, strict=True),
            ):
                at = [e for e, f in enumerate(dims) if f == factor]
                if at or z is x:
                    yield z, at[0] if len(at) == 1 else None


class _Cutter:
    """`x` has `count` rows where `rows` says so, and is cut into `parts`. Element k of its state is
    element k + 1 of the outer loop's."""

    def __init__(self, x: Instruction, rows: Rows, count: int, parts: int) -> None:
        self.x = x
        self.rows = rows
        self.parts = parts
        self.each = count // parts
        self.body = x["body"]
        (self.param,) = x["body"].params
        self.results = self.body.root.operands
        self.elements = _elements(self.body)
        self.reads = users((self.body.root,))
        self.whole = {e for k, e in enumerate(self.elements) if self._goes_through_slices(k)}

    def _goes_through_slices(self, k: int) -> bool:
        """Whether element k is only read and written by the slices that a turn needs: then inner
        loops share the array."""
        e = self.elements[k]
        result = self.results[k]
        if (
            e not in self.rows
            or result is not e
            and not (
                result.op == "dynamic-update-slice"
                and result.operand is e
                and len(self.reads[result]) == 1
            )
        ):
            return False
        readers = [y for y in self.reads.get(e, ()) if y is not self.body.root]
        return all(
            y.operands.count(e) == 1 and y.operand is e and (y is result or y.op == "dynamic-slice")
            for y in readers
        )

    def loop(self) -> Instruction:
        x = self.x
        count = len(self.elements)
        state = x.operand
        param = h.parameter(0, tuple_shape(Shape("s64"), *state.elements))
        turn, *given = (h.get_tuple_element(param, k) for k in range(count + 1))
        first = h.multiply(turn, h.constant(self.each, "s64"))
        begin = [
            self._part(g, self.rows[e], first) if self._is_local(e) else g
            for g, e in zip(given, self.elements, strict=True)
        ]
        after = self._inner(h.tuple_(*begin, first))
        ends = []
        for k, (g, e, r) in enumerate(zip(given, self.elements, self.results, strict=True)):
            if e not in self.rows or r is e:  # the same in all parts
                ends.append(g)
                continue
            end = h.get_tuple_element(after, k)
            ends.append(end if e in self.whole else self._put(g, end, self.rows[e], first))
        body = Computation("part", (param,), h.tuple_(h.add(turn, h.constant(1, "s64")), *ends))
        more = Computation("parts", (param,), h.compare(turn, h.constant(self.parts, "s64"), "LT"))
        whole = h.tuple_(
            h.constant(0, "s64"),
            *(h.get_tuple_element(state, k) for k in range(count)),
        )
        outer = instr("while", (whole,), condition=more, body=body, independent=self.parts)
        return h.tuple_(*(h.get_tuple_element(outer, k + 1) for k in range(count)))

    def _is_local(self, e: Instruction) -> bool:
        return e in self.rows and e not in self.whole

    def _part(self, x: Instruction, dim: int, first: Instruction) -> Instruction:
        zero = h.constant(0, "s64")
        sizes = tuple(self.each if d == dim else n for d, n in enumerate(x.dims))
        return instr(
            "dynamic-slice",
            (x, *(first if d == dim else zero for d in range(len(sizes)))),
            Shape(x.dtype, sizes),
            dynamic_slice_sizes=sizes,
        )

    def _put(self, x: Instruction, part: Instruction, dim: int, first: Instruction) -> Instruction:
        zero = h.constant(0, "s64")
        return instr(
            "dynamic-update-slice",
            (x, part, *(first if d == dim else zero for d in range(x.rank))),
            x.shape,
        )

    # -- the loop over the rows of one part
    def _inner(self, state: Instruction) -> Instruction:
        param = h.parameter(0, state.shape)
        new: Replacements = {e: h.get_tuple_element(param, k) for k, e in enumerate(self.elements)}
        first = h.get_tuple_element(param, len(self.elements))
        for y in postorder((self.body.root,), known=(self.param, *new)):
            new[y] = (
                self._row_part(y, [new[o] for o in y.operands], first)
                if y.op != "tuple"
                else h.tuple_(*(new[o] for o in y.operands), first)
            )
            carry_meta(y, new[y])
        condition = self.x["condition"]
        table = {e: h.get_tuple_element(param, k) for k, e in enumerate(_elements(condition))}
        for y in postorder((condition.root,), known=(condition.params[0], *table)):
            table[y] = replace(y, (table[o] for o in y.operands), y.shape)
        return h.while_(
            Computation(condition.name, (param,), table[condition.root]),
            Computation(self.body.name, (param,), new[self.body.root]),
            state,
        )

    def _row_part(
        self, y: Instruction, operands: list[Instruction], first: Instruction
    ) -> Instruction:
        """`y` on the part's rows."""
        d = self.rows.get(y)
        attrs = dict(y.attrs)
        if d is None:
            return instr(y.op, operands, y.shape, **attrs)
        dims = tuple(self.each if e == d else n for e, n in enumerate(y.dims))
        if y.op == "slice":
            attrs["slice"] = tuple(
                (0, self.each, 1) if e == d else s for e, s in enumerate(y["slice"])
            )
        elif y.op == "dynamic-slice":
            attrs["dynamic_slice_sizes"] = dims
        if y.op in ("dynamic-slice", "dynamic-update-slice") and y.operand in self.whole:
            dims = y.dims if y.op == "dynamic-update-slice" else dims
            at = d + (1 if y.op == "dynamic-slice" else 2)
            operands[at] = (
                first if operands[at].shape == first.shape else h.convert(first, operands[at].dtype)
            )
        return instr(y.op, operands, Shape(y.dtype, dims), **attrs)
