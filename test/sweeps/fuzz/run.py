"""A program's runs: on the CPU, and in one of the modes."""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import torch_hlo
from test.sweeps.fuzz import scope as scopes
from test.sweeps.fuzz.compare import Mismatch, Noise, Outcome, difference, look, rounding
from test.sweeps.fuzz.generate import described, execute, is_variable
from torch_hlo.lazy.record import session

REFUSED = {"NotImplementedError", "LoweringError"}
# dtypes that the device lacks; what the CPU does in an order of its own, with a warning
TEXTS = (
    "has no element type",
    "unsupported operand type",
    "more than one element of the written-to tensor refers to a single memory location",
)
CALLS = {"compile": 2, "compile_hlo": 2, "captured": 5}
MODES = ("lazy", "evaluator", "recorded", "threads", "compile", "compile_hlo", "captured")


@dataclass(frozen=True)
class Program:
    """Statements, and the kind of module that they use."""

    kind: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """`mismatch` is None where the devices agree. `note`: "refused", "rounding" or ""."""

    mismatch: Mismatch | None
    note: str = ""


# --- programs as they are --------------------------------------------------------------------


def finished(scope: dict[str, Any], errors: list[str | None], messages: list[str]) -> Outcome:
    """What a program left. A value that cannot be computed is an error at the end."""
    try:
        left, shown = look(scopes.found(scope))
    except Exception as error:
        return Outcome([*errors, type(error).__name__], messages=[*messages, described(error)])
    return Outcome([*errors, None], left, shown, messages)


def run_lines(program: Program, device: str) -> Outcome:
    """Statement by statement; those that fail are skipped."""
    scope = scopes.new_scope(device, program.kind)
    errors: list[str | None] = []
    messages = []
    for line in program.lines:
        errors.append(execute(line, scope))
        if errors[-1]:
            messages.append(scope["raised"])
    if device == "hlo":
        _sync()
    return finished(scope, errors, messages)


def _sync() -> None:
    with contextlib.suppress(Exception):  # reads say what it was
        torch_hlo.mark_step()


def run_together(programs: list[Program], device: str) -> list[Outcome]:
    """Programs whose statements take turns: one step computes them all."""
    running = [scopes.new_scope(device, p.kind) for p in programs]
    errors: list[list[str | None]] = [[] for _ in programs]
    messages: list[list[str]] = [[] for _ in programs]
    for i in range(max(len(p.lines) for p in programs)):
        for program, scope, raised, said in zip(programs, running, errors, messages):
            if i < len(program.lines):
                raised.append(execute(program.lines[i], scope))
                if raised[-1]:
                    said.append(scope["raised"])
    _sync()
    return [finished(s, e, m) for s, e, m in zip(running, errors, messages)]


def run_threads(programs: list[Program], device: str) -> list[Outcome]:
    """Each in a thread of its own."""
    outcomes: list[Outcome] = [Outcome(["hangs"])] * len(programs)

    def work(i: int) -> None:
        outcomes[i] = run_lines(programs[i], device)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return outcomes


# --- programs as functions -------------------------------------------------------------------

# what makes a tensor of data: an argument of the function
DATA = re.compile(r"make\((\d+), (\(.*?\)), (torch\.\w+)(, True)?\)|ints\((\[[^]]*\])\)")
WORDLESS = ("mark()", "log.append(repr", "log.append(str", "del ", "empty(")


@dataclass(frozen=True)
class Function:
    """A program as the body of a function: `data` makes its arguments, `code` defines `step`."""

    kind: int
    data: tuple[str, ...]
    code: str


def as_function(program: Program) -> Function | None:
    """The statements that work, as a function of the program's data; None if nothing is left."""
    scope = scopes.new_scope("cpu", program.kind)
    lines = [
        line
        for line in program.lines
        if not any(word in line for word in WORDLESS) and execute(line, scope) is None
    ]
    data: list[str] = []

    def argument(found: re.Match) -> str:
        data.append(found.group(0))
        return f"c{len(data) - 1}"

    body = [DATA.sub(argument, line) for line in lines]
    names = [n for n, v in scope.items() if is_variable(n) and isinstance(v, torch.Tensor)]
    if not names or not data:
        return None
    arguments = ", ".join(f"c{i}" for i in range(len(data)))
    code = "\n".join(body).replace("\n", "\n    ")
    results = ", ".join(names)
    return Function(
        program.kind, tuple(data), f"def step({arguments}):\n    {code}\n    return [{results}]\n"
    )


def again(text: str, call: int) -> str:
    """The data of another call: the same shapes."""
    return re.sub(r"make\((\d+)", lambda m: f"make({int(m.group(1)) + call}", text)


