"""Compiled programs with collectives on virtual devices: values, concurrency, failures."""

import threading
import time

import numpy as np
import pytest

from test.hlo import test_collective as texts
from torch_hlo import config
from torch_hlo.compiler.codegen.registry import HOST_CALLS
from torch_hlo.compiler.schedule import memory
from torch_hlo.compiler.schedule.schedule import DONES, STARTS, schedule
from torch_hlo.device import multi_device, runtime
from torch_hlo.device.cpu.workers import WORKERS
from torch_hlo.hlo.evaluate.multi_device import evaluate_spmd
from torch_hlo.hlo.ir.instruction import outputs
from torch_hlo.hlo.ir.numeric import decode, encode
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.sharding.collective import CollectiveError
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.tools.devices import evaluate_on_devices, run_on_devices

DEVICES = 4


def agree(module, inputs, devices=DEVICES):
    """Compiled and evaluated results are equal on every device."""
    for (got, dtype), (want, _) in zip(
        run_on_devices(module, inputs, devices),
        evaluate_on_devices(module, inputs, devices),
        strict=True,
    ):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, err_msg=dtype)


def random(shape, dtype, seed=0):
    values = np.random.default_rng(seed).integers(0, 8, (DEVICES, *shape))
    return list(values.astype(dtype))


KINDS = [
    "{t}[8,6] all-reduce(%p), to_apply=%add, replica_groups={{{{0,1}},{{2,3}}}}, " + texts.FLAT,
    "{t}[8,6] all-reduce(%p), to_apply=%add, replica_groups={{}}, " + texts.FLAT,
    "{t}[16,6] all-gather(%p), dimensions={{0}}, replica_groups={{{{0,2}},{{1,3}}}}, " + texts.FLAT,
    "{t}[8,24] all-gather(%p), dimensions={{1}}, replica_groups={{{{3,1,2,0}}}}, " + texts.FLAT,
    "{t}[2,6] reduce-scatter(%p), dimensions={{0}}, to_apply=%add, replica_groups={{}}, "
    + texts.FLAT,
    "{t}[8,3] reduce-scatter(%p), dimensions={{1}}, to_apply=%add, replica_groups=[2,2]<=[4], "
    + texts.FLAT,
    "{t}[8,6] all-to-all(%p), dimensions={{0}}, replica_groups={{}}, channel_id=1",
    "{t}[8,6] all-to-all(%p), dimensions={{1}}, replica_groups=[2,2]<=[2,2]T(1,0), channel_id=1",
    (
        "{t}[8,6] collective-permute(%p), source_target_pairs={{{{0,1}},{{1,2}},{{2,3}}}},"
        " channel_id=1"
    ),
    "{t}[8,6] collective-broadcast(%p), replica_groups={{{{2,0}}}}, channel_id=1",
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.split("(")[0].split()[1])
@pytest.mark.parametrize("dtype, numpy", [("f32", "f"), ("bf16", "f"), ("s8", "i1")])
def test_values(kind, dtype, numpy):
    module = texts.program(
        f"%p = {dtype}[8,6] parameter(0)",
        "ROOT %r = " + kind.format(t=dtype),
        more=texts.ADD.replace("f32", dtype),
    )
    agree(module, [random((8, 6), numpy)])


def test_more_types():
    for dtype, numpy, op in (
        ("pred", bool, "or"),
        ("c64", "F", "add"),
        ("f16", "e", "maximum"),
        ("f64", "d", "multiply"),
        ("u32", "u4", "xor"),
    ):
        more = texts.ADD.replace("f32", dtype).replace("add(", f"{op}(")
        module = texts.program(
            f"%p = {dtype}[5] parameter(0)",
            f"ROOT %r = {dtype}[5] all-reduce(%p), to_apply=%add, channel_id=1",
            more=more,
        )
        agree(module, [random((5,), numpy)])


def test_between_kernels_and_in_loops():
    """Kernels before and after, the device's number, a loop whose condition depends on what the
    devices exchange."""
    agree(texts.loop(), [[np.int32(0)] * 2, texts.f32([1], [2])], 2)
    module = texts.program(
        "%p = f32[300,300] parameter(0)",
        "%d = u32[] partition-id()",
        "%c = f32[] convert(%d)",
        "%b = f32[300,300] broadcast(%c), dimensions={}",
        "%s = f32[300,300] add(%p, %b)",
        "%m = f32[300,300] dot(%s, %s), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        f"%r = f32[300,300] all-reduce(%m), to_apply=%add, replica_groups={{}}, {texts.FLAT}",
        "ROOT %e = f32[300,300] multiply(%r, %b)",
    )
    agree(module, [random((300, 300), "f")])


