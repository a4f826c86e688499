"""Long tests, started by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def counted(what: str, items: Iterable[T]) -> Iterator[T]:
    """The items; a terminal shows at which of them the sweep is."""
    from torch_hlo import progress  # not for those who only look for a sweep

    items = list(items)
    with progress.shown(what):
        for i, item in enumerate(items, 1):
            with progress.shown(f"{i} of {len(items)}"):
                yield item


class Score:
    """How many tests that pass elsewhere pass here, and why others do not, by frequency."""

    _NUMBERS = re.compile(r"0x[0-9a-f]+|-?\d+\.?\d*(?:e[+-]?\d+)?|\[[^\]]*\]|'[^']*'")

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.reasons: Counter[str] = Counter()
        self.passed = self.wanted = 0

    def add(self, file: str, found: dict[str, str]) -> None:
        """The tests of a file: "" for one that passed, "skipped", else why it did not."""
        found = {name: why for name, why in found.items() if why != "skipped"}
        good = sum(why == "" for why in found.values())
        self.passed += good
        self.wanted += len(found)
        print(f"{file}: {good} of {len(found)} = {good / max(len(found), 1):.1%}", flush=True)
        for name, why in found.items():
            if why:
                self.reasons[self._NUMBERS.sub("#", why)[:160]] += 1
                if self.verbose:
                    print(f"  {name}: {why[:300]}")

    def report(self) -> float:
        """The share that passed."""
        for reason, count in self.reasons.most_common(30):
            print(f"{count:5} {reason}")
        share = self.passed / max(self.wanted, 1)
        print(f"all: {self.passed} of {self.wanted} = {share:.1%}")
        return share
