"""A thread ahead of a loop: order, errors in their place, an end before the values end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from torch_hlo.prefetch import Prefetcher


def test_ahead_and_in_order():
    third = threading.Event()

    def make(i):
        if i == 2:
            third.set()
        return i * i

    found = iter(Prefetcher(range(5), make, 2))
    assert next(found) == 0
    assert third.wait(30)  # though the loop has asked for one
    assert list(found) == [1, 4, 9, 16]


def test_errors_come_in_their_place():
    found = iter(Prefetcher([1, 0], lambda x: 1 // x, 4))
    assert next(found) == 1
    with pytest.raises(ZeroDivisionError):
        next(found)


def test_close_stops_the_thread():
    def forever():
        while True:
            yield 1

    running = Prefetcher(forever(), lambda x: x, 2)
    next(iter(running))
    running.close()
    assert not running._thread.is_alive()


def test_a_process_ends_while_the_thread_is_busy():
    script = """
import torch
from torch_hlo.prefetch import Prefetcher
x = torch.ones(1000, 1000)
next(iter(Prefetcher(iter(lambda: x @ x, None), lambda y: y, 1000)))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
