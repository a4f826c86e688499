"""Matrix products of a warpgroup (PTX ISA, section 9.7.15): wgmma.mma_async, its descriptors of
matrices in shared memory, fence, commit, wait.

D[64, N] = A[64, K] B[K, N] (+ D); K is 32 bytes of elements. A comes from registers (each warp's 16
rows as in mma.m16n8kK) or like B from shared memory. A product is made when it is issued; until it
is waited for, the shared memory it reads must not be written.

A descriptor (9.7.15.5.1.2.2): start address, leading and stride byte offsets (14 bits each of value
/ 16, from bits 0, 16, 32), base offset (bits 49-51), swizzle (bits 62-63: none, 128, 64, 32 bytes).
In 16-byte units, with w = 1, 8, 4, 2 units for the swizzles:
    K-major    row r, unit u of K:    none   8 rows of a unit each, then stride; unit to unit:
        leading
                                      else   (r % 8) w + u, 8 rows to the next: stride
    MN-major   unit u of 8 rows, k:   none   k % 8, then leading; unit to unit: stride
                                      else   u % w + (k % 8) w; w units to the next: leading; 8 k to
                                          the next: stride
Swizzling exchanges units: bits 4-6 of the address are xor-ed with bits 7-9 (64 bytes: 4-5 with 7-8;
32 bytes: 4 with 7).
"""

from __future__ import annotations

import re

import numpy as np

from test.ptx import matrix
from test.ptx.async_copy import Copies, complete, queue_of
from test.ptx.memory import Fault, swizzled
from test.ptx.syntax import Instruction, Vec
from test.ptx.table import RENDEZVOUS, Code, Run, instruction
from test.ptx.warp import together

_UNITS = {0: 1, 1: 8, 2: 4, 3: 2}  # swizzle -> units of 16 bytes that are exchanged
_KINDS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 8,
    "e4m3": 32,
    "e5m2": 32,
    "s8": 32,
    "u8": 32,
}  # type -> K
_SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def addresses(descriptor: int, rows: int, k: int, size: int, k_major: bool) -> np.ndarray:
    """Shared addresses of the first bytes of elements [row, k]. Raises Fault."""
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise Fault("a matrix descriptor with a base offset is not evaluated")
    w = _UNITS[descriptor >> 62 & 3]
    r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
    if k_major:
        unit, inside = np.divmod(c * size, 16)
        if w == 1:
            offset = r // 8 * stride + r % 8 * 16 + unit * leading + inside
        else:
            offset = r // 8 * stride + r % 8 * 16 * w + unit * 16 + inside
    else:
        unit, inside = np.divmod(r * size, 16)
        if w == 1:
            offset = unit * stride + c % 8 * 16 + c // 8 * leading + inside
        else:
            offset = unit % w * 16 + unit // w * leading + c % 8 * 16 * w + c // 8 * stride + inside
    return swizzled(start + offset, w)


@instruction("wgmma")
def wgmma(code: Code, x: Instruction) -> Run | None:
    what = x.modifiers[0]
    if what == "fence":  # orders accesses of registers, which happen one after another here
        return None
    if what == "commit_group":

        def commit(frame):
            queue_of(frame, "wgmma").committed[frame.threads] += 1

        return commit
    if what == "wait_group":
        keep = x.operands[0].value

        def wait(frame):
            queue = queue_of(frame, "wgmma")
            before = np.zeros(len(queue.committed), np.int64)
            before[frame.threads] = queue.committed[frame.threads] - keep
            complete(frame, queue, before, _read)

        return wait
    return _multiply(code, x)


def _read(frame, copies: Copies, done) -> None:
    """The products' operands have been read."""
    for group, tid, units in zip(frame.group, frame.tid, copies.place[done], strict=True):
        frame.run.races.finish_read(int(group), int(tid) >> 5, units)


