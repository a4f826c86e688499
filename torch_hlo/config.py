"""The only place that reads the environment: one table of flags, each `TORCH_HLO_<NAME>`.

config.get("LOG")                      # current value
with config.override(FALLBACK="error"): ...
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch_hlo.frozen import frozen

STARTED = time.time()  # when this process imported the package


@frozen
class Flag:
    name: str
    default: object  # a value, or a function that finds one
    parse: Callable[[str], object]
    doc: str


def _switch(text: str) -> bool:
    return {
        "": False,
        "0": False,
        "off": False,
        "false": False,
        "no": False,
        "1": True,
        "on": True,
        "true": True,
        "yes": True,
    }[text.lower()]


def _one_of(*values: str) -> Callable[[str], str]:
    return {value: value for value in values}.__getitem__


def _at_least(least: float, parse: Callable[[str], float] = int) -> Callable[[str], float]:
    def parse_number(text: str) -> float:
        if not (number := parse(text)) >= least:
            raise ValueError(number)
        return number

    return parse_number


def _default_cache() -> str:
    """XDG_CACHE_HOME/torch_hlo, ~/.cache/torch_hlo, or nothing when there is no home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "torch_hlo") if os.path.isabs(base) else ""


FLAGS: dict[str, Flag] = {
    f.name: f
    for f in (
        Flag(
            "LOG",
            0,
            _at_least(0),
            "1: compiles with their reason; 2: also step timings; 3: also HLO; 4: also LLVM IR",
        ),
        Flag(
            "DUMP",
            "",
            str,
            "directory that gets one folder per compile: every pass's HLO, LLVM IR, assembly,"
            " buffers, reason",
        ),
        Flag(
            "PROFILE",
            "",
            _one_of("", "wall", "thread"),
            "time every step of compiled programs and print a table at exit: wall, or thread (CPU"
            " time of one thread)",
        ),
        Flag(
            "REPORT",
            "shapes",
            _one_of("shapes", "full", "off"),
            "what the file holds that a failed compile leaves in the folder for temporary files:"
            " shapes and operations only, full: also names, lines and constants, or off",
        ),
        Flag(
            "FALLBACK",
            "warn",
            _one_of("warn", "allow", "error"),
            "op without a lowering: warn (run on the CPU, one line per op), allow (silently),"
            " error",
        ),
        Flag(
            "CHECK",
            0,
            _at_least(0),
            "1: verify HLO at pipeline ends; 2: after each pass, with text round trip; 3: also"
            " evaluate after each pass",
        ),
        Flag(
            "NAN",
            0,
            _at_least(0),
            "raise FloatingPointError and say which operation made it: 1: a NaN or an infinity; 2:"
            " a NaN",
        ),
        Flag(
            "CHECK_INDEX",
            False,
            _switch,
            "raise IndexError when an index that the device computed is out of range",
        ),
        Flag("DISABLE", "", str, "comma-separated names of passes to leave out"),
        Flag(
            "ISA",
            "",
            _one_of("", "avx2", "avx512", "amx"),
            "the newest instruction set of x86 that compiled programs use, read when the first is"
            " compiled; empty: what the machine has",
        ),
        Flag(
            "THREADS",
            0,
            _at_least(0),
            "CPU threads for compiled programs; 0: torch.get_num_threads()",
        ),
        Flag(
            "DEVICE",
            "cpu",
            str,
            "what runs compiled programs: cpu, cuda, evaluator (NumPy"
            " reference), pjrt:PATH (an XLA plugin), or a module that offers a back end",
        ),
        Flag(
            "TF32",
            False,
            _switch,
            "products of f32 on NVIDIA GPUs may round their operands to 11 bits (matrix units)",
        ),
        Flag(
            "WINOGRAD",
            True,
            _switch,
            "3x3 convolutions of f32 on the CPU may be computed by minimal filtering, F(2x2, 3x3)",
        ),
        Flag(
            "MEMORY_BUDGET",
            0.0,
            _at_least(0, float),
            "MiB of working memory of a program above which values are computed again instead of"
            " kept; 0: no limit",
        ),
        Flag(
            "PACKED_WEIGHTS",
            -1.0,
            _at_least(-1, float),
            "MiB for packed copies of weights that products read again and again; -1: what the"
            " process's peak memory leaves",
        ),
        Flag(
            "CPU_DEVICES",
            1,
            _at_least(1),
            "virtual devices of the CPU that sharded programs run on",
        ),
        Flag(
            "COLLECTIVE_TIMEOUT",
            300.0,
            _at_least(0, float),
            "seconds that a device waits for the others in a collective; 0: for ever",
        ),
        Flag("COUNT_OPS", False, _switch, "count every operation, in counters named xla::<op>"),
        Flag("EAGER", False, _switch, "run op by op instead of recording"),
        Flag(
            "CPU_NUMBERS",
            True,
            _switch,
            "a number that is read and follows by few small ops from data of the CPU is computed"
            " there, by PyTorch; 0: every read runs a compiled program",
        ),
        Flag("MAX_NODES", 20000, _at_least(1), "recorded ops after which the graph is cut"),
        Flag(
            "CACHE",
            _default_cache,
            str,
            "directory of compiled programs (default ~/.cache/torch_hlo); empty turns the disk"
            " cache off",
        ),
        Flag("CACHE_SIZE", 1024, _at_least(0), "MiB of compiled programs kept on disk"),
        Flag(
            "DYNAMIC",
            True,
            _switch,
            "compile a step that comes back with other sizes once for all sizes",
        ),
        Flag("PROGRAMS", 256, _at_least(1), "compiled programs kept in memory"),
        Flag(
            "SHORTCUTS",
            "1",
            str,
            "0: no shortcut past what PyTorch promises (pytorch/shortcuts.py), slower; names with"
            " commas: only these",
        ),
        Flag(
            "ASYNC",
            True,
            _switch,
            "run steps on a background thread while Python traces the next",
        ),
    )
}
_values: dict[str, Any] = {}


def get(name: str) -> Any:
    """Value of flag `name`, of the type that its `parse` gives, read from the environment once.
    Raises KeyError for an unknown flag, ValueError for a value that the flag cannot have."""
    try:
        return _values[name]
    except KeyError:
        _values[name] = _read(name, FLAGS[name])
        return _values[name]


def _read(name: str, flag: Flag) -> Any:
    text = os.environ.get(f"TORCH_HLO_{name}")
    try:
        default = flag.default() if callable(flag.default) else flag.default
        return default if text is None else flag.parse(text)
    except (ValueError, KeyError):
        raise ValueError(f"TORCH_HLO_{name}={text!r} is not valid: {flag.doc}") from None


def code_flags() -> str:
    """The flags that change what code a program becomes: part of its key in the disk cache."""
    return f"{get('DISABLE')} {get('MEMORY_BUDGET')} {get('WINOGRAD')}"


def assign(name: str, value: object) -> None:
    """Set a flag from now on. Raises KeyError for an unknown flag."""
    get(name)
    _values[name] = value


def variable(name: str, default: object) -> Any:
    """An environment variable of another library, read at each call; `default` where it is not
    set."""
    return os.environ.get(name, default)


def suggest(variable: str, value: str) -> None:
    """Set an environment variable of a library that is about to be loaded, unless the user did."""
    os.environ.setdefault(variable, value)


@contextlib.contextmanager
def override(**flags: object) -> Iterator[None]:
    """Set flags for the duration of a `with` block. Raises KeyError for an unknown flag."""
    before = {name: get(name) for name in flags}
    _values.update(flags)
    try:
        yield
    finally:
        _values.update(before)
