"""Random programs through XLA, through the evaluator, and through us before and after each pass:
all agree.

XLA's CPU backend comes as a PJRT plugin (pip install xla-cpu-pjrt); without it the other two are
compared."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from test.compiler import random_hlo
from torch_hlo.compiler.pipeline import optimize, random_inputs
from torch_hlo.hlo.ir.instruction import Module, postorder
from torch_hlo.hlo.ir.verify import verify
from torch_hlo.tools import execute


def unlike_xla(module: Module) -> bool:
    """XLA drops the initial value of a reduction over dimensions of size 1, and adds truth values
    modulo two."""
    return any(
        x.op == "reduce" or x.op == "add" and x.shape.kind == "p"
        for x in postorder((module.entry.root,))
    )


def assert_agree(module: Module, seed: int) -> None:
    inputs = random_inputs(module, seed)
    want = execute.run_evaluator(module, inputs)
    stages: list[tuple[str, Module]] = []
    optimize(module, dump=lambda name, m, _: stages.append((name, m)))
    for name, stage in stages:
        verify(stage)
        assert not (problem := execute.difference(execute.run_evaluator(stage, inputs), want)), (
            f"evaluated after {name}: {problem}"
        )
    assert not (problem := execute.difference(execute.run_module(module, inputs), want)), (
        f"compiled: {problem}"
    )
    if execute.xla_plugin() and not unlike_xla(module):
        assert not (problem := execute.difference(execute.run_xla(module, inputs), want)), (
            f"XLA: {problem}"
        )
        before_fusion = [
            m for name, m in stages if not any(x.op == "fusion" for x in postorder((m.entry.root,)))
        ][-1]
        assert not (problem := execute.difference(execute.run_xla(before_fusion, inputs), want)), (
            f"XLA, optimized by us: {problem}"
        )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 25))
def test_every_pass_and_executor_agrees(seed, count):
    assert_agree(random_hlo.random_module(seed, count), seed)
