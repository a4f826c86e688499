"""fusion_place: updates of arrays and concatenations are written by the kernels that compute them;
what that must not break."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler.compiled import check, module, parameter
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.fusion.fusion import fusion
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.instruction import Instruction, Module, postorder
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.text.parser import parse_module

rng = np.random.default_rng(0)


def floats(*dims) -> np.ndarray:
    return rng.standard_normal(dims).astype(np.float32)


def put(x: Instruction, update: Instruction, *starts: Instruction) -> Instruction:
    return instr("dynamic-update-slice", (x, update, *starts), x.shape)


def kinds(m: Module) -> list[str]:
    skip = ("parameter", "tuple", "get-tuple-element", "constant", "reshape")
    return [
        f"{x.get('kind', x.op)} {x.shape}"
        for x in postorder((fusion(m).entry.root,))
        if x.op not in skip
    ]


stack, x, y = (
    parameter(0, "f32", 5, 4, 40),
    parameter(1, "f32", 4, 40),
    parameter(2, "f32", 4, 40),
)
i, zero = parameter(3, "s32"), b.constant(0, "s32")
PARAMS, INPUTS = (
    [stack, x, y, i],
    [floats(5, 4, 40), floats(4, 40), floats(4, 40), np.int32(3)],
)


def updated(value: Instruction) -> Instruction:
    return put(stack, b.reshape(value, (1, 4, 40)), i, zero, zero)


def checked(params, *roots, inputs=INPUTS, **options) -> list[str]:
    """Kernels of the program, once its values are the evaluator's, with and without writing in
    place."""
    for aliases in ((), options.get("aliases", ())):
        for optimize in (False, True):
            check(
                module(params, *roots, aliases=aliases, symbols=options.get("symbols", ())),
                inputs,
                1e-5,
                1e-6,
                optimize=optimize,
            )
    return kinds(module(params, *roots, symbols=options.get("symbols", ())))


def test_an_update_is_written_by_the_kernel_that_computes_it():
    h = b.tanh(b.add(x, y))
    assert checked(PARAMS, h, updated(h), aliases=((1, 0),)) == ["loop (f32[4,40], f32[5,4,40])"]
    assert checked(PARAMS, updated(h), aliases=((0, 0),)) == ["loop f32[5,4,40]"]


def test_a_value_that_a_kernel_reads_is_updated_by_it():
    h = b.tanh(b.add(x, y))
    assert checked(PARAMS, h, updated(x), aliases=((1, 0), (0, 1))) == [
        "loop (f32[4,40], f32[5,4,40])"
    ]


def test_arrays_with_other_readers_are_updated_by_a_step_of_their_own():
    h = b.tanh(b.add(x, y))
    old = instr("dynamic-slice", (stack, i, zero, zero), dynamic_slice_sizes=(1, 4, 40))
    both = b.add(h, b.reshape(old, (4, 40)))
    assert "dynamic-update-slice f32[5,4,40]" in checked(PARAMS, updated(both), aliases=((0, 0),))
    assert "dynamic-update-slice f32[5,4,40]" in checked(PARAMS, h, updated(h), b.negate(stack))


def test_a_start_that_depends_on_the_kernel_comes_first():
    h = b.tanh(b.add(x, y))
    start = b.convert(b.reduce(h, b.constant(0, "f32"), (0, 1), "add"), "s32")
    checked(
        PARAMS,
        h,
        put(stack, b.reshape(h, (1, 4, 40)), start, zero, zero),
        aliases=((1, 0),),
    )


def test_two_updates_of_one_array_keep_their_order():
    h, g = b.tanh(b.add(x, y)), b.multiply(b.add(x, y), x)
    first = updated(h)
    second = put(first, b.reshape(g, (1, 4, 40)), b.subtract(i, b.constant(1, "s32")), zero, zero)
    third = put(first, b.reshape(g, (1, 4, 40)), i, zero, zero)
    checked(PARAMS, h, g, second, aliases=((2, 0),))
    checked(PARAMS, h, g, third, aliases=((2, 0),))


def test_halves_are_written_into_a_stack():
    s = b.tanh(b.add(x, y))
    joined = instr("concatenate", (b.multiply(s, x), b.subtract(s, y)), dimensions=(1,))
    rows = parameter(0, "f32", 3, 4, 80)
    into = put(rows, b.reshape(joined, (1, 4, 80)), i, zero, zero)
    inputs = [floats(3, 4, 80), *INPUTS[1:]]
    kernels = ["loop f32[4,40]", "loop (f32[4,80], f32[3,4,80])"]
    found = checked([rows, *PARAMS[1:]], s, joined, into, inputs=inputs, aliases=((2, 0),))
    assert found == kernels


def test_a_concatenation_that_its_own_kernel_would_read_stays_apart():
    s = b.tanh(b.add(x, y))
    joined = instr("concatenate", (b.multiply(s, x), b.subtract(s, y)), dimensions=(1,))
    checked(PARAMS, b.add(s, b.slice_(joined, (0, 20), (4, 60))), joined)


@pytest.mark.parametrize("size", [1, 3, 16, 33])
def test_pieces_of_any_length(size):
    p, q = parameter(0, "f32", 7, size), parameter(1, "f32", 7, size)
    s = b.multiply(p, q)
    joined = instr("concatenate", (b.tanh(s), b.negate(s), s), dimensions=(1,))
    checked(
        [p, q],
        s,
        joined,
        b.multiply(joined, joined),
        inputs=[floats(7, size), floats(7, size)],
    )
    checked([p, q], s, joined, inputs=[floats(7, size), floats(7, size)])


def test_symbolic_sizes():
    n = symbol("n")
    rows, p = parameter(0, "f32", 6, n, 24), parameter(1, "f32", n, 24)
    h = b.tanh(p)
    into = put(rows, b.reshape(h, (1, n, 24)), parameter(2, "s32"), zero, zero)
    inputs = [floats(6, 5, 24), floats(5, 24), np.int32(9)]
    params = [rows, p, parameter(2, "s32")]
    assert checked(params, h, into, inputs=inputs, aliases=((1, 0),), symbols=(("n", 0, 1),)) == [
        "loop (f32[n,24], f32[6,n,24])"
    ]


def test_a_loop_fills_its_stack_in_place():
    m = parse_module("""HloModule scan

