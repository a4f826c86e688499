"""A user's script, run in this process and looked at: `python -m torch_hlo explain train.py`."""

import os
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_hlo import metrics, profiler
from torch_hlo.lazy.record import session


def run(path: str, arguments: Sequence[str]) -> bool:
    """Run a script as `python path arguments` would, with the Python line of every operation. An
    error of the script is printed, and False returned. Raises OSError without a file."""
    Path(path).stat()
    state = session.current()
    before = (sys.argv, sys.path[0])
    known, state.sources = state.sources, True
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            runpy.run_path(path, run_name="__main__")
            session.engine().sync()
    except SystemExit as end:
        return not end.code
    except BaseException:  # noqa: B036 - what it had done until then is shown
        traceback.print_exc()
        return False
    finally:
        state.sources = known
        sys.argv, sys.path[0] = before
    return True


def profile(path: str, arguments: Sequence[str], output: str, trace: str | None) -> bool:
    """Run a script and write what it did: a page, and a `trace` for Perfetto. Prints the advice.
    Whether the script ended well."""
    with profiler.record() as found:
        ended = run(path, arguments)
    found.save(output, f"Profile of {os.path.basename(path)}")
    if trace:
        found.trace(trace)
    for advice in found.advice():
        print(f"* {advice}")
    print(f"{len(found.spans)} spans: {output}")
    return ended


def explain(path: str, arguments: Sequence[str], output: str | None) -> bool:
    """Run a script, and say why each of its programs was compiled: as a page if there is an
    `output`. Whether the script ended well."""
    start = time.time()
    ended = run(path, arguments)
    found = metrics.explain()
    if output:
        title = f"Why {os.path.basename(path)} compiled"
        Path(output).write_text(found.page(title, seconds=time.time() - start, sub=path))
    print(f"{len(found.compiles)} compiles: {output}" if output else found)
    return ended
