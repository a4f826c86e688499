"""The examples run as a user runs them, on small sizes."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(name: str, *args: str) -> str:
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, *args],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_train_gpt():
    text = run(
        "train_gpt.py",
        *"--layers 2 --width 32 --steps 12 --block 16 --batch 4 --generate 5".split(),
    )
    assert float(re.search(r"largest loss difference: (\S+)", text)[1]) < 1e-4
    assert "fallbacks: none" in text
    assert int(re.search(r"compiles: (\d+)", text)[1]) <= 2
    assert "--- generated ---\ndef " in text


@pytest.mark.parametrize(
    "model, epochs", [("mlp", 8), pytest.param("cnn", 4, marks=pytest.mark.slow)]
)
def test_train_digits(model, epochs):
    text = run("train_digits.py", "--model", model, "--epochs", str(epochs))
    assert float(re.search(r"test accuracy ([\d.]+)%", text)[1]) > 94
    assert "fallbacks: none" in text
    assert int(re.search(r"(\d+) compiles", text)[1]) <= 3


def test_tour():
    text = run("tour.py")
    for heading in ("lazy graph", "HLO", "passes", "LLVM IR", "result"):
        assert heading in text


def test_train_gpt_spmd():
    text = run(
        "train_gpt_spmd.py",
        *"--layers 1 --width 32 --block 16 --steps 4 --strategies".split(),
        "single,fsdp,fsdp+megatron",
    )
    assert (
        all(float(d) < 1e-4 for d in re.findall(r"largest difference (\S+)", text))
        and text.count("largest difference") == 3
    )
    fsdp = text[text.index("\nfsdp:") : text.index("\nfsdp+megatron:")]
    gathers, scatters = (
        int(re.search(rf"{kind} +(\d+)", fsdp)[1]) for kind in ("all-gather", "reduce-scatter")
    )
    assert gathers and scatters  # parameters are gathered, gradients scattered
