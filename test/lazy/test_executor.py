"""The two background threads."""
from __future__ import annotations

import os
import time

import pytest

from torch_hlo.lazy import executor, log


def test_housekeeping_that_fails_leaves_the_compiler_running(monkeypatch: pytest.MonkeyPatch) -> None:
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
