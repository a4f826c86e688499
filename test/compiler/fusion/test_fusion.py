"""fusion: what becomes one kernel, and that nothing changes in value."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler import programs
from test.compiler.random_programs import random_module
from test.support import calls
from torch_hlo.compiler.fusion.fusion import fusion
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.instruction import Computation, Module, postorder
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.text.parser import parse_module


def kernels(m: Module) -> list[str]:
    """Kinds and shapes of the entry's fusions and steps."""
    skip = ("parameter", "tuple", "get-tuple-element", "constant")
    return [
        f"{x.get('kind', x.op)} {x.shape}" for x in postorder((m.entry.root,)) if x.op not in skip
    ]


def assert_same_value(m: Module, f: Module, sizes=None) -> None:
    inputs = [
        np.abs(x) if x.dtype.kind == "f" and m.name == "adam" else x
        for x in programs.inputs_for(m, sizes=sizes)
    ]
    for x, y in zip(evaluate(m, inputs), evaluate(f, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("softmax", ["row f32[64,100]"]),
        ("layernorm", ["row (f32[8,16], f32[8,16], f32[8,16,96])"]),
        ("layernorm_backward", ["row (f32[8,16,96], f32[96], f32[96])"]),
        ("cross_entropy", ["row (f32[32], f32[32,200])", "reduce f32[]"]),
    ],
)
def test_row_programs_are_one_kernel(name, expected):
    m = getattr(programs, name)()
    f = fusion(m)
    assert kernels(f) == expected
    assert_same_value(m, f)
    assert fusion(f) is f


def test_bodies_of_loops_and_branches_are_fused():
    m = parse_module("""HloModule loop

%body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[64] get-tuple-element(%p), index=1
  %y = f32[64] multiply(%x, %x)
  %z = f32[64] cosine(%y)
  ROOT %t = (s32[], f32[64]) tuple(%next, %z)
}

%condition (p: (s32[], f32[64])) -> pred[] {
  %p = (s32[], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[64]) -> (s32[], f32[64]) {
  %x = f32[64] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[64]) tuple(%zero, %x)
  ROOT %w = (s32[], f32[64]) while(%start), condition=%condition, body=%body
}
""")
    f = fusion(m)
    (loop,) = [x for x in f.entry.instructions() if x.op == "while"]
    assert [
        x.op for x in loop["body"].instructions() if x.op in ("fusion", "multiply", "cosine")
    ] == ["fusion", "fusion"]
    assert_same_value(m, f)
    assert fusion(f) is f


def test_softmax_over_a_middle_dimension():
    m = programs.softmax((4, 10, 64), 1)
    f = fusion(m)
    assert kernels(f) == ["row f32[4,10,64]"]
    assert_same_value(m, f)


def test_one_long_row_is_split_over_kernels():
    assert len(kernels(fusion(programs.softmax((1, 1 << 20))))) == 3


def test_optimizer_update_is_one_loop_per_parameter():
    m = programs.adam()
    f = fusion(m)
    assert [k.split(" ")[0] for k in kernels(f)] == ["loop"] * 3
    assert_same_value(m, f)


def test_diamond_through_a_step_does_not_cycle():
    x, w = programs.params(("f32", (8, 8)), ("f32", (8, 8)))
    e = b.exponential(x)
    d = b.dot(e, w, (1,), (0,))
    m = programs.module("diamond", [b.add(e, d)], [x, w])
    f = fusion(m)
    assert kernels(f) == ["loop f32[8,8]", "output f32[8,8]"]
    assert_same_value(m, f)


def test_reshape_of_memory_is_a_view():
    (x,) = programs.params(("f32", (6, 4)))
    m = programs.module("view", [b.exponential(b.reshape(x, (24,)))], [x])
    assert kernels(fusion(m)) == ["reshape f32[24]", "loop f32[24]"]


def test_broadcast_for_a_step_is_materialized_once():
    x, w = programs.params(("f32", (8,)), ("f32", (8, 8)))
    wide = b.broadcast(x, (8, 8), (1,))
    one = b.dot(wide, w, (1,), (0,))
    two = b.dot(w, wide, (1,), (0,))
    m = programs.module("wide", [b.add(one, wide), two], [x, w])
    f = fusion(m)
    assert sorted(kernels(f)) == ["dot f32[8,8]", "loop f32[8,8]", "output f32[8,8]"]
    assert_same_value(m, f)


