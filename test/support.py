"""Test cases on HLO text. One assert, six checks: see HloTestCase.assertPass."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from expecttest import TestCase

from torch_hlo.compiler.hlo_pass import Pass
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.hlo.evaluate.communication import devices_of
from torch_hlo.hlo.evaluate.multi_device import evaluate_spmd
from torch_hlo.hlo.ir.build import parameter
from torch_hlo.hlo.ir.instruction import Computation, Instruction, Module, postorder
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.verify import verify
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.hlo.text.printer import module_text


def hlo(text: str) -> Module:
    """The module in `text`, verified."""
    return verify(parse_module(text))


def short(module: Module) -> str:
    """Text with names %0, %1, … as expectations in tests show it."""
    return module_text(module, style="short").rstrip() + "\n"


def program(root: Instruction) -> Module:
    """The module that computes `root`, with all parameters up to the largest index it uses."""
    used = {x["index"]: x for x in postorder((root,)) if x.op == "parameter"}
    params = [used.get(i) or parameter(i, Shape("f32")) for i in range(max(used, default=-1) + 1)]
    return Module("test", Computation("main", tuple(params), root))


def calls(work: Callable[[], object]) -> int:
    """How many functions of Python and C are called by `work()`: what it costs, however busy the
    machine is."""
    count = 0

    def seen(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class HloTestCase(TestCase):
    def hlo(self, text: str) -> Module:
        return hlo(text)

    def program(self, root: Instruction) -> Module:
        return program(root)

    def assertPass(self, p: Pass, module: Module, expected: str, rtol: float = 1e-5) -> None:
        """`p` turns `module` into the program of text `expected`, and:

        the verifier accepts both; both print and parse back to the same root; the pass has nothing
        left to do on its result; the evaluator gives both the same values on random inputs; a pass
        that changed nothing returns the same object. Write the input and the expectation in two
        statements: EXPECTTEST_ACCEPT=1 rewrites the first literal of a statement."""
        result = self.check(p, module, rtol)
        self.assertExpectedInline(short(result), expected, skip=1)

    def assertUnchanged(self, p: Pass, module: Module) -> None:
        """The pass has nothing to do here: a negative test, whose comment says why."""
        self.assertEqual(short(self.check(p, module)), short(module))
        self.assertIs(p(module), module)

    def assertRewrites(
        self, p: Pass, before: Instruction, after: Instruction, rtol: float = 1e-5
    ) -> None:
        """assertPass on a program built in Python: the pass turns the root `before` into the very
        instruction `after`."""
        result = self.check(p, program(before), rtol)
        if result.entry.root is not after:
            self.fail(
                f"{p.name}"
                f" turned\n{short(program(before))}into\n{short(result)}expected\n{short(program(after))}"
            )

    def assertKept(self, p: Pass, x: Instruction) -> None:
        """The pass has nothing to do on the program with root `x`."""
        self.assertRewrites(p, x, x)

    def check(self, p: Pass, module: Module, rtol: float = 1e-5) -> Module:
        """The result of `p`, after all checks but that of the text."""
        self.assertRoundTrip(verify(module))
        result = p(module)
        self.assertRoundTrip(verify(result))
        self.assertIs(
            p(result),
            result,
            f"{p.name} is not idempotent: {short(result)}becomes\n{short(p(result))}",
        )
        if result.entry.root is module.entry.root:
            self.assertIs(result, module, f"{p.name} changed nothing but made a new module")
        self.assertSameValue(module, result, 0, rtol)
        self.assertSameValue(module, result, 1, rtol, special=True)
        return result

    def assertRoundTrip(self, module: Module) -> None:
        for style in ("canonical", "short"):
            text = module_text(module, style=style)
            self.assertIs(
                parse_module(text).entry.root,
                module.entry.root,
                f"does not read back:\n{text}",
            )

    def assertSameValue(
        self,
        before: Module,
        after: Module,
        seed: int = 0,
        rtol: float = 1e-5,
        special: bool = False,
    ) -> None:
        """Equal values within `rtol`, on every device that the program's collectives name; with
        `special` inputs also equal infinities, NaNs and signs of zeros."""
        inputs = [
            random_inputs(before, seed + device, special) for device in range(devices_of(before))
        ]
        values = zip(evaluate_spmd(before, inputs), evaluate_spmd(after, inputs), strict=True)
        for x, y in (pair for old, new in values for pair in zip(old, new, strict=True)):
            np.testing.assert_allclose(y, x, rtol=rtol, atol=rtol)
            # The sum that a dot is may start from either zero.
            if (
                special
                and x.dtype.kind == "f"
                and not any(i.op == "dot" for i in before.entry.instructions())
            ):
                zeros = (x == 0) & (y == 0)
                np.testing.assert_array_equal(
                    np.signbit(y[zeros]), np.signbit(x[zeros]), "signs of zeros"
                )
