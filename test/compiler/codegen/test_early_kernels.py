"""Kernels that are written before the last passes: the same program, and none of them twice."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler.compiled import module, parameter, run
from torch_hlo.compiler import compile as compiler
from torch_hlo.compiler.codegen.program import Program
from torch_hlo.compiler.llvm.machine_code import Objects
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build as b


def network():
    x, w, v = (
        parameter(0, "f32", 40, 48),
        parameter(1, "f32", 48, 64),
        parameter(2, "f32", 64, 20),
    )
    h = b.tanh(b.dot(x, w, (1,), (0,)))
    y = b.dot(h, v, (1,), (0,))
    return module([x, w, v], b.dot(h, y, (0,), (0,)), y)


def test_the_program_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    m = network()
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(p.shape.dims).astype(np.float32) for p in m.entry.params]
    later = run(m, inputs, optimize=True)
    monkeypatch.setattr(compiler, "MANY_INSTRUCTIONS", 0)
    for found, before, expected in zip(
        run(m, inputs, optimize=True), later, evaluate(m, inputs), strict=True
    ):
        assert np.array_equal(found, before)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_functions_are_written_before_fusion_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, arenas = [], []
    add, flush, emit = Objects.add, Objects.flush, compiler.emit
    monkeypatch.setattr(compiler, "MANY_INSTRUCTIONS", 0)
    monkeypatch.setattr(
        Objects,
        "add",
        lambda self, name, text: (written.append(name), add(self, name, text))[1],
    )
    monkeypatch.setattr(Objects, "flush", lambda self: (written.append("flush"), flush(self))[1])

    def watched(m, target, profile, objects, program):
        assert isinstance(program, Program)
        arenas.append(program.arena_size)
        return emit(m, target, profile, objects, program)

    monkeypatch.setattr(compiler, "emit", watched)
    compiler.compile_module(network())
    early, rest = (
        written[: written.index("flush")],
        written[written.index("flush") + 1 :],
    )
    assert any(n.startswith("micro_") for n in early) and not any(
        n.startswith("micro_") for n in rest
    )
    assert "entry" in rest and len(written) == len(set(written))
    assert arenas == [0]  # trying a step takes no memory of the program