def test_siblings_read_a_shared_array_once():
    (x,) = programs.params(("f32", (64, 64)))
    column = b.reduce(x, programs.zero(), (0,), "add")
    m = programs.module("siblings", [column, b.exponential(x)], [x])
    f = fusion(m)
    assert kernels(f) == ["reduce (f32[64], f32[64,64])"]
    assert_same_value(m, f)


def test_numbers_of_one_number_are_one_kernel():
    step, p = programs.params(("f32", ()), ("f32", (64, 8)))
    count = b.add(step, b.full(1, "f32", ()))
    rate, scale = (
        b.power(b.full(0.9, "f32", ()), count),
        b.sqrt(b.power(b.full(0.5, "f32", ()), count)),
    )
    update = b.add(b.multiply(p, b.broadcast(rate, (64, 8), ())), b.broadcast(scale, (64, 8), ()))
    m = programs.module("counter", [update, count], [step, p])
    f = fusion(m)
    assert sorted(kernels(f)) == ["loop (f32[], f32[], f32[])", "loop f32[64,8]"]
    assert_same_value(m, f)


def test_symbolic_rows():
    n = symbol("s0")
    x = b.parameter(0, b.Shape("f32", (n, 32)))
    m = programs.module("symbolic", [programs.softmax_of(x)], [x], symbols=(("s0", 0, 0),))
    f = fusion(m)
    assert kernels(f) == ["row f32[s0,32]"]
    assert_same_value(m, f, {"s0": 5})


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_keep_their_value(seed):
    m = random_module(seed)
    assert_same_value(m, fusion(m))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_large_programs_have_no_cycles(seed):
    """Merging groups must not close a cycle through groups whose members come earlier in the
    program."""
    m = random_module(seed, 1500)
    f = fusion(m)
    assert any(x.op == "fusion" for x in postorder((f.entry.root,)))


def test_cost_is_about_linear():
    fusion(random_module(2, 100))  # what is loaded once
    few, many = random_module(1, 500), random_module(1, 4000)
    assert calls(lambda: fusion(many)) < 14 * calls(lambda: fusion(few))


def test_moves_read_through_elementwise_values():
    """slice -> reshape -> transpose of a sum is one kernel that reads the sum's operands."""
    x, bias = programs.params(("f32", (4, 6, 24)), ("f32", (24,)))
    y = b.add(x, b.broadcast(bias, (4, 6, 24), (2,)))
    parts = [
        b.transpose(
            b.reshape(b.slice_(y, [0, 0, 8 * i], [4, 6, 8 * i + 8]), (4, 6, 2, 4)),
            (0, 2, 1, 3),
        )
        for i in range(3)
    ]
    m = programs.module("qkv", parts, [x, bias])
    f = fusion(m)
    assert kernels(f) == ["loop f32[4,2,6,4]"] * 3 or kernels(f) == [
        "loop (f32[4,2,6,4], f32[4,2,6,4], f32[4,2,6,4])"
    ]
    assert_same_value(m, f)


def test_picking_few_elements_does_not_materialize_the_whole():
    """The loss reads the log-softmax at the targets only."""
    x, target = programs.params(("f32", (32, 400)), ("s64", (32, 1)))
    top = b.reduce(x, b.constant(float("-inf"), "f32"), (1,), "maximum")
    shifted = b.subtract(x, programs.across(top, (32, 400), (0,)))
    total = b.reduce(b.exponential(shifted), programs.zero(), (1,), "add")
    logp = b.subtract(shifted, programs.across(b.log(total), (32, 400), (0,)))
    picked = b.gather(
        logp,
        target,
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
        index_vector_dim=1,
        slice_sizes=(1, 1),
    )
    m = programs.module(
        "nll",
        [b.reduce(picked, programs.zero(), (0,), "add"), b.exponential(logp)],
        [x, target],
    )
    f = fusion(m)
    assert sum("f32[32,400]" in k for k in kernels(f)) == 1 and "(f32[32,400]" not in " ".join(
        kernels(f)
    ).replace(", f32[32,400])", "")
    assert_same_value(m, f)


def test_what_lies_between_two_picks_is_computed_once():
    """A pick moved above elementwise instructions reads the new form of what another pick was part
    of, not the old form beside it."""
    value, *weights = params = programs.params(("f32", (16, 64)), *[("f32", (64, 1024))] * 4)
    sums = []
    for i, w in enumerate(weights):
        grown = b.tanh(b.dot(value, w, (1,), (0,)))
        sums.append(b.reduce(grown, programs.zero(), (1,), "add"))
        value = b.slice_(grown, (0, 64 * i), (16, 64 * (i + 1)))
    m = programs.module("picks", [value, *sums], params)
    f = fusion(m)
    assert (
        sum(
            x.op == "dot"
            for kernel in postorder((f.entry.root,))
            for x in (postorder((kernel["calls"].root,)) if kernel.op == "fusion" else (kernel,))
        )
        == 4
    )
    assert_same_value(m, f)


