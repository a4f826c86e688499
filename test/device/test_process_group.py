"""One process per device: the same values as virtual devices, and what the others say when a
process dies, hangs or runs something else."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from test.device import ranks
from test.device.test_virtual_devices import KINDS, program, random
from test.hlo import test_collective as texts
from torch_hlo.device import multi_device
from torch_hlo.hlo.sharding import collective
from torch_hlo.hlo.text.parser import parse_module
from torch_hlo.tools.devices import run_on_devices

if not hasattr(os, "fork"):
    pytest.skip("needs fork", allow_module_level=True)


def cases():
    """(module, inputs), each kind of collective on several types, small and large."""
    for dtype, numpy in (("f32", "f"), ("bf16", "f"), ("u16", "u2"), ("f64", "d")):
        for kind in KINDS:
            yield (
                texts.program(
                    f"%p = {dtype}[8,6] parameter(0)",
                    "ROOT %r = " + kind.format(t=dtype),
                    more=texts.ADD.replace("f32", dtype),
                ),
                [random((8, 6), numpy)],
            )
    yield (
        parse_module("""
ENTRY %main {
  %p = f32[10,4] parameter(0), sharding={devices=[4,1]<=[4]}
  %q = f32[4,6] parameter(1), sharding={devices=[1,4]<=[4]}
  ROOT %r = f32[10,6] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""),
        [
            np.arange(40, dtype="f").reshape(10, 4),
            np.arange(24, dtype="f").reshape(4, 6),
        ],
    )
    values = [np.random.default_rng(d).standard_normal(30001).astype("f") for d in range(4)]
    for groups in ("{}", "{{3,0},{1,2}}"):
        yield (
            texts.program(
                "%p = f32[30001] parameter(0)",
                f"ROOT %r = f32[30001] all-reduce(%p), to_apply=%add, replica_groups={groups},"
                f" {texts.FLAT}",
            ),
            [values],
        )
    either = texts.ADD.replace("f32", "pred").replace("add(", "or(")
    yield (
        texts.program(
            "%p = pred[3] parameter(0)",
            "ROOT %r = pred[3] all-reduce(%p), to_apply=%add, channel_id=1",
            more=either,
        ),
        [random((3,), bool)],
    )
    yield (
        texts.program(
            "%p = c64[3] parameter(0)",
            "%d = u32[] partition-id()",
            "%f = f32[] convert(%d)",
            "%c = c64[] convert(%f)",
            "%b = c64[3] broadcast(%c), dimensions={}",
            "%q = c64[3] add(%p, %b)",
            "ROOT %r = c64[12] all-gather(%q), dimensions={0}, channel_id=1,"
            " use_global_device_ids=true",
        ),
        [random((3,), "F")],
    )
    yield (
        texts.program(
            "%p = f32[2] parameter(0)",
            "%s = (f32[2], f32[8]) all-gather-start(%p), dimensions={0}, replica_groups={},"
            f" {texts.FLAT}",
            "%q = f32[2] multiply(%p, %p)",
            "%t = f32[2] all-reduce-start(%q), to_apply=%add, replica_groups={}, channel_id=2,"
            " use_global_device_ids=true",
            "%g = f32[8] all-gather-done(%s)",
            "%a = f32[2] all-reduce-done(%t)",
            "ROOT %r = f32[10] concatenate(%g, %a), dimensions={0}",
        ),
        [random((2,), "f")],
    )
    yield (
        texts.program(
            "%p = f32[3] parameter(0)",
            "%q = s8[5] parameter(1)",
            "%g = (f32[12], s8[20]) all-gather(%p, %q), dimensions={0}, channel_id=1,"
            " use_global_device_ids=true",
            "ROOT %r = s8[20] get-tuple-element(%g), index=1",
        ),
        [random((3,), "f"), random((5,), "i1")],
    )


def compute_all(rank):
    return [
        np.stack(run_on_devices(module, inputs, 4)[0][0]).tobytes() for module, inputs in cases()
    ]


def test_the_same_bits_as_virtual_devices():
    want = compute_all(0)
    for outcome in ranks.run(4, compute_all):
        assert outcome.error == ""
        assert outcome.value == want


STEP = (
    "%p = f32[2] parameter(0)",
    (
        "ROOT %r = f32[2] all-reduce(%p), to_apply=%add, replica_groups={{0,1,2}}, channel_id=1,"
        " use_global_device_ids=true"
    ),
)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def dawdle():
    time.sleep(60)


def in_trouble(rank, trouble):
    """Three steps; before the third, rank 1 is in trouble."""
    _, step = program(texts.program(*STEP))
    for i in range(3):
        if i == 2 and rank == 1:
            trouble()
        value = step([np.float32([rank, i])])
    return value[0][0].tolist()


