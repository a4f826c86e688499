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
from torch.autograd.grad_mode import _force_original_view_tracking

import torch_hlo
from test.sweeps.fuzz import generate, scope as scopes
from test.sweeps.fuzz.compare import Mismatch, Noise, Outcome, difference, look, rounding
from test.sweeps.fuzz.generate import described, execute, is_variable
from torch_hlo.lazy.record import session

REFUSED = {"NotImplementedError", "LoweringError"}
# dtypes that the device lacks; what the CPU does in an order of its own, with a warning; a view of
# bools that a comparison with differentiable numbers wrote, which PyTorch replays on its base
TEXTS = (
    "has no element type",
    "unsupported operand type",
    "Autograd not support dtype: Bool",
    "more than one element of the written-to tensor refers to a single memory location",
)
CALLS = {"compile": 2, "compile_hlo": 2, "captured": generate.CALLS}
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


def finished(
    scope: dict[str, Any], errors: list[str | None], messages: list[str], gradients: bool = True
) -> Outcome:
    """What a program left. A value that cannot be computed is an error at the end."""
    try:
        left, shown = look(scopes.found(scope, gradients), gradients=gradients)
    except Exception as error:
        return Outcome([*errors, type(error).__name__], messages=[*messages, described(error)])
    return Outcome([*errors, None], left, shown, messages)


def run_lines(program: Program, device: str, gradients: bool = True) -> Outcome:
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
    return finished(scope, errors, messages, gradients)


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
DATA = re.compile(r"num\(\d+\)|make\((\d+), (\(.*?\)), (torch\.\w+)(, True)?\)|ints\((\[[^]]*\])\)")
WORDLESS = ("mark()", "log.append(repr", "log.append(str", "del ", "empty(")


@dataclass(frozen=True)
class Function:
    """A program as the body of a function: `data` makes its arguments, `code` defines `step`,
    `before` a call happens what is listed."""

    kind: int
    data: tuple[str, ...]
    code: str
    calls: int
    before: dict[int, list[str]]