def test_sum_of_one_hot_row_is_not_computed():
    g, target = programs.params(("f32", (32,)), ("s64", (32,)))
    hot = b.compare(b.iota("s64", (32, 400), 1), programs.across(target, (32, 400), (0,)), "EQ")
    chosen = b.select(
        hot,
        programs.across(g, (32, 400), (0,)),
        b.broadcast(programs.zero(), (32, 400), ()),
    )
    m = programs.module("hot", [b.reduce(chosen, programs.zero(), (1,), "add")], [g, target])
    f = fusion(m)
    assert kernels(f) == ["loop f32[32]"]
    assert_same_value(m, f)


def test_scalar_conversions_are_part_of_every_kernel():
    x, lr = programs.params(("f32", (64,)), ("f64", ()))
    step = b.convert(lr, "f32")
    m = programs.module("scalars", [b.multiply(x, b.broadcast(step, (64,), ()))], [x, lr])
    assert kernels(fusion(m)) == ["loop f32[64]"]


def test_products_take_in_what_is_computed_from_them():
    """A kernel that reads two products goes to the last one, and may have several results."""
    x, w, bias, v = programs.params(
        ("f32", (64, 32)), ("f32", (32, 48)), ("f32", (48,)), ("f32", (32, 48))
    )
    h = b.add(b.dot(x, w, (1,), (0,)), b.broadcast(bias, (64, 48), (1,)))
    m = programs.module(
        "mlp",
        [b.multiply(h, b.logistic(h)), b.add(b.dot(x, v, (1,), (0,)), b.tanh(h))],
        [x, w, bias, v],
    )
    f = fusion(m)
    assert kernels(f) == ["dot f32[64,48]", "output (f32[64,48], f32[64,48])"]
    assert_same_value(m, f)
    assert fusion(f) is f


def test_a_product_takes_only_what_saves_bytes_from_a_row_kernel():
    x, w, rest = programs.params(("f32", (64, 32)), ("f32", (32, 48)), ("f32", (64, 48)))
    d = b.dot(x, w, (1,), (0,))

    def normalized(s):
        return b.divide(
            s,
            b.broadcast(
                b.reduce(b.multiply(s, s), b.constant(0.0, "f32"), (1,), "add"),
                (64, 48),
                (0,),
            ),
        )

    # The sum is needed in memory anyway: computed with the product, it is written once and the
    # product not at all.
    s = b.add(d, rest)
    m = programs.module("residual", [normalized(s), s], [x, w, rest])
    assert kernels(fusion(m)) == ["output f32[64,48]", "row f32[64,48]"]
    assert_same_value(m, fusion(m))
    # A scale of what only the row kernel reads: nothing to gain.
    m = programs.module("scaled", [normalized(b.multiply(d, b.full_like(d, 0.5)))], [x, w])
    assert kernels(fusion(m)) == ["dot f32[64,48]", "row f32[64,48]"]


def test_a_value_that_another_product_needs_first_stays_outside():
    """tanh(d) + dot(f(d), w): what is added cannot join d's product, which has to be complete
    before the other one."""
    x, w = programs.params(("f32", (48, 48)), ("f32", (48, 48)))
    d = b.dot(x, w, (1,), (0,))
    other = b.dot(b.exponential(d), w, (0,), (0,))
    m = programs.module("two", [b.multiply(b.add(d, other), other)], [x, w])
    assert kernels(fusion(m)) == [
        "output (f32[48,48], f32[48,48])",
        "output f32[48,48]",
    ]
    assert_same_value(m, fusion(m))