%body (p: (s32[], f32[4,40], f32[5,4,40])) -> (s32[], f32[4,40], f32[5,4,40]) {
  %p = (s32[], f32[4,40], f32[5,4,40]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %zero = s32[] constant(0)
  %next = s32[] add(%i, %one)
  %h = f32[4,40] get-tuple-element(%p), index=1
  %s = f32[5,4,40] get-tuple-element(%p), index=2
  %g = f32[4,40] cosine(%h)
  %r = f32[1,4,40] reshape(%g)
  %u = f32[5,4,40] dynamic-update-slice(%s, %r, %i, %zero, %zero)
  ROOT %t = (s32[], f32[4,40], f32[5,4,40]) tuple(%next, %g, %u)
}

%condition (p: (s32[], f32[4,40], f32[5,4,40])) -> pred[] {
  %p = (s32[], f32[4,40], f32[5,4,40]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[4,40], s: f32[5,4,40]) -> f32[5,4,40] {
  %x = f32[4,40] parameter(0)
  %s = f32[5,4,40] parameter(1)
  %zero = s32[] constant(0)
  %t = (s32[], f32[4,40], f32[5,4,40]) tuple(%zero, %x, %s)
  %w = (s32[], f32[4,40], f32[5,4,40]) while(%t), condition=%condition, body=%body
  ROOT %r = f32[5,4,40] get-tuple-element(%w), index=2
}
""")
    check(m, [floats(4, 40), floats(5, 4, 40)], 1e-5)
    loop = next(x for x in fusion(m).entry.instructions() if x.op == "while")
    assert not any(x.op == "dynamic-update-slice" for x in loop["body"].instructions())


def test_sums_of_a_product_lie_where_no_array_lives_meanwhile():
    x, w, v = (
        parameter(0, "f32", 900, 700),
        parameter(1, "f32", 700, 700),
        parameter(2, "f32", 700, 700),
    )
    hidden = b.tanh(b.dot(x, w, (1,), (0,)))
    # hidden is dead: its memory holds the gradient's sums, as its only result overwrites w
    z = b.tanh(b.dot(hidden, v, (1,), (0,)))
    rate = b.broadcast(b.constant(0.01, "f32"), (700, 700))
    m = module(
        [x, w, v],
        b.subtract(w, b.multiply(b.dot(x, z, (0,), (0,)), rate)),
        aliases=((0, 1),),
    )
    check(
        m,
        [
            floats(900, 700),
            floats(700, 700) * np.float32(0.05),
            floats(700, 700) * np.float32(0.05),
        ],
        1e-4,
        1e-4,
        optimize=True,
    )
    arrays = 2 * 900 * 700 * 4
    assert arrays <= compile_module(m).arena < arrays + 700 * 700 * 4
