"""Fused attention against the evaluator's meaning of the same program, and the memory it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from test.compiler.attention.attention_programs import inputs_of, program
from test.compiler.compiled import check
from torch_hlo.compiler.attention.attention import (
    attention as attention_pass,
    attention_of,
    on_grid,
)
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.llvm.target import host
from torch_hlo.device.cpu import loader
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.instruction import Module, outputs
from torch_hlo.hlo.ir.numeric import decode, encode

SIZES = [
    (2, 2, 20, 33, 8, 8),
    (1, 3, 130, 140, 17, 40),
    (1, 1, 300, 16, 64, 5),
    (1, 1, 180, 1300, 8, 8),
]
MASKS = ["none", "causal", "pred", "row", "column", "f32"]


def fused(m: Module) -> list:
    return [
        x
        for x in attention_pass.run(m).entry.instructions()
        if x.op == "fusion" and attention_of(x)
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_forward(sizes, mask) -> None:
    m = program("forward", sizes, mask)
    assert len(fused(m)) == 1
    check(m, inputs_of(m), rtol=2e-5, atol=1e-5, optimize=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_backward(sizes, mask) -> None:
    m = program("backward", sizes, mask)
    assert len(fused(m)) == 1
    inputs = inputs_of(m)
    inputs[5] = np.abs(inputs[5]) + 3  # a log-sum-exp that keeps the weights below one
    check(m, inputs, rtol=1e-4, atol=1e-4, optimize=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_symbolic_sizes(kind, mask) -> None:
    b, s, t = (symbol(f"s{i}") for i in range(3))
    m = program(kind, (b, 2, s, t, 16, 24), mask)
    assert len(fused(m)) == 1
    for batch, rows, columns in ((1, 300, 16), (3, 17, 530), (2, 85, 85), (2, 3, 5)):
        inputs = inputs_of(m, s0=batch, s1=rows, s2=columns)
        if kind == "backward":
            inputs[5] = np.abs(inputs[5]) + 3
        check(m, inputs, rtol=1e-4, atol=1e-4, optimize=True)


def test_fewer_heads_of_keys() -> None:
    m = program("forward", (2, 6, 20, 40, 16, 16), "causal", group=3)
    assert len(fused(m)) == 1
    check(m, inputs_of(m), rtol=2e-5, atol=1e-5, optimize=True)


def test_rows_that_see_nothing_are_zero() -> None:
    m = program("forward", (1, 1, 20, 32, 8, 8), "pred")
    inputs = inputs_of(m)
    inputs[3][0, 0, 5] = False
    out, logsumexp = check(m, inputs, rtol=2e-5, atol=1e-5, optimize=True)
    assert (out[0, 0, 5] == 0).all() and logsumexp[0, 0, 5] == 0


def test_infinite_and_undefined_scores() -> None:
    m = program("forward", (1, 1, 20, 32, 8, 8), "none")
    inputs = inputs_of(m)
    inputs[0][0, 0, 3] = np.nan
    inputs[0][0, 0, 4, 0] = np.inf
    check(m, inputs, rtol=2e-5, atol=1e-5, optimize=True)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_no_array_of_scores(kind) -> None:
    assert compile_module(program(kind, (4, 4, 256, 256, 16, 16), "causal")).arena < 256 * 256 * 4


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("mask", ["none", "causal", "f32"])
def test_narrow_types(dtype, mask) -> None:
    m = program("forward", (1, 3, 130, 140, 17, 40), mask, dtype)
    assert len(fused(m)) == 1
    check(m, inputs_of(m), rtol=2e-2, atol=1e-2, optimize=True)
    m = program("backward", (1, 2, 130, 600, 32, 40), mask, dtype)
    assert len(fused(m)) == 1
    inputs = inputs_of(m)
    inputs[5] = np.abs(inputs[5]) + 3
    check(m, inputs, rtol=5e-2, atol=2e-1, optimize=True)


@pytest.mark.parametrize("columns", [1, 5, 13, 14, 40, 300])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        ("none", "f32"),
        ("causal", "f32"),
        ("f32", "f32"),
        ("row", "f32"),
        ("none", "bf16"),
    ],
)
def test_few_rows(rows, columns, mask, dtype) -> None:
    """Decoding: the heads that share keys are computed together where that is possible."""
    m = program("forward", (2, 6, rows, columns, 24, 40), mask, dtype, group=3)
    assert len(fused(m)) == 1
    check(
        m,
        inputs_of(m),
        rtol=2e-5 if dtype == "f32" else 2e-2,
        atol=1e-5 if dtype == "f32" else 2e-2,
        optimize=True,
    )


@pytest.mark.parametrize("mask", ["none", "causal", "pred"])
@pytest.mark.parametrize("columns", [1, 13, 15])
def test_backward_of_few(columns, mask) -> None:
    m = program("backward", (1, 2, 9, columns, 8, 20), mask)
    inputs = inputs_of(m)
    inputs[5] = np.abs(inputs[5]) + 3
    check(m, inputs, rtol=1e-4, atol=1e-4, optimize=True)


@pytest.mark.parametrize(("rows", "columns"), [(3, 40), (20, 33), (300, 150)])
@pytest.mark.parametrize("mask", ["none", "causal", "f32"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("forward", "f32"),
        ("forward", "bf16"),
        ("backward", "f32"),
        ("backward", "bf16"),
    ],
)
def test_dropout(kind, mask, dtype, rows, columns) -> None:
    """Factors of weights are drawn in the kernel: the same numbers as outside of it, and no array
    of them."""
    m = program(kind, (2, 4, rows, columns, 24, 40), mask, dtype, dropout=0.3)
    assert len(fused(m)) == 1
    inputs = inputs_of(m)
    if kind == "backward":
        inputs[5] = np.abs(inputs[5]) + 3
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == "f32" else {"rtol": 5e-2, "atol": 1e-1}
    check(m, inputs, **tolerance, optimize=True)
    assert rows < 100 or compile_module(m).arena < 8 * rows * columns * 4


@pytest.mark.parametrize("bias", ["f32", "both"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), [(20, 33), (9, 13), (300, 150)])
def test_gradient_of_the_bias(rows, columns, dtype, dropout, bias) -> None:
    """Summed over what shares it: the batch, or batch and heads."""
    m = program(
        "backward",
        (3, 4 if bias == "f32" else 1, rows, columns, 24, 40),
        "f32",
        dtype,
        dropout=dropout,
        bias_gradient=True,
    )
    assert len(fused(m)) == 1
    inputs = inputs_of(m)
    inputs[5] = np.abs(inputs[5]) + 3
    check(
        m,
        inputs,
        rtol=1e-4 if dtype == "f32" else 5e-2,
        atol=1e-4 if dtype == "f32" else 2e-1,
        optimize=True,
    )


@pytest.mark.parametrize("mask", ["none", "causal", "f32"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradients_of_fewer_heads_of_keys(dtype, mask) -> None:
    m = program("backward", (2, 6, 70, 90, 24, 40), mask, dtype, group=3)
    assert len(fused(m)) == 1
    inputs = inputs_of(m)
    inputs[5] = np.abs(inputs[5]) + 3
    check(
        m,
        inputs,
        rtol=1e-4 if dtype == "f32" else 5e-2,
        atol=1e-4 if dtype == "f32" else 2e-1,
        optimize=True,
    )


def test_heads_of_grids_have_enough_rows() -> None:
    m = program("forward", (1, 2, 4, 64, 8, 8), "causal")
    assert fused(m) and not [x for x in on_grid.run(m).entry.instructions() if x.op == "fusion"]


@pytest.mark.parametrize("machine", ["no tiles", "avx2"])
@pytest.mark.parametrize(("kind", "rows"), [("forward", 3), ("forward", 45), ("backward", 45)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_lesser_machines(machine, kind, rows, dtype) -> None:
    """The same kernels for processors without AMX, and without AVX-512: other tiles, other widths
    of vectors."""

    def without(*prefixes: str) -> str:
        return ",".join(
            f"-{f[1:]}" if f[1:].startswith(prefixes) else f for f in host().features.split(",")
        )

    target = (
        replace(host(), features=without("amx"))
        if machine == "no tiles"
        else replace(
            host(),
            features=without("amx", "avx512", "avx10"),
            cpu="haswell",
            vector_bytes=32,
        )
    )
    m = program(kind, (1, 2, rows, 150, 20, 40), "causal", dtype)
    inputs = inputs_of(m)
    if kind == "backward":
        inputs[5] = np.abs(inputs[5]) + 3
    run = loader.load(compile_module(m, target), target)
    given = [
        np.frombuffer(encode(x, p.shape.dtype), np.uint8).copy()
        for x, p in zip(inputs, m.entry.params, strict=True)
    ]
    found = [np.zeros(x.shape.nbytes, np.uint8) for x in outputs(m)]
    run.call([x.ctypes.data for x in given], [x.ctypes.data for x in found])
    for x, out, expected in zip(outputs(m), found, evaluate(m, inputs), strict=True):
        rtol, atol = (1e-4, 1e-4) if dtype == "f32" else (2e-2, 5e-2)
        np.testing.assert_allclose(
            decode(out.tobytes(), x.shape.dtype, x.shape.dims),
            expected,
            rtol=rtol,
            atol=atol,
        )
