"""Functions of PyTorch that are called through ours."""

import functools
from collections.abc import Callable
from typing import Any


def around(holder: Any, names: str, function: Callable) -> None:
    """What calls the functions `names` of a class or module calls `function`, which gets the
    original as its first argument."""
    for name in names.split():
        setattr(holder, name, _through(function, getattr(holder, name)))


def _through(function: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return called
