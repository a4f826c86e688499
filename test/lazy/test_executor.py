"""The two background threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import torch_hlo
from torch_hlo import log
from torch_hlo.device import runtime
from torch_hlo.device.cpu.stream import Stream
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run import executor


def test_housekeeping_that_fails_leaves_the_compiler_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError("no such page")

    monkeypatch.setattr(executor, "release_compiler", fail)
    log.forget_warnings()
    with pytest.warns(RuntimeWarning, match="no such page"):
        assert executor.call_compiler(lambda: 1) == 1
        assert executor.call_compiler(lambda: 2) == 2  # the same thread, after it tried to rest


def test_an_error_of_the_function_is_raised_in_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        executor.call_compiler(lambda: 1 // 0)
    assert executor.call_compiler(lambda: 3) == 3


def test_a_promise_is_kept_before_the_process_forks() -> None:
    promise = executor.submit_compiler(lambda: time.sleep(0.2) or 4)
    child = os.fork()
    if child == 0:
        os._exit(promise.result(0) if promise.done() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def prepares(monkeypatch: pytest.MonkeyPatch, *parts: Callable[[], object]) -> None:
    """The back end in use prepares these."""
    monkeypatch.setattr(runtime.backend(), "preparations", lambda: [*parts])


def test_nobody_waits_for_all_that_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    began, asked = threading.Event(), threading.Event()

    def long() -> None:
        began.set()
        asked.wait(60)
        done.append("long")

    def wrong() -> None:
        done.append("wrong")
        raise ImportError("it comes back when it is needed")

    prepares(monkeypatch, long, lambda: done.append("more"))
    prepared = executor.submit_compiler(session.current().compiler.prepare)
    assert began.wait(60)
    promise = executor.submit_compiler(lambda: done.append("asked for"))
    asked.set()
    promise.result(60)
    assert done == ["long", "asked for"] and prepared.result(0) is None

    prepares(monkeypatch, wrong)
    assert executor.submit_compiler(session.current().compiler.prepare).result(60) is None
    assert done[-1] == "wrong"


def test_what_is_read_is_run_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "BRIEF", 0.0)
    handed_over: list[int] = []

    def publish(stream: Stream, number: int, *long: bool) -> None:
        handed_over.append(number)
        original(stream, number, *long)

    original = Stream.publish
    monkeypatch.setattr(Stream, "publish", publish)
    x = torch.rand(8, device="hlo")
    for _ in range(10):  # the first time nobody knows how long it takes
        (x * 2).sum().item()
    handed_over.clear()
    (x * 2).sum().item()
    assert not handed_over
    for _ in range(10):
        y = x * 2
        torch_hlo.mark_step()
        torch_hlo.sync()
    handed_over.clear()
    y = x * 2
    torch_hlo.mark_step()  # who has waited for the program before waits for this one, too
    assert not handed_over
    y = x * 2
    torch_hlo.mark_step()
    assert handed_over
    torch_hlo.sync()
    assert torch.equal(y.cpu(), x.cpu() * 2)


def test_events_and_streams_tell_what_is_under_way() -> None:
    """True when the work before an event has run, whatever came later; asking starts it and does
    not wait."""
    stream, events = torch.accelerator.current_stream(), [torch.Event("hlo") for _ in range(2)]
    assert events[0].query() and stream.query()  # never recorded
    x, held = torch.ones(4).to("hlo"), [threading.Event() for _ in events]
    try:
        for event, hold in zip(events, held):
            program = SimpleNamespace(run=lambda *_, hold=hold: hold.wait(), seconds=0)
            executor.submit(executor.Job("held", program, (), ()))
            x = x + 1
            event.record()
            assert not (event.query() or stream.query())
            held[0].set()
        while not events[0].query():
            time.sleep(0.001)
        assert not (events[1].query() or stream.query())
    finally:
        held[1].set()
    torch.accelerator.synchronize()
    assert events[1].query() and stream.query() and x.tolist() == [3] * 4
