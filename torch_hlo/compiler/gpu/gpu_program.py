"""The builder for GPU programs: kernels for the device, and a plan for the host that launches them.

The plan is the same `entry(ptr block)` as on the CPU, and steps are emitted by the same code. What
differs is where functions run: `parallel` becomes the launch of a kernel made from the function,
copies and host reads go through the driver. The word HOST of the block points to a table of the
host's functions (see CALLS), which device/gpu/gpu.py fills."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Ints, Module, Size, round_up

from ..codegen import CodegenError, Place, Program
from ..codegen.block import ALIGNMENT, HOST, Span
from ..codegen.profile import Profile, describe
from ..codegen.registry import GPU
from ..llvm import libm
from .address_spaces import Spaces
from .branches import Branches
from .target import KERNEL, GpuTarget

# What the plan asks of the host: run a host call, start a kernel, copy, read a value, fill words;
# go on in another branch of the graph being made, once others have come to their ends (a bit each);
# a step of a profiled program begins.
CALLS = ("host_call", "launch", "copy", "fetch", "fill", "branch", "mark")
_WORK = frozenset(("host_call", "launch", "copy", "fetch", "fill"))
TURN = 1 << 20  # bytes of scratch memory that steps use in turns
THREADS = 128  # of a group, where threads do not work together
_NAME = re.compile(r"@(?!llvm\.)([\w.$]+)")
_HEAD = re.compile(
    r"define (?:internal )?void @(?P<name>[\w.$]+)\((?P<params>[^\n]*)\) #0 \{\nentry:\n"
)
_STACK_SLOT = re.compile(r"^  %[\w.$]+ = alloca [^\n]*\n", re.M)


@frozen
class TensorMap:
    """What Hopper's copy engine is told of an array: all but `itemsize` (bytes) and `box` (elements
    of a copy in every dimension) are numbers of arguments of the kernel, counted from `items` = 0.
    `pointer`: to the array; `sizes`: innermost dimension first, which is contiguous; `strides`: of
    the others, in elements. Copies swizzle 128 bytes (compiler/matmul/gpu/gpu_panel.py) and give
    zeros for what is outside. An opaque value of 128 bytes for the device."""

    pointer: int
    itemsize: int
    sizes: Ints
    strides: Ints
    box: Ints


# type of a parameter that is a TensorMap
MAP = "ptr byval([128 x i8]) align 64"


@frozen
class Kernel:
    """An entry point on the device: `name(i64 items, arguments…, maps…)`. `arguments`: "p" for a
    pointer, "n" for an i64, each; `threads` of a group; `label`: the HLO instruction it was first
    made for; `shared`: bytes of shared memory per group beyond what the code declares; `maps`: made
    by the driver from the arguments of each launch."""

    name: str
    arguments: str
    threads: int
    label: str
    shared: int = 0
    maps: tuple[TensorMap, ...] = ()


@frozen
class Group:
    """How a group of threads works on one item of a function: see Kernel. `resident`: groups that a
    multiprocessor shall be able to hold, which limits the registers of a thread; 0 for as many as
    it may be."""

    threads: int
    shared: int = 0
    maps: tuple[TensorMap, ...] = ()
    resident: int = 0


class GpuProfile(Profile):
    """The plan says where a step begins; who runs it takes the time there (device/gpu/gpu.py)."""

    nested = False
    program: GpuProgram

    def start(self, program: Program, order: Sequence[Instruction]) -> None:
        assert isinstance(program, GpuProgram)
        self.program = program

    @contextmanager
    def step(self, x: Instruction) -> Iterator[None]:
        self.program._host("mark", f"i64 {len(self.steps)}")
        yield
        self.steps.append(describe(x, len(self.steps)))


class GpuProgram(Program):
    """See Program. `function` adds device code, `plan_function` host code."""

    emitters = GPU
    target: GpuTarget
    early = False  # there is little but kernels

    def __init__(self, module: Module, target: GpuTarget, profile: Profile | None = None) -> None:
        super().__init__(module, target, profile)
        self.plan: dict[str, str] = {}
        self.kernels: list[Kernel] = []
        self.groups: dict[str, Group] = {}  # functions whose threads work on one item together
        self.routines: dict[str, None] = {}  # of compiler/llvm/libm.py
        self._kernel_numbers: dict[str, int] = {}
        self._kernel_texts: list[str] = []
        self._step: Instruction | None = None
        self._depth = 0  # steps inside steps
        self._work = 0  # calls that start something
        self._written: list[Span] = []  # scratch memory of the step being emitted
        # where that of the next step begins: a little further each time, lest steps wait for
        # nothing but it
        self._turn: Size = 0
        self._branches = Branches()
        self._branch = 0  # the plan goes on in

    def plan_function(self, name: str, text: str) -> str:
        self.plan[name] = text
        self.written(name, text)
        return name

    def _add(self, name: str, text: str) -> None:
        self.functions[name] = text

    def symbol(self, name: str, declaration: str) -> str:
        """A mathematical function: there is no library on the device, so its text becomes part of
        the program."""
        if name not in libm.ROUTINES:
            raise CodegenError(f"{name} has no code for GPUs: add it to compiler/llvm/libm.py")
        self.routines.setdefault(name)
        return name

    def group_function(
        self,
        name: str,
        text: str,
        threads: int,
        shared: int = 0,
        maps: tuple[TensorMap, ...] = (),
        resident: int = 0,
    ) -> str:
        """A function one item of which is worked on by a Group: `shared` bytes of memory are given
        at launch, which the text declares as an external array of no length; its last parameters
        are `maps`, of type MAP, which callers do not give."""
        name = self.function(
            f"{name}_{threads}", text.replace(f"@{name}(", f"@{name}_{threads}(", 1)
        )
        self.groups[name] = Group(threads, shared, maps, resident)
        return name

    def step(self, x: Instruction) -> None:
        outer = self._step
        self._step = x
        self._depth += 1
        lines = self.code.lines
        work = self._work
        start = len(lines)
        top = self._top
        if (
            self._depth == 1
            and isinstance(top, int)
            and isinstance(self._turn, int)
            and top <= self._turn < top + TURN
        ):
            self._top = self._turn
        try:
            super().step(x)
        finally:
            self._depth -= 1
            self._step = outer
            self._top = top
        if self._depth == 0:
            if self._work > work:
                self._place_step(x, lines, start)
            self._turn = round_up(self._written[-1].end, ALIGNMENT) if self._written else self._turn
            self._written = []

    def _place_step(self, x: Instruction, lines: list[str], start: int) -> None:
        """Say, before what a step has written to the plan, in which branch it runs."""
        reads = [s for o in x.operands for s in self.spans(self.places(o))]
        branch, waits = self._branches.place(reads, [*self.spans(self.places(x)), *self._written])
        if branch != self._branch or waits:
            self._branch = branch
            tail = lines[start:]
            del lines[start:]
            self._host("branch", f"i64 {branch}", f"i64 {sum(1 << b for b in waits)}")
            lines += tail

    def _allocate(self, nbytes: Size) -> Place:
        place = super()._allocate(nbytes)
        if self._depth:
            self._written += self.spans(place)
        return place

    # -- calls of the host
    def _host(self, call: str, *arguments: str) -> None:
        self._work += call in _WORK
        table = self._base(HOST)
        slot = self._prologue_once(
            ("slot", call),
            f"getelementptr ptr, ptr {table}, i64 {CALLS.index(call)}",
        )
        function = self._prologue_once(("call", call), f"load ptr, ptr {slot}")
        self.code.do(f"call void {function}({', '.join(('ptr %block', *arguments))})")

    def _prologue_once(self, key: str | tuple[str, ...], expression: str) -> str:
        found = self._bases.get(key)
        if found is None:
            found = self._bases[key] = self._prologue(expression)
        return found

    def parallel(
        self,
        function: str,
        arguments: Sequence[str],
        items: str | Size,
        grain: int = 1,
        cost: float = 0.0,
    ) -> None:
        """Launch `function` on [0, items): a group of threads per item where the function wants
        that, else a thread. `grain` and `cost` are for thread pools."""
        items = items if isinstance(items, str) else self.size(items)
        if items == "0":
            return
        f = self.code
        number = self._kernel(function, arguments)
        kernel = self.kernels[number]
        count = int(items) if items.isdigit() else items
        groups = count if function in self.groups else f.ceildiv(count, kernel.threads)
        self._store_arguments([f"i64 {items}", *arguments])
        self._host("launch", f"i64 {number}", f"i64 {groups}", "ptr %arguments")

    def _label(self) -> str:
        x = self._step
        return (
            ""
            if x is None
            else f"{x.op} {x.shape}" + (f" ({x.meta.op_name})" if x.meta.op_name else "")
        )

    def _kernel(self, function: str, arguments: Sequence[str]) -> int:
        found = self._kernel_numbers.get(function)
        if found is None:
            found = self._kernel_numbers[function] = len(self.kernels)
            kinds = [a.split(" ", 1)[0] for a in arguments]
            if any(k not in ("ptr", "i64") for k in kinds):
                raise CodegenError(
                    f"kernel {function}: arguments are pointers and i64, got {kinds}"
                )
            group = self.groups.get(function)
            g = group or Group(THREADS)
            name = f"k{found}_" + re.sub(r"\W", "_", function)
            self.kernels.append(
                Kernel(
                    name,
                    "n" + "".join("p" if k == "ptr" else "n" for k in kinds),
                    g.threads,
                    self._label(),
                    g.shared,
                    g.maps,
                )
            )
            self._kernel_texts.append(
                kernel_text(
                    self.functions[function],
                    found,
                    name,
                    g,
                    group is not None,
                )
            )
        return found

    def _copy(self, to: str, by: str, n: str) -> None:
        # at the end of the program: after all steps
        if self._depth == 0 and self._branches.count > 1:
            self._host("branch", "i64 0", f"i64 {(1 << self._branches.count) - 2}")
        self._host("copy", f"ptr {to}", f"ptr {by}", f"i64 {n}")

    def fetch(self, kind: str, place: Place) -> str:
        self.fetches = True
        nbytes = {"i8": 1, "i32": 4, "i64": 8}[kind]
        slot = self._prologue_once("fetched", "alloca i64, align 8")
        self._host("fetch", f"ptr {slot}", f"ptr {self.at(place)}", f"i64 {nbytes}")
        return self.code.load(kind, slot)

    def put(self, value: str | int, place: Place) -> None:
        self._host("fill", f"ptr {self.at(place)}", f"i32 {value}", "i64 1")

    def _call_host(self, number: int) -> None:
        self.fetches = True
        self._host("host_call", f"i64 {number}", "ptr %arguments")

    # -- the device's code
    def device_text(self) -> str:
        """All kernels and what they call, with address spaces, and names without dots, which PTX
        does not take."""
        called = _called((*self._kernel_texts, *self.functions.values()))
        helpers = [
            t.replace("define void", "define internal void", 1)
            for f, t in self.functions.items()
            if f in called
        ]
        spaces = Spaces()
        text = "\n".join(
            spaces.assign(t) for t in (*self._library(), *helpers, *self._kernel_texts)
        )
        return _NAME.sub(lambda m: "@" + re.sub(r"\W", "_", m[1]), text)

    def _library(self) -> list[str]:
        """The routines of compiler/llvm/libm.py that are called, under names that no compiler takes
        for its own."""
        needed: dict[str, None] = {}
        stack = list(self.routines)
        while stack:
            name = stack.pop()
            if name not in needed:
                needed[name] = None
                stack += libm.NEEDS[name]
        return [libm.ROUTINES[name](self.target) for name in needed]


def _called(texts: Sequence[str]) -> set[str]:
    return {m for t in texts for m in re.findall(r"call [^\n]*?@([\w.$]+)\(", t)}


def _thread_numbers(threads: int | None) -> list[str]:
    """The range of a thread's item; `threads`: of a group, unless they share an item."""
    lines = [
        "  %kernel.g0 = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()",
        "  %kernel.t0 = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()",
        *(f"  %kernel.{n} = zext i32 %kernel.{n}0 to i64" for n in "gt"),
    ]
    if threads is None:
        lines.append("  %lo = add i64 %kernel.g, 0")
    else:
        lines.append(f"  %kernel.first = mul i64 %kernel.g, {threads}")
        lines.append("  %lo = add i64 %kernel.first, %kernel.t")
    return [
        *lines,
        "  %hi = add i64 %lo, 1",
        "  %kernel.any = icmp slt i64 %lo, %items",
        "  br i1 %kernel.any, label %entry, label %kernel.none",
        "entry:\n",
    ]


