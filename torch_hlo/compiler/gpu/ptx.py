"""PTX instructions that LLVM's text has no operation for, as functions of a Writer: asynchronous
copies, matrix fragments, matrix units.

Each is one line of inline assembly, spelled as in NVIDIA's PTX ISA
(https://docs.nvidia.com/cuda/parallel-thread-execution); sections are named below. Addresses of
shared memory are i32 values (`shared_address`), those of global memory pointers."""

from collections.abc import Sequence

from torch_hlo.frozen import frozen

from ..llvm import Function, Int
from .words import Words

# LLVM type -> constraint
_REGISTER = {
    "i16": "h",
    "i32": "r",
    "i64": "l",
    "ptr": "l",
    "float": "f",
    "double": "d",
}


def assembly(
    f: Function,
    text: str,
    results: Sequence[str] = (),
    operands: Sequence[tuple[str, object]] = (),
    effect: bool = True,
    changed: Sequence[str] = (),
) -> list[str]:
    """Emit `text`, in which $0… are results (of LLVM types `results`), then what the first of those
    are before (`changed`), then `operands`, (type, value) pairs. `effect`: it does more than give
    its results, so that its place among memory accesses matters."""
    constraints = (
        [f"={_REGISTER[kind]}" for kind in results]
        + [str(i) for i in range(len(changed))]
        + [_REGISTER[kind] for kind, _ in operands]
        + ["~{memory}"] * effect
    )
    kind = (
        "void"
        if not results
        else results[0]
        if len(results) == 1
        else f"{{ {', '.join(results)} }}"
    )
    arguments = ", ".join(f"{k} {v}" for k, v in (*zip(results, changed), *operands))
    call = (
        f'call {kind} asm {"sideeffect " if effect else ""}"{text}",'
        f' "{",".join(constraints)}"({arguments})'
    )
    if not results:
        f.do(call)
        return []
    value = f.op(call)
    return (
        [value]
        if len(results) == 1
        else [f.op(f"extractvalue {kind} {value}, {i}") for i in range(len(results))]
    )


def shared_address(f: Function) -> str:
    """i32 address of the kernel's variable @SELF.shared inside the group's shared memory."""
    return f.op("ptrtoint ptr @SELF.shared to i32")


# -- asynchronous copies (cp.async)
COPY_WIDTHS = (16, 8, 4)  # bytes of one cp.async


def copy_async(f: Function, width: int, to: Int, source: str, nbytes: Int) -> None:
    """`width` bytes from global to shared memory, of which those from `nbytes` (an i32) on are
    zeros and not read. Both sides are aligned to `width`. 16 bytes go past the first-level
    cache."""
    cached = "cg" if width == 16 else "ca"
    assembly(
        f,
        f"cp.async.{cached}.shared.global [$0], [$1], {width}, $2;",
        (),
        [("i32", to), ("ptr", source), ("i32", nbytes)],
    )


def commit_copies(f: Function) -> None:
    """The copies since the last call become a group."""
    assembly(f, "cp.async.commit_group;")


def wait_copies(f: Function, pending: int) -> None:
    """Wait until at most `pending` of this thread's youngest groups are under way."""
    assembly(f, f"cp.async.wait_group {pending};")


# -- fragments (ldmatrix, prmt)
def load_matrices(f: Function, address: Int, transposed: bool = False) -> list[str]:
    """ldmatrix.x4: four 8 x 8 matrices of 16-bit elements. Lane 8q + r gives the address of row r
    (16 bytes) of matrix q; lane 4g + t gets elements 2t and 2t + 1 of row g of every matrix, or
    with `transposed` of column g, as an i32 per matrix."""
    how = ".trans" if transposed else ""
    return assembly(
        f,
        f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        ["i32"] * 4,
        [("i32", address)],
    )


