"""Functions in IR text -> object code, on WORKERS threads, while the rest of the program is still
being written.

    with Objects(target) as objects:
        program.written = objects.add
        ...                                     # functions are written
        code = objects.finish()
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import llvmlite.binding as llvm
from llvmlite.binding import ffi

from ..thresholds import FIRST_MODULE_BYTES, MODULE_BYTES
from .target import CpuTarget

WORKERS = 2
_REFERENCE = re.compile(r"@([\w.$]+)")
_LOOP = re.compile(r"^ *br |<\d+ x ", re.M)
# names of lists of calls, and of what unpacks the arguments of a task: each runs once, or once per
# task
_GLUE = re.compile(r"entry|.*\.task$")
# What a function has that does more than call others. Those that do not run once per tile: a few
# instructions more are 1 % of a product of 128x64x128 numbers, and optimising them would take a
# third of the compile time of a convolutional network
_WORK = re.compile(r"<\d+ x |= load | store |@llvm\.(?!s|u)|^ *ret [^v]", re.M)
_HEAD = re.compile(
    r"define (?:internal |private |linkonce_odr |hidden"
    r" )*(?P<result>.*?)@(?P<name>[\w.$]+)\((?P<params>[^\n]*)\)[^\n]*\{"
)

_PRELUDE = """@torch_hlo_zeros = internal constant [64 x i8] zeroinitializer, align 64
attributes #0 = {{ nounwind "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}" \
"no-trapping-math"="true" }}
attributes #1 = {{ nounwind willreturn memory(none) }}
!0 = !{{i32 1}}
"""


def prelude(target: CpuTarget) -> str:
    """What every LLVM module starts with."""
    return _PRELUDE.format(bits=target.vector_bytes * 8)


class Objects:
    """Packs functions into LLVM modules and compiles each as soon as it is full; the first ones are
    small, so that no thread waits for them. A function may refer to itself, to earlier ones, and to
    later ones of its own module or, if it comes late enough, of any."""

    def __init__(self, target: CpuTarget, assembly: bool = False) -> None:
        self.target = target
        self.assembly = assembly
        self.declarations: Mapping[str, str] = {}  # of symbols that are not written here
        self.texts: list[str] = []
        self._heads: dict[str, str] = {}
        # kernels; glue, which is compiled without optimisation
        self._groups: dict[bool, dict[str, str]] = {True: {}, False: {}}
        self._sizes = {True: 0, False: 0}
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[partial[tuple[bytes, str]]] = []  # of the texts
        self._results: list[Future[tuple[bytes, str]]] = []

    def __enter__(self) -> Objects:
        if self.target.arch == "x86_64":
            _Passes.count(1)
        _Turns.count(1)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            # threads that have nothing more to do end by themselves; after an error some may still
            # be inside LLVM
            self._pool.shutdown(wait=exc[0] is not None, cancel_futures=True)
        _Turns.count(-1)
        if self.target.arch == "x86_64":
            _Passes.count(-1)

    def add(self, name: str, text: str) -> None:
        """Another function, complete: `define … @name(…) … {…}`. Raises ValueError when its text
        defines something else."""
        match = _HEAD.search(text)
        if match is None or match["name"] != name:
            raise ValueError(f"function {name} is not defined by its text: {text[:200]!r}")
        params = re.sub(r"%[\w.$]+", "", match["params"])
        self._heads[name] = f"declare {match['result']}@{name}({params})"
        kind = bool((_LOOP if _GLUE.match(name) else _WORK).search(text))
        group = self._groups[kind]
        group[name] = text
        self._sizes[kind] += len(text)
        if self._sizes[kind] >= min(FIRST_MODULE_BYTES << len(self.texts), MODULE_BYTES):
            self._close(kind)

    def flush(self) -> None:
        """Compile what there is: more comes much later."""
        for kind, group in self._groups.items():
            if group:
                self._close(kind)

    def _close(self, kind: bool) -> None:
        """Compile the functions of a group, unless one calls what has yet to be written."""
        group = self._groups[kind]
        module = self._module(group)
        if module is not None:
            group.clear()
            self._sizes[kind] = 0
            self._submit(module, kind)

    def finish(self) -> list[tuple[bytes, str]]:
        """(object code, assembly if that was asked for) of all modules, in the order in which they
        were filled."""
        for kind, group in self._groups.items():
            is_long = self._sizes[kind] > 2 * FIRST_MODULE_BYTES
            for part in _halves(group) if is_long else [group]:
                if part and (module := self._module(part, last=True)):
                    self._submit(module, kind)
        if self._pool:
            return [result.result() for result in self._results]
        return [job() for job in self._jobs]

    def _submit(self, text: str, kind: bool) -> None:
        self.texts.append(text)
        # Glue is long and each line of it runs once: optimising it would take a fifth of a
        # program's compile time for nothing.
        self._jobs.append(partial(machine_code, text, self.target, self.assembly, 2 * kind))
        if self._pool is None:
            # a thread is not worth its while, or cannot start, since the process ends
            if len(text) < FIRST_MODULE_BYTES or not threading.main_thread().is_alive():
                return
            self._pool = ThreadPoolExecutor(WORKERS)
        self._results += map(self._pool.submit, self._jobs[len(self._results) :])

    def _module(self, group: Mapping[str, str], last: bool = False) -> str | None:
        """The text of a module, with declarations of what it uses from others; None if some of that
        has not been written yet."""
        bodies = [text.replace("define internal ", "define ", 1) for text in group.values()]
        used = dict.fromkeys(
            name for body in bodies for name in _REFERENCE.findall(body) if name not in group
        )
        declared = [self._heads.get(n) or self.declarations.get(n, "") for n in used]
        if not last and any(
            not line and not n.startswith(("llvm.", "torch_hlo_zeros"))
            for n, line in zip(used, declared, strict=True)
        ):
            return None
        return "\n".join([prelude(self.target), *filter(None, declared), "", *bodies])


def _halves(group: Mapping[str, str]) -> list[dict[str, str]]:
    """The functions of a group in two, of about as much text each, for two threads."""
    names = sorted(group, key=lambda name: len(group[name]))
    return [{name: group[name] for name in names[k::2]} for k in range(2)]


class _Switch:
    """A setting of the process, which others may want, for as long as somebody compiles."""

    _lock = threading.Lock()
    _users = 0

    @classmethod
    def count(cls, change: int) -> None:
        with cls._lock:
            was, cls._users = cls._users, cls._users + change
            if (was > 0) != (cls._users > 0):
                cls._set(cls._users > 0)

    @classmethod
    def _set(cls, on: bool) -> None:
        """Others find it off."""


class _Turns(_Switch):
    """A worker needs the interpreter between its calls of LLVM, a dozen times per module, and waits
    a switch interval (5 ms) each time while the rest of the program is being written: GPT's first
    modules took 460 ms for 60 of work."""

    interval = 0.0003  # seconds
    _before = 0.0

    @classmethod
    def _set(cls, on: bool) -> None:
        if on:
            cls._before = sys.getswitchinterval()
        sys.setswitchinterval(min(cls.interval, cls._before) if on else cls._before)


class _Passes(_Switch):
    """LLVM's strength reduction of loops takes a third of its time for kernels with many pointers
    (and up to half), and does nothing for x86, whose addressing does what it would: the kernels of
    six training and inference steps ran as fast without it. Its search for selects that should be
    branches takes a twentieth, and finds none in vectors: the code of 43 modules was the same."""

    @classmethod
    def _set(cls, on: bool) -> None:
        for name in ("lsr", "select-optimize"):
            llvm.set_option("", f"-disable-{name}={'true' if on else 'false'}")


def machine_code(
    text: str, target: CpuTarget, assembly: bool = False, level: int = 2
) -> tuple[bytes, str]:
    """Object code of an IR module, and its assembly when asked for. No IR pass runs: the text is
    explicit. `level`: see CpuTarget.machine."""
    _release_lock()
    machine = target.machine(level)
    module = parsed(text, machine)
    asm = machine.emit_assembly(module) if assembly else ""
    return machine.emit_object(module), asm


def parsed(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """IR text as a module for a machine, in a context of its own. Raises RuntimeError with LLVM's
    words."""
    try:
        module = llvm.parse_assembly(text, llvm.create_context())
    except RuntimeError as error:
        raise RuntimeError(f"generated IR is invalid: {error}") from None
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    return module


def _release_lock() -> None:
    """llvmlite holds one lock during every call, so that two threads would compile in turns.
    Generating code touches nothing but the module's context and the target machine, both made for
    it, which is what LLVM allows threads to do: this call goes without the lock."""
    functions = getattr(ffi.lib, "_fntab", None)
    name = "LLVMPY_TargetMachineEmitToMemory"
    function = getattr(ffi.lib, name)
    if functions is not None and hasattr(function, "_cfn"):
        functions[name] = function._cfn
