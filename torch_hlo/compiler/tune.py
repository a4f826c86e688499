"""Measured choices between ways to compute a step, kept in the program cache:
TORCH_HLO_TUNE=SECONDS measures for so long per program.

    with collecting() as wanted:
        compile_module(module, target)            # emitters ask: choose(target.cache_key, step,
                                                  # names)
    for step, names in wanted.items():            # of what nothing is known yet
        record(target.cache_key, step, {name: seconds of `step` compiled under trying(step, name)
            for name in names})

A step is the text of a module with nothing else in it, so equal steps of different programs share a
choice. Names are the emitter's; the first is its own estimate, which is taken when nothing is
known. Entries belong to a target and a version of the compiler; damaged ones are as good as none.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch_hlo import config

from . import cache

_TRIAL: ContextVar[tuple[str, str] | None] = ContextVar("trial", default=None)
_WANTED: ContextVar[dict[str, tuple[str, ...]] | None] = ContextVar("wanted", default=None)


def active() -> bool:
    """Whether anybody has an opinion: measuring is on, or a way is being tried."""
    return config.get("TUNE") > 0 or _TRIAL.get() is not None


def choose(target: str, step: str, names: Sequence[str]) -> str:
    """The way to take for a step: the one being tried, else the fastest known, else `names[0]`."""
    trial = _TRIAL.get()
    if trial is not None:
        return trial[1] if trial[0] == step else names[0]
    known = {name: seconds for name, seconds in measured(target, step).items() if name in names}
    if known:
        return min(known, key=known.__getitem__)
    wanted = _WANTED.get()
    if wanted is not None:
        wanted[step] = tuple(names)
    return names[0]


def measured(target: str, step: str) -> dict[str, float]:
    """Seconds by name; empty when the step has not been measured."""
    data = cache.load(_key(target, step))
    if data is None:
        return {}
    try:
        return {str(name): float(seconds) for name, seconds in json.loads(data).items()}
    except (ValueError, AttributeError, TypeError):
        return {}


def record(target: str, step: str, seconds: Mapping[str, float]) -> bool:
    """Keep measurements; False when there is no place for them."""
    return cache.store(_key(target, step), json.dumps(dict(seconds)).encode())


def _key(target: str, step: str) -> str:
    return cache.fingerprint(step, target, "measured")


@contextmanager
def trying(step: str, name: str) -> Iterator[None]:
    """Steps like `step` are computed the given way, all others by estimate."""
    token = _TRIAL.set((step, name))
    try:
        yield
    finally:
        _TRIAL.reset(token)


@contextmanager
def collecting() -> Iterator[dict[str, tuple[str, ...]]]:
    """Yields what becomes the steps that were asked about and are not known, with their names."""
    wanted: dict[str, tuple[str, ...]] = {}
    token = _WANTED.set(wanted)
    try:
        yield wanted
    finally:
        _WANTED.reset(token)