def load_shared(f: Function, kinds: Sequence[str], address: Int) -> list[str]:
    """Consecutive 32-bit words, one, two or four, aligned to their total."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(kinds)]
    names = ", ".join(f"${i}" for i in range(len(kinds)))
    where = names if len(kinds) == 1 else f"{{{names}}}"
    return assembly(
        f,
        f"ld.shared{vector}.b32 {where}, [${len(kinds)}];",
        kinds,
        [("i32", address)],
    )


def store_shared(f: Function, kind: str, values: Sequence[Int], address: Int) -> None:
    """Consecutive 32-bit words, one, two or four, aligned to their total."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(values)]
    names = ", ".join(f"${i + 1}" for i in range(len(values)))
    assembly(
        f,
        f"st.shared{vector}.b32 [$0], {names if len(values) == 1 else f'{{{names}}}'};",
        (),
        [("i32", address), *((kind, v) for v in values)],
    )


def permute_bytes(f: Function, a: str, b: str, selector: int) -> str:
    """prmt: hexadecimal digit i of `selector` says which byte of b:a (0 … 7, a's first) becomes
    byte i."""
    return assembly(
        f,
        f"prmt.b32 $0, $1, $2, {selector:#x};",
        ["i32"],
        [("i32", a), ("i32", b)],
        effect=False,
    )[0]


def meet_warp(f: Function) -> None:
    """All lanes of the warp see each other's shared memory."""
    assembly(f, "bar.warp.sync 0xffffffff;")


# -- matrix units (mma.sync)
@frozen
class MatrixUnit:
    """mma.sync.m16n8k(32 bytes) on operands of one HLO type. `name`: PTX type; `itemsize`: bytes;
    `accumulator`: LLVM type of the four sums;
    `oldest`: compute capability from which on there is one.

    Lane 4g + t holds, with `each` = 4 / itemsize elements per i32 register: of A (16 x k) rows g, g
    + 8 at k = each * t …, then the same rows half of k later; of B (k x 8) column g at the same two
    k; of C and D (16 x 8) row g columns 2t, 2t + 1, then row g + 8. PTX ISA, "Matrix Fragments for
    mma.m16n8k*".
    """

    name: str
    itemsize: int
    accumulator: str = "float"
    oldest: int = 80

    @property
    def k(self) -> int:
        """Depth of one instruction."""
        return 32 // self.itemsize


MATRIX_UNITS: dict[str, MatrixUnit] = {
    "bf16": MatrixUnit("bf16", 2),
    "f16": MatrixUnit("f16", 2),
    "tf32": MatrixUnit("tf32", 4),
    "s8": MatrixUnit("s8", 1, "i32"),
    "u8": MatrixUnit("u8", 1, "i32"),
    "f8e4m3fn": MatrixUnit("e4m3", 1, oldest=89),
    "f8e5m2": MatrixUnit("e5m2", 1, oldest=89),
}


