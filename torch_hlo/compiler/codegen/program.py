"""The builder that step emitters write to: one native program, `void entry(ptr block)`.

Every buffer of the program is a `Place` (block.py): a base of the block plus a byte offset, so any
function that gets `%block` can reach any buffer.

    def my_op(program, x):                                  # named in a row of registry.py
        f = Function("my_op", "i64 lo, i64 hi, ptr in, ptr out")
        with f.items() as i: …                              # compiler/llvm/function.py
        name = program.define(f)                            # defined once, however often asked for
        n = program.size(x.size)                      # "128", or the name of a symbolic size
        pointers = [f"ptr {program.pointer(y)}" for y in (x.operand, x)]
        program.parallel(name, pointers, n, grain=16, cost=0.2)

Put sizes and pointers in the arguments and not in the text: equal text is compiled once, and layers
of a model repeat. Code runs in order: what is called first is complete before the next call starts.
`program.code` is the Function being written (the entry, or the body of a loop…), for emitters that
need control flow of their own."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import (
    Dim,
    Instruction,
    Ints,
    Literal,
    Module,
    Shape,
    Size,
    dim_max,
    fixed,
    outputs,
    round_up,
    substitute,
    symbol,
)

from ..llvm import Function, Target
from ..thresholds import LARGE_SCRATCH
from .block import (
    ALIGNMENT,
    ARENA,
    CONSTANTS,
    FAILED,
    FIXED_WORDS,
    HOST,
    OWN,
    PACKED_HEAD,
    CodegenError,
    HostCall,
    Packing,
    Place,
    Places,
    Span,
    blame,
    leaves,
)
from .registry import CPU, HOST_CALLS, Table, row_of

PACKED_SLACK = 1 << 17  # bytes that kernels may read past a packed copy, at most
COLD_BYTES = 64 << 20  # of parameters and results
Built = TypeVar("Built")


@dataclass(slots=True)
class Kept:
    """A value that a loop does not change and multiplies by: where a packed copy of it goes that is
    made before the loop; how, once a product has asked."""

    space: Place
    layout: str = ""
    write: Callable[[str, str], None] | None = None


@frozen
class Row:
    """A call of `Program.parallel`; `arguments` are "type value"."""

    function: str
    arguments: tuple[str, ...]
    items: int
    grain: int
    picoseconds: int  # per item

    @property
    def kinds(self) -> tuple[str, ...]:
        """The arguments' types."""
        return tuple(a.split(" ", 1)[0] for a in self.arguments)


class StepProfile(Protocol):
    """What times steps, see profile.py. `nested`: also those of loops and branches."""

    nested: bool

    def start(self, program: Program, order: Sequence[Instruction]) -> None: ...
    def step(self, x: Instruction) -> AbstractContextManager[None]: ...


