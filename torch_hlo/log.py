"""Lines on stderr, by TORCH_HLO_LOG: 1 compiles with their reason, 2 also steps with timings, 3
also HLO, 4 also LLVM IR."""

import contextlib
import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass, field
from types import FrameType

from . import config


def level() -> int:
    """The value of TORCH_HLO_LOG."""
    at: int = config.get("LOG")
    return at


def say(at: int, text: str) -> None:
    """Print `text` if the log level is at least `at`."""
    if config.get("LOG") >= at:
        print(
            "\n".join(f"torch_hlo: {line}" for line in text.splitlines()),
            file=sys.stderr,
            flush=True,
        )


@dataclass
class _Warnings:
    """What was warned about."""

    keys: set[str] = field(default_factory=set)


_warnings = _Warnings()


def warn_once(key: str, text: str, stacklevel: int = 3) -> None:
    """A Python warning, the first time only for each `key`."""
    if key not in _warnings.keys:
        _warnings.keys.add(key)
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)


def forget_warnings() -> None:
    """Warn again about everything (tests)."""
    _warnings.keys.clear()


def source() -> str:
    """`file:line` of the innermost frame outside torch and torch_hlo, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if (
            not name.startswith(("torch.", "torch_hlo."))
            and name not in ("torch", "torch_hlo")
            and not file.startswith(OURS)
        ):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# the command line, PyTorch, Python's `with`, and code that Dynamo has written
_PLACES = importlib.util.find_spec("torch_hlo"), importlib.util.find_spec("torch")
OURS = (
    *[os.path.join(os.path.dirname(x.origin or ""), "") for x in _PLACES if x],
    contextlib.__file__,
    "<",
)
