"""What takes longer than two seconds says so in a terminal, on one line that vanishes in the end.
Nothing is written to pipes and files.

with progress.shown("compiling step_3 (80 ops)"):
    ...
    with progress.shown("partitioning"):     # joined to the first
        ...
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

AFTER, EVERY = 2.0, 0.2  # seconds of silence, and between changes
_under_way: list[str] = []


@contextlib.contextmanager
def shown(text: str) -> Iterator[None]:
    """Show that the block is under way."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(ended,), daemon=True)
    if not _under_way:
        thread.start()
    _under_way.append(text)
    try:
        yield
    finally:
        _under_way.remove(text)
        ended.set()
        if thread.ident is not None:
            thread.join()


def _show(ended: threading.Event) -> None:
    began = time.monotonic()
    wait, end = AFTER, ""
    while not ended.wait(wait):
        line = ", ".join(_under_way)
        _write(f"torch_hlo: {line} ({time.monotonic() - began:.0f} s)")
        wait, end = EVERY, "\r\x1b[K"
    sys.stderr.write(end)


def _write(line: str) -> None:
    sys.stderr.write(f"\r\x1b[K{line[:79]}")
    sys.stderr.flush()
