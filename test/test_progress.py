"""Long compiles say so in a terminal, and nothing anywhere else."""

import io
import os
import sys
import time

import pytest

from test.sweeps import counted
from torch_hlo import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(progress, "AFTER", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    def opened():  # pytest exchanges the stream between the fixture and the test
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return opened


def test_a_terminal_shows_what_is_under_way(terminal):
    stream = terminal()
    with progress.shown("compiling step_9 (12 ops)"):
        time.sleep(0.9)
        with progress.shown("partitioning"):
            time.sleep(0.6)
    text = stream.getvalue()
    assert "torch_hlo: compiling step_9 (12 ops) (0 s)" in text
    assert "torch_hlo: compiling step_9 (12 ops), partitioning (1 s)" in text
    assert text.endswith("\x1b[2K")  # the line has vanished


def test_sweeps_say_where_they_are(terminal):
    stream = terminal()
    assert [time.sleep(0.5) or x for x in counted("sweep", iter("abc"))] == ["a", "b", "c"]
    assert "torch_hlo: sweep, 2 of 3 (1 s)" in stream.getvalue()


def test_what_is_quick_says_nothing(terminal, monkeypatch):
    monkeypatch.setattr(progress, "AFTER", 60)
    stream = terminal()
    with progress.shown("compiling"):
        pass
    assert stream.getvalue() == ""


def test_errors_end_it(terminal):
    stream = terminal()
    with pytest.raises(KeyError), progress.shown("compiling"):
        time.sleep(0.9)
        raise KeyError
    before = stream.getvalue()
    time.sleep(0.05)
    assert before and stream.getvalue() == before and not progress._under_way


def test_a_pipe_gets_nothing(monkeypatch):
    monkeypatch.setattr(progress, "AFTER", 0)
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        with progress.shown("compiling"):
            time.sleep(0.05)
    assert os.read(read, 10) == b""
    os.close(read)