def run_function(function: Function, device: str, wrap: Any, calls: int) -> Outcome:
    """Call it several times. Between calls Python's state changes, and results are written to."""
    gradients = calls != CALLS["captured"]  # results of captured functions have values only
    scope = scopes.new_scope(device, function.kind)
    exec(compile(function.code, "<fuzz>", "exec"), scope)
    step = wrap(scope["step"])
    errors: list[str | None] = []
    messages = []
    left: dict[str, Any] = {}
    shown: dict[str, tuple] = {}
    for call in range(calls):
        try:
            arguments = [eval(again(text, call), scope) for text in function.data]
            results = step(*arguments)
            for name, values in (("argument", arguments), ("result", results)):
                named = {f"call {call} {name} {i}": value for i, value in enumerate(values)}
                copies, forms = look(named, name == "result", gradients)
                left |= copies
                shown |= forms
            with torch.no_grad():  # who else sees a write?
                for value in results[:1]:
                    value[...] = 3
            copies, _ = look(
                {f"call {call} written {i}": v for i, v in enumerate([*arguments, *results])}
            )
            left |= copies
            errors.append(None)
        except Exception as error:
            errors.append(type(error).__name__)
            messages.append(described(error))
            return Outcome(errors, messages=messages)
        scope["state"].count += call % 2
        scope["state"].inner.scale = 2.0 if call < 3 else 0.5
    return Outcome(errors, left, shown, messages)


def compiled(backend: str) -> Any:
    def wrap(step: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(step, backend=backend)

    return wrap


def captured(step: Any) -> Any:
    return torch_hlo.compile(step, full_graph=False)


# --- one program in one mode -------------------------------------------------------------------


@contextlib.contextmanager
def engine(mode: str) -> Iterator[None]:
    """What computes steps in this mode."""
    if mode == "recorded":
        from test.lazy.interpreter import Interpreter

        session.current().pending.clear()
        with session.use(Interpreter()):
            yield
        session.current().pending.clear()
    else:
        yield


def reference(program: Program, mode: str, noise: int | None = None) -> Outcome:
    """What PyTorch does on the CPU; with `noise`, rounding otherwise."""
    rounding = Noise(noise) if noise is not None else None
    with rounding or contextlib.nullcontext():
        if mode not in CALLS:
            outcome = run_lines(program, "cpu")
        else:
            function = as_function(program)
            if function is None:
                return Outcome([])
            outcome = run_function(function, "cpu", lambda f: f, CALLS[mode])
    outcome.undefined = rounding is not None and rounding.undefined
    return outcome


def tested(program: Program, mode: str) -> Outcome:
    """What the package does."""
    if mode not in CALLS:
        with engine(mode):
            return run_lines(program, "hlo")
    function = as_function(program)
    if function is None:
        return Outcome([])
    device = "cpu" if mode == "compile" else "hlo"
    wrap = captured if mode == "captured" else compiled("hlo")
    return run_function(function, device, wrap, CALLS[mode])


def judge(program: Program, mode: str, want: Outcome, got: Outcome) -> Result:
    """Whether `got` is right."""
    lines = list(program.lines) if mode not in CALLS else []
    for w, g in zip(want.errors, got.errors):
        if w is None and (g in REFUSED or g and any(t in m for t in TEXTS for m in got.messages)):
            return Result(None, "refused")
        if w and not g and any("conjugate view" in m for m in want.messages):
            return Result(None, "wider")  # here such a view is like any other
        if w == "NotImplementedError":  # the CPU has no kernel for the dtype
            return Result(None, "wider")
        if w != g:
            break
    found = difference(want, got, lines)
    if found is None:
        return Result(None)
    moved = [reference(program, mode, noise) for noise in range(4)]
    if rounding(want, got, moved):
        return Result(None, "rounding")
    if mode.startswith("compile") and _elsewhere(program, mode, want):
        return Result(None, "upstream")
    return Result(found)


def _elsewhere(program: Program, mode: str, want: Outcome) -> bool:
    """Whether Dynamo differs from eager PyTorch with another back end, too."""
    function = as_function(program)
    assert function is not None
    other = run_function(function, "cpu", compiled("aot_eager"), CALLS[mode])
    return difference(want, other, []) is not None


def check(program: Program, mode: str) -> Result:
    """One program in one mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(program, mode, reference(program, mode), tested(program, mode))


def check_together(
    programs: list[Program], mode: str, wanted: list[Outcome] | None = None
) -> list[Result]:
    """Several programs in one step or, in mode "threads", at the same time; else in turn. `wanted`:
    what they did on the CPU while they were made."""
    with warnings.catch_warnings(), engine(mode):
        warnings.simplefilter("ignore")
        if mode == "together":
            got = run_together(programs, "hlo")
        elif mode == "threads":
            got = run_threads(programs, "hlo")
        else:
            got = [run_lines(p, "hlo") for p in programs]
        results = []
        for i, (p, g) in enumerate(zip(programs, got)):
            if wanted is not None and difference(wanted[i], g, list(p.lines)) is None:
                results.append(Result(None))
            else:
                results.append(judge(p, mode, reference(p, mode), g))
        return results
