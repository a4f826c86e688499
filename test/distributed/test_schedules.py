"""Ranks that differ in all that a program's text does not say, a few seconds of it: the long
version is test/sweeps/schedules.py."""

from __future__ import annotations

import copy
import gc
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_hlo
from test.device import ranks
from test.sweeps import schedules
from torch_hlo.distributed import Mesh, mark_sharding
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run import program_cache, spmd
from torch_hlo.lowering.core.registry import LoweringError


@pytest.mark.parametrize("world, seeds", [(2, range(2)), (3, range(3, 4))])
def test_schedules(world, seeds):
    assert schedules.failures(world, list(seeds), limit=120.0) == []


class Program:
    """A sharded tensor on two ranks."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.mesh = Mesh((2,), ("x",))
        self.x = mark_sharding(torch.arange(8.0).to("hlo"), self.mesh, ("x",))
        torch_hlo.mark_step()


def lost_by_one(rank):
    """Rank 1 loses a result that rank 0 keeps, and still has what rank 0 overwrites."""
    p = Program()
    ring = schedules.Ring(p.x * 3)
    if rank == 1:
        ring = None
        gc.collect()
    old = copy.deepcopy(p.x) if rank == 1 else None
    p.x.add_((p.x + 1).sum())
    torch_hlo.mark_step()
    found = p.x.tolist()
    block = old is not None and old._storage.value.data.on(0).bytes.view(np.float32).tolist()
    return found, ring and ring.value.shape[0], block


def test_what_is_alive_may_differ():
    first, second = ranks.run(2, lost_by_one, COLLECTIVE_TIMEOUT=20.0)
    want = [i + 36.0 for i in range(8)]
    assert first.value == (want, 8, False), first
    assert second.value == (want, None, [4.0, 5.0, 6.0, 7.0]), second


def forgotten_by_one(rank):
    """The program decided itself where its result lives, so it serves the second step; rank 1 has
    to compile that one."""
    p = Program()
    y = p.x.reshape(2, 4) @ torch.ones(4, 2).to("hlo")
    torch_hlo.mark_step()
    for _ in range(3):
        if rank == 1:
            session.engine().clear_cache()
        y.add_(p.x.reshape(2, 4) @ torch.ones(4, 2).to("hlo"))
        torch_hlo.mark_step()
    return y.tolist()


def test_what_is_compiled_may_differ():
    for outcome in ranks.run(2, forgotten_by_one, COLLECTIVE_TIMEOUT=20.0):
        assert outcome.value == [[24.0, 24.0], [88.0, 88.0]], outcome


def own_values(rank):
    """Rank 1 computes and reads values of its own while a step of the mesh is pending, which uses
    one of them."""
    p = Program()
    own = torch.ones(8).to("hlo") * 2
    y = p.x * own
    if rank == 1:
        assert own.sum().item() == 16 and (own.flip(0) + rank).tolist() == [3.0] * 8
        with torch.no_grad():
            for _ in range(30):  # more than MAX_NODES
                own = own + 1
    z = y + p.x.view(8)
    torch_hlo.mark_step()
    return z.tolist()


def test_own_values_are_no_business_of_others():
    for outcome in ranks.run(2, own_values, COLLECTIVE_TIMEOUT=20.0, MAX_NODES=20):
        assert outcome.value == [3.0 * i for i in range(8)], outcome


def collective_behind_a_read(rank):
    """Rank 1 has asked for a sum of all ranks, and may be unable to go on before it comes."""
    p = Program()
    y = p.x * 2
    torch_hlo.mark_step()
    own = torch.ones(2).to("hlo") * rank
    dist.all_reduce(own)
    if rank == 1:
        for i in range(4):  # more steps than may be in flight
            own = own + i
            session.engine().make_room()
    return y.tolist(), own.tolist()


def test_a_read_does_not_hold_up_a_collective():
    first, second = ranks.run(2, collective_behind_a_read, COLLECTIVE_TIMEOUT=20.0)
    want = [2.0 * i for i in range(8)]
    assert first.value == (want, [1.0, 1.0]) and second.value == (want, [7.0, 7.0]), (first, second)


def broken(rank):
    """An operation on the mesh cannot be lowered. Both ranks read other values all the same."""
    p = Program()
    bad, good = p.x.exp(), p.x * 2
    original = spmd.lower

    def lower(nodes, *args, **kwargs):
        for node in nodes:
            if node.target is torch.ops.aten.exp.default:
                error = LoweringError("no exp today")
                error.node = node
                raise error
        return original(nodes, *args, **kwargs)

    with mock.patch.object(spmd, "lower", lower):
        with pytest.warns(RuntimeWarning, match="no exp today"):
            assert good.tolist() == [2.0 * i for i in range(8)]
        total = (good + 1).sum()
        torch_hlo.mark_step()
        if rank == 1:  # it has been computed, and all have it
            assert total.item() == 64
        with pytest.raises(LoweringError, match="no exp today"):
            bad.tolist()
    values = bad.cpu()[:2].tolist()
    torch_hlo.mark_step()
    return values, session.current().journal.pending()


def test_an_operation_that_cannot_be_lowered():
    for outcome in ranks.run(2, broken, COLLECTIVE_TIMEOUT=20.0):
        assert outcome.value == (pytest.approx([1.0, math.e]), 0), outcome


def in_part(rank):
    """On rank 1 only a part of the graph can be run at first: no collective runs twice, or before
    an earlier one."""
    torch.set_num_threads(1)
    first, second = torch.ones(2).to("hlo") * rank, torch.ones(3).to("hlo") + rank
    dist.all_reduce(first)
    dist.all_reduce(second)
    twice = second * 2
    bad = first.exp()
    original = program_cache.lower

    def lower(nodes, *args, **kwargs):
        if any(node.target is torch.ops.aten.exp.default for node in nodes):
            raise LoweringError("no exp today")
        return original(nodes, *args, **kwargs)

    if rank == 1:
        with mock.patch.object(program_cache, "lower", lower), pytest.warns(RuntimeWarning):
            assert twice.tolist() == [6.0] * 3
    return bad.log().tolist(), (second + first.sum()).tolist(), twice.tolist()


def test_collectives_run_once_and_in_order():
    for outcome in ranks.run(2, in_part, COLLECTIVE_TIMEOUT=20.0):
        assert outcome.value == (pytest.approx([1.0, 1.0]), [5.0] * 3, [6.0] * 3), outcome


def expecting(rank):
    """A check of a value on the mesh, which rank 1 is late to compute."""
    p = Program()
    torch._assert_async((p.x > 0).all(), "not positive")
    torch_hlo.mark_step()
    if rank == 1:
        torch_hlo.sync()
    steps = 0
    try:
        for _ in range(4):
            p.x.add_(1)
            torch_hlo.mark_step()
            steps += 1
    except RuntimeError as error:
        assert "not positive" in str(error)
    return steps


def test_checks_are_judged_at_the_same_step():
    for outcome in ranks.run(2, expecting, COLLECTIVE_TIMEOUT=20.0):
        assert outcome.value == 0, outcome


def disagreeing(rank):
    """The ranks' programs differ on the mesh."""
    p = Program()
    y = p.x * 2 if rank == 0 else p.x + 2
    return y.sum().item()


def numbering(rank):
    p = Program()
    return (p.x * (rank + 0.5)).sum().item()


def reading_alone(rank):
    p = Program()
    return p.x.tolist() if rank == 0 else (p.x + 1).sum().item()


@pytest.mark.parametrize(
    "program, texts",
    [
        (disagreeing, ["recorded other operations", "rank 0: aten.mul", "rank 1: aten.add"]),
        (numbering, ["compute with other numbers", "rank 0: 0.5", "rank 1: 1.5"]),
        (reading_alone, ["reading a tensor f32[8]", "the comparison of steps"]),
    ],
)
def test_ranks_whose_programs_differ_are_told_where(program, texts):
    for outcome in ranks.run(2, program, COLLECTIVE_TIMEOUT=20.0):
        assert outcome.error.startswith("CollectiveError") and outcome.seconds < 15, outcome
        for text in (*texts, "test_schedules.py:"):
            assert text in outcome.error, outcome.error
