"""Programs on several devices in the evaluator: the meaning of collectives, and devices that do not
meet."""

import threading

import numpy as np
import pytest

from torch_hlo.hlo.evaluate.communication import arrangement, collectives, devices_of
from torch_hlo.hlo.evaluate.evaluate import EvaluateError, evaluate
from torch_hlo.hlo.evaluate.multi_device import evaluate_spmd
from torch_hlo.hlo.sharding.collective import Collective, CollectiveError
from torch_hlo.hlo.text.parser import parse_module

ADD = (
    "%add {\n %x = f32[] parameter(0)\n %y = f32[] parameter(1)\n ROOT %z = f32[] add(%x, %y)\n}\n"
)
FLAT = "channel_id=1, use_global_device_ids=true"


def program(*lines: str, more: str = ADD):
    return parse_module("HloModule t\n" + more + "ENTRY %main {\n" + "\n".join(lines) + "\n}\n")


def run(module, *inputs):
    """First output of every device; input k of device d is `inputs[k][d]`."""
    return [outs[0] for outs in evaluate_spmd(module, list(zip(*inputs, strict=True)))]


def f32(*rows):
    return [np.float32(r) for r in rows]


def one(line: str, *inputs, operands="%p", shape="f32[2]", more=ADD):
    """The collective `line` on one parameter."""
    return [
        r.tolist()
        for r in run(
            program(
                f"%p = {shape} parameter(0)",
                f"ROOT %r = {line.replace('(%p)', '(' + operands + ')')}",
                more=more,
            ),
            *inputs,
        )
    ]


ROWS = f32([1, 2], [3, 4], [5, 6], [7, 8])


@pytest.mark.parametrize(
    "line, want",
    [
        (
            f"f32[2] all-reduce(%p), to_apply=%add, replica_groups={{{{0,1}},{{2,3}}}}, {FLAT}",
            [[4, 6], [4, 6], [12, 14], [12, 14]],
        ),
        (
            f"f32[2] all-reduce(%p), to_apply=%add, replica_groups=[2,2]<=[2,2]T(1,0), {FLAT}",
            [[6, 8], [10, 12], [6, 8], [10, 12]],
        ),
        (
            f"f32[2] all-reduce(%p), to_apply=%add, replica_groups={{}}, {FLAT}",
            [[16, 20]] * 4,
        ),
        (
            "f32[2] all-reduce(%p), to_apply=%add, replica_groups={{0,1},{2,3}}",
            [[4, 6], [4, 6], [12, 14], [12, 14]],
        ),
        (
            f"f32[4] all-gather(%p), dimensions={{0}}, replica_groups={{{{1,0}},{{2,3}}}}, {FLAT}",
            [[3, 4, 1, 2]] * 2 + [[5, 6, 7, 8]] * 2,
        ),
        (
            (
                "f32[1] reduce-scatter(%p), dimensions={0}, to_apply=%add,"
                f" replica_groups={{{{0,2}},{{1,3}}}}, {FLAT}"
            ),
            [[6], [10], [8], [12]],
        ),
        (
            "f32[2] all-to-all(%p), dimensions={0}, replica_groups={{0,1},{2,3}}, channel_id=1",
            [[1, 3], [2, 4], [5, 7], [6, 8]],
        ),
        (
            (
                "f32[2] collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}},"
                " channel_id=1"
            ),
            [[7, 8], [1, 2], [3, 4], [5, 6]],
        ),
        (
            "f32[2] collective-permute(%p), source_target_pairs={{0,1},{2,2}}, channel_id=1",
            [[0, 0], [1, 2], [5, 6], [0, 0]],
        ),
        (
            "f32[2] collective-broadcast(%p), replica_groups={{2,1,0}}, channel_id=1",
            [[5, 6]] * 3 + [[0, 0]],
        ),
    ],
)
def test_meaning(line, want):
    assert one(line, ROWS) == want


def test_tuples():
    gather = program(
        "%p = f32[1] parameter(0)",
        "%q = s8[1] parameter(1)",
        "%g = (f32[2], s8[2]) all-gather(%p, %q), dimensions={0}, replica_groups={{0,1}},"
        " channel_id=1, use_global_device_ids=true",
        "ROOT %r = s8[2] get-tuple-element(%g), index=1",
    )
    assert [r.tolist() for r in run(gather, f32([1], [2]), [np.int8([3]), np.int8([4])])] == [
        [3, 4]
    ] * 2
    exchange = program(
        "%p = f32[1] parameter(0)",
        "%q = f32[1] parameter(1)",
        "%t = (f32[1], f32[1]) all-to-all(%p, %q), replica_groups={{0,1}}, channel_id=1",
        "%a = f32[1] get-tuple-element(%t), index=0",
        "%b = f32[1] get-tuple-element(%t), index=1",
        "ROOT %r = f32[2] concatenate(%a, %b), dimensions={0}",
    )
    assert [r.tolist() for r in run(exchange, f32([1], [2]), f32([3], [4]))] == [
        [1, 2],
        [3, 4],
    ]


