"""Shape rules: results, and messages that name the opcode, what is wrong and the operand shapes."""

from __future__ import annotations

import pytest

from torch_hlo.hlo.evaluate.evaluate import MEANINGS
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.infer import ShapeError
from torch_hlo.hlo.ir.infer_products import conv_dims
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.opcodes import OPCODES
from torch_hlo.hlo.ir.shape import Shape, tuple_shape
from torch_hlo.hlo.ir.window import WindowDim

N = symbol("s0")


def p(dtype="f32", dims=(2, 3), index=0):
    return h.parameter(index, Shape(dtype, dims))


X, I, C = p(), p("s32"), p("c64")  # noqa: E741
ZERO = h.constant(0, "f32")

RESULTS = [
    (lambda: h.compare(X, X, "LT"), "pred[2,3]"),
    (lambda: h.abs_(C), "f32[2,3]"),
    (lambda: h.complex_(X, X), "c64[2,3]"),
    (lambda: h.dot(X, p(dims=(3, 4)), (1,), (0,)), "f32[2,4]"),
    (lambda: h.dot(p("bf16"), p("bf16", (3, 4)), (1,), (0,), dtype="f32"), "f32[2,4]"),
    (
        lambda: h.dot(p(dims=(5, 2, 3)), p(dims=(5, 4, 3)), (2,), (2,), (0,), (0,)),
        "f32[5,2,4]",
    ),
    (lambda: h.slice_(p(dims=(10,)), (1,), (9,), (3,)), "f32[3]"),
    (lambda: h.pad(X, ZERO, [(1, 2, 1), (-1, 0, 0)]), "f32[6,2]"),
    (lambda: h.concatenate([X, X], 1), "f32[2,6]"),
    (lambda: h.reduce(X, ZERO, (0,), "add"), "f32[3]"),
    (lambda: h.topk(X, 2), "(f32[2,2], s32[2,2])"),
    (lambda: h.fft(X, "RFFT", (3,)), "c64[2,2]"),
    (lambda: h.fft(p("c64", (2, 3)), "IRFFT", (4,)), "f32[2,4]"),
    (lambda: h.bitcast_convert(X, "u8"), "u8[2,3,4]"),
    (lambda: h.bitcast_convert(p("u8", (2, 4)), "f32"), "f32[2]"),
    (
        lambda: h.reduce_window(
            p(dims=(8,)), ZERO, (WindowDim(3, stride=2, pad_low=1, pad_high=1),), "add"
        ),
        "f32[4]",
    ),
    (
        lambda: h.convolution(
            p(dims=(1, 3, 8, 8)),
            p(dims=(4, 3, 3, 3)),
            [WindowDim(3), WindowDim(3, 2)],
            "bf01_oi01->bf01",
        ),
        "f32[1,4,6,3]",
    ),
    (
        lambda: h.convolution(
            p(dims=(1, 4, 8)),
            p(dims=(4, 1, 3)),
            [WindowDim(3)],
            "bf0_oi0->bf0",
            feature_group_count=4,
        ),
        "f32[1,4,6]",
    ),
    (
        lambda: h.gather(
            p(dims=(10, 4)),
            p("s32", (5, 1)),
            offset_dims=[1],
            collapsed_slice_dims=[0],
            start_index_map=[0],
            index_vector_dim=1,
            slice_sizes=[1, 4],
        ),
        "f32[5,4]",
    ),
    (
        lambda: h.rng_bit_generator(p("u64", (2,)), "rng_three_fry", Shape("u32", (7,))),
        "(u64[2], u32[7])",
    ),
    # symbolic sizes
    (lambda: h.add(p(dims=(N, 4)), p(dims=(N, 4))), "f32[s0,4]"),
    (lambda: h.dot(p(dims=(N, 4)), p(dims=(4, N)), (1,), (0,)), "f32[s0,s0]"),
    (lambda: h.concatenate([p(dims=(N,)), p(dims=(N,))], 0), "f32[2*s0]"),
    (lambda: h.slice_(p(dims=(N,)), (1,), (N,)), "f32[s0-1]"),
    (lambda: h.reshape(p(dims=(N, 6)), (N * 2, 3)), "f32[2*s0,3]"),
    (lambda: h.pad(p(dims=(N,)), ZERO, [(1, 1, 0)]), "f32[s0+2]"),
    (lambda: h.reduce(p(dims=(N, 4)), ZERO, (1,), "add"), "f32[s0]"),
]

