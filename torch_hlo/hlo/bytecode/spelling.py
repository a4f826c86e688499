"""From VHLO's names and attributes to those of StableHLO.

spelled("gather", {"offset_dims": …, "index_vector_dim": 1, …}, at)   # {"dimension_numbers": …}
"""

import re
from typing import Any

from ..stablehlo.attributes import Symbol
from .cursor import Cursor

_VERSIONED = re.compile(r"vhlo\.(\w+)_v\d+")
_NAMES = {"func": "func.func", "call": "func.call"}
_CONV = " ".join(
    f"{side}_{part}"
    for side, parts in {
        "input": "batch_dimension feature_dimension spatial_dimensions",
        "kernel": "input_feature_dimension output_feature_dimension spatial_dimensions",
        "output": "batch_dimension feature_dimension spatial_dimensions",
    }.items()
    for part in parts.split()
)
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
# Lists that say nothing when they are empty.
_LISTS = {"func.func": ("arg_attrs", "res_attrs")}


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
    for key in _LISTS.get(name, ()):
        if not attrs.get(key):
            attrs.pop(key, None)
    return attrs


def _symbols(value: Any) -> Any:
    return [_symbols(v) for v in value] if isinstance(value, list) else Symbol(str(value))
