"""Data movement, calls and atomics (PTX ISA, sections 9.7.9, 9.7.12, 9.7.13)."""

from __future__ import annotations

import numpy as np

from test.ptx import floats
from test.ptx.memory import LOCAL_WINDOW, SHARED_WINDOW, Fault
from test.ptx.syntax import SIZES, Instruction, Mem, Sym, Vec
from test.ptx.table import NUMPY, UNSIGNED, Code, Run, bits, instruction

_HINTS = frozenset(
    """volatile relaxed acquire release weak mmio cta cluster gpu sys ca cg cs lu cv wb wt nc L1::evict_normal L1::evict_unchanged L1::evict_first
L1::evict_last L1::no_allocate L2::cache_hint L2::64B L2::128B L2::256B L2::evict_first L2::evict_last L2::evict_normal unified uni""".split()
)
_SPACES = {
    "global": "global", "const": "const", "shared": "shared", "shared::cta": "shared",
    "shared::cluster": "shared", "local": "local", "param": "param", "param::entry": "param",
    "param::func": "param",
}  # fmt: skip
# section 8.5: accesses that may meet others
_STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "mmio"})
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def parts(code: Code, x: Instruction) -> tuple[str, str, int]:
    """(space or "", type, elements) of a load or store."""
    space, kind, count = "", "", 1
    for m in x.modifiers:
        if m in _SPACES:
            space = _SPACES[m]
        elif m in _VECTORS:
            count = _VECTORS[m]
        elif m in SIZES:
            kind = m
        elif m not in _HINTS:
            raise code.fail(x, f".{m} of {x.opcode} is not evaluated")
    return space, kind, count


def space_of(address) -> str:
    """The space of generic addresses, which must all be in one."""
    found = {
        ("global", "shared", "local", "local")[int(v)]
        for v in np.unique(np.atleast_1d(address >> 48) & 3)
    }
    if len(found) > 1:
        raise Fault(f"generic addresses of {' and '.join(sorted(found))} memory in one instruction")
    return found.pop()


def locate(frame, space: str, address):
    """(memory, address in it) of a generic address, or of one in a space."""
    if space:
        return frame.run.spaces[space], address
    space = space_of(address)
    return (
        frame.run.spaces[space],
        address
        - {
            "global": 0,
            "shared": SHARED_WINDOW,
            "local": LOCAL_WINDOW,
        }[space],
    )


@instruction("ld", "ldu")
def load(code: Code, x: Instruction) -> Run:
    space, kind, count = parts(code, x)
    targets = code.items(x, 0)
    if len(targets) != count:
        raise code.fail(x, f"{count} registers were expected")
    writes = [code.write(x, t, "b16" if kind == "bf16" else kind) for t in targets]
    size, dtype = SIZES[kind], NUMPY[kind]
    if space == "param":
        return _load_parameter(code, x, writes, kind)
    address = code.address(x, 1)
    plain = not _STRONG & set(x.modifiers) and space != "const"

    def run(frame):
        at = address(frame)
        if not np.ndim(at) and space not in ("global", "const"):
            at = np.full(len(frame), at)
        memory, at = locate(frame, space, at)
        options = {"watch": True} if plain and memory is frame.run.memory else {}
        for write, value in zip(
            writes, memory.load(frame, at, size, count, **options), strict=True
        ):
            write(frame, value.view(dtype))

    return run


def _load_parameter(code: Code, x: Instruction, writes, kind: str) -> Run:
    base = x.operands[1]
    if not isinstance(base, Mem) or not isinstance(base.base, Sym):
        raise code.fail(x, "a parameter's name was expected")
    name, first, size = base.base.name, base.offset, SIZES[kind]
    mine = any(p.name == name for p in code.function.params) and code.function.entry
    dtype = NUMPY[kind]

    def run(frame):
        whole = frame.run.parameters[name] if mine else frame.registers[name]
        for i, write in enumerate(writes):
            piece = whole[..., first + i * size : first + (i + 1) * size]
            if piece.shape[-1] != size:
                raise Fault(f"parameter {name} has {whole.shape[-1]} bytes")
            write(frame, np.ascontiguousarray(piece).view(dtype)[..., 0])

    return run


@instruction("st")
def store(code: Code, x: Instruction) -> Run:
    space, kind, count = parts(code, x)
    sources = code.items(x, 1)
    if len(sources) != count:
        raise code.fail(x, f"{count} registers were expected")
    reads = [code.read(x, s, "b16" if kind == "bf16" else kind) for s in sources]
    size = SIZES[kind]
    if space == "param":
        return _store_parameter(code, x, reads, size)
    address = code.address(x, 0)
    plain = not _STRONG & set(x.modifiers)

    def run(frame):
        at = frame.spread(address(frame))
        memory, at = locate(frame, space, at)
        options = {"watch": True} if plain and memory is frame.run.memory else {}
        memory.store(frame, at, [frame.spread(bits(r(frame))) for r in reads], size, **options)

    return run


