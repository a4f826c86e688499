"""Module -> StableHLO portable artifact: MLIR bytecode in the dialect VHLO, as StableHLO's own
serialize_portable_artifact writes it. operations.py reads it back.

Each operation has the oldest form that says it, which all later versions of StableHLO read.
Those that VHLO lacks, CHLO's and Shardy's, stand between casts of their values' types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..ir import Module
from ..stablehlo.mlir import Reader
from ..stablehlo.operation import Block, Operation
from ..stablehlo.sdy_syntax import SYNTAX
from ..stablehlo.types import Type
from ..stablehlo.write import stablehlo_text
from ..text.scanner import Scanner
from .encoder import SINCE, Encoder, joined, listed, section, varint
from .operations import ATTRIBUTES, KEPT, OPERANDS, REGIONS, RESULTS
from .properties import PROPERTIES
from .spelling import unspelled

_NAMES = {
    "module": "builtin.module",
    **dict.fromkeys(("cast in", "cast out"), "builtin.unrealized_conversion_cast"),
}
# What text leaves out
_DEFAULTS: dict[str, Any] = {
    "api_version": "ORIGINAL",
    "backend_config": "",
    "channel_id": 0,
    "has_side_effect": False,
    "precision_config": ["DEFAULT", "DEFAULT"],
    "sym_visibility": "",
    "use_global_device_ids": False,
}


def portable_artifact(module: Module) -> bytes:
    """The program for all consumers since StableHLO 1.0, or since the version that introduced
    something it uses. Raises WriteError for what StableHLO cannot say."""
    s = Scanner(stablehlo_text(module))
    writer = _Writer(s)
    ir = writer.operation(Reader(s, SYNTAX).operation(0), {}, 0)
    return writer.out.file(varint(1 << 1) + ir)


class _Writer:
    def __init__(self, s: Scanner) -> None:
        self.out = Encoder(s)
        self.kinds: dict[str, list[Type]] = {}  # of the values so far

    def _region(self, block: Block, outer: dict[str, int], first: int) -> bytes:
        """One block. Its values are numbered from `first`, in order."""
        self.kinds |= {name: [kind] for name, kind in block.args}
        ops = [one for op in block.ops for one in self._mixed(op)]
        values = dict(outer)
        next_ = first
        args = [(name, 1) for name, _ in block.args]
        for name, count in [*args, *(result for op in ops for result in op.results)]:
            values[name] = next_
            next_ += count
        head = joined([1, next_ - first, len(ops) << 1 | bool(args)])
        if args:
            head += listed([self.out.type(kind) << 1 for _, kind in block.args]) + b"\0"
        return head + b"".join(self.operation(op, values, next_) for op in ops)

    def _mixed(self, op: Operation) -> list[Operation]:
        """The operation, with casts around it if VHLO lacks it."""
        self.kinds |= {name: op.types for name, _ in op.results}
        if not op.results or not op.name.startswith(("chlo.", "sdy.")):
            return [op]
        inside = f"{op.results[0]} inside"
        before = f"{op.results[0]} before"
        kinds = [self.kinds[name][i] for name, i in op.operands]
        made = [(inside, i) for i in range(len(op.types))]
        given = [(before, i) for i in range(len(kinds))]
        return [
            Operation("cast out", 0, [(before, len(kinds))], op.operands, types=kinds),
            replace(op, results=[(inside, len(made))], operands=given),
            Operation("cast in", 0, op.results, made, types=op.types),
        ]

    def operation(self, op: Operation, values: dict[str, int], next_: int) -> bytes:
        """`values`: the numbers of those in sight; `next_` is the first that is free."""
        out = self.out
        attrs = unspelled(op.name, op.attrs)
        alone = op.name in ("module", "func.func")
        if op.name == "func.func":
            attrs["function_type"] = [t for _, t in op.regions[0].args], op.types
        full = _versioned(op, attrs)
        ours = full.startswith("vhlo.")
        kept, others = _attributes(full, attrs, out.attribute if ours else out.outer)
        kind = out.type if ours or op.name == "cast in" else out.outside
        scope = ({}, 0) if alone else (values, next_)
        regions = b"".join(self._region(block, *scope) for block in op.regions)
        regions = section("ir", regions) if alone else regions
        parts = {
            ATTRIBUTES: varint(out.dictionary(others)) if others else b"",
            KEPT: varint(out.properties[kept]) if kept else b"",
            RESULTS: listed([kind(t) for t in op.types]) if op.results else b"",
            OPERANDS: listed([values[x] + i for x, i in op.operands]) if op.operands else b"",
            REGIONS: varint(len(op.regions) << 1 | alone) + regions if op.regions else b"",
        }
        mask = sum(bit for bit, data in parts.items() if data)
        return (
            joined([out.operation(full)]) + bytes([mask, *out.location]) + b"".join(parts.values())
        )


def _attributes(
    full: str, attrs: dict[str, Any], number: Callable[[Any, str], int]
) -> tuple[bytes, dict[str, int]]:
    """What the operation keeps, in its order, and the numbers of the others."""
    kept = []
    for field in PROPERTIES.get(full, ()):
        value = attrs.pop(field.removesuffix("?"), _DEFAULTS.get(field, []))
        if field.endswith("?"):
            kept.append(number(value, field) << 1 | 1 if value else 0)
        else:
            kept.append(number(value, field))
    return joined(kept), {key: number(v, key) for key, v in attrs.items() if v != []}


def _versioned(op: Operation, attrs: dict[str, Any]) -> str:
    """The operation's name in the oldest form that says it."""
    name = _NAMES.get(op.name, op.name.removeprefix("func."))
    if "." in name:
        return name
    full = f"vhlo.{name}_v1"
    if f"{name}_v2" in SINCE:
        old = PROPERTIES[full]
        new = PROPERTIES[f"vhlo.{name}_v2"]
        several = "replica_groups" in attrs and len(op.operands) > 1
        # StableHLO's own upgrade of a scatter leaves old operations in its region
        inner = {f"vhlo.{x.name}_v2" for block in op.regions for x in block.ops}
        gained = any(key not in old and attrs.get(key) for key in new)
        if several or gained or not inner.isdisjoint(PROPERTIES):
            return f"vhlo.{name}_v2"
    return full
