"""Everything that needs a real GPU, in one command: `python -m benchmarks.check_gpu [--device
cuda] [--minutes 8] [--json FILE] [--log FILE]`.

    kernels      every family of kernels against the evaluator
    runtime      graphs, memory, exchange with torch.cuda, torch.compile on its tensors
    training     losses of a small transformer and a small CNN next to the CPU, and the time of a
    step streams      bandwidth of kernels that move bytes, as a share of the device-to-device copy
    products     rate of matrix products, next to torch.cuda benchmarks   models and kernels next to
    PyTorch's eager mode, torch.compile and JAX (where installed), from the repository's folder

--only PART,… chooses; --suite adds the test suite; --sanitize memcheck (racecheck, initcheck,
synccheck) runs the kernels under NVIDIA's compute-sanitizer. Checks run in a process of their own,
which is started anew when one of them ends it or takes too long; what does not fit into --minutes
is skipped. Each line says PASS, FAIL or SKIP; the exit status is 1 if something failed. `--device
test.ptx.driver` evaluates kernels without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import check_device
from benchmarks.check_device import Skip, training
from benchmarks.check_kernels import PROGRAMS, check, program, run
from torch_hlo import config

__all__ = ["PROGRAMS", "check", "main", "program", "run", "training"]
_START = 120.0  # seconds until a process may have begun its first check
_BENCHMARKS = (
    "gpt2_124m_bf16_train", "llama_1b_decode", "matmul_bf16_8k", "attention_bf16", "softmax_8k",
    "bert_base_bf16_train", "resnet50_bf16_train", "adamw_124m", "layernorm_gelu_bf16",
    "linear_gelu_bf16", "cross_entropy_50k", "sum_x_yz_100m", "transposes_large", "embedding",
    "bert_base_bf16_infer",
)  # fmt: skip
FACTS = "device: facts"  # without them there is no point in the rest
_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass(frozen=True, slots=True)
class Check:
    """`run` returns what was found; `seconds` it may take."""

    run: Callable[[], object]
    seconds: float = 60.0


def checks(device: str, engines: str) -> dict[str, Check]:
    """All checks by name ("part: what"), the most telling first."""
    large = device.startswith("cuda")
    found = {FACTS: Check(check_device.facts)}
    found |= {
        f"kernels: {name}": Check(lambda name=name: f"largest relative error {check(name):.1e}")
        for name in PROGRAMS
    }
    found |= {
        f"runtime: {f.__name__.replace('_', ' ')}": Check(f, 120)
        for f in (
            check_device.graphs,
            check_device.out_of_memory,
            check_device.exchange,
            check_device.compiled,
        )
    }
    found |= {
        f"training: {name}": Check(lambda name=name: training(name), 120 if large else 1500)
        for name in ("transformer", "cnn")
    }
    found |= {
        f"streams: {name}": Check(lambda name=name: check_device.streaming(name, 0 if large else 6))
        for name in check_device.STREAMS
    }
    found |= {
        f"products: {t}": Check(lambda t=t: check_device.products(t, 8192 if large else 256))
        for t in ("bf16", "f16", "f32")
    }
    found |= {
        f"benchmarks: {name}": Check(
            lambda name=name: check_device.benchmark(name, engines, 280), 300
        )
        for name in _BENCHMARKS
    }
    found["suite: tests"] = Check(lambda: check_device.suite(3600), 3700)
    return found


# -- the process that checks
# -----------------------------------------------------------------------------------------------
def work(device: str, engines: str, names: list[str]) -> None:
    """Run checks by name; a line of JSON before and after each."""
    table = checks(device, engines)
    out, sys.stdout = sys.stdout, sys.stderr

    def say(**what: str) -> None:
        print("@" + json.dumps(what), file=out, flush=True)

    with config.override(DEVICE=device, CACHE=""):
        for name in names:
            say(start=name)
            try:
                say(name=name, result="PASS", what=str(table[name].run()))
            except Skip as reason:
                say(name=name, result="SKIP", what=str(reason))
            except Exception as error:  # one check must not hide the others
                traceback.print_exc()
                say(
                    name=name,
                    result="FAIL",
                    what=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
                )
            if config.get("DEVICE").startswith("cuda") and _lost():
                os._exit(3)  # no call succeeds in this process any more


def _lost() -> bool:
    from torch_hlo.device import runtime

    try:
        runtime.driver().synchronize()
    except Exception:  # whatever it is
        return True
    return False


# -- the process that watches
# ----------------------------------------------------------------------------------------------
class Worker:
    """A process that runs checks; `lines` yields what it says."""

    def __init__(self, options: argparse.Namespace, names: list[str]) -> None:
        prefix = ["compute-sanitizer", "--tool", options.sanitize] if options.sanitize else []
        command = [
            *prefix,
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "benchmarks.check_gpu",
            "--worker",
            "--device",
            options.device,
            "--engines",
            options.engines,
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.process.stdin.write(json.dumps(names))
        self.process.stdin.close()
        self.said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.said.put(line.rstrip("\n"))
        self.said.put(None)

    def next(self, seconds: float) -> str | None:
        """What it says next; None at its end. Raises queue.Empty after `seconds`."""
        return self.said.get(timeout=max(seconds, 0.1))

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def watch(
    options: argparse.Namespace,
    table: dict[str, Check],
    names: list[str],
    deadline: float,
) -> Iterator[tuple[str, str, str]]:
    """(name, result, what) of each check, whatever becomes of the processes that run them."""
    left = list(names)
    while left:
        if time.monotonic() > deadline:
            yield from ((name, "SKIP", "no time was left") for name in left)
            return
        worker = Worker(options, left)
        # the check under way; of the first also what comes before it
        current, noise, limit = left[0], [], _START
        why = ""
        while left:
            try:
                line = worker.next(min(limit, max(deadline - time.monotonic(), 1) + 5))
            except queue.Empty:
                why = (
                    "no time was left"
                    if time.monotonic() > deadline
                    else f"it took longer than {limit:.0f} s"
                )
                break
            if line is None:
                why = f"its process ended ({worker.process.wait()}): {' | '.join(noise[-4:])[:400]}"
                break
            if not line.startswith("@"):
                _log(options, line)
                noise = [*noise[-40:], line.strip()]
                continue
            said = json.loads(line[1:])
            if "start" in said:
                _log(options, f"-- {said['start']}")
                current, noise, limit = (
                    said["start"],
                    [],
                    table[said["start"]].seconds * (20 if options.sanitize else 1),
                )
                continue
            found = [
                n
                for n in noise
                if n.startswith("=========")
                and len(n) > 12
                and not n.startswith(("========= COMPUTE", "========= ERROR SUMMARY: 0"))
            ]
            yield (
                (current, "FAIL", " ".join(found)[:400])
                if found
                else (current, said["result"], said["what"])
            )
            left.remove(current)
            if current == FACTS and said["result"] == "FAIL":
                yield from ((name, "SKIP", "the device cannot be used") for name in left)
                left = []
            current = ""
        worker.kill()
        if current and left:  # else it ended between two checks: the others get another process
            yield current, "SKIP" if why.startswith("no time") else "FAIL", why
            left.remove(current)


def _log(options: argparse.Namespace, line: str) -> None:
    if options.log:
        with open(options.log, "a") as file:
            print(line, file=file)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="cuda",
        help="a TORCH_HLO_DEVICE: cuda, cuda:1, test.ptx.driver",
    )
    parser.add_argument("--json", help="also write the results here, as they come")
    parser.add_argument("--log", help="also write what the checks print here, tracebacks too")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--only", default="", help="parts, such as kernels,products")
    parser.add_argument("--quick", action="store_true", help="kernels only")
    parser.add_argument("--suite", action="store_true", help="also the test suite")
    parser.add_argument("--sanitize", choices=_TOOLS, help="kernels under compute-sanitizer")
    parser.add_argument(
        "--engines", default="eager,inductor,hlo,hlo_compile", help="of the benchmarks"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.device, options.engines, json.load(sys.stdin))
        return 0
    if options.sanitize and not shutil.which("compute-sanitizer"):
        parser.error("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    table = checks(options.device, options.engines)
    parts = (
        options.only.split(",")
        if options.only
        else (
            ["device", "kernels"]
            if options.quick or options.sanitize
            else [
                "device",
                "kernels",
                "runtime",
                "training",
                "streams",
                "products",
                *(["benchmarks"] if options.device.startswith("cuda") else []),
            ]
        )
    )
    names = [
        n for n in table if n.partition(":")[0] in (*parts, *(["suite"] if options.suite else []))
    ]
    start = time.monotonic()
    results: dict[str, dict[str, str]] = {}
    for name, result, what in watch(options, table, names, start + 60 * options.minutes):
        results[name] = {"result": result, "what": what}
        print(f"{result}  {name}: {what}", flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(
                    {
                        "device": options.device,
                        "seconds": time.monotonic() - start,
                        "results": results,
                    },
                    file,
                    indent=1,
                )
    counts = {
        kind: sum(r["result"] == kind for r in results.values())
        for kind in ("PASS", "FAIL", "SKIP")
    }
    print(
        f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped on"
        f" {options.device} in {time.monotonic() - start:.0f} s"
    )
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
