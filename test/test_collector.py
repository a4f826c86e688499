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
