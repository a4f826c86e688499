"""Annotated programs on 8 devices: their values against one device's, their collectives and flops
against XLA's partitioner.

    python -m test.sweeps.partition --jax /path/to/python/with/jax [--forms stablehlo,hlo] [--engine
    compiled] [--table] [NAME…] python -m test.sweeps.partition --programs FILE.pickle           #
    written before by partition_cases.py
XLA's program is parsed and counted like ours (compiler/cost.py; operations of dots and
convolutions). Exit code 0 when at least 95 % are right and at least 80 % move no more bytes and
compute no more flops per device than XLA's.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from test.sweeps import counted
from test.sweeps.jax_corpus import differs
from torch_hlo.compiler.cost import Cost, cost
from torch_hlo.hlo.evaluate.multi_device import evaluate_spmd
from torch_hlo.hlo.ir.instruction import Module
from torch_hlo.hlo.ir.verify import verify
from torch_hlo.hlo.sharding.sharding import shard, unshard
from torch_hlo.tools.devices import run_on_devices
from torch_hlo.tools.text_api import parse_text, partition_text

RIGHT, CHEAP = 0.95, 0.80
FORMS = ("stablehlo", "hlo")


def evaluated(
    module: Module, inputs: Sequence[np.ndarray], dims: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """Whole outputs of a per-device program, by the evaluator."""
    blocks = [shard(np.asarray(v), s) for v, s in zip(inputs, module.in_shardings, strict=True)]
    results = evaluate_spmd(
        module,
        [list(b) for b in zip(*blocks)] if blocks else [[]] * module.num_partitions,
    )
    return [
        unshard([r[i] for r in results], s, d)
        for i, (s, d) in enumerate(zip(module.out_shardings, dims, strict=True))
    ]


def check(text: str, inputs: list, outputs: list, engine: str) -> tuple[str, Module]:
    """(the first difference or "", the per-device program)."""
    module = verify(parse_text(partition_text(text)))
    if engine == "compiled":
        results = [np.asarray(r) for r, _ in run_on_devices(module, inputs, module.num_partitions)]
    else:
        results = evaluated(module, inputs, [np.shape(v) for v in outputs])
    float_type = "bfloat16" if "bf16" in text else "float32"
    for i, (got, want) in enumerate(zip(results, outputs, strict=True)):
        if problem := differs(
            np.asarray(got),
            want,
            float_type if want.dtype.kind == "f" else str(want.dtype),
        ):
            return f"output {i} {problem}", module
    return "", module


def compared(ours: Cost, theirs: Cost) -> str:
    """What we do more of than XLA, or ""."""
    worse = []
    if ours.bytes > theirs.bytes * 1.001:
        worse.append(
            f"{ours.bytes:.0f} bytes against {theirs.bytes:.0f}: {kinds(ours)} against"
            f" {kinds(theirs)}"
        )
    if ours.matrix_flops > theirs.matrix_flops * 1.001:
        worse.append(f"{ours.matrix_flops:.0f} flops against {theirs.matrix_flops:.0f}")
    return "; ".join(worse)


def kinds(found: Cost) -> str:
    return (
        ", ".join(f"{kind} {count:.0f}" for kind, count in sorted(found.sent.items())) or "nothing"
    )


def generate(python: str, names: list[str]) -> dict:
    """The programs, from the JAX of another interpreter. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "programs.pickle"
        subprocess.run(
            [
                python,
                str(Path(__file__).with_name("partition_cases.py")),
                str(path),
                *names,
            ],
            check=True,
        )
        return pickle.loads(path.read_bytes())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of names of programs (all)")
    parser.add_argument(
        "--jax",
        metavar="PYTHON",
        default=sys.executable,
        help="an interpreter that has JAX",
    )
    parser.add_argument("--programs", metavar="FILE", help="what partition_cases.py wrote")
    parser.add_argument("--forms", default=FORMS[0])
    parser.add_argument("--engine", choices=("compiled", "evaluator"), default="evaluator")
    parser.add_argument("--table", action="store_true", help="a line for every program")
    options = parser.parse_args(arguments)
    programs = (
        pickle.loads(Path(options.programs).read_bytes())
        if options.programs
        else generate(options.jax, options.names)
    )
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    cheap: Counter[str] = Counter()
    start = time.perf_counter()
    for form in options.forms.split(","):
        for name, program in counted(f"partitioning, {form}", programs.items()):
            if form not in program or options.names and not any(n in name for n in options.names):
                continue
            if "sharding" not in program[form]:  # varied annotations may be none at all
                continue
            total[form] += 1
            theirs = cost(parse_text(program["xla"]))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    problem, module = check(
                        program[form],
                        program["inputs"],
                        program["outputs"],
                        options.engine,
                    )
                    worse = compared(cost(module), theirs)
                except Exception as error:  # a sweep reports everything
                    problem, worse = (
                        f"{type(error).__name__}: {' '.join(str(error).split())[:240]}",
                        "no program",
                    )
            right[form] += not problem
            cheap[form] += not worse
            notes = (
                [f"WRONG {problem}"] * bool(problem)
                + [worse] * bool(worse)
                + [str(w.message).splitlines()[0][:160] for w in caught]
            )
            if options.table and not notes:
                notes = [f"{kinds(cost(module))} against {kinds(theirs)}"]
            if notes:
                print(f"{name} {form}: {'; '.join(notes)}", flush=True)
    for form in total:
        n = total[form]
        print(
            f"{form}: {right[form]} of {n} right ({100 * right[form] / n:.1f} %), {cheap[form]} no"
            f" dearer than XLA's ({100 * cheap[form] / n:.1f} %)"
        )
    print(f"{time.perf_counter() - start:.0f} s")
    return (
        0 if all(right[f] >= RIGHT * n and cheap[f] >= CHEAP * n for f, n in total.items()) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
