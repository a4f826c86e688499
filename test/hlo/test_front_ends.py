"""Modules as other front ends spell StableHLO (front_ends/*.mlir) against what they mean in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import torch_hlo

FOLDER = Path(__file__).parent / "front_ends"
R = np.random.RandomState(0)
ROWS = R.randn(2, 3).astype("f")


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return [e / e.sum(1, keepdims=True)]


def loss(x, w):
    y = w @ x
    return [2 * (y * y).sum(), np.outer(w, 4 * y)]


def loop(n):
    value = np.float32(1)
    for i in range(n):
        value = value * 2 if i % 2 else value + 0.5
    return [n, value]


# file: inputs, what they become, devices
CASES = {
    "iree_function": (
        [ROWS[:1, [0, 1, 2, 0]]],
        lambda x: [x @ np.arange(1, 9).reshape(4, 2)],
        None,
    ),
    "nx_argsort": (
        [np.float32([[3, 1, 2, 1], [0, 5, -1, 5]])],
        lambda x: [x.argsort(1, kind="stable"), x.argmax(1)],
        None,
    ),
    "nx_softmax": ([ROWS], softmax, None),
    "nx_while": ([np.int32(5)], loop, None),
    "reactant_broadcast": ([ROWS, R.randn(2).astype("f")], loss, None),
    "reactant_loop": ([R.randn(10).astype("f")], lambda x: [np.sin(x)], None),
    "reactant_sharded": (
        [R.randn(4, 2).astype("f"), R.randn(3, 4).astype("f")],
        lambda a, b: [b @ a],
        2,
    ),
    "tf_saved_model": ([ROWS], lambda x: [np.maximum(x + np.float32([1, -2, 3]), 0)], None),
}


def test_every_module_has_a_case():
    assert {p.stem for p in FOLDER.glob("*.mlir")} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_module(name):
    inputs, meaning, devices = CASES[name]
    text = (FOLDER / f"{name}.mlir").read_text()
    assert "written by hand after" in text.partition("\n")[0]
    got = torch_hlo.run_text(text, *inputs, devices=devices)
    for value, want in zip(got, meaning(*inputs), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)
