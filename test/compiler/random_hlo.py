"""Random well-typed programs over most opcodes, with size-1 and size-0 dimensions and many
constants, for tests of passes."""

from __future__ import annotations

import random

from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import Computation, Instruction, Module
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.opcodes import OPCODES
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.window import WindowDim

DTYPES = ("f32", "f32", "f32", "s32", "pred", "bf16", "f64", "u8", "s64", "c64")
# Opcodes whose results do not blow up or lie on a branch cut when operands differ by an ulp.
UNARY = (
    "negate abs sign not cosine tanh logistic exponential real imag is-finite popcnt"
    " count-leading-zeros floor copy"
).split()
BINARY = (
    "add subtract multiply maximum minimum and or xor power divide atan2 shift-left"
    " shift-right-logical remainder"
).split()


class Maker:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.params: list[Instruction] = []
        self.pool: list[Instruction] = []

    def module(self, count: int) -> Module:
        for _ in range(self.r.randint(2, 4)):
            p = h.parameter(len(self.params), Shape(self.r.choice(DTYPES), self.dims()))
            self.params.append(p)
            self.pool.append(p)
        for _ in range(count):
            x = self.pick()
            y = getattr(self, self.r.choice(MAKERS))(x)
            if (
                y is not None
                and not y.shape.is_tuple
                and (not y.shape.is_static or y.shape.size <= 4000)
            ):
                self.pool.append(y)
        outs = [self.pool[-1], *self.r.sample(self.pool, min(3, len(self.pool)))]
        return Module("random", Computation("main", tuple(self.params), h.tuple_(*outs)))

    def dims(self) -> tuple[int, ...]:
        return tuple(
            self.r.choice((1, 2, 3, 4, 4, 5)) if self.r.random() > 0.02 else 0
            for _ in range(self.r.randint(0, 3))
        )

    def pick(self) -> Instruction:
        return self.pool[-1 - min(int(self.r.expovariate(0.3)), len(self.pool) - 1)]

    def alike(self, x: Instruction) -> Instruction:
        same = [y for y in self.pool if y.shape == x.shape]
        k = self.r.random()
        if k < 0.25:
            return self.uniform(x)
        if k < 0.4 and x.shape.rank:
            d = self.r.randrange(x.shape.rank)
            vector = [y for y in self.pool if y.shape == Shape(x.shape.dtype, (x.shape.dims[d],))]
            if vector:
                return h.broadcast(self.r.choice(vector), x.shape.dims, (d,))
        return self.r.choice(same)

    def uniform(self, x: Instruction) -> Instruction:
        values = {
            "p": (True, False),
            "u": (0, 1, 2, 255),
            "s": (0, 1, -1, 2, 7),
            "c": (0, 1),
        }
        return h.full_like(
            x,
            self.r.choice(
                values.get(x.shape.kind, (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 3.0, float("inf")))
            ),
        )

    # Every method makes one more instruction from `x`, or None.

    def unary(self, x):
        name = self.r.choice(UNARY)
        try:
            return instr(name, (x,))
        except ValueError:
            return None

    def binary(self, x):
        name = self.r.choice(BINARY)
        y = self.alike(x)
        if (
            name in ("power", "divide", "remainder")
            and x.shape.kind != "f"
            or name.startswith("shift")
            and x.shape.kind not in "su"
        ):
            return None
        if name.startswith("shift"):
            y = h.full_like(x, self.r.choice((0, 1, 3)))
        if name in ("power", "atan2", "remainder"):
            x, y = h.abs_(x) if name == "power" else x, self.uniform(x)
        pair = (
            (y, x)
            if self.r.random() < 0.3
            and name not in ("power", "remainder")
            and not name.startswith("shift")
            else (x, y)
        )
        try:
            return instr(name, pair)
        except ValueError:
            return None

    def compare(self, x):
        names = ("EQ", "NE") if x.shape.kind == "c" else ("EQ", "NE", "LT", "LE", "GT", "GE")
        return h.compare(x, self.alike(x), self.r.choice(names))

    def select(self, x):
        preds = [p for p in self.pool if p.shape == x.shape.with_dtype("pred")] or [self.compare(x)]
        return h.select(self.r.choice(preds), x, self.alike(x))

    def convert(self, x):
        if x.shape.kind == "c":
            return None
        y = (
            h.clamp(
                h.constant(-100 if x.shape.kind != "u" else 0, x.shape.dtype),
                x,
                h.constant(100, x.shape.dtype),
            )
            if x.shape.kind != "p"
            else x
        )
        return h.convert(y, self.r.choice(DTYPES))

    def broadcast(self, x):
        if x.shape.rank > 3:
            return None
        dims = list(x.shape.dims)
        places = list(range(len(dims)))
        for _ in range(self.r.randint(1, 2)):
            at = self.r.randint(0, len(dims))
            dims.insert(at, self.r.choice((1, 2, 3)))
            places = [p + (p >= at) for p in places]
        if self.r.random() < 0.1 and len(places) > 1:
            x, places = (
                h.transpose(x, [1, 0, *range(2, len(places))]),
                [places[1], places[0], *places[2:]],
            )
        return h.broadcast(x, dims, places)

    def reshape(self, x):
        n = x.shape.size
        if n == 0:
            return None
        dims, left = [], n
        for _ in range(self.r.randint(0, 3)):
            f = self.r.choice([d for d in range(1, left + 1) if left % d == 0])
            dims.append(f)
            left //= f
        dims.append(left)
        if self.r.random() < 0.5:
            dims = [d for d in dims if d != 1]
        self.r.shuffle(dims)
        return h.reshape(x, dims)

    def transpose(self, x):
        return h.transpose(x, self.r.sample(range(x.shape.rank), x.shape.rank))

    def slice(self, x):
        ranges = []
        for n in x.shape.dims:
            a = self.r.randint(0, n)
            b = self.r.randint(a, n)
            ranges.append((0, n, 1) if self.r.random() < 0.6 else (a, b, self.r.choice((1, 1, 2))))
        return h.slice_(x, *zip(*ranges)) if ranges else None

    def pad(self, x):
        value = (
            self.uniform(h.reshape(h.slice_(x, [0] * x.shape.rank, [1] * x.shape.rank), ()))
            if x.shape.size
            else h.constant(0, x.shape.dtype)
        )
        amounts = [
            (
                self.r.choice((0, 0, 1, -1)) if n > 2 else 0,
                self.r.choice((0, 0, 2, -1)) if n > 2 else 0,
                self.r.choice((0, 0, 0, 1)),
            )
            for n in x.shape.dims
        ]
        return h.pad(x, value, amounts)

    def concatenate(self, x):
        if not x.shape.rank:
            return None
        d = self.r.randrange(x.shape.rank)
        others = [
            y
            for y in self.pool
            if y.shape.dtype == x.shape.dtype
            and y.shape.rank == x.shape.rank
            and all(i == d or a == b for i, (a, b) in enumerate(zip(x.shape.dims, y.shape.dims)))
        ]
        return h.concatenate([x, *self.r.choices(others, k=self.r.randint(1, 3))], d)

    def halves(self, x):
        if not x.shape.rank or x.shape.dims[0] < 2:
            return None
        n = self.r.randint(1, x.shape.dims[0] - 1)
        rest = x.shape.dims[1:]
        a = h.slice_(x, [0] * x.shape.rank, [n, *rest])
        b = h.slice_(x, [n, *[0] * len(rest)], x.shape.dims)
        return h.concatenate([a, b] if self.r.random() < 0.5 else [b, a], 0)

    def reverse(self, x):
        return h.reverse(x, [d for d in range(x.shape.rank) if self.r.random() < 0.5])

    def iota(self, x):
        if not x.shape.rank or x.shape.kind in "pc" or x.shape.dtype == "bf16":
            return None
        return h.iota(x.shape.dtype, x.shape.dims, self.r.randrange(x.shape.rank))

    def reduce(self, x):
        dims = [d for d in range(x.shape.rank) if self.r.random() < 0.6]
        if x.shape.kind == "c" or x.shape.kind in "su" and x.shape.dtype != "s32":
            return None
        if x.shape.kind == "p":
            name, init = self.r.choice((("and", True), ("or", False)))
        else:
            name, init = self.r.choice(
                (
                    ("add", 0),
                    ("maximum", h.lowest(x.shape.dtype)),
                    ("minimum", h.highest(x.shape.dtype)),
                    ("add", 1),
                )
            )
        return h.reduce(x, h.constant(init, x.shape.dtype), dims, name)

    def dot(self, x):
        if x.shape.kind not in "fs":
            return None
        y = self.r.choice([o for o in self.pool if o.shape.dtype == x.shape.dtype])
        pairs = [
            (a, b) for a, m in enumerate(x.shape.dims) for b, n in enumerate(y.shape.dims) if m == n
        ]
        self.r.shuffle(pairs)
        batch, contract = [], []
        for a, b in pairs:
            if all(a != p and b != q for p, q in batch + contract):
                self.r.choice((batch, contract, contract, [])).append((a, b))
        return h.dot(
            x,
            y,
            [a for a, _ in contract],
            [b for _, b in contract],
            [a for a, _ in batch],
            [b for _, b in batch],
        )

    def dynamic(self, x):
        if not x.shape.rank or 0 in x.shape.dims:
            return None
        starts = [self.start() for _ in x.shape.dims]
        sizes = [self.r.randint(1, n) for n in x.shape.dims]
        block = h.dynamic_slice(x, starts, sizes)
        return (
            block
            if self.r.random() < 0.5
            else h.dynamic_update_slice(
                x,
                (
                    self.alike(block)
                    if block in self.pool
                    else h.negate(block)
                    if x.shape.kind in "fs"
                    else block
                ),
                starts,
            )
        )

    def start(self):
        scalars = [p for p in self.pool if p.shape == Shape("s32")]
        return (
            self.r.choice(scalars)
            if scalars and self.r.random() < 0.5
            else h.constant(self.r.randint(-1, 4), "s32")
        )

    def gather(self, x):
        if not x.shape.rank or 0 in x.shape.dims:
            return None
        n = self.r.randint(1, 4)
        indices = h.constant([self.r.randint(-1, 5) for _ in range(n)], "s32")
        sizes = (1, *x.shape.dims[1:])
        return h.gather(
            x,
            indices,
            offset_dims=range(1, x.shape.rank),
            collapsed_slice_dims=[0],
            start_index_map=[0],
            index_vector_dim=1,
            slice_sizes=sizes,
        )

    def sort(self, x):
        if not x.shape.rank or x.shape.kind in "pc":
            return None
        both = h.sort(
            [x, h.iota("s32", x.shape.dims, x.shape.rank - 1)],
            x.shape.rank - 1,
            self.r.choice(("LT", "GT")),
            True,
        )
        return h.get_tuple_element(both, self.r.randrange(2))

    def window(self, x):
        if x.shape.kind != "f" or not x.shape.rank or 0 in x.shape.dims:
            return None
        window = tuple(
            WindowDim(self.r.choice((1, 2)), self.r.choice((1, 2)), self.r.choice((0, 1)), 1)
            for _ in x.shape.dims
        )
        return h.reduce_window(x, h.constant(0, x.shape.dtype), window, "add")

    def loop(self, x):
        if x.shape.kind != "f":
            return None
        state = h.tuple_(h.constant(0, "s32"), x, h.full_like(x, 0.5), self.alike(x))

        def body(s):
            i, v, half, idle = (h.get_tuple_element(s, k) for k in range(4))
            return [
                h.add(i, h.constant(1, "s32")),
                h.add(h.multiply(v, half), h.full_like(v, 0.25)),
                half,
                h.add(idle, idle),
            ]

        condition = h.computation(
            lambda s: h.compare(h.get_tuple_element(s, 0), h.constant(3, "s32"), "LT"),
            [state.shape],
            "cond",
        )
        return h.get_tuple_element(
            h.while_(condition, h.computation(body, [state.shape], "body"), state), 1
        )

    def branch(self, x):
        scalar = next(
            (p for p in self.pool if p.shape == Shape("pred")),
            h.constant(self.r.random() < 0.5, "pred"),
        )
        yes = h.computation(
            lambda v: [h.tanh(v) if v.shape.kind == "f" else v, v], [x.shape], "yes"
        )
        no = h.computation(
            lambda v: [v, h.broadcast(h.constant(1, v.shape.dtype), v.shape.dims)],
            [x.shape],
            "no",
        )
        return h.get_tuple_element(h.conditional(scalar, [yes, no], [x, x]), self.r.randrange(2))


MAKERS = (
    ["unary"] * 4
    + ["binary"] * 8
    + ["broadcast"] * 4
    + ["reshape"] * 5
    + ["transpose"] * 4
    + ["slice"] * 2
    + ["reduce"] * 3
    + ["dot"] * 3
    + "compare select convert convert pad concatenate halves reverse iota dynamic gather sort"
    " window loop branch".split()
)
assert all(name in OPCODES for name in UNARY + BINARY)


def random_module(seed: int, count: int = 30) -> Module:
    return Maker(seed).module(count)
