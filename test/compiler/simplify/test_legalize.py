"""legalize: nothing composite is left, and values stay."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler import compiled
from test.support import HloTestCase
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.compiler.simplify.legalize import EXPANSIONS, legalize
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.infer import ShapeError
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.opcodes import OPCODES
from torch_hlo.hlo.ir.shape import Shape


def p(dtype, *dims, index=0):
    return h.parameter(index, Shape(dtype, dims))


def batch_norm(dtype="f32"):
    x, scale, offset, mean, spread = (
        p(dtype, 4, 3, 5),
        *(p("f32", 3, index=i) for i in range(1, 5)),
    )
    variance, grad = h.multiply(spread, spread), p(dtype, 4, 3, 5, index=5)
    attrs = dict(epsilon=1e-3, feature_index=1)
    return [
        instr("batch-norm-inference", (x, scale, offset, mean, variance), **attrs),
        instr("batch-norm-training", (x, scale, offset), **attrs),
        instr("batch-norm-grad", (x, scale, mean, variance, grad), **attrs),
    ]


class Legalize(HloTestCase):
    def assertLegal(self, x, rtol=1e-5):
        result = self.check(legalize, self.program(x), rtol)
        assert not any(
            "composite" in OPCODES[i.op].traits or i.op in ("call", "map")
            for i in result.entry.instructions()
        )
        return result

    def test_every_composite_opcode_is_expanded(self):
        assert {
            name for name, row in OPCODES.items() if "composite" in row.traits
        } <= EXPANSIONS.keys()

    def test_batch_norm(self):
        for x in batch_norm():
            with self.subTest(x.op):
                self.assertLegal(x, 1e-4)
        for x in batch_norm("bf16"):
            with self.subTest("bf16 " + x.op):
                self.assertLegal(x, 2e-2)

    def test_topk(self):
        for dtype in ("f32", "bf16", "s8", "u32", "f64"):
            for largest in (True, False):
                self.assertLegal(h.topk(p(dtype, 3, 7), 3, largest))

    def test_random_bits(self):
        for algorithm, state in [
            ("rng_three_fry", p("u64", 2)),
            ("rng_philox", p("u64", 3)),
            ("rng_philox", p("u64", 2)),
            ("rng_default", p("u32", 4)),
        ]:
            for dtype in ("u32", "u64", "s8", "u16"):
                for dims in ((), (5,), (4, 3), (3, 5, 2), (0,)):
                    with self.subTest(f"{algorithm} {state.shape} {dtype}{dims}"):
                        m = self.program(h.rng_bit_generator(state, algorithm, Shape(dtype, dims)))
                        result = self.assertLegal(m.entry.root)
                        # the counter wraps
                        big = [
                            np.full(
                                state.shape.dims,
                                np.iinfo(f"u{state.shape.itemsize}").max - 1,
                                f"u{state.shape.itemsize}",
                            )
                        ]
                        for a, b in zip(evaluate(m, big), evaluate(result, big), strict=True):
                            np.testing.assert_array_equal(a, b)

    def test_threefry_known_answer(self):
        # Random123's test vectors for threefry2x32 with 20 rounds: key 0, counter 0.
        m = legalize(
            self.program(h.rng_bit_generator(p("u64", 2), "rng_three_fry", Shape("u32", (2,))))
        )
        assert [hex(v) for v in evaluate(m, [np.zeros(2, np.uint64)])[1]] == [
            "0x6b200159",
            "0x99ba4efe",
        ]

    def test_philox_known_answer(self):
        # Random123's test vectors for philox4x32 with 10 rounds: key 0, counter 0.
        m = legalize(
            self.program(h.rng_bit_generator(p("u64", 3), "rng_philox", Shape("u32", (4,))))
        )
        assert [hex(v) for v in evaluate(m, [np.zeros(3, np.uint64)])[1]] == [
            "0x6627e8d5",
            "0xe169c58d",
            "0xbc57ac4c",
            "0x9b00dbd8",
        ]

    def test_conversions(self):
        x, scale, zero = (
            p("f32", 4, 3, 5),
            h.add(h.abs_(p("f32", 3, index=1)), h.full(0.1, "f32", (3,))),
            p("s32", 3, index=2),
        )
        self.assertLegal(h.stochastic_convert(p("f32", 6), p("u32", 6, index=1), "s32"))
        m = self.program(h.uniform_quantize(x, scale, zero, "s8", (1,)))
        self.assertRoundTrip(m)
        inputs = [
            np.linspace(-3, 3, 60, dtype=np.float32).reshape(4, 3, 5),
            np.array([0.5, 1, 2], np.float32),
            np.array([0, 3, -3], np.int32),
        ]
        np.testing.assert_array_equal(evaluate(legalize(m), inputs)[0], evaluate(m, inputs)[0])
        self.assertLegal(
            h.uniform_dequantize(
                p("s8", 4, 3, 5),
                p("f32", 3, index=1),
                p("s32", 3, index=2),
                "f32",
                (1,),
            )
        )

    def test_bits_of_what_is_narrower_than_a_byte(self):
        for source, dims, dtype in (
            ("s4", (2, 4), "f16"), ("f16", (2,), "s4"), ("s4", (4,), "u4"), ("u4", (4,), "s4"),
            ("s2", (2, 16), "s32"), ("u8", (3,), "u2"), ("s64", (2,), "u2"),
        ):  # fmt: skip
            x = p(source, *dims)
            y = h.bitcast_convert(x, dtype)
            self.assertLegal(y)
            m = compiled.module([x], y)
            compiled.check(m, random_inputs(m), optimize=True)

    def test_clamp(self):
        x, low, high = p("f32", 4), h.constant(0, "f32"), h.constant(1, "f32")
        self.assertRewrites(
            legalize,
            h.clamp(low, x, high),
            h.clamp(h.full_like(x, 0), x, h.full_like(x, 1)),
        )

    def test_computations_are_inlined(self):
        x, scalar = p("f32", 4), Shape("f32")
        inner = h.computation(h.negate, [x.shape])
        outer = h.computation(lambda v: h.exponential(h.call(inner, [v])), [x.shape])
        self.assertRewrites(legalize, h.call(outer, [x]), h.exponential(h.negate(x)))
        body = h.computation(
            lambda a, b: h.multiply(a, h.add(b, h.constant(2, "f32"))), [scalar, scalar]
        )
        self.assertRewrites(
            legalize, h.map_([x, x], body), h.multiply(x, h.add(x, h.full_like(x, 2)))
        )
        start = instr("async-start", (x,), calls=inner)
        assert legalize(self.program(instr("async-done", (start,)))).entry.root is h.negate(x)

    def test_map_of_anything_else(self):
        body = h.computation(lambda a: h.reshape(h.reshape(a, (1,)), ()), [Shape("f32")])
        with pytest.raises(
            ShapeError, match="map: the computation must consist of pointwise opcodes"
        ):
            legalize(self.program(h.map_([p("f32", 4)], body)))

    def test_ragged_dot(self):
        sizes = h.constant([1, 3, 2], "s32")
        rng = np.random.default_rng(0)
        a, b = (
            rng.standard_normal((6, 4)).astype(np.float32),
            rng.standard_normal((3, 4, 5)).astype(np.float32),
        )
        rows = h.ragged_dot(
            p("f32", 6, 4),
            p("f32", 3, 4, 5, index=1),
            sizes,
            lhs_contract=[1],
            rhs_contract=[1],
            lhs_ragged=[0],
            rhs_group=[0],
        )
        self.assertLegal(rows, 1e-4)
        expected = np.concatenate([a[:1] @ b[0], a[1:4] @ b[1], a[4:] @ b[2]])
        np.testing.assert_allclose(
            evaluate(legalize(self.program(rows)), [a, b])[0],
            expected,
            rtol=1e-5,
            atol=1e-5,
        )
        c = rng.standard_normal((6, 5)).astype(np.float32)
        inner = h.ragged_dot(
            p("f32", 6, 4),
            p("f32", 6, 5, index=1),
            sizes,
            lhs_contract=[0],
            rhs_contract=[0],
            lhs_ragged=[0],
        )
        expected = np.stack([a[:1].T @ c[:1], a[1:4].T @ c[1:4], a[4:].T @ c[4:]])
        np.testing.assert_allclose(
            evaluate(legalize(self.program(inner)), [a, c])[0],
            expected,
            rtol=1e-5,
            atol=1e-5,
        )