def as_function(program: Program, mode: str) -> Function | None:
    """The statements that work, as a function of the program's data; None if nothing is left."""
    before: dict[int, list[str]] = {}
    for line in program.lines:
        if line.startswith(generate.BEFORE):
            call, statement = line.removeprefix(generate.BEFORE).split(": ", 1)
            before.setdefault(int(call), []).append(statement)
    scope = scopes.new_scope("cpu", program.kind)
    lines = [
        line
        for line in program.lines
        if not line.startswith("#")
        and not any(word in line for word in WORDLESS)
        and execute(line, scope) is None
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
    code = f"def step({arguments}):\n    {code}\n    return [{', '.join(names)}]\n"
    return Function(program.kind, tuple(data), code, CALLS[mode], before)


def again(text: str, call: int) -> str:
    """The data of another call: the same shapes."""
    return re.sub(r"(make|num)\((\d+)", lambda m: f"{m[1]}({int(m[2]) + call}", text)


class Calls:
    """A function's calls on a device, one after another, and what they leave."""

    def __init__(self, function: Function, device: str, wrap: Any) -> None:
        self.function = function
        self.scope = scopes.new_scope(device, function.kind)
        exec(compile(function.code, "<fuzz>", "exec"), self.scope)
        self.step = wrap(self.scope["step"])
        self.outcome = Outcome([])
        self.kept: dict[str, Any] = {}
        self.captured = function.calls == generate.CALLS

    def run(self) -> Outcome:
        torch.manual_seed(0)
        for call in range(self.function.calls):
            try:
                self.call(call)
            except Exception as error:
                # where the function raises, Dynamo has its own words
                name = "raised" if self.captured and call else type(error).__name__
                self.outcome.errors.append(name)
                self.outcome.messages.append(described(error))
                return self.outcome
            self.outcome.errors.append(None)
        if self.captured:  # does anything that was given or left change later?
            self.keep({f"at the end {k}": v for k, v in self.kept.items()})
            self.keep(scopes.found(self.scope, gradients=False))
        return self.outcome

    def keep(self, values: dict[str, Any], shown: bool = False) -> None:
        # results of captured functions have values only
        copies, forms = look(values, shown, not self.captured)
        self.outcome.left |= copies
        self.outcome.shown |= forms if shown else {}

    def call(self, call: int) -> None:
        """Between calls Python's state changes, and results are written to."""
        scope = self.scope
        scope["given"] = given = [eval(again(text, call), scope) for text in self.function.data]
        for statement in self.function.before.get(call, ()):
            # what has been changed, or why it cannot be, is the same everywhere
            self.outcome.left[f"call {call} {statement}"] = execute(statement, scope)
        results = self.step(*given)
        arguments = {f"call {call} argument {i}": value for i, value in enumerate(given)}
        named = {f"call {call} result {i}": value for i, value in enumerate(results)}
        self.keep(named, True)
        self.keep(arguments)
        with torch.no_grad():  # who else sees a write?
            for value in results[:1]:
                value[...] = 3
        self.keep({f"written {k}": v for k, v in [*arguments.items(), *named.items()]})
        self.kept |= arguments | named
        scope["before"], scope["last"] = given, results
        if not self.captured:
            scope["state"].count += call % 2
            scope["state"].inner.scale = 2.0 if call < 3 else 0.5


def run_function(function: Function, device: str, wrap: Any) -> Outcome:
    """Call it several times."""
    return Calls(function, device, wrap).run()


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


# statements whose numbers differ between devices
RANDOM = re.compile(r"rand|bernoulli|dropout")


def reference(program: Program, mode: str, noise: int | None = None) -> Outcome:
    """What PyTorch does on the CPU; with `noise`, rounding otherwise. Random numbers are those of
    the device, without being captured."""
    rounding = Noise(noise) if noise is not None else None
    with rounding or contextlib.nullcontext():
        if mode not in CALLS:
            outcome = run_lines(program, "cpu")
        else:
            function = as_function(program, mode)
            if function is None:
                return Outcome([])
            device = "hlo" if RANDOM.search(function.code) else "cpu"
            outcome = run_function(function, device, lambda f: f)
    outcome.undefined = rounding is not None and rounding.undefined
    return outcome


def tested(program: Program, mode: str) -> Outcome:
    """What the package does."""
    if mode not in CALLS:
        with engine(mode):
            return run_lines(program, "hlo")
    function = as_function(program, mode)
    if function is None:
        return Outcome([])
    device = "cpu" if mode == "compile" else "hlo"
    return run_function(function, device, captured if mode == "captured" else compiled("hlo"))


def judge(program: Program, mode: str, want: Outcome, got: Outcome) -> Result:
    """Whether `got` is right."""
    lines = list(program.lines) if mode not in CALLS else []
    for w, g in zip(want.errors, got.errors):
        if w is None and (g in REFUSED or g and any(t in m for t in TEXTS for m in got.messages)):
            return Result(None, "refused")
        if w and g == "NoElementType":
            return Result(None, "refused")
        if w and not g and any("conjugate view" in m for m in want.messages):
            return Result(None, "wider")  # here such a view is like any other
        if w and not g and any("ZeroDivisionError" in m for m in want.messages):
            return Result(None, "wider")  # to raise, each division would have to be read
        if w == "NotImplementedError":  # the CPU has no kernel for the dtype
            return Result(None, "wider")
        if w != g:
            break
    found = difference(want, got, lines)
    if found is None:
        return Result(None)
    for noises in (range(4), range(16)):
        if rounding(want, got, [reference(program, mode, noise) for noise in noises]):
            return Result(None, "rounding")
    if mode in CALLS:
        other = _elsewhere(program, mode, want)
        # what is silently wrong with other back ends, too, is mended here
        if other and (mode != "captured" or other.kind == found.kind == "exception"):
            return Result(None, "upstream")
    elif found.kind == "exception" and _as_replayed(program, got):
        return Result(None, "upstream")
    return Result(found)


def _elsewhere(program: Program, mode: str, want: Outcome) -> Mismatch | None:
    """Where Dynamo differs from eager PyTorch with another back end, too."""
    function = as_function(program, mode)
    assert function is not None
    other = run_function(function, "cpu", compiled("aot_eager"))
    return difference(want, other, [])


def _as_replayed(program: Program, got: Outcome) -> bool:
    """Whether the device does what the CPU does if views are replayed, as they are on devices, and
    values are the same where nobody asks for gradients. A view's gradients cannot be told when its
    base has become another tensor."""
    lines = list(program.lines)
    with _force_original_view_tracking(True):
        if difference(run_lines(program, "cpu"), got, lines):
            return False
    want, plain = (run_lines(program, device, gradients=False) for device in ("cpu", "hlo"))
    return difference(want, plain, lines) is None


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
