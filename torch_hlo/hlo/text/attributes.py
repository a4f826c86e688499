"""Parsers of instruction attributes: `ATTRIBUTES[name](scanner) -> value`. A computation's name
becomes a `Ref` until it is built."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from torch_hlo.frozen import frozen

from ..ir import Ints, Shape, Size, WindowDim, tuple_shape
from ..sharding.sharding import (
    MAX_DEVICES,
    MAX_RANK,
    Axis,
    Mesh,
    ShardingError,
)
from .scanner import SIZE, STRING, Scanner, element_type, parse_size, split_sizes, unescape

T = TypeVar("T")
NAME = re.compile(r"%?([A-Za-z0-9_][\w.\-]*+)|%\"([^\"\n]+)\"")
WORD = re.compile(r"[A-Za-z_][\w\-]*+")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]\[]*+)\](?:\{([^{}]*+)\})?")
_TOKEN = re.compile(r"token\[\](?:\{[^{}]*+\})?")
_LAYOUT = re.compile(r"(?:\s*+\d{0,9}+\s*+,)*+\s*+\d{0,9}+\s*+")
_FLOAT = re.compile(r"[+-]?(?:inf|nan|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")
MAX_DEPTH = 50  # of nested tuple shapes


@frozen
class Ref:
    """A computation named in an attribute at `position`."""

    name: str
    position: int


def name(scanner: Scanner, what: str = "a name") -> str:
    found = scanner.need(NAME, what)
    return found.group(1) or found.group(2)


def shape(scanner: Scanner, depth: int = 0) -> Shape:
    """A shape as written, layouts included (row-major ones become None)."""
    if scanner.at("("):
        if depth > MAX_DEPTH:
            raise scanner.error(f"tuple shapes nest deeper than {MAX_DEPTH}")
        return tuple_shape(*scanner.listed("(", ")", lambda: shape(scanner, depth + 1)))
    if scanner.match(_TOKEN):
        return Shape("token")
    begin = scanner.skip()
    found = scanner.need(_ARRAY, "a shape such as f32[8,16]")
    dtype = element_type(scanner, found.group(1), begin)
    text = found.group(2).strip()
    dims = tuple(parse_size(scanner, d, begin) for d in split_sizes(text)) if text else ()
    return Shape(dtype, dims, _layout(scanner, found.group(3), len(dims), begin))


def _layout(scanner: Scanner, text: str | None, rank: int, position: int) -> Ints | None:
    """Minor-to-major order; tilings, memory spaces and the like after the colon do not change the
    meaning."""
    if text is None:
        return None
    order = text.partition(":")[0]
    if not _LAYOUT.fullmatch(order) or len(order) > 1000:
        raise scanner.error(f"bad layout {{{text[:40]}}}", position)
    numbers = tuple(int(n) for n in order.split(",") if n.strip())
    if sorted(numbers) != list(range(rank)) and (numbers or ":" not in text):
        raise scanner.error(f"layout {{{order}}} does not order {rank} dimensions", position)
    return numbers if numbers and numbers != tuple(reversed(range(rank))) else None


def plain(s: Shape) -> Shape:
    """`s` without layouts."""
    return Shape(s.dtype, s.dims, None, tuple(plain(e) for e in s.elements))


def _size(scanner: Scanner) -> Size:
    begin = scanner.skip()
    if scanner.accept("-"):
        return -1 * _size(scanner)
    return parse_size(scanner, scanner.need(SIZE, "a size").group(), begin)


def listed(read: Callable[[Scanner], T]) -> Callable[[Scanner], tuple[T, ...]]:
    """The parser of a list in braces."""
    return lambda scanner: tuple(scanner.listed("{", "}", lambda: read(scanner)))


_integers = listed(Scanner.integer)


def _word(scanner: Scanner) -> str:
    return scanner.need(WORD, "a word").group()


def boolean(scanner: Scanner) -> bool:
    found = scanner.need(re.compile(r"(true|1)\b|(?:false|0)\b"), "true or false")
    return found.group(1) is not None


def _float(scanner: Scanner) -> float:
    return float(scanner.need(_FLOAT, "a number").group())


def _computation(scanner: Scanner) -> Ref:
    begin = scanner.skip()
    return Ref(name(scanner, "a computation's name"), begin)


def _computations(scanner: Scanner) -> tuple[Ref, ...]:
    return listed(_computation)(scanner) if scanner.at("{") else (_computation(scanner),)


def _slice(scanner: Scanner) -> tuple[tuple[Size, Size, int], ...]:
    def one() -> tuple[Size, Size, int]:
        scanner.expect("[")
        start = _size(scanner)
        scanner.expect(":")
        limit = _size(scanner)
        stride = scanner.integer() if scanner.accept(":") else 1
        scanner.expect("]")
        return start, limit, stride

    return tuple(scanner.listed("{", "}", one))


def _split_sizes(scanner: Scanner, text: str, position: int) -> list[list[Size]]:
    """`0_1x(s0)_2` -> [[0, 1], [s0, 2]]: `x` between dimensions, `_` within one, symbolic sizes in
    parentheses."""
    rows: list[list[Size]] = [[]]
    at = 0
    part = re.compile(r"(-?\d{1,19})|\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
    while True:
        found = part.match(text, at)
        if not found:
            raise scanner.error(f"bad sizes {text[:60]!r}", position)
        rows[-1].append(
            int(found.group(1)) if found.group(1) else parse_size(scanner, found.group(2), position)
        )
        at = found.end()
        if at == len(text):
            return rows
        if text[at] == "x":
            rows.append([])
        elif text[at] != "_":
            raise scanner.error(f"bad sizes {text[:60]!r}", position)
        at += 1


_SIZES_TEXT = re.compile(r"(?:[-\dx_]|\([^\n{}]*?\)(?=[x_,\s}]|$))++")


def _padding(scanner: Scanner) -> tuple[tuple[Size, Size, Size], ...]:
    begin = scanner.skip()
    found = scanner.match(_SIZES_TEXT)
    if not found:
        return ()
    rows = _split_sizes(scanner, found.group(), begin)
    if any(len(r) not in (2, 3) for r in rows):
        raise scanner.error("padding is low_high or low_high_interior per dimension", begin)
    return tuple((r[0], r[1], r[2] if len(r) == 3 else 0) for r in rows)


_WINDOW_FIELDS = {
    "size": 1,
    "stride": 1,
    "pad": 2,
    "lhs_dilate": 1,
    "rhs_dilate": 1,
    "rhs_reversal": 1,
}


def _window(scanner: Scanner) -> tuple[WindowDim, ...]:
    begin = scanner.skip()
    scanner.expect("{")
    fields: dict[str, list[list[Size]]] = {}
    while not scanner.accept("}"):
        at = scanner.skip()
        key = _word(scanner)
        scanner.expect("=")
        if key not in _WINDOW_FIELDS or key in fields:
            raise scanner.error(
                f"bad window field {key!r}; known are {', '.join(_WINDOW_FIELDS)}",
                at,
            )
        rows = _split_sizes(scanner, scanner.need(_SIZES_TEXT, "sizes").group(), at)
        if any(len(r) != _WINDOW_FIELDS[key] for r in rows):
            raise scanner.error(f"bad window field {key}", at)
        fields[key] = rows
    if not fields:
        return ()
    rank = len(fields.get("size", []))
    if any(len(rows) != rank for rows in fields.values()):
        raise scanner.error("window fields have different numbers of dimensions", begin)

    def column(key: str, default: int) -> list[Any]:
        return [r[0] for r in fields[key]] if key in fields else [default] * rank

    pads = fields.get("pad", [[0, 0]] * rank)
    columns = zip(
        column("size", 1),
        column("stride", 1),
        pads,
        column("lhs_dilate", 1),
        column("rhs_dilate", 1),
        column("rhs_reversal", 0),
    )
    window = tuple(
        WindowDim(size, stride, low, high, lhs, rhs, bool(flip))
        for size, stride, (low, high), lhs, rhs, flip in columns
    )
    for w in window:
        if any(
            type(v) is not int or v < 1 for v in (w.stride, w.base_dilation, w.window_dilation)
        ) or (type(w.size) is int and w.size < 0):
            raise scanner.error("window strides and dilations are positive integers", begin)
    return window


def _groups(scanner: Scanner) -> tuple[Ints, ...]:
    """`{{0,1},{2,3}}`; `[2,2]<=[4]` and `[2,2]<=[2,2]T(1,0)`: an iota, transposed, cut into rows;
    `mesh['x'=2,'y'=2] {'y'}`: along axes."""
    begin = scanner.skip()
    if scanner.match(re.compile(r"mesh(?=\[)")):
        return _axis_groups(scanner, begin)
    if scanner.at("{"):
        if scanner.peek(re.compile(r"\{\s*[\d}]")):
            flat = _integers(scanner)
            return (flat,) if flat else ()
        return listed(_integers)(scanner)
    dims = scanner.listed("[", "]", scanner.integer)
    scanner.expect("<=")
    order = _device_order(scanner, math.prod(dims), begin)
    return tuple(tuple(row) for row in order.reshape(-1, dims[-1]).tolist())


def _device_order(scanner: Scanner, count: int, begin: int) -> np.ndarray:
    """`[2,4]T(1,0)`: the numbers of `count` devices, transposed."""
    source = scanner.listed("[", "]", scanner.integer)
    order = (
        scanner.listed("(", ")", scanner.integer)
        if scanner.accept("T")
        else list(range(len(source)))
    )
    if (
        min(source, default=0) < 1
        or math.prod(source) != count
        or count > MAX_DEVICES
        or len(source) > MAX_RANK
        or sorted(order) != list(range(len(source)))
    ):
        raise scanner.error("bad list of device groups", begin)
    return np.arange(count).reshape(source).transpose(order).ravel()


def _axis_groups(scanner: Scanner, begin: int) -> tuple[Ints, ...]:
    def axis() -> tuple[str, int]:
        axis_name = scanner.need(_QUOTED, "an axis").group(1)
        scanner.expect("=")
        return axis_name, scanner.integer()

    def along() -> Axis:
        axis_name = scanner.need(_QUOTED, "an axis").group(1)
        if not scanner.accept(":"):
            return mesh.axis(axis_name)
        scanner.expect("(")
        pre = scanner.integer()
        scanner.expect(")")
        return Axis(axis_name, pre, scanner.integer())

    try:
        mesh = Mesh(tuple(scanner.listed("[", "]", axis)))
        if scanner.accept(","):
            scanner.need(re.compile(r"device_ids=\("), "device_ids")
            mesh = Mesh(mesh.axes, tuple(_device_order(scanner, mesh.size, begin).tolist()))
            scanner.expect(")")
        return mesh.groups(scanner.listed("{", "}", along))
    except ShardingError as error:
        raise scanner.error(str(error), begin) from None


_QUOTED = re.compile(r"'([^'\n]*)'")


def _string_or_raw(scanner: Scanner) -> str:
    return scanner.string() if scanner.at('"') else raw(scanner)


def raw(scanner: Scanner) -> str:
    """The text of any attribute value: a word, a string, a bracketed group, or a run of these."""
    begin = scanner.skip()
    while True:
        at = scanner.pos
        if scanner.text[at : at + 1] in ("{", "[", "("):
            scanner.balanced()
        elif found := STRING.match(scanner.text, at) or _RAW_PART.match(scanner.text, at):
            scanner.pos = found.end()
        else:
            break
    if scanner.pos == begin:
        raise scanner.error(f"expected a value, found {scanner.found()}")
    return scanner.text[begin : scanner.pos]


_RAW_PART = re.compile(r"[^,{}()\[\]\"\s]++")


def metadata(scanner: Scanner) -> dict[str, str]:
    """`{op_name="x" source_line=3}` as a dictionary of texts."""
    begin = scanner.skip()
    text = scanner.balanced()
    if text[0] != "{":
        raise scanner.error("expected {", begin)
    fields = re.findall(r'(\w+)=("(?:[^"\\]++|\\.)*+"|[^\s"{}]++)', text)
    return {k: unescape(v[1:-1]) if v[0] == '"' else v for k, v in fields}


ATTRIBUTES: dict[str, Callable[[Scanner], object]] = {
    **dict.fromkeys(
        "dimensions lhs_contracting_dims rhs_contracting_dims lhs_batch_dims rhs_batch_dims"
        " lhs_ragged_dims rhs_group_dims offset_dims collapsed_slice_dims start_index_map"
        " operand_batching_dims start_indices_batching_dims update_window_dims inserted_window_dims"
        " scatter_dims_to_operand_dims input_batching_dims scatter_indices_batching_dims".split(),
        _integers,
    ),
    **dict.fromkeys("dynamic_slice_sizes slice_sizes fft_length".split(), listed(_size)),
    **dict.fromkeys(
        "index iota_dimension index_vector_dim feature_group_count batch_group_count channel_id k"
        " exponent_bits mantissa_bits feature_index delta serial independent".split(),
        Scanner.integer,
    ),
    **dict.fromkeys(
        "indices_are_sorted unique_indices is_stable lower left_side unit_diagonal largest"
        " use_global_device_ids constrain_layout custom_call_has_side_effect"
        " is_host_transfer".split(),
        boolean,
    ),
    **dict.fromkeys(
        "to_apply body condition select scatter calls true_computation false_computation".split(),
        _computation,
    ),
    **dict.fromkeys("branch_computations called_computations".split(), _computations),
    **dict.fromkeys(
        "direction type fft_type transpose_a distribution algorithm kind api_version".split(),
        _word,
    ),
    **dict.fromkeys(
        "custom_call_target opaque infeed_config outfeed_config async_execution_thread"
        " backend_config".split(),
        _string_or_raw,
    ),
    "epsilon": _float,
    "window": _window,
    "padding": _padding,
    "slice": _slice,
    "replica_groups": _groups,
    "source_target_pairs": listed(_integers),
    "operand_precision": listed(_word),
    "metadata": metadata,
    "outfeed_shape": lambda s: plain(shape(s)),
}

# Attributes that do not change what is computed by one program on one device: read and left out.
HARMLESS = frozenset(
    "control-predecessors parameter_replication origin statistics result_accuracy is_scheduled"
    " scheduling_name execution_thread operand_layout_constraints output_to_operand_aliasing"
    " custom_call_schedule cross_program_prefetch_index precision schedule"
    " allow_spmd_sharding_propagation_to_parameters operands_layout split_dimension"
    " is_cross_program_prefetch skip_device_barrier parallel_dimensions ragged_dims"
    " literal_original".split()
)
