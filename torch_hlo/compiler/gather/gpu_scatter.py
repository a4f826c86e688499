"""scatter of many windows on a grid, without atomics: windows are sorted by where they go, and each
destination is written once.

The positions of the windows' starts are keys; a stable sort brings windows with the same start
together, in the order of their indices. A thread per vector of a destination folds its run of
updates. Long runs are cut at every 64th window: the folds of the pieces come first, each by threads
of its own. So results do not depend on chance, and many updates of one row do not wait for each
other. Few windows, and windows that may overlap without being equal, are left to the CPU's scheme
(gather_scatter.py): threads split the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_hlo.hlo.ir import DTYPES, Instruction, Instructions, Shape, Size, build, ceildiv, product

from ..codegen import Writer, apply, leaves, load, store
from ..control.control_flow import copy_places
from ..gpu.gpu_program import GpuProgram
from ..llvm import Int, item_parameters, scalar
from ..llvm.scalar import STORAGE, Value
from ..sort.gpu_sort import sort
from . import gather_scatter
from .gather_scatter import Scatter, Sizes, digits, dot_product

FEW = 32  # windows that threads may go through one after the other
PIECE = 64  # windows of a run that one thread folds
_ASSOCIATIVE = {"add", "multiply", "maximum", "minimum", "and", "or", "xor"}


def scatter(program: GpuProgram, x: Instruction) -> None:
    count = len(x.operands) // 2
    operands = x.operands[:count]
    updates = x.operands[count + 1 :]
    s = _Sorted(program, x, operands, x.operands[count], updates)
    empty = updates[0].size == 0 or operands[0].size == 0
    if empty or isinstance(s.windows, int) and s.windows <= FEW or not s.disjoint():
        return gather_scatter.scatter(program, x)
    targets = list(leaves(program.places(x)))
    for place, operand in zip(targets, operands, strict=True):
        copy_places(program, place, program.places(operand))
    keys, order = s.sorted_windows()
    pointers = [
        keys,
        order,
        *(program.at(p) for p in targets),
        *(program.pointer(u) for u in updates),
    ]
    if s.associative:
        pointers.append(
            program.at(
                program.scratch(ceildiv(s.windows, PIECE) * s.window * STORAGE[s.part_dtype].bytes)
            )
        )
        s.launch("scatter_pieces", s.pieces, pointers, ceildiv(s.windows, PIECE) * s.vectors)
    s.launch("scatter_rows", s.destinations, pointers, s.windows * s.vectors)


class _Sorted:
    """What the kernels of one scatter share. `windows`: number of updates windows; `window`:
    elements of one; `vectors`: threads of one."""

    def __init__(
        self,
        program: GpuProgram,
        x: Instruction,
        operands: Instructions,
        indices: Instruction,
        updates: Instructions,
    ) -> None:
        self.program = program
        self.x = x
        self.operands = operands
        self.indices = indices
        self.updates = updates
        self.types = [o.dtype for o in operands]
        self.form = form = self._form(Writer(program, "form", []))
        self.windows = product(form.update_dims[d] for d in form.scatter_positions)
        self.window = product(form.window_sizes)
        self.lanes = self._lanes()
        self.vectors = self.window // self.lanes
        root = x["to_apply"].root
        params = x["to_apply"].params
        plain = len(params) == 2 and STORAGE[self.types[0]].parts == 1
        self.replaces = plain and root is params[1]
        self.op = (
            root.op
            if plain
            and root.op in _ASSOCIATIVE
            and {*root.operands} == {*params}
            and root.dtype == self.types[0]
            else None
        )
        self.associative = self.replaces or self.op is not None
        # narrow floats are rounded once, at the end
        self.part_dtype = "f32" if STORAGE[self.types[0]].register == "float" else self.types[0]
        size = operands[0].size
        self.key_dtype = "s32" if isinstance(size, int) and size < 1 << 31 else "s64"
        self.key_kind = "i32" if self.key_dtype == "s32" else "i64"
        # the key of a window that does not fit
        self.nowhere = str((1 << (31 if self.key_dtype == "s32" else 63)) - 1)

    def _form(self, f: Writer) -> Scatter:
        return Scatter(f, self.x, self.operands, self.indices, self.updates, 1)

    def disjoint(self) -> bool:
        """Whether windows with different starts have nothing in common."""
        form = self.form
        sizes = dict(zip(form.window_dims, form.window_sizes, strict=True))
        return all(
            sizes.get(d, 1) == 1 or sizes[d] == form.dims[d]
            for d in self.x["scatter_dims_to_operand_dims"]
        )

    def _lanes(self) -> int:
        """Elements of a window that a thread handles: 16 bytes where rows of operand and updates
        allow it."""
        form = self.form
        if not form.window_dims or any(STORAGE[t].parts != 1 for t in self.types):
            return 1
        contiguous = (
            form.window_dims[-1] == len(form.dims) - 1
            and form.window_positions[-1] == len(form.update_dims) - 1
        )
        last = form.window_sizes[-1]
        lanes = min(self.program.target.lanes(8 * STORAGE[t].bytes) for t in self.types)
        return (
            lanes
            if contiguous and isinstance(last, int) and last == form.dims[-1] and last % lanes == 0
            else 1
        )

    def launch(
        self,
        name: str,
        kernel: Callable[..., Any],
        pointers: list[str],
        items: Size,
    ) -> None:
        program = self.program

        def written() -> tuple[str, list[Size]]:
            names = [
                "keys",
                "order",
                *(f"to{i}" for i in range(len(self.types))),
                *(f"by{i}" for i in range(len(self.types))),
                "parts",
            ]
            self.f = f = Writer(
                program,
                name,
                item_parameters(names[: len(pointers)]),
            )
            self.size = Sizes(f)
            kernel()
            return f.define(), list(self.size.names)

        key = (
            name,
            self.x["to_apply"],
            tuple(a for a in self.x.attrs if a[0] != "to_apply"),
            tuple(o.shape for o in self.x.operands),
        )
        function, sizes = program.once(key, written)
        program.parallel(
            function,
            program.arguments(pointers, sizes),
            items,
        )

    def sorted_windows(self) -> tuple[str, str]:
        """Pointers to the windows' starts in ascending order, and to the numbers of these
        windows."""
        program = self.program
        shapes = (
            Shape(self.key_dtype, (self.windows,)),
            Shape("s32", (self.windows,)),
        )
        given, found = ([program.scratch(s.nbytes) for s in shapes] for _ in range(2))
        f = Writer(
            program,
            "scatter_keys",
            "i64 lo, i64 hi, ptr indices, ptr keys, ptr order",
        )
        form = self._form(f)
        start, fits = form.starts(
            digits(f, "%lo", [form.size(form.update_dims[d]) for d in form.scatter_positions])
        )
        key = start if self.key_kind == "i64" else f.op(f"trunc i64 {start} to i32")
        f.store_at(
            self.key_kind,
            f.select(fits, self.key_kind, key, self.nowhere) if fits else key,
            "%keys",
            "%lo",
        )
        f.store_at("i32", f.op("trunc i64 %lo to i32"), "%order", "%lo")
        pointers = [
            program.pointer(self.indices),
            *(program.at(p) for p in given),
        ]
        name = f.define()
        program.parallel(
            name,
            program.arguments(pointers, form.size.names),
            self.windows,
        )
        parameters = [build.parameter(i, s) for i, s in enumerate(shapes)]
        with program.rebound():
            for p, place in zip(parameters, given, strict=True):
                program.bind(p, place)
            ordered = build.sort(parameters, 0, "LT", True)
            program.bind(ordered, tuple(found))
            sort(program, ordered)
        keys, order = (program.at(p) for p in found)
        return keys, order

    # -- kernels
    def key(self, i: Int) -> str:
        return self.f.load_at(self.key_kind, "%keys", i)

    def same(self, i: Int, key: str) -> str:
        return self.f.icmp("eq", self.key(i), key, self.key_kind)

    def enter(self) -> Int:
        """Take the thread's vector of the window; returns the rest of the thread's number."""
        f = self.f
        form = self.form
        sizes = [self.size(n) for n in form.window_sizes]
        if sizes:
            sizes[-1] = f.div(sizes[-1], self.lanes)
        rest, number = f.divmod("%lo", self.size(self.vectors))
        place = digits(f, number, sizes)
        if place:
            place[-1] = f.mul(place[-1], self.lanes)
        self.inside = dot_product(f, place, [self.size(form.strides[d]) for d in form.window_dims])
        self.read_from = dot_product(
            f,
            place,
            [self.size(form.update_strides[d]) for d in form.window_positions],
        )
        self.number = f.mul(number, self.lanes)
        return rest

    def update(self, i: Int) -> list[Value]:
        """The thread's vector of the i-th window in order."""
        f = self.f
        form = self.form
        window = f.op(f"zext i32 {f.load_at('i32', '%order', i)} to i64")
        batch = digits(f, window, [self.size(form.update_dims[d]) for d in form.scatter_positions])
        at = f.add(
            self.read_from,
            dot_product(
                f,
                batch,
                [self.size(form.update_strides[d]) for d in form.scatter_positions],
            ),
        )
        return [self._load(t, f"%by{k}", at) for k, t in enumerate(self.types)]

    def _load(self, dtype: str, pointer: str, at: Int) -> Value:
        return load(
            self.f,
            dtype,
            pointer,
            at,
            self.lanes,
            align=self.lanes * STORAGE[dtype].bytes,
        )

    def _store(self, dtype: str, value: Value, pointer: str, at: Int) -> None:
        store(
            self.f,
            dtype,
            value,
            pointer,
            at,
            self.lanes,
            align=min(16, self.lanes * STORAGE[dtype].bytes),
        )

    def combine(self, a: list[Value], b: list[Value]) -> list[Value]:
        if self.replaces:
            return b
        if self.op is not None:
            return [
                scalar.TABLE[self.op, DTYPES[self.types[0]].kind](
                    self.f.typed(STORAGE[self.types[0]].register, self.lanes),
                    a[0],
                    b[0],
                )
            ]
        return apply(self.f, self.x["to_apply"], [*a, *b], self.lanes)

    def run(
        self,
        first: Int,
        end: Int,
        key: str,
        values: list[Value],
    ) -> tuple[str, list[Value]]:
        """Fold the windows with this key from `first` on, before `end`, to `values`; returns the
        first window that is not one of them."""
        f = self.f
        kinds = [
            f.emit(self.lanes).type(STORAGE[t].register)
            for t in self.types
            for _ in range(STORAGE[t].parts)
        ]
        with f.while_([("i64", first), *zip(kinds, scalar.flat(values), strict=True)]) as loop:
            i, *carried = loop.vars
            f.break_if(loop, f.icmp("sge", i, end))
            f.break_if(loop, f.op(f"xor i1 {self.same(i, key)}, true"))
            loop.next = [
                f.add(i, 1),
                *scalar.flat(self.combine(scalar.grouped(carried, self.types), self.update(i))),
            ]
        return loop.vars[0], scalar.grouped(loop.vars[1:], self.types)

    def pieces(self) -> None:
        """The fold of what a run has in a piece that it does not begin in."""
        f = self.f
        n = self.size(self.windows)
        piece = self.enter()
        first = f.mul(piece, PIECE)
        with f.when(f.icmp("sgt", piece, 0)):
            key = self.key(first)
            goes_on = self.same(f.sub(first, 1), key)
            with f.when(
                f.op(f"and i1 {goes_on}, {f.icmp('ne', key, self.nowhere, self.key_kind)}")
            ):
                _, values = self.run(
                    f.add(first, 1),
                    f.min(f.add(first, PIECE), n),
                    key,
                    self.update(first),
                )
                self._store(
                    self.part_dtype,
                    values[0],
                    "%parts",
                    f.muladd(piece, self.size(self.window), self.number),
                )

    def destinations(self) -> None:
        """Where a run begins: the old value and all updates."""
        f = self.f
        n = self.size(self.windows)
        first = self.enter()
        key = self.key(first)
        before = f.max(f.sub(first, 1), 0)
        head = f.op(
            f"or i1 {f.icmp('eq', first, 0)}, {f.op(f'xor i1 {self.same(before, key)}, true')}"
        )
        with f.when(f.op(f"and i1 {head}, {f.icmp('ne', key, self.nowhere, self.key_kind)}")):
            start = key if self.key_kind == "i64" else f.op(f"zext i32 {key} to i64")
            at = f.add(start, self.inside)
            values = (
                self.update(first)
                if self.replaces
                else self.combine(
                    [self._load(t, f"%to{k}", at) for k, t in enumerate(self.types)],
                    self.update(first),
                )
            )
            if not self.associative:
                _, values = self.run(f.add(first, 1), n, key, values)
            else:
                piece = f.add(f.div(first, PIECE), 1)
                _, values = self.run(f.add(first, 1), f.min(f.mul(piece, PIECE), n), key, values)
                kind = f.emit(self.lanes).type(STORAGE[self.types[0]].register)
                with f.while_([("i64", piece), (kind, scalar.single(values[0]))]) as loop:
                    piece, value = loop.vars
                    f.break_if(loop, f.icmp("sge", f.mul(piece, PIECE), n))
                    f.break_if(loop, f.op(f"xor i1 {self.same(f.mul(piece, PIECE), key)}, true"))
                    part = self._load(
                        self.part_dtype,
                        "%parts",
                        f.muladd(piece, self.size(self.window), self.number),
                    )
                    loop.next = [
                        f.add(piece, 1),
                        scalar.single(self.combine([value], [part])[0]),
                    ]
                values = [loop.vars[1]]
            for k, (t, v) in enumerate(zip(self.types, values, strict=True)):
                if self.op is not None:
                    v = scalar.round_to(f.emit(self.lanes), t, scalar.single(v))
                self._store(t, v, f"%to{k}", at)