def test_asynchronous_pairs():
    module = texts.program(
        "%p = f32[2] parameter(0)",
        "%s = (f32[2], f32[8]) all-gather-start(%p), dimensions={0}, replica_groups={},"
        f" {texts.FLAT}",
        "%q = f32[2] multiply(%p, %p)",
        "%t = f32[2] all-reduce-start(%q), to_apply=%add, replica_groups={}, channel_id=2,"
        " use_global_device_ids=true",
        "%g = f32[8] all-gather-done(%s)",
        "%a = f32[2] all-reduce-done(%t)",
        "ROOT %r = f32[10] concatenate(%g, %a), dimensions={0}",
    )
    agree(module, [random((2,), "f")])
    steps = [x.op for x in schedule(module.entry)]
    assert steps.index("multiply") > steps.index("all-gather-start") and steps.index(
        "all-gather-done"
    ) > steps.index("all-reduce-start")


def test_operands_live_until_done():
    """What is computed between start and done does not go to the memory of a dead operand of the
    start, nor to that of its result."""
    lines = ["%p = f32[64] parameter(0)", "%x0 = f32[64] negate(%p)"]
    for i in range(5):
        lines += [
            (
                f"%s{i} = f32[64] all-reduce-start(%x{i}), to_apply=%add, replica_groups={{}},"
                f" channel_id={i + 1}, use_global_device_ids=true"
            ),
            f"%a{i} = f32[64] sine(%p)",
            f"%b{i} = f32[64] sort(%a{i}), dimensions={{0}}, to_apply=%less",
            f"%c{i} = f32[64] cosine(%b{i})",
            f"%d{i} = f32[64] all-reduce-done(%s{i})",
            f"%x{i + 1} = f32[64] multiply(%d{i}, %c{i})",
        ]
    less = texts.ADD + texts.ADD.replace("%add", "%less").replace(
        "ROOT %z = f32[] add(%x, %y)", "ROOT %z = pred[] compare(%x, %y), direction=LT"
    )
    module = texts.program(*lines, "ROOT %r = f32[64] negate(%x5)", more=less)
    order = schedule(module.entry)
    slots = memory.assign(module.entry, order).slots
    for t, x in enumerate(order):
        if x.op in STARTS:
            end = next(i for i, y in enumerate(order) if y.op in DONES and y.operands == (x,))
            assert not {slots[x], slots[x.operands[0]]} & {slots[y] for y in order[t + 1 : end]}
    agree(
        module,
        [[np.random.default_rng(d).standard_normal(64).astype("f") / 8 for d in range(DEVICES)]],
    )


def program(module):
    """(compiled program, run on the given inputs of each device)."""
    made = runtime.compile_program(module)

    def run(*rows):
        types = [x.shape for x in outputs(module)]
        ins = [
            [
                runtime.from_bytes(p.shape, encode(np.asarray(v), p.shape.dtype))
                for p, v in zip(module.entry.params, row, strict=True)
            ]
            for row in rows
        ]
        shared = dict(made.aliases)
        outs = [
            [row[shared[i]] if i in shared else runtime.allocate(t) for i, t in enumerate(types)]
            for row in ins
        ]
        multi_device.run_devices(made, ins, outs)
        return [
            [decode(o.bytes.tobytes(), o.shape.dtype, o.shape.dims) for o in row] for row in outs
        ]

    return made, run


def test_the_pool_is_shared():
    """Eight devices on the threads of one, many times: no deadlock, values stay right, and
    afterwards the threads are one program's again."""
    lines = ["%p = f32[256,256] parameter(0)"]
    for i in range(6):
        lines.append(
            f"%d{i} = f32[256,256] dot(%{'p' if not i else f'r{i - 1}'}, %p),"
            " lhs_contracting_dims={1}, rhs_contracting_dims={0}"
        )
        lines.append(
            f"%r{i} = f32[256,256] all-reduce(%d{i}), to_apply=%add,"
            f" replica_groups={{{{0,{i % 7 + 1}}},{{{','.join(str(d) for d in range(1, 8) if d != i % 7 + 1)}}}}},"
            f" channel_id={i + 1}, use_global_device_ids=true"
        )
    module = texts.program(*lines, "ROOT %r = f32[256,256] negate(%r5)")
    values = [
        [np.random.default_rng(d).standard_normal((256, 256)).astype("f") / 32] for d in range(8)
    ]
    want = [row[0] for row in evaluate_spmd(module, values)]
    before = WORKERS.threads()
    _, run = program(module)
    for _ in range(20):
        for x, y in zip(run(*values), want, strict=True):
            np.testing.assert_allclose(x[0], y, rtol=1e-3, atol=1e-3)
    assert WORKERS.threads() == before


def test_sums_do_not_depend_on_who_comes_last():
    module = texts.program(
        "%p = f32[100000] parameter(0)",
        "ROOT %r = f32[100000] all-reduce(%p), to_apply=%add, channel_id=1",
    )
    values = [
        [np.random.default_rng(d).standard_normal(100000).astype("f")] for d in range(DEVICES)
    ]
    _, run = program(module)
    first = run(*values)
    for _ in range(5):
        for row, want in zip(run(*values), first, strict=True):
            assert row[0].tobytes() == want[0].tobytes() == first[0][0].tobytes()