def test_an_array_without_its_mean_is_computed_where_it_is_read():
    """Batch norm and its gradient read the product, which the mean needs in memory; the difference,
    squared or scaled, is never written."""
    m = parse_module("""
        add { a = f32[] parameter(0)  b = f32[] parameter(1)  ROOT s = f32[] add(a, b) }
        ENTRY main {
          a = f32[512,48] parameter(0)
          w = f32[48,48] parameter(1)
          g = f32[512,48] parameter(2)
          zero = f32[] constant(0)
          x = f32[512,48] dot(a, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
          mean = f32[48] reduce(x, zero), dimensions={0}, to_apply=add
          means = f32[512,48] broadcast(mean), dimensions={1}
          d = f32[512,48] subtract(x, means)
          square = f32[512,48] multiply(d, d)
          spread = f32[48] reduce(square, zero), dimensions={0}, to_apply=add
          scale = f32[48] rsqrt(spread)
          scales = f32[512,48] broadcast(scale), dimensions={1}
          normal = f32[512,48] multiply(d, scales)
          zeros = f32[512,48] broadcast(zero), dimensions={}
          y = f32[512,48] maximum(normal, zeros)
          both = f32[512,48] multiply(g, normal)
          dw = f32[48] reduce(both, zero), dimensions={0}, to_apply=add
          dws = f32[512,48] broadcast(dw), dimensions={1}
          back = f32[512,48] multiply(normal, dws)
          dx = f32[512,48] subtract(g, back)
          ROOT t = (f32[512,48], f32[512,48]) tuple(y, dx)
        }""")
    f = fusion(m)
    assert_same_value(m, f)
    # the product; y and dx
    assert [k.partition(" ")[2] for k in kernels(f) if "512" in k] == [
        "f32[512,48]",
        "(f32[512,48], f32[512,48])",
    ]


def test_indices_that_a_gather_reads_often_are_in_memory():
    """Nearest neighbours: 8 x 200 elements are read through 200 indices, which take more than an
    operation each."""
    m = parse_module("""HloModule nearest

ENTRY %main (x: f32[8,100]) -> f32[8,200] {
  %x = f32[8,100] parameter(0)
  %i = f32[200] iota(), iota_dimension=0
  %half = f32[] constant(0.5)
  %halves = f32[200] broadcast(%half), dimensions={}
  %scaled = f32[200] multiply(%i, %halves)
  %whole = f32[200] floor(%scaled)
  %at = s32[200] convert(%whole)
  ROOT %y = f32[8,200] gather(%x, %at), offset_dims={0}, collapsed_slice_dims={1}, start_index_map={1}, index_vector_dim=1, slice_sizes={8,1}
}
""")
    f = fusion(m)
    assert kernels(f) == ["loop s32[200]", "loop f32[8,200]"]
    assert_same_value(m, f)


def test_a_concatenation_that_is_read_often_is_in_memory():
    """Frames of a padded signal: each element would choose between the parts again."""
    m = parse_module("""HloModule frames

ENTRY %main (x: f32[8,100], at: s32[200,1]) -> f32[8,200] {
  %x = f32[8,100] parameter(0)
  %at = s32[200,1] parameter(1)
  %border = f32[8,10] slice(%x), slice={[0:8], [90:100]}
  %padded = f32[8,110] concatenate(%border, %x), dimensions={1}
  ROOT %y = f32[8,200] gather(%padded, %at), offset_dims={0}, collapsed_slice_dims={1}, start_index_map={1}, index_vector_dim=1, slice_sizes={8,1}
}
""")
    f = fusion(m)
    assert kernels(f) == ["loop f32[8,110]", "loop f32[8,200]"]
    assert_same_value(m, f)


def test_sums_over_the_neighbours_of_few_columns_are_done_in_two_steps():
    """[6, 32, 8, 3] over the middle: first rows of 96, which fill vectors, then the 32 sums of each
    of the 3 columns."""
    x = b.parameter(0, Shape("f32", (6, 32, 8, 3)))
    m = Module(
        "narrow",
        Computation("main", (x,), b.reduce(b.negate(x), b.constant(0.0, "f32"), (1, 2), "add")),
    )
    f = fusion(m)
    inside = [
        y
        for z in postorder((f.entry.root,))
        if z.op == "fusion"
        for y in z["calls"].instructions()
        if y.op == "reduce"
    ]
    assert [y.shape.dims for y in inside] == [(6, 96), (6, 3)]
    assert_same_value(m, f)