@pytest.mark.parametrize(
    "trouble, verb",
    [
        (die, "does not respond any more"),
        (stop, "does not respond any more"),
        (dawdle, "did not come"),
    ],
)
def test_a_rank_in_trouble(trouble, verb):
    """Killed, stopped, or busy with something else: all other ranks name the rank, the collective
    and the program in a few seconds (and compile time)."""
    outcomes = ranks.run(3, in_trouble, trouble, without=(1,), COLLECTIVE_TIMEOUT=2.0)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert f"rank 1 {verb}" in error, error
        assert "all-reduce(f32) of sizes [2], the 3. of ranks 0,1,2, in t" in error, error
        assert outcomes[rank].seconds < 30, outcomes[rank]


def different(rank):
    """Rank 2 multiplies by another number."""
    number = "3" if rank == 2 else "2"
    lines = (
        STEP[0],
        f"%c = f32[2] constant({{{number}, 1}})",
        "%m = f32[2] multiply(%p, %c)",
        STEP[1].replace("(%p)", "(%m)"),
    )
    return program(replace(texts.program(*lines), num_partitions=3))[1]([np.float32([1, 2])])[0][
        0
    ].tolist()


def test_different_programs():
    """Found before the first collective, on every rank, with the first line that differs."""
    for outcome in ranks.run(3, different):
        assert outcome.error.startswith(
            "CollectiveError: t: the ranks run different programs. Ranks 0, 1 and 2 differ first in"
            " line"
        ), outcome
        assert (
            "rank 0: %constant" in outcome.error
            and "constant({2, 1})" in outcome.error
            and "constant({3, 1})" in outcome.error
        )


def other_collectives(rank):
    """Programs that may differ, but not in what they exchange."""
    op = "maximum" if rank == 1 else "add"
    return program(texts.program(*STEP, more=texts.ADD.replace("add(", f"{op}(")))[1](
        [np.float32([1, 2])]
    )


def test_different_collectives():
    for outcome in ranks.run(3, other_collectives):
        assert (
            "the ranks do not run the same collectives" in outcome.error
            and "maximum" in outcome.error
        ), outcome


def beside_a_step(rank, what):
    """`what` in the foreground, and a step in the background: each rank begins with another."""
    _, step = program(texts.program(*STEP))
    found = []

    def background():
        with collective.named("a step"):
            found.append(step([np.float32([rank, 1])])[0][0].tolist())

    thread = threading.Thread(target=background)
    if rank == 1:
        thread.start()
        time.sleep(1)
    value = what()
    if rank != 1:
        thread.start()
    thread.join()
    assert found == [[3.0, 3.0]]
    return value


def read_beside_a_step(rank):
    block = np.full(3, rank, np.uint8)
    read = beside_a_step(rank, lambda: multi_device.communicator().gather(block, "a read"))
    return [block.tolist() for block in read]


def test_reads_and_steps_do_not_wait_for_each_other():
    for outcome in ranks.run(3, read_beside_a_step, COLLECTIVE_TIMEOUT=10.0):
        assert outcome.value == [[0] * 3, [1] * 3, [2] * 3], outcome


def of_other_sizes(rank):
    data = bytes(4000 + rank)
    return multi_device.communicator().gather(
        np.frombuffer(data, np.uint8), "a read", f"line {rank}"
    )


def test_ranks_that_exchange_other_sizes_find_out():
    """The transport would end both processes."""
    for outcome in ranks.run(2, of_other_sizes):
        assert (
            "a read (4000 bytes) (line 0)" in outcome.error
            and "a read (4001 bytes) (line 1)" in outcome.error
        ), outcome


def group_beside_a_step(rank):
    """The user makes a group, which is named by how many there are."""

    def total():
        own = dist.new_group([0, 1, 2], use_local_synchronization=True)
        x = torch.ones(())
        dist.all_reduce(x, group=own)
        return x.item()

    return beside_a_step(rank, total)


def test_groups_of_the_user_do_not_interfere():
    for outcome in ranks.run(3, group_beside_a_step, COLLECTIVE_TIMEOUT=10.0):
        assert outcome.value == 3.0, outcome


def test_a_process_ends_while_its_heart_beats():
    script = """
import datetime, importlib, time, torch.distributed as dist
processes = importlib.import_module("torch_hlo.device.process_group")
seconds = datetime.timedelta(seconds=0.5)
processes._BEAT = 0.01
processes._Board._failure = lambda own: own._try(lambda: own.store.wait(["never"], seconds))
dist.init_process_group("gloo", store=dist.TCPStore("localhost", 0, 1, True), rank=0, world_size=1)
processes._Board(0, 1, print)
time.sleep(0.1)
dist.destroy_process_group()
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
