"""What takes longer than two seconds says so in a terminal, on one line that vanishes in the end.
Nothing is written to pipes and files.

with progress.shown("compiling step_3 (80 ops)"):
    ...
    with progress.shown("partitioning"):     # joined to the first
        ...
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator

AFTER = 2.0  # seconds of silence
_under_way: list[str] = []


@contextlib.contextmanager
def shown(text: str) -> Iterator[None]:
    """Show that the block is under way."""
    ended = threading.Event()
    line = threading.Thread(target=_draw, args=[ended], daemon=True)
    _under_way.append(text)
    if first := sys.stderr.isatty() and len(_under_way) == 1:
        line.start()
    try:
        yield
    finally:
        ended.set()
        if first:
            line.join()
        _under_way.remove(text)


def _draw(ended: threading.Event) -> None:
    began = time.monotonic()
    if ended.wait(AFTER):
        return
    while True:
        text = f"torch_hlo: {', '.join(_under_way)} ({time.monotonic() - began:.0f} s)"
        _write(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}")
        if ended.wait(0.2):
            return _write("\r\x1b[2K")


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