def _store_parameter(code: Code, x: Instruction, reads, size: int) -> Run:
    base = x.operands[0]
    if not isinstance(base, Mem) or not isinstance(base.base, Sym):
        raise code.fail(x, "a parameter's name was expected")
    name, first = base.base.name, base.offset
    results = {v.name: v.nbytes for v in code.function.results}
    nbytes = results.get(name) or code.function.variables[name].nbytes

    def run(frame):
        old = frame.registers.get(name)
        whole = np.zeros((len(frame), nbytes), np.uint8) if old is None else old.copy()
        for i, read in enumerate(reads):
            value = np.ascontiguousarray(frame.spread(bits(read(frame))))
            whole[:, first + i * size : first + (i + 1) * size] = value[:, None].view(np.uint8)
        frame.registers[name] = whole

    return run


@instruction("call")
def call(code: Code, x: Instruction) -> Run:
    """Section 9.7.12.5. Arguments and results are .param variables of the caller."""
    operands = list(x.operands)
    results = [o.name for o in operands.pop(0).items] if isinstance(operands[0], Vec) else []
    name = operands.pop(0).name
    arguments = [o.name for o in operands.pop(0).items] if operands else []
    function = code.module.functions.get(name)
    if function is None or not function.body:
        raise code.fail(
            x,
            f"there is no function {name}" if name != "vprintf" else "vprintf is not evaluated",
        )
    if len(arguments) != len(function.params) or len(results) != len(function.results):
        raise code.fail(x, "the number of arguments is not the function's")

    def run(frame):
        inner = frame.callee(
            {p.name: frame.registers[a] for p, a in zip(function.params, arguments, strict=True)}
        )
        done = frame.run.image.routine(name).execute(inner)
        if done is None or len(done) != len(frame):
            raise Fault(f"{name} did not return in all threads")
        for r, p in zip(results, function.results, strict=True):
            frame.registers[r] = done.registers[p.name]

    return run


@instruction("mov")
def move(code: Code, x: Instruction) -> Run:
    """Also packs `{a, b}` into a wider register, low parts first, and unpacks it (section
    9.7.9.4)."""
    (kind,) = code.modifiers(x, tuple(SIZES))
    target, source = x.operands
    if isinstance(source, Vec) and isinstance(target, Vec):
        raise code.fail(x, "not a move")
    if isinstance(source, Vec):
        count = len(source.items)
        part = f"b{8 * SIZES[kind] // count}"
        reads, write, dtype, width = (
            [code.read(x, s, part) for s in source.items],
            code.write(x, target, kind),
            UNSIGNED[SIZES[kind]],
            8 * SIZES[kind] // count,
        )

        def pack(frame):
            value = dtype.type(0)
            for i, r in enumerate(reads):
                value = value | r(frame).astype(dtype) << dtype.type(i * width)
            write(frame, value)

        return pack
    if isinstance(target, Vec):
        count = len(target.items)
        part = f"b{8 * SIZES[kind] // count}"
        read, writes, width, dtype = (
            code.read(x, source, kind),
            [code.write(x, t, part) for t in target.items],
            8 * SIZES[kind] // count,
            NUMPY[part],
        )

        def unpack(frame):
            value = bits(read(frame))
            for i, w in enumerate(writes):
                w(frame, (value >> value.dtype.type(i * width)).astype(dtype))

        return unpack
    read, write = code.read(x, source, kind), code.write(x, target, kind)
    return lambda frame: write(frame, read(frame))


_WINDOWS = {
    "global": 0,
    "const": 0,
    "param": 0,
    "shared": SHARED_WINDOW,
    "shared::cta": SHARED_WINDOW,
    "shared::cluster": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
}


@instruction("cvta")
def to_generic(code: Code, x: Instruction) -> Run:
    to, space, kind = code.modifiers(x, "to", tuple(_WINDOWS), ("u64", "u32"))
    if kind != "u64":
        raise code.fail(x, "32-bit addresses are not evaluated")
    window = np.uint64(_WINDOWS[space])
    read, write = code.read(x, 1, kind), code.write(x, 0, kind)
    return (
        (lambda frame: write(frame, read(frame) - window))
        if to
        else lambda frame: write(frame, read(frame) + window)
    )


@instruction("isspacep")
def is_space(code: Code, x: Instruction) -> Run:
    (space,) = code.modifiers(x, tuple(_WINDOWS))
    read, write = code.read(x, 1, "u64"), code.write(x, 0, "pred")
    window = np.uint64(_WINDOWS[space] >> 48)
    return lambda frame: write(frame, read(frame) >> np.uint64(48) == window)


