"""The pretty forms of Shardy's operations: `SYNTAX[name](reader, operation, depth)` fills operands,
attributes, regions and types.

A sharding stays text here (`Raw`); sdy.py reads it when the mesh is known.
"""

import re

from .attributes import Raw, attribute, dictionary, symbol
from .mlir import PrettyForm, Reader
from .operation import Operation
from .types import angle_group, parse_types

_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)")


def _value(reader: Reader, key: str) -> object:
    s = reader.s
    if s.at("[") or s.at("{"):  # in_shardings=[<@mesh, …>, …], manual_axes={"x"}
        return Raw(s.balanced()[1:-1])
    if s.at("<"):
        return Raw(angle_group(s))
    return attribute(s, typed=False)


def _simple(reader: Reader, op: Operation, depth: int) -> None:
    """`op [axes] %x <@mesh, […]> key=value {attributes} : types`."""
    s = reader.s
    while True:
        if s.at("%"):
            op.operands.append(reader.use())
        elif s.at("("):
            op.operands += s.listed("(", ")", reader.use)
        elif s.at("<"):
            op.attrs["sharding"] = Raw(angle_group(s))
        elif s.at("["):
            op.attrs["axes"] = Raw(s.balanced())
        elif found := s.match(_KEYWORD):
            op.attrs[found.group(1)] = _value(reader, found.group(1))
        elif s.at("{"):
            op.attrs.update(dictionary(s))
        elif not s.accept(","):
            break
    if s.accept(":"):
        op.types = reader.types(op.name == "sdy.return")


def _region(reader: Reader, op: Operation, depth: int) -> None:
    """`op <"name">(%x, …) in_shardings=[…] out_shardings=[…] manual_axes={…} (%a: type, …) { … } :
    types`."""
    s = reader.s
    if s.at("<"):
        op.attrs["name"] = angle_group(s)
    op.operands = s.listed("(", ")", reader.use)
    while found := s.match(_KEYWORD):
        op.attrs[found.group(1)] = _value(reader, found.group(1))
        s.accept(",")
    args = s.listed("(", ")", reader.typed_argument)
    op.regions = [reader.region(depth + 1, args)]
    if s.at("{"):
        op.attrs.update(dictionary(s))
    s.expect(":")
    parse_types(s)
    s.expect("->")
    op.types = parse_types(s)


def _mesh(reader: Reader, op: Operation, depth: int) -> None:
    """`sdy.mesh @name = <["x"=2, "y"=4], device_ids=[…]>`."""
    s = reader.s
    op.attrs["sym_name"] = symbol(s, "the mesh's @name")
    s.expect("=")
    op.attrs["mesh"] = Raw(angle_group(s))
    if s.at("{"):
        op.attrs.update(dictionary(s))


COLLECTIVES = (
    "all_gather all_slice all_to_all all_reduce reduce_scatter collective_permute"
    " replicated_to_unreduced sharded_to_unreduced"
)
SYNTAX: dict[str, PrettyForm] = {
    "sdy.mesh": _mesh,
    "sdy.manual_computation": _region,
    "sdy.named_computation": _region,
    **{
        f"sdy.{name}": _simple
        for name in (
            "sharding_constraint reshard propagation_barrier sharding_group data_flow_edge return "
            + COLLECTIVES
        ).split()
    },
}
