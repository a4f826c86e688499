"""The command that checks a GPU: whatever becomes of the processes that run its checks, every check
has a result."""

import argparse
import json
import queue
import time

import pytest

from benchmarks import check_device, check_gpu
from benchmarks.check_gpu import Check

OPTIONS = argparse.Namespace(sanitize=None, device="test.ptx.driver", engines="", log=None)
TABLE = {f"kernels: {c}": Check(lambda: None, 5.0) for c in "abcd"}


def start(name):
    return "@" + json.dumps({"start": name})


def done(name, result="PASS", what="fine"):
    return "@" + json.dumps({"name": name, "result": result, "what": what})


def watched(monkeypatch, *lives, options=OPTIONS, minutes=1.0, table=TABLE):
    """The results when the processes say, one after the other, what is in `lives`; an exception in
    there is raised."""
    asked, rest = [], iter(lives)

    class Worker:
        def __init__(self, options, names):
            asked.append(list(names))
            self.said, self.process = iter(next(rest)), self

        def next(self, seconds):
            line = next(self.said, None)
            if isinstance(line, Exception):
                raise line
            return line

        def wait(self):
            return -11

        def kill(self): ...

    monkeypatch.setattr(check_gpu, "Worker", Worker)
    found = {
        name: (result, what)
        for name, result, what in check_gpu.watch(
            options, table, list(table), time.monotonic() + 60 * minutes
        )
    }
    return found, asked


A, B, C, D = TABLE


def test_all_in_one_process(monkeypatch):
    found, asked = watched(monkeypatch, [x for n in TABLE for x in (start(n), "chatter", done(n))])
    assert (
        list(found) == list(TABLE) and set(found.values()) == {("PASS", "fine")} and len(asked) == 1
    )


def test_a_crash_loses_one_check(monkeypatch):
    found, asked = watched(
        monkeypatch,
        [start(A), done(A), start(B), "Fatal Python error: Segmentation fault"],
        [start(C), done(C), start(D), done(D, "FAIL", "wrong")],
    )
    assert found[B] == (
        "FAIL",
        "its process ended (-11): Fatal Python error: Segmentation fault",
    )
    assert found[C][0] == "PASS" and found[D] == ("FAIL", "wrong") and asked[1] == [C, D]


def test_a_process_that_ends_between_two_checks_loses_none(monkeypatch):
    found, asked = watched(
        monkeypatch,
        [start(A), done(A, "FAIL", "illegal memory access")],
        [x for n in (B, C, D) for x in (start(n), done(n))],
    )
    assert [found[n][0] for n in TABLE] == ["FAIL", "PASS", "PASS", "PASS"] and asked[1] == [
        B,
        C,
        D,
    ]


def test_without_a_device_nothing_else_is_tried(monkeypatch):
    facts = check_gpu.FACTS
    found, asked = watched(
        monkeypatch,
        [start(facts), done(facts, "FAIL", "no driver")],
        table={facts: Check(lambda: None), **TABLE},
    )
    assert found[A] == ("SKIP", "the device cannot be used") and len(asked) == 1 and len(found) == 5


def test_a_check_that_hangs_is_ended(monkeypatch):
    found, asked = watched(
        monkeypatch,
        [start(A), queue.Empty()],
        [x for n in (B, C, D) for x in (start(n), done(n))],
    )
    assert found[A] == ("FAIL", "it took longer than 5 s") and asked[1] == [B, C, D]


def test_what_does_not_fit_is_skipped(monkeypatch):
    found, asked = watched(monkeypatch, minutes=0)
    assert set(found.values()) == {("SKIP", "no time was left")} and not asked


def test_the_sanitizer_speaks_between_the_lines(monkeypatch):
    options = argparse.Namespace(**{**vars(OPTIONS), "sanitize": "memcheck"})
    lives = [
        "========= COMPUTE-SANITIZER",
        start(A),
        done(A),
        start(B),
        "========= Invalid __global__ write of size 4 bytes",
        done(B),
    ]
    found, _ = watched(
        monkeypatch,
        [
            *lives,
            *[x for n in (C, D) for x in (start(n), done(n))],
            "========= ERROR SUMMARY: 1 error",
        ],
        options=options,
    )
    assert (
        found[B] == ("FAIL", "========= Invalid __global__ write of size 4 bytes")
        and [found[n][0] for n in (A, C, D)] == ["PASS"] * 3
    )


def test_processes_of_its_own(tmp_path):
    """The real thing: one check on the evaluator of PTX."""
    assert (
        check_gpu.main(
            [
                "--device",
                "test.ptx.driver",
                "--only",
                "device",
                "--json",
                str(tmp_path / "found.json"),
            ]
        )
        == 0
    )
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert (
        found["device: facts"]["result"] == "PASS"
        and "PTX evaluator" in found["device: facts"]["what"]
    )


def test_a_device_that_is_not_there(capsys):
    assert check_gpu.main(["--device", "cuda:7", "--only", "device"]) == 1
    assert "FAIL  device: facts: DriverError" in capsys.readouterr().out


def test_rows_of_benchmarks():
    row = {
        "eager": {"median_s": 0.004},
        "inductor": {"error": "no compiler"},
        "hlo": {"median_s": 0.002, "bytes": 4e9, "flops": 8e12},
    }
    assert (
        check_device.describe(row)
        == "2.00 ms, eager 2.00x, inductor failed (no compiler), 2000 GB/s, 4000.0 TFLOP/s"
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        check_device.describe({"hlo": {"error": "out of memory"}})
