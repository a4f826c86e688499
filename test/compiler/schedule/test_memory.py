"""memory and schedule: programs run on simulated memory give the evaluator's results."""

from __future__ import annotations

import numpy as np
import pytest

from test.compiler import programs
from test.compiler.random_programs import random_module
from torch_hlo.compiler.fusion.fusion import fusion
from torch_hlo.compiler.schedule.memory import assign
from torch_hlo.compiler.schedule.schedule import is_step, schedule
from torch_hlo.hlo.evaluate.evaluate import evaluate, evaluate_instruction
from torch_hlo.hlo.ir import build as b
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.instruction import Computation, Module, outputs, postorder
from torch_hlo.hlo.text.parser import parse_module


def run_in_memory(m: Module, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Execute the steps one by one, reading and writing arrays at their slots only."""
    a = assign(m.entry, schedule(m.entry, m.aliases), m.aliases)
    results = outputs(m)
    memory = {
        "arena": {0: np.full(int(a.arena) + 64, 0xAB, np.uint8)},
        "parameter": {},
        "output": {},
        "constant": {},
    }
    for i, x in enumerate(inputs):
        memory["parameter"][i] = np.frombuffer(
            bytearray(np.ascontiguousarray(x).tobytes()), np.uint8
        )
    for o, x in enumerate(results):
        memory["output"][o] = np.zeros(x.shape.nbytes, np.uint8)

    def data(slot):
        return memory[slot.base][slot.index][slot.offset : slot.offset + slot.nbytes]

    def read(x, slots):
        if isinstance(slots, tuple):
            return tuple(read(e, s) for e, s in zip(x.elements, slots))
        kind = {"pred": np.bool_, "f32": np.float32, "s64": np.int64, "s32": np.int32}[x.dtype]
        return data(slots).view(kind).reshape(x.dims).copy()

    def write(value, slots):
        if isinstance(slots, tuple):
            for v, s in zip(value, slots):
                write(v, s)
        else:
            data(slots)[:] = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)

    for x in postorder((m.entry.root,)):
        if x.op == "constant":
            memory["constant"][a.slots[x].index] = np.frombuffer(x["literal"].data, np.uint8)
    for x in schedule(m.entry, m.aliases):
        write(
            evaluate_instruction(x, *(read(o.shape, a.slots[o]) for o in x.operands)),
            a.slots[x],
        )
    for source, target in a.copies:
        data(target)[:] = data(source)
    where = dict(m.aliases)
    return [
        memory["parameter"][where[o]] if o in where else memory["output"][o]
        for o in range(len(results))
    ]


def check(m: Module, seed: int = 0) -> None:
    inputs = programs.inputs_for(m, seed)
    if m.name == "adam":
        inputs = [np.abs(x) for x in inputs]
    for x, y in zip(evaluate(m, inputs), run_in_memory(m, inputs), strict=True):
        np.testing.assert_allclose(y.view(x.dtype).reshape(x.shape), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("fused", [False, True])
def test_random_programs(seed, fused):
    m = random_module(seed)
    check(fusion(m) if fused else m, seed)


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_with_donation(seed):
    """Outputs alias parameters of their shape, also when the program still reads the old value
    later."""
    m = random_module(seed)
    free = {p.shape: i for i, p in enumerate(m.entry.params)}
    aliases = tuple((o, free.pop(x.shape)) for o, x in enumerate(outputs(m)) if x.shape in free)
    donated = Module(m.name, m.entry, aliases)
    check(donated, seed)
    check(fusion(donated), seed)


def test_adam_updates_in_place():
    m = fusion(programs.adam())
    check(m)
    a = assign(m.entry, schedule(m.entry, m.aliases), m.aliases)
    assert a.copies == () and a.arena == 0
    assert "parameter 1" in str(a)


def test_swap_of_two_parameters():
    x, y = programs.params(("f32", (4,)), ("f32", (4,)))
    m = programs.module("swap", [y, x], [x, y], aliases=((0, 0), (1, 1)))
    check(m)
    a = assign(m.entry, schedule(m.entry, m.aliases), m.aliases)
    assert len(a.copies) == 3


def test_old_value_is_returned_too():
    (x,) = programs.params(("f32", (4,)))
    check(programs.module("old", [b.add(x, x), x], [x], aliases=((0, 0),)))


def test_reader_runs_before_the_overwriting_step():
    x, w = programs.params(("f32", (16, 16)), ("f32", (16, 16)))
    product = b.dot(x, w, (1,), (0,))
    m = fusion(programs.module("late", [b.add(x, w), product], [x, w], aliases=((0, 0),)))
    order = [x.op for x in schedule(m.entry, m.aliases)]
    assert order == ["dot", "fusion"]
    assert assign(m.entry, schedule(m.entry, m.aliases), m.aliases).copies == ()
    check(m)


def test_the_same_array_returned_twice():
    (x,) = programs.params(("f32", (4,)))
    y = b.exponential(x)
    check(programs.module("twice", [y, y, x, b.reshape(y, (2, 2))], [x]))


def test_chain_of_elementwise_steps_uses_one_buffer():
    (x,) = programs.params(("f32", (16, 16)))
    y = x
    for _ in range(6):
        y = b.sort(b.exponential(y), 0, "LT")
    m = fusion(programs.module("chain", [y], [x]))
    a = assign(m.entry, schedule(m.entry), m.aliases)
    assert a.arena <= 2 * 1024


def test_views_take_no_memory():
    (x,) = programs.params(("f32", (4, 6)))
    m = programs.module("views", [b.reshape(b.reshape(x, (24,)), (2, 12))], [x])
    assert not [x for x in postorder((m.entry.root,)) if is_step(x)]
    check(m)


def test_symbolic_sizes_share_places():
    n = symbol("s0")
    x = b.parameter(0, b.Shape("f32", (n, 8)))
    y = x
    for _ in range(4):
        y = b.sort(b.exponential(y), 1, "LT")
    m = fusion(programs.module("symbolic", [y], [x], symbols=(("s0", 0, 0),)))
    a = assign(m.entry, schedule(m.entry), m.aliases)
    assert str(a.arena).count("floordiv") <= 2


def test_every_step_is_scheduled_once_and_after_its_operands():
    m = fusion(random_module(3, 400))
    order = schedule(m.entry)
    at = {x: i for i, x in enumerate(order)}
    assert (
        len(at)
        == len(order)
        == sum(map(is_step, Computation("c", m.entry.params, m.entry.root).instructions()))
    )
    for x in order:
        for o in x.operands:
            while not is_step(o) and o.operands:
                o = o.operands[0]
            assert o not in at or at[o] < at[x]


def test_what_a_loop_only_reads_is_not_copied():
    m = parse_module("""HloModule loop

%body (p: (s32[], f32[64], f32[64], f32[64])) -> (s32[], f32[64], f32[64], f32[64]) {
  %p = (s32[], f32[64], f32[64], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[64] get-tuple-element(%p), index=1
  %w = f32[64] get-tuple-element(%p), index=2
  %v = f32[64] get-tuple-element(%p), index=3
  %y = f32[64] multiply(%x, %w)
  %z = f32[64] add(%y, %v)
  ROOT %t = (s32[], f32[64], f32[64], f32[64]) tuple(%next, %z, %w, %v)
}

%condition (p: (s32[], f32[64], f32[64], f32[64])) -> pred[] {
  %p = (s32[], f32[64], f32[64], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[64], w: f32[64]) -> (f32[64], f32[64]) {
  %x = f32[64] parameter(0)
  %w = f32[64] parameter(1)
  %zero = s32[] constant(0)
  %v = f32[64] negate(%w)
  %start = (s32[], f32[64], f32[64], f32[64]) tuple(%zero, %x, %w, %v)
  %loop = (s32[], f32[64], f32[64], f32[64]) while(%start), condition=%condition, body=%body
  %r = f32[64] get-tuple-element(%loop), index=1
  %same = f32[64] get-tuple-element(%loop), index=2
  %u = f32[64] get-tuple-element(%loop), index=3
  %s = f32[64] add(%same, %u)
  ROOT %t = (f32[64], f32[64]) tuple(%r, %s)
}
""")
    a = assign(m.entry, schedule(m.entry))
    (loop,) = [x for x in m.entry.instructions() if x.op == "while"]
    _, x, w, v = a.slots[loop]
    assert (w.base, w.index) == ("parameter", 1)
    assert v == a.slots[loop.operands[0].operands[3]]
    assert x.base != "parameter"
    inputs = programs.inputs_for(m)
    for got, want in zip(run_in_memory(m, inputs), evaluate(m, inputs)):
        np.testing.assert_allclose(got.view(want.dtype), want, rtol=1e-5)
