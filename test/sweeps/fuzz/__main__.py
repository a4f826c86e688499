"""Random programs on the device and in eager PyTorch.

    python -m test.sweeps.fuzz --seed 0 --programs 1000 --minutes 10 --processes 2 --shrink
    python -m test.sweeps.fuzz --seed 4711 --programs 1 --mode lazy     one program again

Modes: lazy (each program by itself), together (sixteen in a step), threads (four at a time),
recorded (recorded graphs on aten, without the compiler), compile and compile_hlo (torch.compile,
tensors of the CPU and of the device), captured (torch_hlo.compile). Without --mode, a mixture, in
which one program of a hundred is a function of the last three modes.
A program's seed decides all of it, whatever the number of processes.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

BLOCK = 16
# the mixture: one of these for each block, and of the others now and then
MIXTURE = [*["together"] * 8, *["recorded"] * 9, *["lazy"] * 1, *["threads"] * 2]
FUNCTIONS = ["captured", "compile", "compile_hlo"]
RARE = 100  # blocks, of which one has functions
HANGS = 900  # seconds for a block
SAY = 5  # minutes between counts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m test.sweeps.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--mode", default="", help="see above")
    parser.add_argument("--shrink", action="store_true", help="make failing programs smaller")
    parser.add_argument("--stop", type=int, default=50, help="stop after so many mismatches")
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--after", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args()


def environment() -> dict[str, str]:
    """Programs are compiled, not found on disk, and numbers do not come from the CPU."""
    wanted = {"TORCH_HLO_CACHE": "", "TORCH_HLO_CPU_NUMBERS": "0", "TORCH_HLO_FALLBACK": "allow"}
    return {**wanted, **os.environ, "OMP_NUM_THREADS": "1"}


def blocks(options: argparse.Namespace) -> Iterator[list[int]]:
    """The seeds that this worker looks at."""
    end = options.seed + options.programs
    starts = range(options.seed, end, BLOCK)
    for i, start in enumerate(starts):
        if i % options.processes == options.worker and start > options.after:
            yield list(range(start, min(start + BLOCK, end)))


def mixed(block: int) -> str:
    """The mode of a block of the mixture."""
    if block % RARE == RARE - 1:
        return FUNCTIONS[block // RARE % len(FUNCTIONS)]
    return MIXTURE[block % len(MIXTURE)]


def settle() -> None:
    """This process compiles all the time: what makes a program that rests small only takes time,
    as does looking for garbage among PyTorch's modules."""
    import torch

    from torch_hlo.lazy.run import executor

    torch.set_num_threads(1)
    gc.set_threshold(5_000, 20, 50)
    vars(executor)["release_compiler"] = lambda: None


def work(options: argparse.Namespace) -> None:
    """One process: prints a line of JSON before and after each block."""
    from test.sweeps.fuzz.report import check_block

    settle()
    deadline = time.monotonic() + options.minutes * 60
    imported = 0
    for seeds in blocks(options):
        if time.monotonic() > deadline:
            break
        if imported != len(sys.modules) or not gc.get_freeze_count():
            imported = len(sys.modules)  # the functions of PyTorch's modules stay
            gc.collect()
            gc.freeze()
        mode = options.mode or mixed(seeds[0] // BLOCK)
        print(json.dumps({"begin": seeds, "mode": mode}), flush=True)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        notes, reports = check_block(seeds, mode, options.shrink)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"notes": notes, "reports": reports}), flush=True)


class Workers:
    """The processes. Where one dies, another goes on behind the block that it died in."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.running: dict[int, subprocess.Popen] = {}
        self.last: dict[int, list[int]] = {}  # the block that each is at
        for i in range(options.processes):
            self.start(i, -1)

    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def start(self, i: int, after: int) -> None:
        left = self.options.minutes - self.minutes()
        own = ["--worker", str(i), "--after", str(after), "--minutes", str(left)]
        command = [sys.executable, "-m", "test.sweeps.fuzz", *sys.argv[1:], *own]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True)
        self.running[i] = worker
        self.selector.register(worker.stdout, selectors.EVENT_READ, i)  # type: ignore[arg-type]

    def found(self) -> Iterator[dict]:
        """What they say: {"notes": counts, "reports": texts}."""
        while self.selector.get_map():
            for key, _ in self.selector.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    self.selector.unregister(key.fileobj)
                    yield from self.ended(key.data)
                elif line.startswith("{"):
                    said = json.loads(line)
                    self.last[key.data] = said.get("begin", [])
                    yield said

    def ended(self, i: int) -> Iterator[dict]:
        code, seeds = self.running[i].wait(), self.last.pop(i, [])
        if code:
            text = f"--- a process ended with {code} in a block of seeds {seeds}"
            yield {"notes": {"mismatch": 1}, "reports": [text]}
            if seeds:
                self.start(i, seeds[-1])

    def end(self) -> None:
        for worker in self.running.values():
            worker.terminate()


def watch(options: argparse.Namespace) -> int:
    """Start the workers, print what they find, and how many programs there were."""
    workers = Workers(options)
    total: Counter[str] = Counter()
    said = 0.0
    for found in workers.found():
        total.update(found.get("notes", {}))
        for report in found.get("reports", ()):
            print(report, flush=True)
        if total["mismatch"] >= options.stop:
            workers.end()
            break
        if workers.minutes() > said + SAY:
            said = workers.minutes()
            print(summary(options.seed, total, said), flush=True)
    print(summary(options.seed, total, workers.minutes()))
    return bool(total["mismatch"])


def summary(seed: int, total: Counter[str], minutes: float) -> str:
    counts = ", ".join(f"{n} {what}" for what, n in sorted(total.items()))
    return f"seeds from {seed}: {total.total()} programs in {minutes:.1f} minutes: {counts}"


def main() -> int:
    options = arguments()
    if options.worker >= 0:
        work(options)
        return 0
    from torch_hlo import progress  # workers choose their flags first

    with progress.shown(f"fuzzing from seed {options.seed}"):
        return watch(options)


if __name__ == "__main__":
    sys.exit(main())
