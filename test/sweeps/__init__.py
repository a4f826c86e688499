"""Long tests, started by hand."""

from __future__ import annotations

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
