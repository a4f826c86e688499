"""Processes of one torch.distributed job, for tests.

outcomes = run(4, function, *args)       # function(rank, *args) in every process; [Outcome, …]
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from dataclasses import dataclass
from queue import Empty

import torch.distributed as dist

# Children are forked from a server that has imported everything: starting four takes less than
# importing torch once.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch_hlo",
        "torch_hlo.device.cpu.native",
        "torch_hlo.tools.devices",
        "torch.distributed",
    ]
)


@dataclass
class Outcome:
    value: object = None
    error: str = ""  # "CollectiveError: …", also of a process that ended without a word
    seconds: float = 0.0


def run(
    n: int, function, *args, limit: float = 90.0, without: tuple[int, ...] = (), **flags
) -> list[Outcome]:
    """Call `function(rank, *args)` in `n` processes with these config flags; ranks in `without` are
    not waited for. The store that they meet in lives in this process, as under torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = _context.Queue()
    processes = [
        _context.Process(
            target=_child,
            args=(rank, n, store.port, queue, function, args, flags),
            daemon=True,
        )
        for rank in range(n)
    ]
    for p in processes:
        p.start()
    outcomes = [Outcome(error="ended without a word") for _ in range(n)]
    end = time.monotonic() + limit
    missing = set(range(n)) - set(without)
    while missing and time.monotonic() < end:
        with contextlib.suppress(Empty):
            rank, outcomes[rank] = queue.get(timeout=0.2)
            missing.discard(rank)
    for p in processes:
        p.kill()
        p.join()
    return outcomes


def _child(rank: int, n: int, port: int, queue, function, args, flags) -> None:
    from torch_hlo import config

    start = time.monotonic()
    try:
        with config.override(**flags):
            dist.init_process_group(
                "gloo",
                store=dist.TCPStore("127.0.0.1", port, is_master=False),
                rank=rank,
                world_size=n,
            )
            start = time.monotonic()
            outcome = Outcome(function(rank, *args))
    except BaseException as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - start
    queue.put((rank, outcome))
    # until this process is killed: nobody sees a link close because a process ended
    time.sleep(600)
