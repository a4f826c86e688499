"""Matrix instructions of a warp (PTX ISA, section 9.7.14): mma.sync, ldmatrix, stmatrix, movmatrix.

Fragments (9.7.14.5). A lane is `group = lane / 4` and `t = lane % 4`; a register of 32 bits holds e
neighbouring elements (4 bytes / element). For every shape m16n8kK and type, and element i of
register r:
    A   row = group + 8 (r % 2)    column = e t + i + 4 e (r / 2)        registers K / 4 e * 2
    B   row = e t + i + 4 e r      column = group                        registers K / 4 e
    C   row = group + 8 (r / 2)    column = 2 t + r % 2                  f32, s32, f64: a register
        per element; f16: pairs
f64 has an element per 64-bit register; shapes with m8 have the first row block only.
"""

from __future__ import annotations

import re

import numpy as np

from test.ptx import floats
from test.ptx.convert import SMALL
from test.ptx.memory import Fault
from test.ptx.movement import locate
from test.ptx.races import MANY
from test.ptx.syntax import Instruction
from test.ptx.table import RENDEZVOUS, Code, Run, bits, instruction
from test.ptx.warp import together
from torch_hlo.hlo.ir.numeric import decode

_LANE = np.arange(32)
_GROUP, _T = _LANE >> 2, _LANE & 3
# type -> elements of a register
PER_REGISTER = {
    "f16": 2,
    "bf16": 2,
    "tf32": 1,
    "e4m3": 4,
    "e5m2": 4,
    "s8": 4,
    "u8": 4,
    "f64": 1,
}
# (m, n, k) of what types
SHAPES = {
    "m16n8k8": ("f16", "bf16", "tf32", "f64"),
    "m16n8k16": ("f16", "bf16", "s8", "u8", "f64", "e4m3", "e5m2"),
    "m16n8k32": ("s8", "u8", "e4m3", "e5m2"), "m16n8k4": ("tf32", "f64"), "m8n8k4": ("f64",),
    "m8n8k16": ("s8", "u8"),
}  # fmt: skip


