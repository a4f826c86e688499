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


@pytest.fixture(autouse=True)
def without_lines():
    """A compile that fails has the lines of operations noted from there on: for this test only."""
    from torch_hlo.lazy.record import session

    before = session.current().sources
    yield
    session.current().sources = before
