"""The pipeline: flags, dumps, checks, and every pass on random programs."""

from __future__ import annotations

import random
from functools import partial

import pytest

from test.compiler.random_hlo import random_module
from test.support import HloTestCase, calls, program
from torch_hlo import config
from torch_hlo.compiler import pipeline
from torch_hlo.compiler.compile import emit
from torch_hlo.compiler.hlo_pass import Pass, fixpoint, hlo_pass
from torch_hlo.compiler.llvm.target import host
from torch_hlo.compiler.pipeline import PassError, cpu_pipeline, optimize
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import Computation, Module
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.verify import VerifyError, verify

PASSES = cpu_pipeline(host()).passes
SIMPLIFY = next(p for p in PASSES if p.members)
LOCAL = [PASSES[0], *SIMPLIFY.members, SIMPLIFY]  # everything before fusion
X = h.parameter(0, Shape("f32", (4,)))


@pytest.mark.parametrize("block", range(6))
def test_random_programs(block):
    case = HloTestCase()
    for seed in range(1000 + 10 * block, 1010 + 10 * block):
        m = random_module(seed, 12 + seed % 25)
        for p in LOCAL:
            try:
                case.check(p, m, rtol=2e-3)
            except Exception as error:
                error.add_note(f"pass {p.name}, random_module({seed}, {12 + seed % 25})")
                raise


def chain(length: int) -> Module:
    """A chain of four instructions per link; chains of other lengths have no link in common."""
    r = random.Random(length)
    x = X
    for i in range(length):
        x = r.choice((h.add, h.multiply, h.subtract))(
            h.negate(x), h.full_like(x, float(length + i % 7))
        )
    return verify(program(x))


def test_ten_thousand_instructions():
    # Deeper than Python's recursion limit, and linear.
    few, many = chain(250), chain(2500)
    for p in LOCAL:
        p(chain(10))  # what is loaded once
        assert calls(partial(p, many)) < 12 * calls(partial(p, few)) + 1000, p.name


def layers(count: int, width: int) -> Module:
    """A residual block per layer: a norm, a product with weights of its own, an activation; and the
    sum of squares at the end."""
    f32, zero = Shape("f32", (8, width)), h.constant(0, "f32")
    x = h.parameter(0, f32)
    params = [
        x,
        *(h.parameter(i, Shape("f32", (width, width))) for i in range(1, count + 1)),
    ]
    for w in params[1:]:
        mean = h.divide(h.reduce(x, zero, (1,), "add"), h.full(width, "f32", (8,)))
        centred = h.subtract(x, h.broadcast(mean, f32.dims, (0,)))
        scale = h.rsqrt(
            h.add(
                h.reduce(h.multiply(centred, centred), zero, (1,), "add"),
                h.full(1e-5, "f32", (8,)),
            )
        )
        x = h.add(
            x,
            h.tanh(
                h.dot(
                    h.multiply(centred, h.broadcast(scale, f32.dims, (0,))),
                    w,
                    (1,),
                    (0,),
                )
            ),
        )
    return Module(
        "layers",
        Computation(
            "main",
            tuple(params),
            h.tuple_(h.reduce(h.multiply(x, x), zero, (0, 1), "add"), x),
        ),
    )


def compiling(module: Module) -> int:
    """Calls that it takes to compile `module` to IR text."""
    return calls(lambda: emit(optimize(module), host()))


def test_work_grows_with_the_program_and_not_faster():
    compiling(layers(4, 16))  # what is loaded and cached once
    few, many = compiling(layers(20, 24)), compiling(layers(160, 32))
    assert many < 8.5 * few


def test_dump_names_what_changed():
    seen = []
    m = program(h.negate(h.negate(X)))
    optimize(
        m,
        dump=lambda name, module, ms: seen.append(name),
        passes=[PASSES[0], SIMPLIFY],
    )
    assert seen == ["input", SIMPLIFY.name]


def test_disable():
    m = program(h.negate(h.negate(X)))
    with config.override(DISABLE="algebra,fusion"):
        assert optimize(m) is m
    with (
        config.override(DISABLE="nonsense"),
        pytest.raises(ValueError, match="no pass 'nonsense'; passes are algebra"),
    ):
        optimize(m)
    with config.override(DISABLE=",".join(p.name for p in SIMPLIFY.members)):
        assert SIMPLIFY not in pipeline.enabled(PASSES)


def wrong(change) -> Pass:
    return Pass(
        "wrong",
        lambda m: Module(m.name, Computation("main", m.entry.params, change(m.entry.root))),
        "",
    )


def test_check_names_the_wrong_pass():
    m = program(h.negate(X))
    with (
        config.override(CHECK=3),
        pytest.raises(
            PassError,
            match=r"pass wrong on module test: output 0 changed: \[.*\] became \[",
        ),
    ):
        optimize(m, passes=[wrong(h.negate)])
    with (
        config.override(CHECK=2),
        pytest.raises(PassError, match="pass wrong on module test: .*not in its signature"),
    ):
        optimize(m, passes=[wrong(lambda root: h.add(root, h.parameter(5, X.shape)))])
    with config.override(CHECK=0):
        optimize(m, passes=[wrong(h.negate)])


def test_check_verifies_the_input():
    m = Module("m", Computation("main", (), X))
    with config.override(CHECK=1), pytest.raises(VerifyError):
        optimize(m)


def test_errors_name_the_pass():
    @hlo_pass
    def breaks(module):
        """Always fails."""
        raise KeyError("inside")

    with pytest.raises(KeyError) as caught:
        optimize(program(X), passes=[breaks])
    assert caught.value.__notes__ == ["in pass breaks on module test"]


def test_fixpoint_that_does_not_settle():
    flip = wrong(h.negate)
    with pytest.raises(RuntimeError, match="did not settle in 16 rounds"):
        fixpoint(flip)(program(X))
