"""PyTorch's own tests for devices, on tensors of the hlo device, beside the CPU: how much of what
passes there passes here.

    git clone -b v2.13.0 --depth 1 https://github.com/pytorch/pytorch ../pytorch
    python -m test.sweeps.torch_tests --repository ../pytorch --file test_indexing [--sample 100]

PyTorch makes each test of these files for each device that it finds. Prints a line per file, and
why tests fail, by frequency. Wants pytest-timeout. Many small programs are compiled: with
TORCH_HLO_DEVICE=evaluator it takes a third of the time, and does not try the code generators.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

from test.sweeps import Score, counted
from test.sweeps.jax_tests import message

FILES = (
    "test_indexing test_view_ops test_shape_ops test_sort_and_select test_type_promotion"
    " test_reductions test_tensor_creation_ops test_torch test_nn test_autograd test_modules"
    " nn/test_convolution nn/test_pooling nn/test_embedding nn/test_dropout"
    " nn/test_multihead_attention test_transformers"
).split()
# of other devices, and of more memory than most machines have
OTHERS = re.compile("cudnn|cuda|mps|64bit|large|huge")


def pytest(options: argparse.Namespace, arguments: list[str]) -> str:
    """What it prints. The device is there before PyTorch's tests look for devices."""
    here = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "torch_hlo", "-p", "no:cacheprovider"]
        + arguments,
        cwd=Path(options.repository, "test"),
        env={**os.environ, "PYTHONPATH": here, "TORCH_HLO_FALLBACK": "allow"},
        capture_output=True,
        text=True,
    ).stdout


def beside(name: str) -> str:
    """The CPU's test of a device's."""
    name = re.sub(r"(PRIVATEUSE1|HLO)(?=::|$)", "CPU", name)
    return re.sub(r"_hlo(?=_|$)", "_cpu", name)


def pairs(options: argparse.Namespace, file: str) -> dict[str, str]:
    """The device's tests, and the CPU's."""
    found = pytest(options, ["--collect-only", f"{file}.py"])
    names = {line for line in found.splitlines() if "::" in line and " " not in line}
    if not names:
        raise SystemExit(f"no tests in {file}:\n{found[-2000:]}")
    both = {n: beside(n) for n in sorted(names) if n != beside(n) and not OTHERS.search(n)}
    both = {n: other for n, other in both.items() if other in names}
    if options.sample and options.sample < len(both):
        both = {
            n: both[n] for n in random.Random(options.seed).sample(sorted(both), options.sample)
        }
    return both


def results(options: argparse.Namespace, names: list[str]) -> dict[tuple[str, str], str]:
    """Of each test, by class and name: "" when it passed, "skipped", else why it did not."""
    with tempfile.TemporaryDirectory() as folder:
        listed, report = Path(folder, "names"), Path(folder, "report.xml")
        listed.write_text("\n".join(names))
        said = pytest(
            options, [f"@{listed}", f"--junitxml={report}", f"--timeout={options.timeout}"]
        )
        if not report.exists():
            print(said[-3000:])
            return {}
        cases = xml.parse(report).getroot().iter("testcase")
        return {
            (c.get("classname", "").split(".")[-1], c.get("name", "")): message(c) for c in cases
        }


def key(name: str) -> tuple[str, str]:
    """A test in a report."""
    _, kind, test = name.split("::")
    return kind, test


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", required=True, help="a checkout of PyTorch")
    parser.add_argument("--file", action="append", help="one of its files of tests")
    parser.add_argument("--sample", type=int, default=0, help="so many tests of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=int, default=100, help="seconds for a test")
    parser.add_argument("--verbose", action="store_true", help="name the tests that fail")
    options = parser.parse_args()
    score = Score(options.verbose)
    for file in counted("tests of PyTorch", options.file or FILES):
        both = pairs(options, file)
        found = results(options, [*both, *both.values()])
        passing = [n for n, other in both.items() if found.get(key(other)) == ""]
        score.add(file, {n: found.get(key(n), "did not end") for n in passing})
    score.report()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