def elements(raw: np.ndarray, kind: str) -> np.ndarray:
    """Registers [..., r] as values [..., r * e], float64 or int64."""
    raw = np.ascontiguousarray(raw)
    if kind == "f64":
        return raw.view(np.float64)
    if kind == "f16":
        return raw.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return floats.from_bf16(raw.view(np.uint16)).astype(np.float64)
    if kind == "tf32":  # the low 13 bits are not looked at
        return (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind in ("s8", "u8"):
        return raw.view(np.int8 if kind == "s8" else np.uint8).astype(np.int64)
    small = raw.view(np.uint8)
    return decode(small.tobytes(), SMALL[f"{kind}x2"], small.shape).astype(np.float64)


def fragment_a(m: int, k: int, e: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of [lane, element] of A."""
    count = m // 8 * k // 4 // e
    r, i = np.divmod(np.arange(count * e), e)
    blocks = m // 8
    return _GROUP[:, None] + 8 * (r % blocks), e * _T[:, None] + i + 4 * e * (r // blocks)


def fragment_b(k: int, e: int) -> tuple[np.ndarray, np.ndarray]:
    r, i = np.divmod(np.arange(k // 4), e)
    return e * _T[:, None] + i + 4 * e * r, np.broadcast_to(_GROUP[:, None], (32, k // 4))


def fragment_c(m: int) -> tuple[np.ndarray, np.ndarray]:
    r = np.arange(m // 4)
    return _GROUP[:, None] + 8 * (r // 2), 2 * _T[:, None] + r % 2


def whole_warps(frame) -> int:
    """The number of warps; the frame has all lanes of each, in order."""
    if not len(frame.run_of_warps()):
        raise Fault("not all threads of the warp are here")
    return len(frame) // 32


def gather(frame, reads) -> np.ndarray:
    """Registers as [warp, lane, register], bits."""
    return np.stack([frame.spread(bits(r(frame))) for r in reads], axis=-1).reshape(
        len(frame) // 32, 32, len(reads)
    )


@instruction("mma")
def multiply(code: Code, x: Instruction) -> Run:
    shape = next((m for m in x.modifiers if re.fullmatch(r"m\d+n\d+k\d+", m)), "")
    rest = [
        m
        for m in x.modifiers
        if m not in (shape, "sync", "aligned", "row", "col", "satfinite", "kind::f8f6f4")
    ]
    if (
        shape not in SHAPES
        or len(rest) != 4
        or rest[1] not in SHAPES[shape]
        or rest[2] not in SHAPES[shape]
    ):
        raise code.fail(x, "this matrix product is not evaluated")
    if [m for m in x.modifiers if m in ("row", "col")] != ["row", "col"]:
        raise code.fail(x, "A is row-major and B column-major (.row.col)")
    d_kind, a_kind, b_kind, c_kind = rest
    m, n, k = map(int, re.findall(r"\d+", shape))
    e = PER_REGISTER[a_kind]
    integer, double = a_kind in ("s8", "u8"), a_kind == "f64"
    allowed = (
        {"s32"}
        if integer
        else {"f64"}
        if double
        else {"f32", "f16"}
        if a_kind in ("f16", "e4m3", "e5m2")
        else {"f32"}
    )
    if not {d_kind, c_kind} <= allowed or PER_REGISTER[b_kind] != e:
        raise code.fail(x, "no such types")
    places = fragment_a(m, k, e), fragment_b(k, e), fragment_c(m)
    register = "b64" if double else "b32"
    reads = []
    for number, kind, elements_of, per in (
        (1, a_kind, places[0], e),
        (2, b_kind, places[1], e),
        (3, c_kind, places[2], 2 if c_kind == "f16" else 1),
    ):
        items = code.items(x, number)
        if len(items) != elements_of[0].shape[1] // per:
            raise code.fail(
                x,
                f"{elements_of[0].shape[1] // per} registers of .{kind} were expected",
            )
        reads.append([code.read(x, o, register) for o in items])
    per_d = 2 if d_kind == "f16" else 1
    targets = code.items(x, 0)
    if len(targets) != m // 4 // per_d:
        raise code.fail(x, f"{m // 4 // per_d} registers for the result were expected")
    writes = [code.write(x, t, register) for t in targets]
    work = np.int64 if integer else np.float64
    saturate = "satfinite" in x.modifiers

    def run(frame):
        warps = whole_warps(frame)
        raw = [gather(frame, r) for r in reads]
        a, b, c = (np.zeros((warps, *size), work) for size in ((m, k), (k, n), (m, n)))
        a[:, places[0][0], places[0][1]] = elements(raw[0], a_kind)
        b[:, places[1][0], places[1][1]] = elements(raw[1], b_kind)
        c[:, places[2][0], places[2][1]] = accumulators(raw[2], c_kind)
        d = a @ b + c
        store(frame, result(d[:, places[2][0], places[2][1]], d_kind, saturate), writes)

    return run


def accumulators(raw: np.ndarray, kind: str) -> np.ndarray:
    dtype = {"f32": np.float32, "s32": np.int32, "f64": np.float64, "f16": np.float16}[kind]
    return np.ascontiguousarray(raw).view(dtype)


def result(values: np.ndarray, kind: str, saturate: bool = False) -> np.ndarray:
    """[warp, lane, element] -> [warp, lane, register], bits."""
    if kind == "s32":
        values = np.clip(values, -(1 << 31), (1 << 31) - 1) if saturate else values
        return values.astype(np.int32).view(np.uint32)
    if kind == "f16":
        return np.ascontiguousarray(values.astype(np.float16)).view(np.uint32)
    dtype = {"f32": np.float32, "f64": np.float64}[kind]
    return np.ascontiguousarray(values.astype(dtype)).view(
        {"f32": np.uint32, "f64": np.uint64}[kind]
    )


def store(frame, registers: np.ndarray, writes) -> None:
    columns = registers.reshape(len(frame), len(writes))
    for i, write in enumerate(writes):
        write(frame, np.ascontiguousarray(columns[:, i]))


# -- 8 x 8 matrices of 16-bit elements
# ----------------------------------------------------------------------------------------
def _matrices(code: Code, x: Instruction) -> tuple[int, bool]:
    count = next((int(m[1]) for m in x.modifiers if m in ("x1", "x2", "x4")), 0)
    rest = [
        m
        for m in x.modifiers
        if m
        not in (
            "x1",
            "x2",
            "x4",
            "sync",
            "aligned",
            "m8n8",
            "trans",
            "shared",
            "shared::cta",
            "b16",
        )
    ]
    if not count or rest:
        raise code.fail(x, "this shape is not evaluated")
    return count, "trans" in x.modifiers


@instruction("ldmatrix")
def load(code: Code, x: Instruction) -> Run:
    """9.7.14.5.15: lane 8 i + j gives the address of row j of matrix i; lane l gets elements 2 (l %
    4) and the next of row l / 4, with .trans of column l / 4."""
    count, transposed = _matrices(code, x)
    targets = code.items(x, 0)
    if len(targets) != count:
        raise code.fail(x, f"{count} registers were expected")
    writes, address = [code.write(x, t, "b32") for t in targets], code.address(x, 1)
    space = "shared" if any(m.startswith("shared") for m in x.modifiers) else ""

    def run(frame):
        warps = whole_warps(frame)
        giving = np.tile(_LANE < 8 * count, warps)
        part = frame.select(giving, ()) if count < 4 else frame
        memory, at = locate(frame, space, frame.spread(address(frame))[giving])
        words = np.stack(memory.load(part, at, 4, 4, lanes=MANY), axis=-1)  # a row: 4 words
        tiles = np.ascontiguousarray(words).view(np.uint16).reshape(warps, count, 8, 8)
        if transposed:
            tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
        registers = tiles.view(np.uint32).reshape(warps, count, 32).swapaxes(1, 2)
        store(frame, np.ascontiguousarray(registers), writes)

    return run


@instruction("stmatrix")
def store_matrices(code: Code, x: Instruction) -> Run:
    count, transposed = _matrices(code, x)
    reads, address = (
        [code.read(x, o, "b32") for o in code.items(x, 1)],
        code.address(x, 0),
    )
    if len(reads) != count:
        raise code.fail(x, f"{count} registers were expected")
    space = "shared" if any(m.startswith("shared") for m in x.modifiers) else ""

    def run(frame):
        warps = whole_warps(frame)
        giving = np.tile(_LANE < 8 * count, warps)
        part = frame.select(giving, ()) if count < 4 else frame
        memory, at = locate(frame, space, frame.spread(address(frame))[giving])
        tiles = (
            np.ascontiguousarray(gather(frame, reads).swapaxes(1, 2))
            .view(np.uint16)
            .reshape(warps, count, 8, 8)
        )
        if transposed:
            tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
        words = tiles.view(np.uint32).reshape(warps * count * 8, 4)
        memory.store(
            part,
            at,
            [np.ascontiguousarray(words[:, i]) for i in range(4)],
            4,
            lanes=MANY,
        )

    return run


@instruction("movmatrix")
def transpose(code: Code, x: Instruction) -> Run:
    code.modifiers(x, "sync", "aligned", "m8n8", "trans", "b16")
    read, write = code.read(x, 1, "b32"), code.write(x, 0, "b32")

    def run(frame):
        tiles = gather(frame, [read]).view(np.uint16).reshape(whole_warps(frame), 8, 8)
        write(
            frame,
            np.ascontiguousarray(tiles.swapaxes(1, 2)).view(np.uint32).reshape(len(frame)),
        )

    return run


for _opcode in ("mma", "ldmatrix", "stmatrix", "movmatrix"):
    RENDEZVOUS[_opcode] = together(None)
