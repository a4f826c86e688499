"""A sign of life on stderr while a compile takes longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

AFTER = 2.0  # seconds of silence


@contextlib.contextmanager
def compiling(name: str, ops: int) -> Iterator[None]:
    """Say that `name` is being compiled if the block runs longer than AFTER, and how long it took
    in the end."""
    start = time.perf_counter()
    shown = threading.Event()
    ended = threading.Lock()

    def show() -> None:
        with ended:
            if not done:
                print(
                    f"torch_hlo: compiling {name} ({ops} ops) ...",
                    file=sys.stderr,
                    flush=True,
                )
                shown.set()

    done: list[bool] = []
    timer = threading.Timer(AFTER, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with ended:
            done.append(True)
        if shown.is_set():
            print(
                f"torch_hlo: compiled {name} in {time.perf_counter() - start:.1f} s",
                file=sys.stderr,
                flush=True,
            )
