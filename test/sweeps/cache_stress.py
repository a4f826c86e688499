"""Many processes on one program cache, most of them killed, entries damaged between the rounds:
every survivor must be right.

    python -m test.sweeps.cache_stress [--rounds 10] [--processes 8] [--seed 0]

A worker trains small models of random widths and prints a digest of the losses; the digest without
any cache is the reference. In every round all workers start together on one directory and all but
one, chosen at random, get SIGKILL at a random moment. Then entries are truncated, flipped, swapped,
and replaced by links, FIFOs and directories.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from test.sweeps import counted

WORKER = """
import hashlib, sys, torch, torch_hlo
digest = hashlib.sha256()
for width in (8, 12, 16, 24, 32):
    torch.manual_seed(width)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width), torch.nn.Linear(width, 3)).to("hlo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(16, width).to("hlo"), torch.randint(3, (16,)).to("hlo")
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch_hlo.mark_step()
        digest.update(loss.detach().cpu().numpy().tobytes())
print(digest.hexdigest(), torch_hlo.metrics.counter_value("UncachedCompile") or 0)
"""


def start(directory: str) -> subprocess.Popen:
    environment = {**os.environ, "TORCH_HLO_CACHE": directory, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def damage(directory: Path, rng: random.Random) -> str:
    """Spoil one entry in one way; the name of the way."""
    entries = sorted(p for p in directory.glob("*.bin") if p.is_file() and not p.is_symlink())
    if len(entries) < 2:
        return "nothing to damage"
    one, two = rng.sample(entries, 2)
    way = rng.choice(
        [
            "truncate",
            "flip",
            "swap",
            "empty",
            "link",
            "hard link",
            "fifo",
            "directory",
            "foreign",
        ]
    )
    raw = bytearray(one.read_bytes())
    if way == "truncate":
        one.write_bytes(raw[: rng.randrange(max(len(raw), 1))])
    elif way == "flip" and raw:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        one.write_bytes(raw)
    elif way == "swap":
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
    elif way == "empty":
        one.write_bytes(b"")
    elif way == "foreign":
        one.write_bytes(os.urandom(4096))
    else:
        one.unlink()
        if way == "link":
            one.symlink_to(two)
        elif way == "hard link":
            os.link(two, one)
        elif way == "fifo":
            os.mkfifo(one)
        else:
            one.mkdir()
    return way


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    directory = Path(tempfile.mkdtemp(prefix="cache-stress-"))
    directory.chmod(0o700)
    began = time.time()
    reference = start("")
    want, errors = reference.communicate()
    if reference.returncode:
        print(errors)
        return 1
    alone = time.time() - began
    want = want.split()[0]
    killed = survived = wrong = 0
    ways: Counter[str] = Counter()
    for number in counted("cache", range(args.rounds)):
        workers = [start(str(directory)) for _ in range(args.processes)]
        spared = rng.randrange(args.processes)
        deadlines = sorted(
            (time.time() + rng.uniform(0.4, 1.0) * alone * args.processes / 2, i)
            for i in range(args.processes)
            if i != spared
        )
        for deadline, i in deadlines:
            time.sleep(max(0.0, deadline - time.time()))
            if workers[i].poll() is None:
                workers[i].kill()
                killed += 1
        for i, worker in enumerate(workers):
            out, errors = worker.communicate(timeout=600)
            if worker.returncode == -9:
                continue
            survived += 1
            if worker.returncode or out.split()[0] != want:
                wrong += 1
                print(
                    f"round {number}, worker {i}: code {worker.returncode}, {out} {errors[-2000:]}"
                )
        damaged = [damage(directory, rng) for _ in range(4)]
        ways.update(damaged)
        print(
            f"round {number}: {killed} killed, {survived} survived, {wrong} wrong; entries"
            f" {len(list(directory.glob('*.bin')))}; then {', '.join(damaged)}",
            flush=True,
        )
    last = start(str(directory))
    out, errors = last.communicate()
    again = start(str(directory))
    final, errors = again.communicate()
    print(f"after the last damage: {out.strip()}; once more: {final.strip()}")
    good = not wrong and out.split()[0] == want and final.split() == [want, "0"]
    print(
        f"{killed} killed, {survived} survivors, {wrong} wrong; damage {dict(ways)};"
        f" {'every survivor is right' if good else 'FAILED'}"
    )
    shutil.rmtree(directory, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