def _multiply(code: Code, x: Instruction) -> Run:
    shape = next((m for m in x.modifiers if re.fullmatch(r"m64n\d+k\d+", m)), "")
    kinds = [
        m for m in x.modifiers if m not in (shape, "mma_async", "sync", "aligned", "satfinite")
    ]
    if (
        not shape
        or len(kinds) != 3
        or kinds[1] not in _KINDS
        or kinds[2] not in _KINDS
        or _KINDS[kinds[1]] != _KINDS[kinds[2]]
    ):
        raise code.fail(x, "this product is not evaluated")
    d_kind, a_kind, b_kind = kinds
    n, k = map(int, re.findall(r"\d+", shape)[1:])
    integer = a_kind in ("s8", "u8")
    if k != _KINDS[a_kind] or n % (8 if not integer or n <= 32 else 16) or not 8 <= n <= 256:
        raise code.fail(x, "no such shape")
    if d_kind not in (
        ("s32",)
        if integer
        else ("f32", "f16")
        if a_kind != "bf16" and a_kind != "tf32"
        else ("f32",)
    ):
        raise code.fail(x, "no such types")
    targets = code.items(x, 0)
    per = 2 if d_kind == "f16" else 1
    if len(targets) != n // 2 // per:
        raise code.fail(x, f"{n // 2 // per} registers for the result were expected")
    writes, olds = (
        [code.write(x, t, "b32") for t in targets],
        [code.read(x, t, "b32") for t in targets],
    )
    from_registers = isinstance(x.operands[1], Vec)
    left = (
        [code.read(x, o, "b32") for o in code.items(x, 1)]
        if from_registers
        else code.read(x, 1, "b64")
    )
    right, accumulate = code.read(x, 2, "b64"), code.read(x, 3, "pred")
    rest = [o.value for o in x.operands[4:]]
    signs = (1, 1) if integer else tuple(rest[:2])
    transposes = rest[2:] if not integer else []
    if set(signs) - {1, -1} or len(transposes) != (
        (1 if from_registers else 2) if _SIZES[a_kind] == 2 else 0
    ):
        raise code.fail(
            x,
            "scales are 1 or -1; types of 16 bits, and only they, say which operands are"
            " transposed",
        )
    a_major = not (transposes[0] if not from_registers and transposes else 0)
    b_major = not (transposes[-1] if transposes else 0)
    rows, columns = matrix.fragment_c(16)
    work = np.int64 if integer else np.float64
    e = matrix.PER_REGISTER[a_kind]
    a_rows, a_columns = matrix.fragment_a(16, k, e)

    def run(frame):
        count = len(frame) // 128
        if not len(frame.run_of_warps()) or (frame.tid[::128] % 128).any():
            raise Fault("not all threads of the warpgroup are here")
        leaders = frame.select(frame.tid % 128 == 0, ())
        units: list[list[np.ndarray]] = [[] for _ in range(count)]
        b = _matrices(frame, leaders, right(frame), n, k, b_kind, b_major, units)
        if from_registers:
            raw = matrix.elements(matrix.gather(frame, left), a_kind)
            a = np.zeros((4 * count, 16, k), work)
            a[:, a_rows, a_columns] = raw
            a = a.reshape(count, 64, k)
        else:
            a = _matrices(frame, leaders, left(frame), 64, k, a_kind, a_major, units)
        product = (signs[0] * signs[1]) * (a @ b.swapaxes(1, 2))
        old = matrix.accumulators(matrix.gather(frame, olds), d_kind)  # [warp, lane, element]
        keep = frame.spread(accumulate(frame))[:, None].reshape(4 * count, 32, 1)
        # [warp, 8 columns, row, column]
        tiles = product.reshape(4 * count, 16, n // 8, 8).swapaxes(1, 2)
        # lanes, then 8 columns at a time
        new = tiles[:, :, rows, columns].swapaxes(1, 2).reshape(4 * count, 32, n // 2)
        with np.errstate(all="ignore"):
            total = np.where(keep, new + old.astype(work), new)
        matrix.store(frame, matrix.result(total, d_kind, "satfinite" in x.modifiers), writes)
        queue = queue_of(frame, "wgmma")
        place = np.empty(count, object)
        for i, u in enumerate(units):
            place[i] = np.concatenate(u)
        queue.pending.append(Copies(leaders, queue.committed[leaders.threads], place, 0, None))

    return run


def _matrices(
    frame,
    leaders,
    descriptors,
    rows: int,
    k: int,
    kind: str,
    k_major: bool,
    units: list,
) -> np.ndarray:
    """[warpgroup, row, k] of the matrices that the warpgroups' descriptors name; also starts their
    reads."""
    descriptors = frame.spread(descriptors)
    if (descriptors.reshape(-1, 128) != descriptors[::128, None]).any():
        raise Fault("the threads of a warpgroup give different descriptors")
    shared, races, size = frame.run.shared, frame.run.races, _SIZES[kind]
    result = np.zeros((len(leaders), rows, k), np.int64 if kind in ("s8", "u8") else np.float64)
    first = descriptors[::128]
    for d in np.unique(first):
        mine = np.flatnonzero(first == d)
        at = addresses(int(d), rows, k, size, k_major)
        if at.min() < shared.first or at.max() + size > shared.first + shared.nbytes:
            raise Fault(
                f"a matrix reaches outside of shared memory: addresses {at.min():#x} to"
                f" {at.max() + size:#x} of {shared.first:#x} to {shared.first + shared.nbytes:#x}",
                mine,
            )
        base = leaders.group[mine] * shared.stride - shared.first
        raw = shared.bytes.views[size][(at[None] + base[:, None, None]) // size]
        words = (
            np.ascontiguousarray(raw) if size == 4 else np.ascontiguousarray(raw).view(np.uint32)
        )
        result[mine] = matrix.elements(words, kind)
        touched = np.unique(at // races.unit * races.unit)
        which = np.zeros(len(leaders), bool)
        which[mine] = True
        all_units = (touched[None] + base[:, None]) // races.unit
        races.start_read(leaders.select(which, ()), all_units)
        for i, u in zip(mine, all_units, strict=True):
            units[i].append(u)
    return result


def _meet(code: Code, x: Instruction):
    return together(None, 128)(code, x)


RENDEZVOUS["wgmma"] = _meet