ERRORS = [
    (
        lambda: h.dot(X, p(dims=(4, 5)), (1,), (0,)),
        "dot: contracting sizes 3 != 4 (f32[2,3] · f32[4,5])",
    ),
    (lambda: h.add(X, p(dims=(3,))), "add: shapes differ (f32[2,3] · f32[3])"),
    (lambda: h.add(X, I), "add: element types differ (f32[2,3] · s32[2,3])"),
    (
        lambda: h.add(p(dims=(N,)), p(dims=(4,))),
        "add: shapes differ (f32[s0] · f32[4])",
    ),
    (lambda: h.exponential(I), "exponential: is not defined on s32 (s32[2,3])"),
    (lambda: h.compare(C, C, "LT"), "compare: complex numbers have no LT"),
    (
        lambda: h.reshape(X, (7,)),
        "reshape: element types or counts differ (f32[2,3] · f32[7])",
    ),
    (
        lambda: h.broadcast(X, (2, 4), (0, 1)),
        "broadcast: dimensions [0, 1] do not carry the operand into the result",
    ),
    (
        lambda: h.transpose(X, (0, 0)),
        "transpose: dimensions [0, 0] are no permutation of 2",
    ),
    (lambda: h.slice_(X, (0, 0), (2, 4)), "slice: limit 4 exceeds size 3"),
    (
        lambda: h.concatenate([X, p(dims=(2, 4))], 0),
        "concatenate: operands differ outside dimension 0",
    ),
    (
        lambda: h.reduce(X, h.constant(0, "s32"), (0,), "add"),
        "reduce: parameter 1 of add_s32 is s32[], got f32[]",
    ),
    (
        lambda: h.reduce(X, ZERO, (2,), "add"),
        "reduce: dimensions [2] out of range for rank 2",
    ),
    (
        lambda: h.select(X, X, X),
        "select: the predicate must be pred with the dims of the branches",
    ),
    (lambda: h.get_tuple_element(X, 0), "get-tuple-element: no element 0 (f32[2,3])"),
    (
        lambda: h.convolution(p(dims=(1, 3, 8)), p(dims=(4, 2, 3)), [WindowDim(3)], "bf0_oi0->bf0"),
        "convolution: 3 input features, the kernel expects 2",
    ),
    (
        lambda: h.dynamic_slice(X, [h.constant(0, "s32")], (1, 1)),
        "dynamic-slice: 1 start indices for rank 2",
    ),
    (lambda: h.cholesky(X), "cholesky: takes square matrices"),
    (lambda: h.sort(X, 0, "LE"), "sort: the comparator must be LT or GT, got 'LE'"),
    (lambda: instr("add", (X,)), "add: takes 2 operands, got 1 (f32[2,3])"),
    (
        lambda: instr("negate", (X,), dimensions=(1,)),
        "negate: unknown attribute dimensions; legal are none",
    ),
    (lambda: instr("transpose", (X,)), "transpose: missing attribute dimensions"),
    (
        lambda: instr("iota", (), iota_dimension=0),
        "iota: the operands do not determine the shape; give one",
    ),
    (
        lambda: conv_dims("bf01_oi0->bf01"),
        "convolution: bad dim_labels 'bf01_oi0->bf01'",
    ),
    (
        lambda: h.rng_bit_generator(p("u64", (2,)), "rng_three_fry", Shape("s4", (7,))),
        "rng-bit-generator: bits must be integers of 8 bits",
    ),
    (
        lambda: h.while_(
            h.computation(lambda s: s, [X.shape]),
            h.computation(lambda s: s, [X.shape]),
            X,
        ),
        "while: the condition must return pred[]",
    ),
]


@pytest.mark.parametrize(("make", "shape"), RESULTS, ids=[r for _, r in RESULTS])
def test_result(make, shape):
    assert str(make().shape) == shape


@pytest.mark.parametrize(("make", "message"), ERRORS, ids=[m.partition(" (")[0] for _, m in ERRORS])
def test_error(make, message):
    with pytest.raises(ShapeError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_every_opcode_has_a_meaning():
    missing = [name for name in OPCODES if not callable(MEANINGS.get(name))]
    assert missing == ["parameter"]  # its value comes from the caller


def test_tables_agree():
    for name, row in OPCODES.items():
        assert row.name == name and row.required <= set(row.attrs)
        assert row.rule is not None or row.check is not None, name
        assert "commutative" not in row.traits or row.arity == 2
        assert (row.spelling is None) == (
            "pointwise" not in row.traits or "composite" in row.traits
        )


def test_pointwise_builders_come_from_the_rows():
    assert h.erf_inv(X) is instr("erf-inv", (X,)) and h.not_(I) is instr("not", (I,))
    assert h.atan2.__doc__ == "`atan2` of 2 operands of equal shape."


def test_identities_build_nothing():
    assert (
        h.reshape(X, (2, 3)) is X
        and h.transpose(X, (0, 1)) is X
        and h.convert(X, "f32") is X
        and h.broadcast(X, (2, 3), (0, 1)) is X
    )
    assert (
        h.slice_(X, (0, 0), (2, 3)) is X
        and h.concatenate([X], 0) is X
        and h.reverse(X, ()) is X
        and h.pad(X, ZERO, [(0, 0, 0)] * 2) is X
    )
    assert h.get_tuple_element(h.tuple_(X, I), 1) is I


def test_defaults_are_left_out():
    x = h.sort(X, 1, "LT", is_stable=False)
    assert "is_stable" not in dict(x.attrs) and x["is_stable"] is False
    assert instr("cholesky", (p(dims=(3, 3)),), lower=False) is instr("cholesky", (p(dims=(3, 3)),))


def test_limits():
    assert (h.lowest("f32"), h.highest("s8"), h.highest("u64"), h.lowest("pred")) == (
        -float("inf"),
        127,
        2**64 - 1,
        False,
    )
    assert h.highest("f8e4m3fn") == 448 and h.lowest("s64") == -(2**63)


def test_tuple_shapes_compare():
    both = h.sort([X, I], 0, "LT")
    assert both.shape == tuple_shape(X.shape, I.shape)
