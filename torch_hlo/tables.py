"""Tables of functions that decorators fill."""

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def entry(table: MutableMapping[Any, Any], keys: Iterable[Any]) -> Callable[[F], F]:
    """Decorator: the function is what `table` has for these keys. Raises ValueError for a key that
    has a function."""

    def enter(fn: F) -> F:
        for key in keys:
            if key in table:
                raise ValueError(f"{key} has two functions: {table[key]} and {fn}")
            table[key] = fn
        return fn

    return enter
