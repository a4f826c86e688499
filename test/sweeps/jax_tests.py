"""JAX's own tests on the plugin, beside its CPU back end: how much of what passes there passes here.

    git clone -b jax-v0.10.2 https://github.com/jax-ml/jax ../jax
    python -m test.sweeps.jax_tests --repository ../jax [--file lax_test] [--sample 300] [--seed 0]

Prints a line per file, and the reasons by frequency. Exit code 0 when at least 97 % pass.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

from test.sweeps import Score, counted

GOAL = 0.97
FILES = (
    "lax_test lax_numpy_test lax_numpy_indexing_test lax_numpy_reducers_test lax_control_flow_test"
    " lax_autodiff_test lax_scipy_test lax_vmap_test nn_test random_test linalg_test api_test"
    " fft_test dtypes_test scipy_stats_test scipy_signal_test image_test jet_test ode_test"
    " sparse_bcoo_bcsr_test pjit_test shard_map_test"
).split()


def environment(platform: str, cases: int, devices: int) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu",
        "JAX_NUM_GENERATED_CASES": str(cases),
        "JAX_SKIP_SLOW_TESTS": "1",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }


class Tests:
    """The tests of one file."""

    def __init__(self, options: argparse.Namespace, file: str) -> None:
        self.options, self.file = options, file

    def run(self, platform: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        command = [self.options.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(
            command,
            cwd=self.options.repository,
            env=environment(platform, self.options.cases, self.options.devices),
            capture_output=True,
            text=True,
        )

    def names(self) -> list[str]:
        """Of the tests that both platforms have: JAX makes some cases for each."""
        both = [self._names(p) for p in ("cpu", "hlo")]
        names = sorted({*both[0]} & {*both[1]})
        if self.options.sample and self.options.sample < len(names):
            names = random.Random(self.options.seed).sample(names, self.options.sample)
        return names

    def _names(self, platform: str) -> list[str]:
        found = self.run(platform, ["--collect-only", f"tests/{self.file}.py"]).stdout
        names = [line for line in found.splitlines() if "::" in line and " " not in line]
        if not names:
            raise SystemExit(f"no tests in {self.file}:\n{found[-2000:]}")
        return names

    def results(self, platform: str, names: list[str]) -> dict[str, str]:
        """Of each test: "" when it passed, "skipped", else the last line of its message."""
        with tempfile.TemporaryDirectory() as folder:
            listed, report = Path(folder, "names"), Path(folder, "report.xml")
            listed.write_text("\n".join(names))
            done = self.run(
                platform,
                [
                    f"@{listed}",
                    f"--junitxml={report}",
                    f"--timeout={self.options.timeout}",
                    f"-n{self.options.processes}",
                ],
            )
            if not report.exists():
                print(f"exit code {done.returncode}:", done.stdout[-3000:], done.stderr[-3000:])
                return {}
            cases = xml.parse(report).getroot().iter("testcase")
            return {f"{c.get('classname')}.{c.get('name')}": message(c) for c in cases}


def message(case: xml.Element) -> str:
    for part in case:
        if part.tag == "skipped":
            return "skipped"
        if part.tag in ("failure", "error"):
            lines = [line for line in (part.text or "").splitlines() if line.startswith("E  ")]
            return (lines[0] if lines else part.get("message") or "failed")[1:].strip()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", required=True, help="a checkout of JAX")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has JAX")
    parser.add_argument("--file", action="append", help="one of JAX's files of tests")
    parser.add_argument("--sample", type=int, default=0, help="so many tests of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=3, help="generated cases of each test")
    parser.add_argument("--devices", type=int, default=1, help="of each platform")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=300)
    parser.add_argument("--verbose", action="store_true", help="name the tests that fail")
    options = parser.parse_args()
    score = Score(options.verbose)
    for file in counted("tests of JAX", options.file or FILES):
        tests = Tests(options, file)
        names = tests.names()
        theirs, ours = (tests.results(p, names) for p in ("cpu", "hlo"))
        passing = [name for name, why in theirs.items() if why == ""]
        score.add(file, {name: ours.get(name, "did not end") for name in passing})
    return 0 if score.report() >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
