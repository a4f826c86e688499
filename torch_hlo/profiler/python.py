"""What the user's Python does: the lines that its time goes to, and the names that keep tensors."""

import contextlib
import linecache
import os
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch_hlo import log
from torch_hlo.device.memory import Memory
from torch_hlo.lazy.record import HloTensor

EVERY = 0.004  # seconds between looks at what Python does
_LIBRARIES = *log.OURS, os.path.dirname(os.__file__)
# what waits for the device, compiles, records, or notes where it is for autograd
_DEVICE = "torch_hlo.", "torch.", "traceback", "linecache"
_PUT = (
    r"\b{0}\b(\[[^=]*\])?\s*(\.(append|appendleft|add|insert|extend|update|setdefault)\b"
    r"|\+=|\[.*\]\s*=[^=]|=.*\b{0}\b)"
)


class Place(NamedTuple):
    """Where Python is: the innermost line of the user's, the one that called it (if that was by way
    of one of PyTorch's loaders of data: `loads`), or "" for both while the device is at work."""

    line: str = ""
    caller: str = ""
    loads: bool = False


def place(frame: FrameType | None) -> Place:
    loads = False
    lines = list[str]()
    for at in _stack(frame):
        name = at.f_globals.get("__name__", "")
        if name.startswith("torch.utils.data."):
            loads = True
            lines = lines[:1]
        elif not lines and name.startswith(_DEVICE):
            return Place()
        elif _is_users(at.f_code.co_filename):
            lines.append(f"{at.f_code.co_filename}:{at.f_lineno}")
    line, caller, *_ = *lines, "", ""
    return Place(line, caller, loads)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and "site-packages" not in file


@contextlib.contextmanager
def sampled(found: Counter[Place]) -> Iterator[None]:
    """Count where this thread is in the block, every EVERY seconds."""
    me = threading.get_ident()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(EVERY):
            found[place(sys._current_frames().get(me))] += 1

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def holder(memory: Memory) -> str:
    """Who keeps an array, in words."""
    frames = [f for f in _stack(sys._getframe()) if _is_users(f.f_code.co_filename)]
    spaces = [space for f in frames for space in (f.f_locals, f.f_globals)]
    names = {id(x): (name, x) for space in spaces for name, x in [*space.items()]}.values()
    seen: set[int] = set()
    for name, x in names:
        if found := _keeps(name, x, memory, seen):
            return f" `{found}` holds them; they are put there at {_put(found, frames)}."
    graphs = [(_length(x.grad_fn), name) for name, x in names if type(x) is HloTensor]
    found = max(graphs, default=(0, ""))[1]
    return found and (
        f" The backward pass of `{found}`, which grows at {_put(found, frames)}, holds them: add"
        " `.detach()` to what it is made of."
    )


def _keeps(
    name: str,
    x: Any,
    memory: Memory,
    seen: set[int],
    depth: int = 8,
) -> str:
    """The name of what keeps an array, if that is in `x`: `name`, or that of an attribute or of a
    variable of a function."""
    if type(x) is HloTensor:
        return name if getattr(getattr(x._storage.value, "data", x), "memory", x) is memory else ""
    if not depth or id(x) in seen or isinstance(x, type):
        return ""
    seen.add(id(x))
    if isinstance(x, (dict, list, tuple, set, deque)):
        parts = [(name, y) for y in [*(x.values() if isinstance(x, dict) else x)]]
    elif isinstance(x, FunctionType):
        cells = zip(x.__code__.co_freevars, x.__closure__ or ())
        parts = [(k, c.cell_contents) for k, c in cells if c != CellType()]  # not bound yet
    elif isinstance(x, ModuleType) and not _is_users(getattr(x, "__file__", "") or "<"):
        return ""
    else:
        parts = [*getattr(x, "__dict__", {}).items()]
    return next(filter(None, (_keeps(k, y, memory, seen, depth - 1) for k, y in parts)), "")


def _length(node: Any) -> int:
    seen = set()
    left = [node]
    while left:
        if (at := left.pop()) is not None and at not in seen:
            seen.add(at)
            left += [x for x, _ in at.next_functions]
    return len(seen)


def _put(name: str, frames: list[FrameType]) -> str:
    """The line that adds to a name: of a function that runs, or else the first of a file."""
    wanted = re.compile(_PUT.format(re.escape(name)))
    codes = [f.f_code for f in frames]
    lines = [(c.co_filename, n) for c in codes for _, _, n in c.co_lines() if n]
    modules = [
        f for m in [*sys.modules.values()] if _is_users(f := getattr(m, "__file__", "") or "<")
    ]
    for file in dict.fromkeys([*(c.co_filename for c in codes), *modules]):
        lines += [(file, n + 1) for n in range(len(linecache.getlines(file)))]
    for file, n in lines:
        if wanted.search(linecache.getline(file, n).partition("#")[0]):
            return f"{file}:{n}"
    return "?"
