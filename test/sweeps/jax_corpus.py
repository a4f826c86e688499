"""Programs that JAX emits, compiled by us, against what XLA computes: HLO, optimized HLO and
StableHLO text.

    python -m test.sweeps.jax_corpus --jax /path/to/python/with/jax [--forms
        stablehlo,hlo,optimized] [--engine evaluator] [NAME…]
    # written before by jax_cases.py
    python -m test.sweeps.jax_corpus --programs FILE.pickle
Exit code 0 when at least 97 % agree. JAX need not be installed beside this project: its interpreter
runs in a process of its own.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from test.sweeps import counted
from torch_hlo.tools import execute
from torch_hlo.tools.adopt import adopted
from torch_hlo.tools.text_api import parse_text

GOAL = 0.97
FORMS = ("stablehlo", "hlo", "optimized")
NORMAL = 1.2e-38  # XLA's CPU backend flushes smaller floats to zero
# Differences that are allowed relative to the largest value of an output
TOLERANCE = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 2e-4,
    "complex64": 2e-4,
    "float16": 1e-2,
    "bfloat16": 4e-2,
}


def differs(got: np.ndarray, want: np.ndarray, dtype: str) -> str:
    """What is wrong with one output, or ""."""
    if got.shape != want.shape:
        return f"sizes {got.shape} instead of {want.shape}"
    if want.dtype.kind not in "fc":
        same = got == want
    else:
        tolerance = TOLERANCE.get(dtype, 0.25)
        got, want = (np.where(np.abs(v) < NORMAL, 0, v) for v in (got, want))
        scale = min(float(np.max(np.abs(want[np.isfinite(want)]), initial=0)), 1e6)
        same = np.isclose(
            got, want, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True
        )
    if same.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~same)[0])
    return (
        f"{dtype}{list(want.shape)}: {int((~same).sum())} of {same.size} differ, first {list(at)}:"
        f" {got[at]} instead of {want[at]}"
    )


def check(text: str, inputs: list, outputs: list, types: list, engine: str = "compiled") -> str:
    """Run a program; the first difference, or ""."""
    results = execute.ENGINES[engine](adopted(parse_text(text)), inputs)
    if len(results) != len(outputs):
        return f"{len(results)} outputs instead of {len(outputs)}"
    for i, ((got, _), want, dtype) in enumerate(zip(results, outputs, types, strict=True)):
        if problem := differs(np.asarray(got), np.asarray(want), dtype):
            return f"output {i} {problem}"
    return ""


def generate(python: str, names: list[str]) -> dict:
    """Programs and XLA's values from the JAX of another interpreter. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "programs.pickle"
        script = Path(__file__).with_name("jax_cases.py")
        subprocess.run([python, str(script), str(path), *names], check=True)
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
    parser.add_argument("--programs", metavar="FILE", help="what jax_cases.py wrote")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--engine", choices=("compiled", "evaluator"), default="compiled")
    options = parser.parse_args(arguments)
    programs = (
        pickle.loads(Path(options.programs).read_bytes())
        if options.programs
        else generate(options.jax, options.names)
    )
    forms = options.forms.split(",")
    good: Counter[str] = Counter()
    total: Counter[str] = Counter()
    start = time.perf_counter()
    for name, program in counted("programs of JAX", programs.items()):
        if options.names and not any(n in name for n in options.names):
            continue
        for form in forms:
            if "{...}" in program[form]:  # XLA leaves large constants out of what it prints
                continue
            total[form] += 1
            try:
                problem = check(
                    program[form],
                    program["inputs"],
                    program["outputs"],
                    program["types"],
                    options.engine,
                )
            except Exception as error:  # a sweep reports everything
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
            good[form] += not problem
            if problem:
                print(f"{name} {form}: {problem}", flush=True)
    for form in forms:
        print(
            f"{form}: {good[form]} of {total[form]} agree"
            f" ({100 * good[form] / max(total[form], 1):.1f} %)"
        )
    print(f"{time.perf_counter() - start:.0f} s")
    return 0 if all(good[f] >= GOAL * total[f] for f in forms) else 1


if __name__ == "__main__":
    sys.exit(main())