def test_reductions():
    """Any computation; narrow floats are summed in f32 and rounded once."""
    last = (
        "%f {\n %x = f32[] parameter(0)\n %y = f32[] parameter(1)\n %m = f32[] multiply(%x, %y)\n"
        " ROOT %z = f32[] add(%m, %y)\n}\n"
    )
    got = one(
        "f32[2] all-reduce(%p), to_apply=%f, replica_groups={{0,1,2,3}}",
        ROWS,
        more=last,
    )
    assert got == [[((1 * 3 + 3) * 5 + 5) * 7 + 7, ((2 * 4 + 4) * 6 + 6) * 8 + 8]] * 4
    bf16 = ADD.replace("f32", "bf16")
    got = one(
        "bf16[1] all-reduce(%p), to_apply=%add, replica_groups={}",
        f32([256], [1], [1], [1]),
        shape="bf16[1]",
        more=bf16,
    )
    assert got == [[260]] * 4  # in bf16, 256 + 1 is 256
    either = ADD.replace("f32", "pred").replace("add(", "or(")
    got = one(
        "pred[2] all-reduce(%p), to_apply=%add",
        [np.array([True, False]), np.array([False, False])],
        shape="pred[2]",
        more=either,
    )
    assert got == [[True, False]] * 2


def test_ragged_all_to_all():
    """Device i sends counts[i][j] rows from starts[i][j] on to row targets[i][j] of device j."""
    module = program(
        "%rows = f32[4] parameter(0)",
        "%out = f32[4] parameter(1)",
        *(
            f"%{name} = s32[2] parameter({i})"
            for i, name in enumerate(("start", "count", "target", "received"), 2)
        ),
        "ROOT %r = f32[4] ragged-all-to-all(%rows, %out, %start, %count, %target, %received),"
        " replica_groups={{0,1}}",
    )
    got = run(
        module,
        f32([1, 2, 3, 4], [5, 6, 7, 8]),
        f32([0] * 4, [9] * 4),
        [np.int32([0, 1]), np.int32([0, 3])],
        [np.int32([1, 3]), np.int32([3, 1])],
        [np.int32([0, 0]), np.int32([1, 3])],
        [np.int32([1, 3]), np.int32([3, 1])],
    )
    assert [r.tolist() for r in got] == [[1, 5, 6, 7], [2, 3, 4, 8]]


def test_ids_without_a_channel_are_replicas():
    lines = (
        "%p = f32[2] parameter(0)",
        "ROOT %r = f32[2] all-reduce(%p), to_apply=%add, replica_groups={{0,1}}",
    )
    assert arrangement(program(*lines), 4) == (4, 1)
    c = Collective.of(program(*lines).entry.root)
    assert c.ids == "replica" and c.groups(2, 3) == ((0, 3), (1, 4), (2, 5))
    both = Collective.of(program(lines[0], lines[1] + ", channel_id=3").entry.root)
    assert both.groups(2, 3) == ((0, 1, 2, 3, 4, 5),)
    permute = Collective.of(
        program(
            lines[0],
            "ROOT %r = f32[2] collective-permute(%p), source_target_pairs={{0,2}}, channel_id=3",
        ).entry.root
    )
    assert permute.groups(2, 3) == ((0, 2), (3, 5)) and permute.pairs(2, 3) == (
        (0, 2),
        (3, 5),
    )
    assert Collective.from_json(permute.to_json()) == permute


def test_device_ids():
    module = program(
        "%p = u32[] partition-id()",
        "%q = u32[] replica-id()",
        "ROOT %t = (u32[], u32[]) tuple(%p, %q)",
    )
    assert [[int(v) for v in outs] for outs in evaluate_spmd(module, [[]] * 3)] == [
        [0, 0],
        [1, 0],
        [2, 0],
    ]
    assert [int(v) for v in evaluate(module, [])] == [0, 0]


