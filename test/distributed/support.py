"""Real processes: `launch(script, 4)` runs a Python script in as many ranks of torch.distributed as asked."""
from __future__ import annotations

import os
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


def start(script: str, world: int, *args: str, env: dict[str, str] | None = None) -> list[subprocess.Popen]:
    """The ranks of a job, as torchrun would start them, without its own process."""
    common = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", **(env or {}),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, *args], env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in range(world)
    ]  # fmt: skip


def finish(ranks: list[subprocess.Popen], timeout: float = 240) -> list[str]:
    """What the ranks printed. Fails with the end of the first bad rank's stderr; ends what is left."""
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


def launch(script: str, world: int, *args: str, timeout: float = 240, env: dict[str, str] | None = None) -> list[str]:
    return finish(start(script, world, *args, env=env), timeout)
