"""The two background threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from torch_hlo import log
from torch_hlo.device import runtime
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
