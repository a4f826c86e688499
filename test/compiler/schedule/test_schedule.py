"""schedule: legal orders, small peaks, readers of a donated parameter before its overwriting."""

from __future__ import annotations

import pytest

from test.compiler import programs
from test.compiler.random_programs import random_module
from torch_hlo.compiler.fusion.fusion import fusion
from torch_hlo.compiler.schedule.schedule import VIEWS, is_step, schedule
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.instruction import Instruction


def sources(x: Instruction) -> set[Instruction]:
    """Steps whose results `x` reads, through views."""
    found, stack = set(), list(x.operands)
    while stack:
        y = stack.pop()
        if is_step(y):
            found.add(y)
        elif y.op in VIEWS:
            stack.extend(y.operands)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_orders_are_complete_and_legal(seed):
    m = random_module(seed, 80)
    for program in (m, fusion(m)):
        order = schedule(program.entry)
        done: set[Instruction] = set()
        for x in order:
            assert sources(x) <= done and x not in done
            done.add(x)
        assert done == {x for x in program.entry.instructions() if is_step(x)}


def test_wide_values_are_consumed_before_the_next_one_is_made():
    """Each branch makes a large array and keeps a small one: one large array is alive at a time."""
    (x,) = programs.params(("f32", (8, 8)))
    small = []
    for i in range(6):
        large = b.sort(
            b.broadcast(b.add(x, programs.scalar(float(i), x)), (64, 8, 8), (1, 2)),
            0,
            "LT",
        )
        small.append(b.reduce(large, programs.zero(), (0,), "add"))
    m = programs.module("wide", small, [x])
    order = [y.op for y in schedule(m.entry)]
    at = [i for i, op in enumerate(order) if op in ("sort", "reduce")]
    assert [order[i] for i in at] == ["sort", "reduce"] * 6


def test_results_take_no_scratch_memory():
    """A large array is read by the step that updates three parameters. That comes before the next
    large array is made, though its results are larger."""
    dims = 64, 8, 8
    x, *given = programs.params(("f32", (8, 8)), *[("f32", dims)] * 4)
    large = b.sort(b.broadcast(x, dims, (1, 2)), 0, "LT")
    small = b.reduce(large, programs.zero(), (0,), "add")
    update = b.sort((large, *given[:2]), 1, "LT")
    other = b.sort(b.broadcast(b.add(x, small), dims, (1, 2)), 0, "LT")
    results = [b.sort((other, given[3]), 2, "LT"), update]
    parts = [b.get_tuple_element(r, i) for r in results for i in range(len(r.elements))]
    aliases = (0, 4), (1, 3), (2, 1), (3, 2)
    m = programs.module("updates", parts, [x, *given], aliases)
    order = list(schedule(m.entry, m.aliases))
    assert order.index(update) < order.index(other)


def test_donated_parameter_is_read_before_it_is_overwritten():
    x, w = programs.params(("f32", (8, 8)), ("f32", (8, 8)))
    new = b.sort(b.add(x, w), 0, "LT")
    old = b.dot(x, w, (1,), (0,))
    m = programs.module("donated", [new, old], [x, w], aliases=((0, 0),))
    order = [y.op for y in schedule(m.entry, m.aliases)]
    assert order.index("dot") < order.index("sort")


def test_a_wanted_order_that_would_be_a_cycle_is_ignored():
    x, w = programs.params(("f32", (8, 8)), ("f32", (8, 8)))
    new = b.dot(x, w, (1,), (0,))
    m = programs.module("cycle", [new, b.dot(new, x, (1,), (0,))], [x, w], aliases=((0, 0),))
    assert [y.op for y in schedule(m.entry, m.aliases)] == ["dot", "dot"]


def test_independent_collectives_keep_the_order_of_their_channels():
    """Other devices may run a program that was cut elsewhere: what is recorded first meets first,
    also where memory says otherwise."""
    (x,) = programs.params(("f32", (4, 4)))

    def gather(x, channel):
        return b.instr(
            "all-gather",
            (x,),
            channel_id=channel,
            replica_groups=((0, 1),),
            use_global_device_ids=True,
            dimensions=(0,),
        )

    parts = [
        b.reduce(
            gather(b.multiply(x, b.full_like(x, i)), 9 - i),
            b.constant(0.0, "f32"),
            (0, 1),
            "add",
        )
        for i in range(6)
    ]
    order = [
        y["channel_id"]
        for y in schedule(programs.module("m", parts, [x]).entry)
        if y.op == "all-gather"
    ]
    assert order == sorted(order)


def test_channels_numbered_against_the_data_flow_are_only_names():
    (x,) = programs.params(("f32", (4, 4)))
    gather = x
    for channel in (3, 2, 1):
        gather = b.instr(
            "all-reduce",
            (gather,),
            channel_id=channel,
            replica_groups=((0, 1),),
            to_apply=b.binary_computation("add", "f32"),
        )
    assert [y["channel_id"] for y in schedule(programs.module("m", [gather], [x]).entry)] == [
        3,
        2,
        1,
    ]


def test_effects_keep_the_order_of_the_program():
    """Whatever runs them: a loop that is long, a call that frees memory."""

    def act(serial, *operands):
        shape = b.constant(True, "pred").shape
        more = {"custom_call_has_side_effect": True, "serial": serial}
        return b.instr("custom-call", operands, shape, custom_call_target="act", **more)

    def loop(serial, big):
        (state,) = programs.params(("pred", ()))
        (other,) = programs.params(("pred", ()))
        body = b.Computation("body", (state,), act(serial))
        return b.instr(
            "while",
            (act(serial - 1, big),),
            condition=b.Computation("c", (other,), other),
            body=body,
        )

    (x,) = programs.params(("f32", (64, 64)))
    loops = [loop(9 - 2 * i, b.multiply(x, b.full_like(x, i))) for i in range(4)]
    order = [
        y["serial"] if y.op == "custom-call" else y["body"].root["serial"]
        for y in schedule(programs.module("m", loops, [x]).entry)
        if y.op in ("custom-call", "while")
    ]
    assert order == sorted(order)