def test_started_and_done():
    module = program(
        "%p = f32[2] parameter(0)",
        "%s = (f32[2], f32[4]) all-gather-start(%p), dimensions={0}, replica_groups={{0,1}},"
        f" {FLAT}",
        "%g = f32[4] all-gather-done(%s)",
        f"%t = f32[4] all-reduce-start(%g), to_apply=%add, replica_groups={{{{0,1}}}}, {FLAT}",
        "%u = f32[4] all-reduce-done(%t)",
        "%v = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%u),"
        " source_target_pairs={{0,1}}, channel_id=3",
        "ROOT %w = f32[4] collective-permute-done(%v)",
    )
    assert [r.tolist() for r in run(module, f32([1, 2], [3, 4]))] == [
        [0] * 4,
        [2, 4, 6, 8],
    ]


LOOP = (
    ADD
    + """
%body {
  %s = (s32[], f32[1]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[1] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %w = f32[1] all-reduce(%v), to_apply=%add, replica_groups={{0,1}}, channel_id=1,
      use_global_device_ids=true
  ROOT %t = (s32[], f32[1]) tuple(%j, %w)
}
%condition {
  %s = (s32[], f32[1]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(3)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}
"""
)


def loop():
    return program(
        "%i = s32[] parameter(0)",
        "%v = f32[1] parameter(1)",
        "%t = (s32[], f32[1]) tuple(%i, %v)",
        "%w = (s32[], f32[1]) while(%t), condition=%condition, body=%body",
        "ROOT %r = f32[1] get-tuple-element(%w), index=1",
        more=LOOP,
    )


def test_in_loops():
    assert [r.tolist() for r in run(loop(), [np.int32(0)] * 2, f32([1], [2]))] == [
        [12],
        [12],
    ]
    assert [x.op for x in collectives(loop().entry)] == ["all-reduce"]
    assert devices_of(loop()) == 2


def test_devices_that_do_not_meet():
    """One device goes round the loop less often: an error that says who waits where, and nobody
    hangs."""
    with pytest.raises(
        CollectiveError,
        match=(
            r"device 0: in all-reduce\(f32\) by add over \{0,1\}, channel 1 of sizes \[1\]; device"
            r" 1: finished"
        ),
    ):
        run(loop(), [np.int32(0), np.int32(1)], f32([1], [2]))
    branches = (
        ADD
        + """
%t { %p = f32[2] parameter(0)
 ROOT %r = f32[2] all-reduce(%p), to_apply=%add, replica_groups={{0,1}} }
%f { %p = f32[2] parameter(0)
 %g = f32[4] all-gather(%p), dimensions={0}, replica_groups={{0,1}}
 ROOT %r = f32[2] slice(%g), slice={[0:2]} }
"""
    )
    module = program(
        "%c = pred[] parameter(0)",
        "%p = f32[2] parameter(1)",
        "ROOT %r = f32[2] conditional(%c, %p, %p), true_computation=%t, false_computation=%f",
        more=branches,
    )
    assert [r.tolist() for r in run(module, [np.bool_(True)] * 2, ROWS[:2])] == [[4, 6]] * 2
    with pytest.raises(CollectiveError, match=r"device 0: in all-reduce.*device 1: in all-gather"):
        run(module, [np.bool_(True), np.bool_(False)], ROWS[:2])
    assert threading.active_count() < 20


def test_a_device_that_fails_releases_the_others():
    wrong = f32([1, 2]) + [np.float32([1, 2, 3])]
    with pytest.raises(EvaluateError, match="not 3") as caught:
        one("f32[2] all-reduce(%p), to_apply=%add", wrong)
    assert "on device 1 of 2" in str(caught.value.__notes__)


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "f32[2] all-reduce(%p), to_apply=%add, replica_groups={{0,5}}",
            "no such replica among 4 replicas",
        ),
        (
            "f32[2] all-reduce(%p), to_apply=%add, replica_groups={{0,1},{1,2}}",
            "in two groups",
        ),
        (
            "f32[2] all-reduce(%p), to_apply=%add, replica_groups={{0,1}}",
            "device [23], which is in none of its groups",
        ),
        (
            "f32[4] all-gather(%p), dimensions={0}, replica_groups={}",
            "does not fit a group of 4",
        ),
    ],
)
def test_wrong_groups(line, message):
    with pytest.raises((CollectiveError, EvaluateError), match=message):
        one(line, ROWS)


def test_one_device_is_not_enough():
    module = program(
        "%p = f32[2] parameter(0)",
        "ROOT %r = f32[2] all-reduce(%p), to_apply=%add, replica_groups={{0,1}}",
    )
    with pytest.raises(CollectiveError, match="needs more than one device"):
        evaluate(module, [np.zeros(2, "f")])