@instruction("mapa")
def map_rank(code: Code, x: Instruction) -> Run:
    """The same variable in another group of the cluster; clusters have one group here, so only rank
    0 is there."""
    code.modifiers(x, ("shared::cluster", "shared"), ("u32", "u64"))
    kind = x.modifiers[-1]
    read, rank, write = (
        code.read(x, 1, kind),
        code.read(x, 2, "u32"),
        code.write(x, 0, kind),
    )

    def run(frame):
        if np.any(rank(frame) != 0):
            raise Fault("clusters of more than one group are not evaluated")
        write(frame, read(frame))

    return run


@instruction(
    "prefetch",
    "prefetchu",
    "nanosleep",
    "membar",
    "fence",
    "discard",
    "applypriority",
    "pmevent",
    "createpolicy",
    "griddepcontrol",
    "setmaxnreg",
)
def nothing(code: Code, x: Instruction) -> Run | None:
    """Hints, and orderings that one instruction at a time gives anyway."""
    if (
        x.opcode == "fence"
        and "proxy" in x.modifiers
        and any(m.startswith("async") for m in x.modifiers)
    ):
        return lambda frame: frame.run.races.fence(*frame.warps())
    if x.opcode == "createpolicy":
        write = code.write(x, 0, "b64")
        return lambda frame: write(frame, np.uint64(0))
    return None


@instruction("trap", "brkpt")
def trap(code: Code, x: Instruction) -> Run:
    def run(frame):
        raise Fault("the kernel traps", np.arange(len(frame)))

    return run


# -- atomics
# -------------------------------------------------------------------------------------------------------------------
def _wrapping(up: bool):
    def count(old, limit):
        if up:
            return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))
        return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))

    return count


_ATOMIC = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda a, b: b,
    "inc": _wrapping(True), "dec": _wrapping(False), "cas": lambda old, expected, new: np.where(old == expected, new, old),
}  # fmt: skip


@instruction("atom", "red")
def atomic(code: Code, x: Instruction) -> Run:
    """Sections 9.7.13.5 and 9.7.13.6. Threads that meet at one address go one after another, by
    their numbers."""
    space, kind, operation, count = "", "", "", 1
    for m in x.modifiers:
        if m in _SPACES:
            space = _SPACES[m]
        elif m in _ATOMIC:
            operation = m
        elif m in SIZES:
            kind = m
        elif m in _VECTORS:
            count = _VECTORS[m]
        elif m not in _HINTS and m not in ("noftz", "acq_rel", "async"):
            raise code.fail(x, f".{m} of {x.opcode} is not evaluated")
    if not operation or count > 1 or kind == "b128":
        raise code.fail(x, "this atomic operation is not evaluated")
    at = 1 if x.opcode == "atom" else 0
    address = code.address(x, at)
    paired = kind in ("f16x2", "bf16x2", "bf16", "f16")
    reads = [
        floats.decoded(code, x, i, kind) if paired else code.read(x, i, kind)
        for i in range(at + 1, len(x.operands))
    ]
    write = code.write(x, 0, kind if kind != "bf16" else "b16") if x.opcode == "atom" else None
    operate, size, dtype = _ATOMIC[operation], SIZES[kind], NUMPY[kind]
    widen = {
        "bf16": floats.from_bf16,
        "f16x2": lambda v: floats.pairs(v).view(np.float16),
        "bf16x2": lambda v: floats.from_bf16(floats.pairs(v)),
    }.get(kind, lambda v: v.view(dtype))
    narrow = {
        "bf16": floats.to_bf16,
        "f16x2": lambda v: floats.joined(v.astype(np.float16).view(np.uint16)),
        "bf16x2": lambda v: floats.joined(floats.to_bf16(v)),
    }.get(kind, lambda v: np.ascontiguousarray(v.astype(dtype)).view(UNSIGNED[size]))

    def run(frame):
        memory, where = locate(frame, space, frame.spread(address(frame)))
        values = [
            (
                np.broadcast_to(v, (len(frame), *np.shape(v)))
                if np.ndim(v) < 1 + kind.endswith("x2")
                else v
            )
            for v in (r(frame) for r in reads)
        ]
        owners = memory.owner(frame) if hasattr(memory, "owner") else 0
        key = np.asarray(where + owners * (1 << 32))
        old = np.zeros(len(frame), UNSIGNED[size])
        rest = np.arange(len(frame))
        while len(rest):  # each round takes the first thread of every address
            _, first = np.unique(key[rest], return_index=True)
            now = rest[np.sort(first)]
            part = frame.select(now, ()) if len(now) < len(frame) else frame
            (before,) = memory.load(part, where[now], size, 1)
            old[now] = before
            memory.store(
                part,
                where[now],
                [narrow(operate(widen(before), *[v[now] for v in values]))],
                size,
            )
            rest = np.setdiff1d(rest, now)
        if write is not None:
            write(frame, old.view(dtype))

    return run
