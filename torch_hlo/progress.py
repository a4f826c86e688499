"""What takes longer than two seconds says so in a terminal, on one line that vanishes in the end,
if `rich` is installed, which draws it. Nothing is written to pipes and files.

with progress.shown("compiling step_3 (80 ops)"):
    ...
    with progress.shown("partitioning"):     # joined to the first
        ...
"""

import contextlib
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator

AFTER = 2.0  # seconds of silence
_under_way: list[str] = []


@contextlib.contextmanager
def shown(text: str) -> Iterator[None]:
    """Show that the block is under way."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield
        return
    with contextlib.ExitStack() as line:
        timer = None if _under_way else threading.Timer(AFTER, _draw, [line, time.monotonic()])
        _under_way.append(text)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
                timer.join()
                line.close()
            _under_way.remove(text)


def _draw(line: contextlib.ExitStack, began: float) -> None:
    """Until `line` is closed."""
    from rich import console, live, text  # not before it is used

    def now() -> text.Text:
        seconds = time.monotonic() - began
        return text.Text(f"torch_hlo: {', '.join(_under_way)} ({seconds:.0f} s)", end="")

    drawn = console.Console(file=sys.stderr)
    line.enter_context(
        live.Live(get_renderable=now, console=drawn, transient=True, redirect_stderr=False)
    )