@pytest.fixture
def trouble():
    """A custom call `trouble(x)` that fails or sleeps on the device whose x is 1 or 2."""

    def call(outputs, inputs):
        if inputs[0][0] == 1:
            raise ArithmeticError("trouble")
        if inputs[0][0] == 2:
            time.sleep(3)
        outputs[0][...] = inputs[0]

    HOST_CALLS["trouble"] = call
    yield texts.program(
        "%p = f32[2] parameter(0)",
        '%t = f32[2] custom-call(%p), custom_call_target="trouble"',
        "ROOT %r = f32[2] all-reduce(%t), to_apply=%add, channel_id=1",
    )
    del HOST_CALLS["trouble"]


def test_a_device_that_fails(trouble):
    _, run = program(trouble)
    assert run(*[[np.zeros(2, "f")]] * 3)[2][0].tolist() == [0, 0]
    with pytest.raises(ArithmeticError, match="trouble") as caught:
        run([np.zeros(2, "f")], [np.ones(2, "f")], [np.zeros(2, "f")])
    assert "on device 1 of 3, in t" in caught.value.__notes__
    assert run(*[[np.zeros(2, "f")]] * 3)[2][0].tolist() == [0, 0]


def test_a_device_that_fails_leaves_loops():
    """Device 0 waits for the others, which have finished; its condition would stay true for
    ever."""
    more = (
        texts.ADD
        + """
%body { %s = f32[1] parameter(0)
 ROOT %r = f32[1] all-reduce(%s), to_apply=%add, replica_groups={}, channel_id=1, use_global_device_ids=true }
%condition { %s = f32[1] parameter(0)
 %v = f32[] reshape(%s)
 %d = u32[] partition-id()
 %f = f32[] convert(%d)
 %n = f32[] constant(5)
 %m = f32[] multiply(%f, %n)
 ROOT %c = pred[] compare(%v, %m), direction=GE }
"""
    )
    module = texts.program(
        "%p = f32[1] parameter(0)",
        "ROOT %w = f32[1] while(%p), condition=%condition, body=%body",
        more=more,
    )
    with pytest.raises(CollectiveError, match="devices 1, 2: finished"):
        program(module)[1](*[[np.float32([1])]] * 3)


@pytest.mark.parametrize("before", [True, False])
def test_donated_memory_survives_a_failure(trouble, before):
    """A parameter updated in place has its old value when a collective fails, whether the update
    runs before or after it."""
    add = "%u = f32[2] add(%p, %p)" if before else "%u = f32[2] add(%p, %r)"
    text = f"""HloModule t, input_output_alias={{ {{0}}: (0, {{}}, may-alias) }}
{texts.ADD}
ENTRY %main {{
  %p = f32[2] parameter(0)
  %q = f32[2] parameter(1)
  %x = f32[2] custom-call(%q), custom_call_target="trouble"
  %r = f32[2] all-reduce(%x), to_apply=%add, channel_id=1
  {add}
  ROOT %t = (f32[2], f32[2]) tuple(%u, %r)
}}"""
    made = runtime.compile_program(parse_module(text))
    assert made.aliases == ((0, 0),)
    for q, want in ((1.0, 3.0), (0.0, 6.0 if before else 3.0)):
        ins = [
            [
                runtime.from_bytes(Shape("f32", (2,)), np.full(2, v, "f").view(np.uint8))
                for v in (3.0, q if d == 1 else 0.0)
            ]
            for d in range(2)
        ]
        outs = [[row[0], runtime.allocate(Shape("f32", (2,)))] for row in ins]
        if q == 1:
            with pytest.raises(ArithmeticError):
                multi_device.run_devices(made, ins, outs)
        else:
            multi_device.run_devices(made, ins, outs)
        assert [row[0].bytes.view("f").tolist() for row in ins] == [[want, want]] * 2


def test_updates_after_the_last_collective_need_no_copy():
    text = f"""HloModule t, input_output_alias={{ {{}}: (0, {{}}, may-alias) }}
{texts.ADD}
ENTRY %main {{
  %p = f32[2] parameter(0)
  %r = f32[2] all-reduce(%p), to_apply=%add, channel_id=1
  ROOT %u = f32[2] add(%p, %r)
}}"""
    assert runtime.compile_program(parse_module(text)).executable.exposed == ()


def test_a_device_that_hangs(trouble):
    start = time.monotonic()
    with (
        config.override(COLLECTIVE_TIMEOUT=0.3),
        pytest.raises(
            CollectiveError,
            match=r"t: device 2 did not come to all-reduce.* within 0.3 s",
        ),
    ):
        program(trouble)[1](*[[np.float32([v, v])] for v in (0, 0, 2)])
    assert time.monotonic() - start < 9
    while any(t.name == "torch_hlo device" and not t.daemon for t in threading.enumerate()):
        time.sleep(0.1)


def test_one_device_is_told_what_to_do():
    module = texts.program(
        "%p = f32[2] parameter(0)",
        "ROOT %r = f32[2] all-reduce(%p), to_apply=%add, replica_groups={{0,1}}, channel_id=1",
    )
    with pytest.raises(CollectiveError, match=r"run_text\(…, devices=N\)"):
        program(module)[1]([np.zeros(2, "f")])