def test_masks_of_labels_are_computed_where_they_are_read():
    """The gradient waits for a sum over all rows, yet the mask is no array in memory."""

    def gradient(x, t):
        counts = b.compare(t, b.full_like(t, -1), "NE")
        scale = b.divide(
            b.constant(1.0, "f32"),
            b.reduce(b.convert(counts, "f32"), b.constant(0.0, "f32"), (0,), "add"),
        )
        label = b.select(counts, t, b.full_like(t, 0))
        chosen = b.compare(
            b.iota("s32", x.shape.dims, 1), b.broadcast(label, x.shape.dims, (0,)), "EQ"
        )
        return b.select(chosen, b.broadcast(scale, x.shape.dims, ()), x)

    x, t = b.parameter(0, Shape("f32", (64, 1000))), b.parameter(1, Shape("s32", (64,)))
    m = Module("labels", Computation("main", (x, t), b.tuple_(gradient(x, t))))
    f = fusion(m)
    assert not any("pred" in k for k in kernels(f)), kernels(f)
    assert_same_value(m, f)


def test_groups_of_channels_are_rows_of_one_kernel():
    """Statistics of groups are sums of the channels' sums; where channels are whole pieces of
    memory, a group is a row."""

    def normalized(x):
        def spread(m):
            per_channel = b.reshape(b.broadcast(m, (4, 8, 2), (0, 1)), (4, 16))
            return b.broadcast(b.opt_barrier(per_channel), x.shape.dims, (0, 1))

        def mean(y):
            channels = b.reshape(b.reduce(y, b.constant(0.0, "f32"), (2, 3), "add"), (4, 8, 2))
            return b.multiply(
                b.reduce(channels, b.constant(0.0, "f32"), (2,), "add"),
                b.full_like(b.parameter(9, Shape("f32", (4, 8))), 1 / 60),
            )

        centred = b.subtract(x, spread(mean(x)))
        return b.multiply(centred, spread(b.rsqrt(mean(b.multiply(centred, centred)))))

    x = b.parameter(0, Shape("f32", (4, 16, 5, 6)))
    m = Module("groups", Computation("main", (x,), normalized(x)))
    f = fusion(m)
    assert kernels(f) == [
        "reshape f32[4,8,60]",
        "row f32[4,16,5,6]",
    ]  # the reshape is a view
    assert_same_value(m, f)


def test_samples_of_rows_are_summed_as_rows():
    """Two taps of channels that lie first: the array is turned once, the taps are read as rows, and
    the sum is turned back."""
    m = parse_module("""HloModule samples

ENTRY %main (x: f32[32,200], i: s32[300], j: s32[300], w: f32[300]) -> f32[32,300] {
  %x = f32[32,200] parameter(0)
  %i = s32[300] parameter(1)
  %j = s32[300] parameter(2)
  %w = f32[300] parameter(3)
  %rows = f32[200,32] transpose(%x), dimensions={1,0}
  %weights = f32[300,32] broadcast(%w), dimensions={0}
  %a = f32[300,32] gather(%rows, %i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,32}
  %b = f32[300,32] gather(%rows, %j), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,32}
  %left = f32[300,32] multiply(%a, %weights)
  %sum = f32[300,32] add(%left, %b)
  ROOT %y = f32[32,300] transpose(%sum), dimensions={1,0}
}
""")
    f = fusion(m)
    assert kernels(f) == ["loop f32[200,32]", "loop f32[300,32]", "loop f32[32,300]"]
    assert_same_value(m, f)


def test_rows_that_are_read_once_are_turned_where_they_are_picked():
    m = parse_module("""HloModule picked

ENTRY %main (x: f32[32,200], i: s32[300]) -> f32[32,300] {
  %x = f32[32,200] parameter(0)
  %i = s32[300] parameter(1)
  %rows = f32[200,32] transpose(%x), dimensions={1,0}
  %a = f32[300,32] gather(%rows, %i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,32}
  ROOT %y = f32[32,300] transpose(%a), dimensions={1,0}
}
""")
    f = fusion(m)
    assert kernels(f) == ["loop f32[32,300]"]
    assert_same_value(m, f)


def test_sums_over_images_do_not_turn_arrays():
    """A gradient with channels last beside an activation with channels first: a loop turns it in
    blocks, the sums per channel read the result."""
    m = parse_module("""HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
ENTRY %e (y: f32[16,64,32,32], g: f32[16,32,32,64]) -> f32[64] {
  %y = f32[16,64,32,32] parameter(0)
  %g = f32[16,32,32,64] parameter(1)
  %t = f32[16,64,32,32] transpose(%g), dimensions={0,3,1,2}
  %p = f32[16,64,32,32] multiply(%y, %t)
  %z = f32[] constant(0)
  ROOT %r = f32[64] reduce(%p, %z), dimensions={0,2,3}, to_apply=%add
}""")
    f = fusion(m)
    assert [k.split(" ")[0] for k in kernels(f)] == ["loop", "reduce"]
