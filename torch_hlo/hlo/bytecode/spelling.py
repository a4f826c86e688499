"""From VHLO's names and attributes to those of StableHLO.

spelled("gather", {"offset_dims": …, "index_vector_dim": 1, …}, at)   # {"dimension_numbers": …}
"""

import re
from typing import Any

from ..stablehlo.attributes import Symbol
from ..stablehlo.ops import CONVOLUTION
from .cursor import Cursor

_VERSIONED = re.compile(r"vhlo\.(\w+)_v\d+")
_NAMES = {"func": "func.func", "call": "func.call"}
_CONV = " ".join(CONVOLUTION)
_GATHER = (
    "offset_dims collapsed_slice_dims operand_batching_dims start_indices_batching_dims"
    " start_index_map index_vector_dim"
)
# operation: (the attribute of StableHLO, its fields, which stand alone in VHLO)
_GROUPED = {
    "convolution": ("dimension_numbers", _CONV),
    "dynamic_conv": ("dimension_numbers", _CONV),
    "gather": ("dimension_numbers", _GATHER),
    "dynamic_gather": ("dimension_numbers", _GATHER),
    "scatter": (
        "scatter_dimension_numbers",
        "update_window_dims inserted_window_dims input_batching_dims"
        " scatter_indices_batching_dims scatter_dims_to_operand_dims index_vector_dim",
    ),
    "dot_general": (
        "dot_dimension_numbers",
        "lhs_batching_dimensions rhs_batching_dimensions lhs_contracting_dimensions"
        " rhs_contracting_dimensions",
    ),
}
_SYMBOLS = {
    "func.call": "callee",
    "composite": "decomposition",
    "custom_call": "called_computations",
}


def short_name(full: str) -> str:
    """`vhlo.add_v1` -> "add": the names of hlo/stablehlo."""
    if found := _VERSIONED.fullmatch(full):
        return _NAMES.get(found.group(1), found.group(1))
    return full.removeprefix("stablehlo.")


def spelled(name: str, attrs: dict[str, Any], at: Cursor) -> dict[str, object]:
    if name in _GROUPED:
        whole, fields = _GROUPED[name]
        attrs[whole] = {f: attrs.pop(f) for f in fields.split() if f in attrs}
    if name in _SYMBOLS and (key := _SYMBOLS[name]) in attrs:
        attrs[key] = _symbols(attrs[key])
    return attrs


def unspelled(name: str, attrs: dict[str, Any]) -> dict[str, Any]:
    """VHLO's attributes, from those of StableHLO's text."""
    found = dict(attrs)
    if name in _GROUPED:
        whole, fields = _GROUPED[name]
        given = found.pop(whole)
        given = _dimensions(given) if isinstance(given, str) else given
        found |= {field: given.get(field, []) for field in fields.split()}
    if "channel_handle" in found:
        found["channel_id"] = found.pop("channel_handle")["handle"]
    if "use_global_device_ids" in found:
        found["use_global_device_ids"] = True  # it has no value
    return found


def _dimensions(text: str) -> dict[str, Any]:
    """Those of `[b, f, 0]x[o, i, 0]->[b, f, 0]`."""
    parts = re.split(r"\]\s*x|->", text)
    sides = dict(zip(("input", "kernel", "output"), (re.findall(r"\w", p) for p in parts)))
    found: dict[str, Any] = {}
    for field, letter in CONVOLUTION.items():
        row = sides[field.partition("_")[0]]
        found[field] = (
            row.index(letter) if letter else [*map(row.index, map(str, range(len(row) - 2)))]
        )
    return found


def _symbols(value: Any) -> Any:
    return [_symbols(v) for v in value] if isinstance(value, list) else Symbol(str(value))
