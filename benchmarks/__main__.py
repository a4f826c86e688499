"""Workloads x engines, interleaved in one run; a table of ratios, JSON, and a plot.

    python -m benchmarks                                    # everything that is installed
    python -m benchmarks --workloads gpt_train,softmax --engines eager,hlo --rounds 9
    python -m benchmarks --torch-xla OTHER_VENV/bin/python  # PyTorch/XLA from another environment
    python -m benchmarks --device cuda --workloads gpu      # the same engines on an NVIDIA GPU
    python -m benchmarks --jax OTHER_VENV/bin/python        # XLA as JAX ships it, on the recorded
                                                            # step of each workload (see xla.py)
    python -m benchmarks --isa avx2,avx512                  # one machine as two
    python -m benchmarks --floor                            # and what the machine could do

Each pair runs in a process of its own, so that cold start and peak memory are its own; rounds go A
B C A B C, so that a noisy machine hits all alike. Quote the ratios of medians; absolute times of a
shared machine mean little.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import instruction_sets, write_bytecode, xla
from benchmarks.gpu import CPU_TOO, GPU
from benchmarks.models import MODELS
from benchmarks.workloads import WORKLOADS

GROUPS = {
    "models": MODELS,
    "gpu": GPU,
    "core": [
        name for name in WORKLOADS if name not in MODELS and (name not in GPU or name in CPU_TOO)
    ],
}


class Worker:
    """A running benchmarks.worker, or benchmarks.xla in another interpreter; `failed` is the reason
    when it died."""

    def __init__(
        self,
        column: str,
        workload: str,
        threads: int,
        cache: str,
        python: str,
        device: str,
    ) -> None:
        engine, restricted = instruction_sets.parts(column)
        env = dict(
            os.environ,
            TORCHINDUCTOR_CACHE_DIR=os.path.join(cache, "inductor"),
            TORCH_HLO_CACHE=os.path.join(cache, "hlo"),
            PJRT_DEVICE="CPU",
            **restricted,
        )
        os.makedirs(env["TORCH_HLO_CACHE"], mode=0o700, exist_ok=True)
        if device == "cuda":  # XLA takes most of a GPU's memory when it starts, unless told not to
            env.update(
                TORCH_HLO_DEVICE="cuda",
                PJRT_DEVICE="CUDA",
                XLA_PYTHON_CLIENT_PREALLOCATE="false",
            )
        # an installed package has its byte code: compiling Python files is no part of a cold start
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        self.log = tempfile.TemporaryFile("w+")
        command = [
            python,
            "-m",
            "benchmarks.worker",
            engine,
            workload,
            str(threads),
            device,
        ]
        if engine == "jax":
            step = os.path.join(cache, "step")
            if not os.path.exists(step):
                os.mkdir(step)
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.xla", workload, step],
                    stderr=self.log,
                    env=env,
                )
            command = [python, xla.__file__, step, str(threads), device]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=env,
        )
        self.column, self.failed, self.seconds, self.host, self.last = (
            column,
            None,
            [],
            [],
            {},
        )
        self.ready = self._read()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            lines = [x for x in self.log.read().strip().splitlines() if x.strip()]
            self.failed = lines[-1] if lines else f"exit {self.process.returncode}"
            return {}
        return json.loads(line)

    def steps(self, count: int) -> list[float]:
        if self.failed:
            return []
        self.process.stdin.write(f"steps {count}\n")
        self.process.stdin.flush()
        reply = self._read()
        self.last = reply or self.last
        self.host = reply.get("host", self.host)
        return reply.get("seconds", [])

    def quit(self) -> None:
        if self.process.poll() is None:
            self.process.stdin.write("quit\n")
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def measure(workload: str, engines: list[str], args: argparse.Namespace) -> dict:
    """First-step times (cold, and in a second process), medians and peaks of every engine on one
    workload."""
    results: dict[str, dict] = {}
    workers = []
    with tempfile.TemporaryDirectory() as cache:
        for engine in engines:
            others = {"torch_xla": args.torch_xla, "jax": args.jax}
            python = others.get(instruction_sets.parts(engine)[0], sys.executable)
            cold = Worker(engine, workload, args.threads, cache, python, args.device)
            results[engine] = {"cold_s": cold.ready.get("first_step")}
            if args.warm and not cold.failed:
                cold.quit()
                warm = Worker(engine, workload, args.threads, cache, python, args.device)
                results[engine]["warm_s"] = warm.ready.get("first_step")
                cold = warm
            workers.append(cold)
        for w in workers:
            w.steps(args.warmup)
        counts = {}
        for w in workers:
            one = min(w.steps(2) or [1.0])
            counts[w.column] = max(1, min(200, int(args.slice / max(one, 1e-6))))
        for round_ in range(args.rounds):
            order = workers if round_ % 2 == 0 else workers[::-1]
            for w in order:
                w.seconds += w.steps(counts[w.column])
                time.sleep(0.01)
        for w in workers:
            r = results[w.column]
            if w.failed or not w.seconds:
                r["error"] = w.failed or "no samples"
            else:
                r.update(
                    median_s=statistics.median(w.seconds),
                    best_s=min(w.seconds),
                    peak_mb=w.last["peak_bytes"] / 1e6,
                    samples=len(w.seconds),
                )
                r.update(
                    {k: w.last[k] for k in ("compiles", "fallbacks", "ops") if k in w.last},
                    flops=w.ready["flops"],
                    bytes=w.ready["bytes"],
                )
                # CPU time of the thread until step() returns: the program's Python, autograd,
                # recording, starting the step
                if w.last.get("ops"):
                    r["host_us_per_op"] = statistics.median(w.host) / w.last["ops"] * 1e6
            w.quit()
    return results


FLOOR = """
import json
from torch_hlo.profiler.steps import measured_limits
limits = measured_limits("wall")
print(json.dumps([limits.bandwidth, limits.f32]))
"""


def machine(threads: int) -> tuple[float, float]:
    """(bytes per second of a large copy, operations per second of large f32 products), measured in
    a process of its own."""
    env = {**os.environ, "TORCH_HLO_THREADS": str(threads)}
    run = subprocess.run(
        [sys.executable, "-c", FLOOR], env=env, capture_output=True, text=True, check=True
    )
    bandwidth, flops = json.loads(run.stdout)
    return bandwidth, flops


def floors(all_results: dict[str, dict], engines: list[str], bandwidth: float, flops: float) -> str:
    """Times over the floor: the bytes that a step must move, or its products in f32, at the
    machine's rates, whichever takes longer. What is in a cache, or computed in a narrower type, may
    be below 1."""
    lines = [
        "",
        f"step over the floor: bytes at {bandwidth / 1e9:.1f} GB/s (a large copy),"
        f" products at {flops / 1e9:.0f} GF/s (f32)",
    ]
    for name, results in all_results.items():
        row = f"{name:20s}"
        for e in engines:
            r = results[e]
            floor = max(r.get("bytes", 0) / bandwidth, r.get("flops", 0) / flops)
            row += f"{r['median_s'] / floor:>24.2f}" if floor else f"{'':>24s}"
        if row.strip() != name:
            lines.append(row)
    return "\n".join(lines)


def table(all_results: dict[str, dict], engines: list[str], ours: str) -> str:
    """Median ms per engine, and the ratio peer/ours in brackets (above 1: ours is faster), of the
    same instruction set."""
    lines = [f"{'workload':20s}" + "".join(f"{e:>24s}" for e in engines)]
    ratios: dict[str, list[float]] = {e: [] for e in engines}
    for name, results in all_results.items():
        row = f"{name:20s}"
        for e in engines:
            r = results[e]
            if "error" in r:
                row += f"{'failed':>24s}"
                continue
            text = f"{r['median_s'] * 1e3:.2f} ms"
            own = instruction_sets.beside(ours, e)
            base = results.get(own, {}).get("median_s")
            if base and e != own:
                ratios[e].append(r["median_s"] / base)
                text += f" ({ratios[e][-1]:.2f}x)"
            row += f"{text:>24s}"
        lines.append(row)
    mean = f"{'geometric mean':20s}"
    for e in engines:
        mean += (
            f"{math.exp(statistics.fmean(map(math.log, ratios[e]))):>22.2f}x "
            if ratios[e]
            else f"{'':>24s}"
        )
    lines.append(mean)
    for key, title in (
        ("cold_s", "first step, empty caches, s"),
        ("warm_s", "first step, second process, s"),
        ("peak_mb", "peak memory, MB"),
        (
            "host_us_per_op",
            "host time per op of the graph (detach and most views are none), us",
        ),
    ):
        if any(key in r for results in all_results.values() for r in results.values()):
            lines += ["", title]
            for name, results in all_results.items():
                lines.append(
                    f"{name:20s}"
                    + "".join(f"{results[e].get(key) or float('nan'):>24.2f}" for e in engines)
                )
    for name, results in all_results.items():
        for e in engines:
            if "error" in results[e]:
                lines.append(f"{name} {e}: {results[e]['error'][:200]}")
            elif results[e].get("fallbacks"):
                lines.append(f"{name} {e}: fallbacks {results[e]['fallbacks']}")
    return "\n".join(lines)


def plot(all_results: dict[str, dict], engines: list[str], ours: str, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peers = [e for e in engines if e != ours]
    figure, axes = pyplot.subplots(figsize=(1.5 + 0.8 * len(all_results), 4))
    for i, e in enumerate(peers):
        heights = [
            (
                r[e]["median_s"] / r[ours]["median_s"]
                if "median_s" in r[e] and "median_s" in r[ours]
                else 0
            )
            for r in all_results.values()
        ]
        axes.bar(
            [x + i / (len(peers) + 1) for x in range(len(all_results))],
            heights,
            1 / (len(peers) + 1),
            label=e,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(
        [x + 0.3 for x in range(len(all_results))],
        list(all_results),
        rotation=45,
        ha="right",
    )
    axes.set_ylabel(f"time relative to {ours} (above 1: {ours} is faster)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workloads",
        default="core",
        help="comma-separated names, or core, models, gpu",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where all engines compute",
    )
    parser.add_argument(
        "--engines",
        default="eager,inductor,hlo",
        help=(
            "of eager, inductor, hlo, hlo_captured (torch_hlo.compile of the whole step),"
            " hlo_compile"
        ),
    )
    parser.add_argument(
        "--isa",
        default="",
        help="comma-separated instruction sets to restrict every engine to: avx2, avx512, amx",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=3, help="steps before measuring")
    parser.add_argument("--slice", type=float, default=0.5, help="seconds per engine and round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--warm",
        action="store_true",
        help="also measure the first step of a second process",
    )
    parser.add_argument(
        "--floor",
        action="store_true",
        help="also print steps over the time that their bytes and products take on this CPU",
    )
    parser.add_argument(
        "--torch-xla",
        metavar="PYTHON",
        help="interpreter of an environment with torch_xla; adds that engine",
    )
    parser.add_argument(
        "--jax",
        metavar="PYTHON",
        help="interpreter of an environment with jax; adds that engine",
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    args = parser.parse_args()
    write_bytecode()
    engines = (
        args.engines.split(",")
        + (["torch_xla"] if args.torch_xla else [])
        + (["jax"] if args.jax else [])
    )
    sets = [name for name in args.isa.split(",") if name]
    if wrong := instruction_sets.missing(sets):
        parser.error(wrong)
    if args.floor and args.device != "cpu":
        parser.error("--floor measures this CPU: leave --device out")
    engines = instruction_sets.columns(engines, sets)
    names = [name for given in args.workloads.split(",") for name in GROUPS.get(given, [given])]
    unknown = [n for n in names if n not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workloads {unknown}; there are {', '.join(WORKLOADS)}")
    results: dict[str, dict] = {}
    own = [e for e in engines if e.partition("@")[0] == "hlo"]
    ours = own[0] if own else engines[-1]
    for name in names:
        results[name] = measure(name, engines, args)
        print(table({name: results[name]}, engines, ours).split("\n")[1], flush=True)
        if args.json:
            with open(args.json, "w") as f:
                json.dump(results, f, indent=1)
    print("\n" + table(results, engines, ours))
    if args.floor:
        print(floors(results, engines, *machine(args.threads)))
    if args.plot:
        plot(results, engines, ours, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
