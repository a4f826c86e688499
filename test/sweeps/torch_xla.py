"""PyTorch/XLA's own tests under its names, with this package behind them.

    python -m test.sweeps.torch_xla --repository DIR                    # all tests and examples
    python -m test.sweeps.torch_xla --repository DIR test/test_metrics.py --verbose

DIR is a checkout of PyTorch/XLA. Every file runs in a process of its own, with a time limit, and
every test of it has one. Prints passed, failed and skipped per file, and why tests fail. A script
without unittest counts as one test. The files need absl-py, some of them torchvision."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

SECONDS = 60  # for one test
# arguments of the training scripts
ONCE = "--fake_data --num_epochs 1"
RESNET = f"{ONCE} --model resnet18 --batch_size 8 --test_set_batch_size 8 --log_steps 1"
DECAY = "--lr_scheduler_divide_every_n_epochs 20 --lr_scheduler_divisor 5"
SAVED = "--ckpt_prefix saved/mnist"
WRAPPED = "--auto_wrap_policy type_based --use_gradient_checkpointing"
TWO, FOUR = {"CPU_NUM_DEVICES": "2"}, {"CPU_NUM_DEVICES": "4"}
# Examples and training scripts, with their arguments -> CPU_NUM_DEVICES and other variables.
SCRIPTS: dict[str, dict[str, str]] = {
    "examples/train_resnet_base.py": {},
    "examples/train_resnet_amp.py": {},
    "examples/train_decoder_only_base.py": {},
    "examples/data_parallel/train_resnet_ddp.py": {"CPU_NUM_DEVICES": "2"},
    "examples/data_parallel/train_resnet_xla_ddp.py": {"CPU_NUM_DEVICES": "2"},
    "examples/data_parallel/train_resnet_spmd_data_parallel.py": {"CPU_NUM_DEVICES": "2"},
    "examples/fsdp/train_decoder_only_fsdp_v2.py": {"CPU_NUM_DEVICES": "2"},
    "examples/fsdp/train_resnet_fsdp_auto_wrap.py": {"CPU_NUM_DEVICES": "2"},
    "examples/flash_attention/train_decoder_only_flash_attention.py": {},
    "examples/flash_attention/train_decoder_only_flash_attention_fsdp_v2.py": {
        "CPU_NUM_DEVICES": "2"
    },
    "examples/eager/train_decoder_only_eager.py": {},
    "examples/eager/train_decoder_only_eager_with_compile.py": {},
    "examples/eager/train_decoder_only_eager_multi_process.py": {"CPU_NUM_DEVICES": "2"},
    "examples/eager/train_decoder_only_eager_spmd_data_parallel.py": {"CPU_NUM_DEVICES": "2"},
    "examples/debug/train_resnet_profile.py": {},
    "examples/scan/scan_examples.py": {},
    "examples/debug/train_resnet_benchmark.py": {},
    "examples/train_decoder_only_base.py scan.decoder_with_scan.DecoderWithScan": {},
    f"test/test_train_mp_mnist.py {ONCE} --num_cores 1 --metrics_debug": {},
    f"test/test_train_mp_mnist.py {ONCE} --async_closures": TWO,
    f"test/test_train_mp_mnist.py {ONCE} --ddp": TWO,
    f"test/test_train_mp_mnist_zero1.py {ONCE}": TWO,
    f"test/test_train_mp_mnist_amp.py {ONCE}": {**TWO, "PJRT_DEVICE": "TPU"},
    f"test/test_train_mp_mnist_amp.py {ONCE} --use_syncfree_optim": {**TWO, "PJRT_DEVICE": "TPU"},
    f"test/test_train_mp_mnist_fsdp_with_ckpt.py {ONCE} --use_nested_fsdp {SAVED}": TWO,
    f"test/test_train_mp_mnist_fsdp_with_ckpt.py {ONCE} {WRAPPED} {SAVED}": TWO,
    f"test/test_train_mp_imagenet.py {RESNET} --num_cores 1 --profile": {},
    f"test/test_train_mp_imagenet.py {RESNET} --metrics_debug": TWO,
    f"test/test_train_mp_imagenet.py {RESNET} --ddp --pjrt_distributed": TWO,
    f"test/test_train_mp_imagenet_amp.py {RESNET} --amp": {**TWO, "PJRT_DEVICE": "TPU"},
    f"test/test_train_mp_imagenet_fsdp.py {RESNET} {DECAY} --use_nested_fsdp": TWO,
    f"test/test_train_mp_imagenet_fsdp.py {RESNET} {DECAY} {WRAPPED} --compute_dtype bfloat16": TWO,
    f"test/spmd/test_train_spmd_imagenet.py {RESNET} --sharding batch": FOUR,
    f"test/spmd/test_train_spmd_imagenet.py {RESNET} --sharding spatial": FOUR,
    f"test/spmd/test_train_spmd_imagenet.py {RESNET} --sharding conv": FOUR,
    f"test/spmd/test_train_spmd_imagenet.py {RESNET} --sharding linear": FOUR,
    f"test/spmd/test_train_spmd_imagenet.py {RESNET} --sharding batch spatial": FOUR,
    f"test/spmd/test_train_spmd_imagenet.py {RESNET}": FOUR,
}

# The tests are files test_*.py, without those of its benchmarks and of other hardware.
OTHERS = ("test/benchmarks/", "test/neuron/", "test/test_train_", "test/test_profile_mp")


def files(repository: Path) -> list[str]:
    found = (str(p.relative_to(repository)) for p in repository.glob("test/**/test_*.py"))
    tests = [f for f in found if not f.startswith(OTHERS) and "test_train_spmd_im" not in f]
    return [*sorted(tests), *SCRIPTS]


def variables(file: str) -> dict[str, str]:
    """CPU_NUM_DEVICES and others."""
    if file == "test/spmd/test_xla_spmd_python_api_interaction.py":  # it wants one device
        return {}
    several = "/test_mp_" in file or "torch_distributed" in file
    return SCRIPTS.get(file, FOUR if "spmd" in file else TWO if several else {})


# Sizes that two cores can do, in the examples and training scripts, which have fake data.
SMALLER = (
    (r"1200000\b", "32"),
    (r"(60000|10000) // flags", "2560 // flags"),
    (r"50000 // FLAGS", "32 // FLAGS"),
    (r"'img_dim': 224", "'img_dim': 64"),
    (r'"/tmp/profile/"', '"."'),
    (r"num_steps( *: int)? = \d+", r"num_steps\1 = 3"),
    (r"self.batch_size = \d+", "self.batch_size = 4"),
    (r"img_dim = \d+", "img_dim = 64"),
    (r"seq_len = \d+", "seq_len = 64"),
    (r"(hidden_size: int|default) ?= ?1024", r"\1=64"),
    (r"(intermediate_size: int|default) ?= ?32 \* 1024", r"\1=256"),
    (r"default=200", "default=3"),
    (r"step % 10 == 0", "step % 2 == 0"),
)


class _Result(unittest.TextTestResult):
    """Writes a line per test when it begins and when it ends."""

    log = ""

    def _write(self, test, outcome: str, why: str = "") -> None:
        with open(self.log, "a") as file:
            file.write(json.dumps([test.id(), outcome, why]) + "\n")

    def startTest(self, test) -> None:
        super().startTest(test)
        self._write(test, "lost")
        signal.alarm(SECONDS)

    def stopTest(self, test) -> None:
        signal.alarm(0)
        super().stopTest(test)

    def addSuccess(self, test) -> None:
        super().addSuccess(test)
        self._write(test, "passed")

    def addExpectedFailure(self, test, error) -> None:
        super().addExpectedFailure(test, error)
        self._write(test, "passed")

    def addUnexpectedSuccess(self, test) -> None:
        super().addUnexpectedSuccess(test)
        self._write(test, "passed")

    def addSkip(self, test, reason) -> None:
        super().addSkip(test, reason)
        self._write(test, "skipped", reason)

    def addFailure(self, test, error) -> None:
        super().addFailure(test, error)
        self._write(test, "failed", _reason(error[1]))

    def addError(self, test, error) -> None:
        super().addError(test, error)
        self._write(test, "failed", _reason(error[1]))

    def addSubTest(self, test, subtest, error) -> None:
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._write(subtest, "failed", _reason(error[1]))


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:200]}"


def _late(*_: object) -> None:
    raise TimeoutError(f"took more than {SECONDS} s")


def child(file: str, log: str, *arguments: str) -> None:
    """Run one file as a script, under the names."""
    from torch_hlo.compat import install_as_torch_xla

    install_as_torch_xla()
    _Result.log = log
    unittest.TextTestRunner.resultclass = _Result
    with contextlib.suppress(ImportError):
        from absl.testing import _pretty_print_reporter

        _pretty_print_reporter.TextTestRunner = unittest.TextTestRunner
    signal.signal(signal.SIGALRM, _late)
    sys.argv = [file, *arguments]
    sys.path[:0] = [os.path.dirname(file)]
    runpy.run_path(file, run_name="__main__")


def run(repository: Path, file: str, seconds: float) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each test of a file."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        if "examples/" in file or "test_train_mp" in file or "imagenet" in file:
            repository = _smaller(repository, Path(folder))
        path, *arguments = file.split()
        path = repository / path
        command = [sys.executable, "-m", __spec__.name, "--child", str(path), str(log), *arguments]
        folders = [str(Path(__file__).parents[2]), str(repository / "test")]
        given = {
            "PJRT_DEVICE": "CPU",
            "PYTHONPATH": os.pathsep.join(folders),
            **variables(file),
        }
        try:
            done = subprocess.run(
                command,
                cwd=path.parent,
                env={**os.environ, **given},
                timeout=seconds,
                capture_output=True,
                text=True,
                errors="replace",
            )
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            code, text = -1, f"took more than {seconds:.0f} s {(late.stderr or b'')[-300:]!r}"
        lines = log.read_text().splitlines() if log.exists() else []
    found = {name: (outcome, why) for name, outcome, why in map(json.loads, lines)}
    if not found:
        last = [line for line in text.splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
        why = (last or text.splitlines() or [""])[-1][:300]
        found = {file: ("failed" if code else "passed", why if code else "")}
    return found


def _smaller(repository: Path, folder: Path) -> Path:
    """A copy of the examples and training scripts with smaller sizes."""
    for name in ("examples", "test"):
        shutil.copytree(repository / name, folder / name, ignore_dangling_symlinks=True)
    for file in (*folder.glob("examples/**/*.py"), *folder.glob("test/**/test_train*.py")):
        text = file.read_text()
        for pattern, replacement in SMALLER:
            text = re.sub(pattern, replacement, text)
        file.write_text(text)
    return folder


# What the words of a failure say about its kind, the first that fits.
KINDS = (
    (r"_get_xla_tensors|HLO|IR::|%\d|xla::|aten::|not found in", "text of IR, HLO or counters"),
    (r"torch_hlo offers no|NotImplementedError", "a name that is not there"),
    (r"No module named", "a package that is not installed"),
    (r"TimeoutError|took more than", "too slow"),
    (r"not close|Tensor-likes|Scalars", "other numbers"),
)


def kind(why: str) -> str:
    return next((name for pattern, name in KINDS if re.search(pattern, why)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="files of the repository; default: all")
    parser.add_argument("--repository", type=Path)
    parser.add_argument("--seconds", type=float, default=900, help="time limit of a file")
    parser.add_argument("--verbose", action="store_true", help="every test that fails, and why")
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    options = parser.parse_args()
    if options.repository is None:
        parser.error("--repository: a checkout of PyTorch/XLA")
    totals: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    print(f"{'passed':>7} {'failed':>7} {'skipped':>8} {'s':>5}  file")
    for file in options.files or files(options.repository):
        start = time.time()
        found = run(options.repository.resolve(), file, options.seconds)
        failed = {n: why for n, (outcome, why) in found.items() if outcome in ("failed", "lost")}
        outcomes = collections.Counter(outcome for outcome, _ in found.values())
        count = (outcomes["passed"], len(failed), outcomes["skipped"])
        totals.update(dict(zip(("passed", "failed", "skipped"), count)))
        kinds.update(map(kind, failed.values()))
        print("{:7} {:7} {:8} {:5.0f}  {}".format(*count, time.time() - start, file), flush=True)
        reasons = collections.Counter(re.sub(r"\d+", "#", why)[:150] for why in failed.values())
        if options.verbose:
            for name, why in failed.items():
                print(f"          {name.split('.', 1)[-1]}: {why}")
        else:
            for why, n in reasons.most_common(4):
                print(f"          {n} x {why}")
    print(
        "{passed:7} {failed:7} {skipped:8}        all".format(
            **{"failed": 0, "skipped": 0, **totals}
        )
    )
    for name, n in kinds.most_common():
        print(f"{n:15}  {name}")


if __name__ == "__main__":
    main()