def matrix_multiply(
    f: Function,
    a: MatrixUnit,
    b: MatrixUnit,
    left: Sequence[str],
    right: Sequence[str],
    sums: Sequence[str],
) -> list[str]:
    """mma.sync: D = A B + C on fragments: `left` four, `right` two registers, `sums` and the result
    four. `a` and `b` have one itemsize; 16-bit and tf32 operands one type."""
    kind = a.accumulator
    out = "s32" if a.accumulator == "i32" else "f32"
    text = (
        f"mma.sync.aligned.m16n8k{a.k}.row.col.{out}.{a.name}.{b.name}.{out} "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return assembly(
        f,
        text,
        [kind] * 4,
        [*(("i32", v) for v in (*left, *right)), *((kind, v) for v in sums)],
        effect=False,
    )


# -- Hopper's matrix units (wgmma)
WARPGROUP, WARPGROUP_ROWS = (
    4,
    64,
)  # warps that issue together; rows of C of one instruction


def fence_shared_for_units(f: Function) -> None:
    """What this thread wrote to shared memory, its asynchronous copies too, is seen by wgmma after
    the next barrier."""
    assembly(f, "fence.proxy.async.shared::cta;")


def matrix_descriptor(w: Words, address: Int, along_k: bool, slab: int) -> str:
    """i64 descriptor of an operand in shared memory in lines of 128 bytes with the 128-byte
    swizzle; blocks of eight lines start at multiples of 1024 bytes. `slab`: bytes between groups of
    128 bytes along the rows, when those are contiguous. PTX ISA, "Matrix Descriptor Format"."""
    f = w.f
    start = w.wide(w.div(w.mask(address, 0x3FFFF), 16))
    leading = 1 if along_k else slab >> 4
    return f.op(f"or i64 {start}, {leading << 16 | 1024 >> 4 << 32 | 1 << 62}")


def warpgroup_multiply(
    f: Function,
    a: MatrixUnit,
    b: MatrixUnit,
    n: int,
    steps: Sequence[tuple[str, str]],
    rows: tuple[bool, bool],
    sums: Sequence[str],
) -> list[str]:
    """wgmma.mma_async: C (64 x n) += A B for each (descriptor of A, of B) in `steps`, as one group.
    `rows`: the operands are contiguous along rows (16-bit types only). The results are not to be
    touched before `wait_units`. Warp i of the four holds rows 16 i …, of every eight columns the
    sums of mma.sync."""
    count = len(sums)
    kind = a.accumulator
    out = "s32" if a.accumulator == "i32" else "f32"
    registers = ", ".join(f"${i}" for i in range(count))
    scale = "" if kind == "i32" else ", 1, 1"
    order = f", {int(rows[0])}, {int(rows[1])}" if a.itemsize == 2 else ""
    lines = ["{ .reg .pred on; setp.eq.u32 on, 0, 0; wgmma.fence.sync.aligned;"]
    for i in range(len(steps)):
        at = 2 * count + 2 * i  # after the results and the sums, which are the same registers
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{a.k}.{out}.{a.name}.{b.name} {{{registers}}},"
            f" ${at}, ${at + 1}, on{scale}{order};"
        )
    lines.append("wgmma.commit_group.sync.aligned; }")
    descriptors = [("i64", d) for pair in steps for d in pair]
    return assembly(f, " ".join(lines), [kind] * count, descriptors, changed=sums)


def wait_units(f: Function, pending: int) -> None:
    """Wait until at most `pending` of the youngest groups of this warpgroup are under way."""
    assembly(f, f"wgmma.wait_group.sync.aligned {pending};")


# -- Hopper's copy engine (cp.async.bulk.tensor) and the barriers it arrives at (mbarrier)
def initialize_barrier(f: Function, address: Int) -> None:
    """A barrier (8 bytes of shared memory) whose phases end when one arrival and all bytes
    expected have come. One thread; then `fence_barriers` and a barrier of the group."""
    assembly(f, "mbarrier.init.shared::cta.b64 [$0], 1;", (), [("i32", address)])


def fence_barriers(f: Function) -> None:
    """The copy engine sees the barriers initialized before."""
    assembly(f, "fence.mbarrier_init.release.cluster;")


def expect_bytes(f: Function, barrier: Int, nbytes: int) -> None:
    """Arrive at a barrier whose phase also waits for so many bytes."""
    assembly(
        f,
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {nbytes};",
        (),
        [("i32", barrier)],
    )


def wait_barrier(f: Function, barrier: Int, parity: Int) -> None:
    """Until the phase with this parity (0 for the first) has ended: what was copied for it is
    seen."""
    again = f.label("wait")
    done = f.label("arrived")
    f.jump(again)
    f.start(again)
    text = (
        "{ .reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [$1], $2; selp.b32 $0,"
        " 1, 0, over; }"
    )
    (over,) = assembly(f, text, ["i32"], [("i32", barrier), ("i32", parity)])
    f.branch(f.icmp("ne", over, 0, "i32"), done, again)
    f.start(done)


def copy_tensor(
    f: Function, to: Int, tensor_map: str, coordinates: Sequence[Int], barrier: Int
) -> None:
    """The box of an array (program.TensorMap) at `coordinates` (i32, innermost first) to shared
    memory; its bytes arrive at `barrier`. One thread."""
    n = len(coordinates)
    place = ", ".join(f"${i + 2}" for i in range(n))
    text = (
        f"cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0],"
        f" [$1, {{{place}}}], [${n + 2}];"
    )
    assembly(
        f,
        text,
        (),
        [
            ("i32", to),
            ("ptr", tensor_map),
            *(("i32", c) for c in coordinates),
            ("i32", barrier),
        ],
    )