def kernel_text(text: str, number: int, name: str, g: Group, group: bool) -> str:
    """The entry point made of a function `void f(i64 lo, i64 hi, …)`: its [lo, hi) is the group's
    item, or the thread's: one each way. What LLVM shall know of it is metadata of this number,
    since LLVM 20 overlooks attributes: it would copy maps that it does not know to be constant to
    the stack of a thread, where the copy engine reads none."""
    threads = g.threads
    head = _HEAD.search(text)
    if head is None:
        raise CodegenError(f"kernel {name} is not a function of a range: {text[:120]!r}")
    params = [p.strip() for p in head["params"].split(",")][2:]
    body = text[head.end() :]
    # Stack slots are as aligned as their elements: threads have many stacks, and drivers place
    # over-aligned ones wrongly.
    slots = [
        re.sub(r"\[1 x ([\w.]+)\]", r"\1", s.split(", align")[0]).rstrip() + "\n"
        for s in _STACK_SLOT.findall(body)
    ]
    body = _STACK_SLOT.sub("", body)
    start = _thread_numbers(None if group else threads)
    before = text[: head.start()].replace("@SELF", f"@{name}")
    body = body.rstrip()
    if not body.endswith("}"):
        raise CodegenError(f"kernel {name} has more than one function in its text")
    body = body[:-1].rstrip() + "\nkernel.none:\n  ret void\n}\n"
    notes = f'!"maxntidx", i32 {threads}'
    notes += f', !"minctasm", i32 {g.resident}' if g.resident else ""
    # parameters count from 1
    if maps := ", ".join(f"i32 {len(params) + 1 - i}" for i in range(len(g.maps))):
        notes += f', !"grid_constant", !{{{maps}}}'
    signature = ", ".join(["i64 %items", *params])
    return (
        f"{before}define {KERNEL} void @{name}({signature}) #0"
        " {\nkernel.start:\n"
        + "".join(slots)
        + "\n".join(start)
        + body.replace("@SELF", f"@{name}")
        + f"!{number} = !{{ptr @{name}, {notes}}}\n!nvvm.annotations = !{{!{number}}}"
    )
