"""What the collector is told of objects that stay."""

from __future__ import annotations

import gc

import pytest

from torch_hlo import collector


def is_old(value: object) -> bool:
    return any(x is value for x in gc.get_objects(generation=2))


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_there_becomes_old_without_a_collection(frozen: bool) -> None:
    if frozen:
        gc.freeze()
    try:
        runs = gc.get_stats()[2]["collections"]
        new: list[object] = [[]]
        with collector.paused():
            collector.settle()
        assert is_old(new) != frozen
        assert bool(gc.get_freeze_count()) == frozen and gc.get_stats()[2]["collections"] == runs
    finally:
        gc.unfreeze()


def test_objects_of_operations_are_no_reason_to_collect() -> None:
    before, enabled = gc.get_threshold(), gc.isenabled()
    runs = lambda: sum(s["collections"] for s in gc.get_stats())  # noqa: E731
    allowance = collector.Allowance()
    try:
        gc.enable()
        gc.collect()
        gc.set_threshold(100, 10, 10)
        allowance.step(50)
        start = runs()
        kept: list[object] = [{i} for i in range(400)]
        allowance.step(50)
        assert runs() == start
        allowance.step(1)  # more than such a step explains
        assert runs() == start + 1 and gc.get_threshold() == (120, 10, 10)
        gc.set_threshold(0)  # what others choose counts
        kept += [{i} for i in range(1000)]
        allowance.step(1)
        assert runs() == start + 1 and gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
        if not enabled:
            gc.disable()
