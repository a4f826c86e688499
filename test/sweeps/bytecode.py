"""Mutated MLIR bytecode: each becomes a program or an error of ours, soon and in little memory.

    python -m test.sweeps.bytecode --seed 0 --count 100000 [--seconds 2] [--memory 3] [--ours] [--compile]

Prints each artifact for which that is not so, with the seed that makes it again. With --compile,
programs are compiled, each in a process of its own, unless the mutation changed nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from test.sweeps import counted
from torch_hlo.compiler.codegen import CodegenError
from torch_hlo.compiler.compile import compile_module
from torch_hlo.hlo.bytecode import parse_bytecode, portable_artifact
from torch_hlo.hlo.ir.verify import VerifyError, verify
from torch_hlo.hlo.sharding.sharding import ShardingError
from torch_hlo.hlo.text.printer import module_text
from torch_hlo.hlo.text.scanner import ParseError
from torch_hlo.tools.adopt import adopted
from torch_hlo.tools.devices import is_annotated, partitioned
from torch_hlo.tools.execute import flat

DATA = Path(__file__).parents[1] / "data" / "artifacts.npz"


def _flip(data: bytearray, r: random.Random) -> None:
    for _ in range(r.randint(1, 4)):
        data[r.randrange(len(data))] ^= 1 << r.randrange(8)


def _replace(data: bytearray, r: random.Random) -> None:
    data[r.randrange(len(data))] = r.choice([0, 1, 2, 3, 127, 128, 254, 255, r.randrange(256)])


def _insert(data: bytearray, r: random.Random) -> None:
    at = r.randrange(len(data))
    data[at:at] = r.randbytes(r.randint(1, 9))


def _remove(data: bytearray, r: random.Random) -> None:
    at = r.randrange(len(data))
    del data[at : at + r.randint(1, 9)]


def _cut(data: bytearray, r: random.Random) -> None:
    del data[r.randrange(len(data)) :]


def _copy(data: bytearray, r: random.Random) -> None:
    """A run of bytes over another one."""
    a, b, n = r.randrange(len(data)), r.randrange(len(data)), r.randint(1, 16)
    data[a : a + n] = data[b : b + n]


Mutation = Callable[[bytearray, random.Random], None]
MUTATIONS: tuple[Mutation, ...] = (_flip, _replace, _insert, _remove, _cut, _copy)


def mutated(data: bytes, r: random.Random, mutate: Mutation) -> bytes:
    """Mutated behind the version."""
    found = bytearray(data[20:])
    mutate(found, r)
    return data[:20] + bytes(found)


def attempt(data: bytes) -> str:
    """Read it: "program" or "error". Everything else is raised."""
    try:
        verify(parse_bytecode(data))
    except (ParseError, VerifyError):
        return "error"
    return "program"


REFUSED = (CodegenError, ParseError, VerifyError, ShardingError)


def compiled(data: bytes) -> None:
    """As JAX's plugin does it."""
    module = flat(adopted(parse_bytecode(data)))
    compile_module(partitioned(module) if is_annotated(module) else module)


def attempt_compiling(data: bytes, seconds: int) -> str:
    """Read and compile it: "code", "refused" or "error". Raises RuntimeError for a process that was
    killed, and for any other error."""
    outcome = attempt(data)
    if outcome == "error":
        return outcome
    said, say = os.pipe()
    if not (child := os.fork()):
        signal.alarm(20 * seconds)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        message = "code"
        try:
            compiled(data)
        except REFUSED:
            message = "refused"
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(say, message.encode()[:4000])
        os._exit(0)
    os.close(say)
    with open(said) as f:
        message = f.read()
    status = os.waitpid(child, 0)[1]
    if message in ("code", "refused"):
        return message
    raise RuntimeError(message or f"ended by signal {os.WTERMSIG(status)}")


def _is_read_as(data: bytes, text: str) -> bool:
    try:
        return module_text(parse_bytecode(data)) == text
    except (ParseError, VerifyError):
        return False


def _late(*_: object) -> None:
    raise TimeoutError("took too long")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=5, help="that one artifact may take")
    parser.add_argument("--memory", type=int, default=4, help="in GiB")
    parser.add_argument("--ours", action="store_true", help="of artifacts that we write")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (options.memory << 30, options.memory << 30))
    signal.signal(signal.SIGPROF, _late)
    found = np.load(DATA)
    whole = [found[k].tobytes() for k in found.files if not k.endswith("/text")]
    if options.ours:
        whole = [portable_artifact(parse_bytecode(data)) for data in whole]
    texts = {data: module_text(parse_bytecode(data)) for data in whole} if options.compile else {}
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for seed in counted("bytecode", range(options.seed, options.seed + options.count)):
        r = random.Random(seed)
        original = r.choice(whole)
        data = mutated(original, r, r.choice(MUTATIONS))
        begin = time.process_time()
        # of the processor's time: others may pause this process
        signal.setitimer(signal.ITIMER_PROF, options.seconds)
        try:
            if not options.compile:
                outcome = attempt(data)
            elif _is_read_as(data, texts[original]):
                outcome = "unchanged"
            else:
                outcome = attempt_compiling(data, options.seconds)
        except Exception as error:
            outcome = "FAULT"
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - begin)
        outcomes[outcome] += 1
    print(dict(outcomes), f"slowest {slowest:.2f} s")
    return 1 if outcomes["FAULT"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
