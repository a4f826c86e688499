"""The attributes of a module's header that mean something here: `HEADER[name](scanner)`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..ir import Shape
from ..sharding.sharding import MAX_DEVICES
from . import attributes
from .attributes import raw, shape
from .scanner import Scanner, unescape


def _entry_layout(s: Scanner) -> tuple[list[Shape], Shape]:
    s.expect("{")
    params = s.listed("(", ")", lambda: shape(s))
    s.expect("->")
    result = shape(s)
    s.expect("}")
    return params, result


def _alias(s: Scanner) -> list[tuple[int, int]]:
    def one() -> tuple[int, int] | None:
        output = s.listed("{", "}", s.integer)
        s.expect(":")
        s.expect("(")
        param = s.integer()
        inner = s.listed("{", "}", s.integer) if s.accept(",") else []
        if s.accept(","):
            s.need(attributes.WORD, "may-alias or must-alias")
        s.expect(")")
        # Aliases of parts of tuple parameters only concern memory; programs here take arrays.
        return None if inner or len(output) > 1 else (output[0] if output else 0, param)

    return [pair for pair in s.listed("{", "}", one) if pair is not None]


def _count(s: Scanner) -> int:
    at = s.skip()
    value = s.integer()
    if not 1 <= value <= MAX_DEVICES:
        raise s.error(f"{value} devices: there are 1 to {MAX_DEVICES}", at)
    return value


def _symbol_table(s: Scanner) -> list[tuple[str, int, int]]:
    def one() -> tuple[str, int, int]:
        symbol_name = s.need(attributes.WORD, "a symbol").group()
        s.expect("=")
        param, dimension = s.listed("(", ")", s.integer)[:2] if s.at("(") else (-1, -1)
        if param < 0 or dimension < 0:
            raise s.error("expected symbol=(parameter,dimension)")
        return symbol_name, param, dimension

    return s.listed("{", "}", one)


def _frontend_attributes(s: Scanner) -> dict[str, str]:
    return {key: unescape(value) for key, value in _FRONTEND.findall(raw(s))}


_FRONTEND = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
HEADER: dict[str, Callable[[Scanner], Any]] = {
    "entry_computation_layout": _entry_layout, "input_output_alias": _alias,
    "symbols": _symbol_table, "num_partitions": _count, "replica_count": _count,
    "allow_spmd_sharding_propagation_to_output": attributes.listed(attributes.boolean),
    "is_scheduled": raw, "frontend_attributes": _frontend_attributes,
}  # fmt: skip