class Program:
    """Collects the functions, constants and calls of one module for a target
    (compiler/llvm/target.py)."""

    emitters: Table = CPU
    fetches = False  # whether the host looks at values on the way
    # functions are compiled one by one, on other threads, while more are written
    early = True

    def __init__(self, module: Module, target: Target, profile: StepProfile | None = None) -> None:
        self.module = module
        self.target = target
        self.profile = profile
        self.functions: dict[str, str] = {}  # name -> text of the definition
        # called with every function that runs on the host
        self.written: Callable[[str, str], None] = lambda name, text: None
        self.declarations: dict[str, str] = {}  # external symbol -> declare line
        self.host_calls: list[HostCall] = []
        self.calling: set[Instruction] = set()  # steps that call the host
        self.exposed: Ints = ()  # see executable.py
        self.largest = ""  # see Executable.buffers
        self.memo: dict[Hashable, Any] = {}  # for emitters: see `once`
        self._by_text: dict[tuple[str, str], str] = {}
        self._constants: dict[bytes, int] = {}
        self._constant_bytes = 0
        self._symbols = {name: FIXED_WORDS + i for i, (name, _, _) in enumerate(module.symbols)}
        self._first_parameter = FIXED_WORDS + len(module.symbols)
        self.first_output = self._first_parameter + len(module.entry.params)
        self.words = self.first_output + len(outputs(module))
        # words that hold the same address
        self._same = {self.first_output + o: self._first_parameter + p for o, p in module.aliases}
        touched = sum(
            x.nbytes for x in (*module.entry.params, *outputs(module)) if isinstance(x.nbytes, int)
        )
        # operands come from memory, not from a cache that an earlier run filled
        self.cold = touched >= COLD_BYTES
        # what to make a copy of, and what writes it
        self.packings: dict[Packing, tuple[Place, Callable[[str, str], None]]] = {}
        self.kept: dict[Place, Kept] = {}  # what the loops around do not change
        self.rows: list[Row] | None = None  # where parallel calls are collected, see batch.py
        self._memory = ARENA  # word of the memory that is given out
        self._top: Size = 0  # its first free byte
        self._arena: Size = 0  # the largest value of that
        # (from, to): bytes of the arena in which no array lives during the current step
        self._step_gaps: Callable[[], list[tuple[int, int]]] = list
        # what is left of them, once they were asked for
        self._gaps: list[tuple[int, int]] | None = None
        self._places: list[dict[Instruction, Places]] = [{}]
        self.code: Function = None  # type: ignore[assignment]
        # sizes that the program computes: where they are, their limits
        self._locals: dict[str, tuple[Place, Size]] = {}
        self._sizes: dict[Size, str] = {}
        self._bases: dict[Hashable, str] = {}
        self._arguments = 0
        self._numbers = 0

    # -- memory
    def place(self, x: Instruction, *path: int) -> Place:
        """The buffer of `x`; of element `path` when `x` is a tuple: `place(x, 0)`, `place(x, 1,
        0)`."""
        found = self.places(x)
        for i in path:
            assert isinstance(found, tuple)
            found = found[i]
        if not isinstance(found, Place):
            raise CodegenError(f"{x.op} {x.shape} is a tuple: say which element's buffer you want")
        return found

    def places(self, x: Instruction) -> Places:
        """Place of `x`, or for a tuple a (nested) tuple of Places."""
        scope = self._places[-1]
        found = scope.get(x)
        if found is None:
            found = scope[x] = self._find(x)
        return found

    def bind(self, x: Instruction, places: Places) -> None:
        """Say where `x` lives in the current computation (a Place, or tuples of Places)."""
        self._places[-1][x] = places

    @contextmanager
    def rebound(self) -> Iterator[None]:
        """Forget, at the end of a `with` block, what was bound in it, and free the memory it
        took."""
        scope = self._places[-1]
        top = self._top
        before = dict(scope)
        try:
            yield
        finally:
            self._top = top
            for x in [x for x in scope if scope[x] is not before.get(x)]:
                del scope[x]
            scope.update(before)

    def pointer(self, x: Instruction, *path: int) -> str:
        """SSA name (`%p7`) of the address of `x`'s buffer, valid in the current function."""
        return self.at(self.place(x, *path))

    def at(self, place: Place) -> str:
        """SSA name of the address of a Place."""
        base = self._base(place.word)
        if place.offset == 0:
            return base
        return self.code.op(f"getelementptr inbounds i8, ptr {base}, i64 {self.size(place.offset)}")

    def spans(self, places: Places) -> Iterator[Span]:
        """The bytes that places (nested in tuples) are, without constants."""
        for place in leaves(places):
            if place.word == CONSTANTS:
                continue
            yield Span(
                self._same.get(place.word, place.word),
                place.offset,
                place.offset + place.nbytes,
            )

    def scratch(self, nbytes: Size) -> Place:
        """Arena memory that is valid until the end of the current step (also inside computations
        that the step calls): of what holds no array meanwhile, if it is much, else behind all
        arrays."""
        return self._within(nbytes) or self._allocate(nbytes)

    @property
    def is_apart(self) -> bool:
        return self._memory != ARENA

    @contextmanager
    def apart(self) -> Iterator[Callable[[], Size]]:
        """For computations that run several times at once, a thread each: in the `with` block
        memory comes from where word OWN of the block points to, and no calls are parallel. Yields
        what says how many bytes were needed."""
        saved = (self._memory, self._top, self._arena)
        self._memory = OWN
        self._top = 0
        self._arena = 0
        needed: Size = 0
        try:
            yield lambda: needed
        finally:
            needed = self._arena
            (self._memory, self._top, self._arena) = saved

    def constant(self, value: Literal | bytes) -> Place:
        """The place of constant data: 64-byte aligned, never written to; equal bytes are stored
        once."""
        data = value.data if isinstance(value, Literal) else value
        offset = self._constants.get(data)
        if offset is None:
            offset = self._constants[data] = self._constant_bytes
            self._constant_bytes += round_up(len(data), ALIGNMENT)
        return Place(CONSTANTS, offset, len(data))

    def packed(
        self,
        source: Place,
        nbytes: int,
        layout: str,
        write: Callable[[str, str], None],
    ) -> str | None:
        """Address of the packed copy of a constant of the program, null where this run has none, or
        of what the loops around keep; None when `source` is neither. `write(source, target)` emits
        what fills the copy: at the program's start, if this run is the copy's first, or before the
        loop. `layout` names everything that decides what is written."""
        if (kept := self.kept.get(source)) is not None:
            if nbytes + PACKED_HEAD > fixed(kept.space.nbytes) or kept.layout not in (
                "",
                layout,
            ):
                return None
            kept.layout = layout
            kept.write = write
            return self.at(kept.space)
        parameter = source.word - self._first_parameter
        if parameter not in self.module.constants or self.is_apart:
            return None
        packing = Packing(parameter, nbytes, f"{layout} {source.offset}")
        self.packings.setdefault(packing, (source, write))
        return self._base(self.words + list(self.packings).index(packing))

    def is_kept(self, source: Places) -> bool:
        """Whether a loop around has a packed copy of `source`, or may have one."""
        return isinstance(source, Place) and source in self.kept

    @contextmanager
    def keeping(self, sources: Sequence[Place]) -> Iterator[None]:
        """Around the emission of a loop's body, before that of the loop: packed copies of the
        `sources` that products ask for are made here."""
        found = {
            s: Kept(self.scratch(2 * s.nbytes + PACKED_SLACK))
            for s in sources
            if s not in self.kept
        }
        self.kept.update(found)
        yield
        for source, kept in found.items():
            del self.kept[source]
            if kept.write is not None:
                kept.write(self.at(source), self.code.gep("i8", self.at(kept.space), PACKED_HEAD))

    def emit_packings(self) -> None:
        """Fill the copies that this run is the first to have."""
        f = self.code
        for number, (source, write) in enumerate(self.packings.values()):
            copy = self._base(self.words + number)
            with (
                f.when(f.icmp("ne", copy, "null", "ptr")),
                f.when(f.icmp("eq", f.load("i64", copy), 0)),
            ):
                write(self.at(source), f.gep("i8", copy, PACKED_HEAD))
                f.store("i64", 1, copy)

    def copy(self, target: Place, source: Place) -> None:
        """Copy a whole buffer, unless it is the same one."""
        if (target.word, target.offset) == (source.word, source.offset) or source.nbytes == 0:
            return
        self._copy(self.at(target), self.at(source), self.size(source.nbytes))

    def _copy(self, to: str, by: str, n: str) -> None:
        name = self.function("copy_bytes", _COPY)
        self.parallel(name, [f"ptr {to}", f"ptr {by}"], n, grain=65536, cost=0.08)

    def fetch(self, kind: str, place: Place) -> str:
        """SSA name of a scalar in a buffer, for control flow: everything before it must have
        run."""
        return self.code.load(kind, self.at(place))

    def put(self, value: str | int, place: Place) -> None:
        """Write an i32 that the host knows to a buffer."""
        self.code.store("i32", value, self.at(place))

    # -- sizes
    def size(self, size: Size) -> str:
        """i64 operand for a size: a decimal literal, or the SSA name of a symbolic one (computed
        once, at function entry)."""
        if isinstance(size, int):
            return str(size)
        found = self._sizes.get(size)
        if found is None:
            found = self._sizes[size] = self._size(size)
        return found

    def _size(self, size: Dim) -> str:
        return emit_size(size, self._prologue, self._symbol)

    @contextmanager
    def local_size(self, name: str, place: Place, limit: Size) -> Iterator[Size]:
        """Yields a size that the program computes itself, an i64 in `place`, at most `limit` (what
        is allocated is made for that). For functions that are begun and ended in the `with` block:
        they read it when they are entered."""
        self._locals[name] = (place, limit)
        try:
            yield symbol(name)
        finally:
            del self._locals[name]

    def _symbol(self, name: str) -> str:
        if name in self._locals:
            place = self._locals[name][0]
            address = self._prologue(
                f"getelementptr i8, ptr {self._base(place.word)}, i64 {self.size(place.offset)}"
            )
            return self._prologue(f"load i64, ptr {address}")
        if name not in self._symbols:
            raise CodegenError(
                f"size symbol {name} is used in {self.module.name} but no parameter defines it"
                " (module.symbols)"
            )
        address = self._prologue(f"getelementptr i64, ptr %block, i64 {self._symbols[name]}")
        return self._prologue(f"load i64, ptr {address}")

    def _prologue(self, expression: str) -> str:
        name = self.code.fresh("a")
        self.code.entry_allocas.append(f"  {name} = {expression}")
        return name

    # -- code
    def function(self, name: str, text: str) -> str:
        """Add a definition (complete text: `define … @name(…) … {…}`) and return the name to call
        it by. The same text is kept once; another text under a taken name is renamed."""
        key = (name, text)
        found = self._by_text.get(key)
        if found is None:
            found = name
            n = 1
            while found in self.functions:
                n += 1
                found = f"{name}.{n}"
            if found != name:
                text = re.sub(rf"@{re.escape(name)}(?![\w.$])", f"@{found}", text)
            self._add(found, text)
            self._by_text[key] = found
        return found

    def define(self, f: Function) -> str:
        """Add a function that is written; returns the name to call it by."""
        return self.function(f.name, f.text())

    def _add(self, name: str, text: str) -> None:
        self.functions[name] = text
        self.written(name, text)

    def plan_function(self, name: str, text: str) -> str:
        """Like `function`, for code that runs on the host and calls the kernels: `void name(ptr
        block)`."""
        return self.function(name, text)

    def once(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """`build()` the first time `key` is seen, the remembered result afterwards. Use it to skip
        writing text again: e.g. `program.once(("row", x["calls"], x.shape), lambda: ...)`; interned
        instructions and computations make exact keys."""
        if key not in self.memo:
            self.memo[key] = build()
        found: Built = self.memo[key]
        return found

    def made(self, make: Callable[..., Built], *arguments: Any) -> Built:
        """`make(program, *arguments)`, written once."""
        return self.once((make, *arguments), lambda: make(self, *arguments))

    def call(self, function: str, arguments: Sequence[str], result: str = "void") -> str:
        """Call a function once; arguments are "type value". Returns the result's SSA name ("" for
        void)."""
        return self.code.call(function, *arguments, result=result)

    def arguments(self, pointers: Iterable[str | Place], sizes: Iterable[Size] = ()) -> list[str]:
        """Arguments of a call: addresses, then sizes."""
        addresses = (self.at(p) if isinstance(p, Place) else p for p in pointers)
        return [*(f"ptr {p}" for p in addresses), *(f"i64 {self.size(n)}" for n in sizes)]

    def parallel(
        self,
        function: str,
        arguments: Sequence[str],
        items: str | Size,
        grain: int = 1,
        cost: float = 0.0,
    ) -> None:
        """Call `function(i64 lo, i64 hi, arguments…)` on ranges that together cover [0, items), on
        the thread pool when the estimated time is worth it. Ranges start at multiples of `grain`.
        `cost` is nanoseconds per item on one thread.

        How many ranges there are depends on the machine; results must not depend on it. For partial
        results make the number of partials a constant of the kernel: one item = one partial."""
        items = items if isinstance(items, str) else self.size(items)
        if items == "0":
            return
        picoseconds = max(1, int(cost * 1000))
        if not self.target.threads or self.is_apart:
            # functions take ranges that are not empty
            with (
                nullcontext()
                if items.isdigit()
                else self.code.when(self.code.icmp("sgt", items, 0))
            ):
                self.call(function, ["i64 0", f"i64 {items}", *arguments])
            return
        if items.isdigit():
            if self.rows is not None:
                self.rows.append(Row(function, tuple(arguments), int(items), grain, picoseconds))
                return
            if int(items) <= grain or int(items) * picoseconds < self.target.parallel_threshold_ps:
                self.call(function, ["i64 0", f"i64 {items}", *arguments])
                return
        trampoline = self._trampoline(function, tuple(a.split(" ", 1)[0] for a in arguments))
        self._store_arguments(arguments)
        pool = self.symbol(
            "torch_hlo_parallel",
            "declare void @torch_hlo_parallel(ptr, ptr, i64, i64, i64)",
        )
        self.call(
            pool,
            [
                f"ptr @{trampoline}",
                "ptr %arguments",
                f"i64 {items}",
                f"i64 {grain}",
                f"i64 {picoseconds}",
            ],
        )

    def _trampoline(self, function: str, kinds: tuple[str, ...]) -> str:
        """`void f.task(ptr args, i64 lo, i64 hi)`: unpack the argument words and call f."""
        lines = [f"define void @{function}.task(ptr %a, i64 %lo, i64 %hi) #0 {{"]
        for i, kind in enumerate(kinds):
            lines += [
                f"  %q{i} = getelementptr i64, ptr %a, i64 {i}",
                f"  %v{i} = load {kind}, ptr %q{i}",
            ]
        values = "".join(f", {kind} %v{i}" for i, kind in enumerate(kinds))
        lines += [
            f"  call void @{function}(i64 %lo, i64 %hi{values})",
            "  ret void",
            "}",
            "",
        ]
        return self.function(f"{function}.task", "\n".join(lines))

    def symbol(self, name: str, declaration: str) -> str:
        """Use a C symbol: `declaration` is its `declare …` line. Where it comes from is
        device/cpu/symbols.py's affair."""
        known = self.declarations.setdefault(name, declaration)
        if known != declaration:
            raise CodegenError(f"symbol {name} is declared twice: {known} / {declaration}")
        return name

    def host_call(
        self,
        name: str,
        outputs: Sequence[tuple[Place, Shape]],
        inputs: Sequence[tuple[Place, Shape]],
        rare: bool = False,
        **attrs: object,
    ) -> None:
        """Call the Python function registered as `name` with arrays over these buffers. `attrs`
        must be JSON data. `rare`: see HostCall."""
        if name not in HOST_CALLS:
            raise CodegenError(f"no host call named {name} is registered")
        index = len(self.host_calls)
        self.host_calls.append(
            HostCall(
                name,
                json.dumps(attrs),
                tuple(s for _, s in outputs),
                tuple(s for _, s in inputs),
                rare,
            )
        )
        self._store_arguments([f"ptr {self.at(place)}" for place, _ in (*outputs, *inputs)])
        self._call_host(index)

    def failed(self) -> str:
        """i1: a host call of this run has raised."""
        f = self.code
        return f.icmp("ne", f.load("i64", f.op(f"getelementptr i64, ptr %block, i64 {FAILED}")), 0)

    def return_if_failed(self) -> None:
        """Leave the current function when a host call has raised: nothing more is written."""
        f = self.code
        leave = f.label("leave")
        go_on = f.label("go")
        f.branch(self.failed(), leave, go_on)
        f.start(leave)
        f.ret()
        f.start(go_on)

    def _call_host(self, number: int) -> None:
        self.code.do(f"call void {self._base(HOST)}(ptr %block, i64 {number}, ptr %arguments)")

    def _store_arguments(self, arguments: Sequence[str]) -> None:
        """Put "type value" texts into the function's argument words."""
        self._arguments = max(self._arguments, len(arguments), 1)
        for i, a in enumerate(arguments):
            self.code.do(f"store {a}, ptr %argument{i}")

    # -- functions of the block and steps
    @contextmanager
    def block_function(
        self, name: str, places: dict[Instruction, Places] | None = None
    ) -> Iterator[Function]:
        """Write into a new function `void name(ptr block)`; yields its Function, add its text with
        `function`. With `places`, instructions are looked up there and not in the enclosing
        computation."""
        saved = (self.code, self._sizes, self._bases, self._arguments)
        self.code = Function(name, [("ptr", "block")])
        self._sizes = {}
        self._bases = {}
        self._arguments = 0
        if places is not None:
            self._places.append(places)
        try:
            yield self.code
            if self._arguments:
                self.code.entry_allocas.append(
                    f"  %arguments = alloca [{self._arguments} x i64], align 16"
                )
                self.code.entry_allocas += [
                    f"  %argument{i} = getelementptr i64, ptr %arguments, i64 {i}"
                    for i in range(self._arguments)
                ]
        finally:
            self.code, self._sizes, self._bases, self._arguments = saved
            if places is not None:
                self._places.pop()

    def try_step(self, x: Instruction) -> None:
        """Emit a step whose operands are parameters, of which only the functions that it defines
        stay."""
        saved = (self._top, self._arena, self.rows)
        with self.block_function("trial", {p: self.allocate_shape(p.shape) for p in x.operands}):
            self.step(x)
        self._top, self._arena, self.rows = saved

    def step(self, x: Instruction) -> None:
        """Emit one scheduled instruction. Raises CodegenError naming it when no emitter takes
        it."""
        row = row_of(x)
        if row not in self.emitters:
            error = CodegenError(
                f"{x.op}({x.operand_shapes}) -> {x.shape}: no emitter for this target; lower it to"
                f" other opcodes or name one in codegen/registry.py, row {row}"
            )
            blame(error, x)
            raise error
        self.places(x)  # the result's buffer outlives the step's scratch memory
        top = self._top
        outer = (self._step_gaps, self._gaps)
        self._step_gaps = (
            functools.partial(find, x)
            if (find := getattr(self._places[-1], "gaps", None)) is not None
            else list
        )
        self._gaps = None
        try:
            self.emitters[row](self, x)
        except Exception as error:
            blame(error, x)
            raise
        self._top = top
        (self._step_gaps, self._gaps) = outer

    def number(self) -> int:
        """A number that no other call returns."""
        self._numbers += 1
        return self._numbers

    # -- internals
    def reserve(self, nbytes: Size) -> Place:
        """Memory for the buffers of a computation. It stays reserved until the calling step
        ends."""
        return self._allocate(nbytes)

    def _find(self, x: Instruction) -> Places:
        if x.op == "get-tuple-element":
            elements = self.places(x.operand)
            assert isinstance(elements, tuple)
            index: int = x["index"]
            return elements[index]
        if x.op == "tuple":
            return tuple(self.places(o) for o in x.operands)
        if x.op == "constant":
            return self.constant(x["literal"])
        return self.allocate_shape(x.shape)

    def allocate_shape(self, shape: Shape) -> Places:
        """Scratch memory for a value: a Place, or tuples of Places."""
        if shape.is_tuple:
            return tuple(self.allocate_shape(e) for e in shape.elements)
        return self._allocate(shape.nbytes)

    def _allocate(self, nbytes: Size) -> Place:
        if self._locals:
            nbytes = substitute(nbytes, {name: limit for name, (_, limit) in self._locals.items()})
        start = self._top
        end = start + (nbytes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
        self._top = end
        self._arena = dim_max(self._arena, end)
        return Place(self._memory, start, nbytes)

    def _within(self, nbytes: Size) -> Place | None:
        """A place for scratch memory among the arrays, in the smallest gap; None where there is
        none, for what is small or of unknown size, and for steps that run beside others."""
        if (
            not isinstance(nbytes, int)
            or nbytes < LARGE_SCRATCH
            or self._memory != ARENA
            or self.rows is not None
        ):
            return None
        if self._gaps is None:
            self._gaps = self._step_gaps()
        fits = [
            (high - low, low, high)
            for low, high in self._gaps
            if round_up(low, ALIGNMENT) + nbytes <= high
        ]
        if not fits:
            return None
        _, low, high = min(fits)
        start = round_up(low, ALIGNMENT)
        self._gaps.remove((low, high))
        self._gaps.append((round_up(start + nbytes, ALIGNMENT), high))
        return Place(ARENA, start, nbytes)

    def _base(self, word: int) -> str:
        found = self._bases.get(word)
        if found is None:
            address = (
                self._prologue(f"getelementptr i64, ptr %block, i64 {word}") if word else "%block"
            )
            found = self._bases[word] = self._prologue(f"load ptr, ptr {address}")
        return found

    def parameter_place(self, index: int) -> Place:
        return Place(self._first_parameter + index, 0, self.module.entry.params[index].nbytes)

    def output_place(self, index: int) -> Place:
        return Place(self.first_output + index, 0, outputs(self.module)[index].nbytes)

    @property
    def arena_size(self) -> Size:
        return self._arena

    def constant_data(self) -> bytes:
        """All constants, in the order of their offsets."""
        parts = []
        for data in self._constants:
            parts += [data, b"\0" * (-len(data) % ALIGNMENT)]
        return b"".join(parts)


# divisors are at least 1; quotients are rounded down, as in Python
_DIM_OPS: dict[str, Callable[[str, str, Callable[[str], str]], str]] = {
    "floordiv": lambda a, b, op: op(
        f"add i64 {op(f'sdiv i64 {a}, {b}')}, {_sign(op(f'srem i64 {a}, {b}'), op)}"
    ),
    "mod": lambda a, b, op: op(
        f"add i64 {(r := op(f'srem i64 {a}, {b}'))}, {op(f'and i64 {_sign(r, op)}, {b}')}"
    ),
    "max": lambda a, b, op: op(f"call i64 @llvm.smax.i64(i64 {a}, i64 {b})"),
    "min": lambda a, b, op: op(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})"),
}


def _sign(x: str, op: Callable[[str], str]) -> str:
    """-1 for negative numbers, else 0."""
    return op(f"ashr i64 {x}, 63")


def emit_size(size: Size, op: Callable[[str], str], symbol: Callable[[str], str]) -> str:
    """Write the polynomial `size` with `op(expression) -> name`; `symbol(name)` gives the value of
    a symbol."""
    if isinstance(size, int):
        return str(size)
    total = ""
    for monomial, coefficient in size.terms:
        product = ""
        for atom in monomial:
            if atom[0] == "sym":
                factor = symbol(atom[1])
            else:
                a = emit_size(atom[1], op, symbol)
                b = emit_size(atom[2], op, symbol)
                factor = _DIM_OPS[atom[0]](a, b, op)
            product = op(f"mul i64 {product}, {factor}") if product else factor
        if not product:
            product = str(coefficient)
        elif coefficient != 1:
            product = op(f"mul i64 {product}, {coefficient}")
        total = op(f"add i64 {total}, {product}") if total else product
    return total


_COPY = """define void @copy_bytes(i64 %lo, i64 %hi, ptr %to, ptr %from) #0 {
  %a = getelementptr i8, ptr %to, i64 %lo
  %b = getelementptr i8, ptr %from, i64 %lo
  %n = sub i64 %hi, %lo
  call void @llvm.memmove.p0.p0.i64(ptr %a, ptr %b, i64 %n, i1 false)
  ret void
}
"""
