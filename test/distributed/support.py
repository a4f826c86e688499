"""Real processes: `launch(script, 4)` runs a Python script in as many ranks of torch.distributed as
asked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(
    script: str, world: int, *args: str, env: dict[str, str] | None = None
) -> list[subprocess.Popen]:
    """The ranks of a job, as torchrun would start them, without its own process."""
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, *args],
            env={**common, "RANK": str(r), "LOCAL_RANK": str(r)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(world)
    ]


def run_group(command: list, env: dict[str, str], timeout: float) -> None:
    """Run a command that starts processes of its own (torchrun); none of them outlives the call.
    Fails with the end of its stderr."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, err[-3000:]
    finally:
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, as long as their parents live."""
    found, below = [], {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            below.setdefault(int(fields[1]), []).append(int(status.parent.name))
    wanted = [pid]
    while wanted:
        children = below.get(wanted.pop(), [])
        found += children
        wanted += children
    return found


def finish(ranks: list[subprocess.Popen], timeout: float = 240) -> list[str]:
    """What the ranks printed. Fails with the end of the first bad rank's stderr; ends what is
    left."""
    deadline = time.monotonic() + timeout
    outputs, problems = [], []
    try:
        for i, process in enumerate(ranks):
            try:
                out, err = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                problems.append(f"rank {i} did not end within {timeout} s:\n{err[-3000:]}")
            if process.returncode:
                problems.append(f"rank {i} ended with {process.returncode}:\n{err[-3000:]}")
            outputs.append(out)
    finally:
        for process in ranks:
            process.kill()
    assert not problems, "\n".join(problems)
    return outputs


def launch(
    script: str,
    world: int,
    *args: str,
    timeout: float = 240,
    env: dict[str, str] | None = None,
) -> list[str]:
    return finish(start(script, world, *args, env=env), timeout)
