"""Makes `test.support` importable from every folder of tests; programs of earlier runs are not
found on disk, so that compiles can be counted; numbers that tests read come from compiled
programs."""

import os

import pytest

os.environ["TORCH_HLO_CACHE"] = ""
os.environ.setdefault("TORCH_HLO_CPU_NUMBERS", "0")
os.environ.setdefault("TORCH_HLO_REPORT", "off")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: tests keep one core busy each, and take up to 3 GB."""
    return min(len(os.sched_getaffinity(0)), 8)
