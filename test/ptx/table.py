"""THE table: opcode -> how to decode it. Decoding an instruction gives a function of a frame; what
it does not know is an error at load time.

    @instruction("add")
    def add(code: Code, x: Instruction) -> Run: ...

`Code` helps with operands: `code.read(x, 1, "f32")` is a function of the frame that gives operand 1
as float32, `code.write(x, 0, "f32")` a function of (frame, value). A value is an array with an
element per thread of the frame, or a NumPy scalar where all threads agree.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from test.ptx.syntax import (
    SIZES,
    Function,
    Imm,
    Instruction,
    Mem,
    Module,
    Operand,
    PtxError,
    Reg,
    Sym,
    Vec,
)

Run = Callable[["Frame"], None]  # noqa: F821 - evaluate.py
Decode = Callable[["Code", Instruction], Run]
TABLE: dict[str, Decode] = {}
# instructions for which threads wait: (code, x) -> what tells who may go on
RENDEZVOUS: dict[str, Callable] = {}
NUMPY = {
    k: np.dtype(v)
    for k, v in {
        "pred": np.bool_,
        "b8": np.uint8,
        "u8": np.uint8,
        "s8": np.int8,
        "b16": np.uint16,
        "u16": np.uint16,
        "s16": np.int16,
        "f16": np.float16,
        "bf16": np.uint16,
        "b32": np.uint32,
        "u32": np.uint32,
        "s32": np.int32,
        "f32": np.float32,
        "f16x2": np.uint32,
        "bf16x2": np.uint32,
        "b64": np.uint64,
        "u64": np.uint64,
        "s64": np.int64,
        "f64": np.float64,
        "f32x2": np.uint64,
    }.items()
}
UNSIGNED = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
# NaNs, and far from every address
_UNDEFINED = {
    1: np.uint8(0xA5),
    2: np.uint16(0x7FA5),
    4: np.uint32(0x7FA5A5A5),
    8: np.uint64(0x7FFDA5A5A5A5A5A5),
}


def instruction(*opcodes: str) -> Callable[[Decode], Decode]:
    def register(decode: Decode) -> Decode:
        for o in opcodes:
            TABLE[o] = decode
        return decode

    return register


def bits(value):
    """The unsigned integers of the same bits."""
    return value if value.dtype.kind in "ub" else value.view(UNSIGNED[value.dtype.itemsize])


class Code:
    """A function while its instructions are decoded."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module, self.function = module, function

    def fail(self, x: Instruction, message: str) -> PtxError:
        return PtxError(f"{self.function.name}, line {x.line}: {message}: {x.text}")

    def kind(self, name: str) -> str:
        """The declared type of a register."""
        found = self.function.registers.get(name) or self.function.registers.get(
            name.rstrip("0123456789")
        )
        if found is None:
            if name in SPECIAL:
                return SPECIAL[name][0]
            raise PtxError(f"{self.function.name}: register {name} is not declared")
        return found

    def modifiers(self, x: Instruction, *choices: tuple[str, ...] | str) -> tuple[str, ...]:
        """The instruction's modifiers sorted into slots: the one of each group of choices that is
        there, or "". Raises PtxError for others."""
        rest = list(x.modifiers)
        found = []
        for group in choices:
            group = (group,) if isinstance(group, str) else group
            found.append(next((m for m in rest if m in group), ""))
            if found[-1]:
                rest.remove(found[-1])
        if rest:
            raise self.fail(x, f".{rest[0]} of {x.opcode} is not evaluated")
        return tuple(found)

    # -- operands
    # -------------------------------------------------------------------------------------------------
    def read(self, x: Instruction, number: int | Operand, kind: str) -> Callable:
        """An operand (by number, or itself) as values of `kind`; of a wider register the low bits
        (section 9.4.1)."""
        operand = x.operands[number] if isinstance(number, int) else number
        dtype = NUMPY[kind]
        if isinstance(operand, Imm):
            value = _constant(operand, kind)
            return lambda frame: value
        if isinstance(operand, Sym):
            known = {
                *self.function.variables,
                *self.module.variables,
                *(p.name for p in self.function.params if self.function.entry),
            }
            if operand.name not in known:
                raise self.fail(x, f"{operand.name} has no address")
            name, offset = operand.name, operand.offset
            return lambda frame: (
                np.int64(frame.run.addresses[name] + offset)
                .view(np.uint64)
                .astype(UNSIGNED[dtype.itemsize])
                .view(dtype)
            )
        if not isinstance(operand, Reg):
            raise self.fail(x, "an operand of another form was expected")
        name = operand.name
        if name in SPECIAL:
            have, value_of = SPECIAL[name]
            if SIZES[have] == SIZES[kind]:
                return lambda frame: value_of(frame).view(dtype)
            return lambda frame: value_of(frame).astype(UNSIGNED[dtype.itemsize]).view(dtype)
        have = SIZES[self.kind(name)] if self.kind(name) != "pred" else 1
        if (kind == "pred") != (self.kind(name) == "pred") or have < dtype.itemsize:
            raise self.fail(x, f"register {name} of type .{self.kind(name)} is used as .{kind}")
        undefined = np.bool_(True) if kind == "pred" else _UNDEFINED[have]
        if operand.negated:
            return lambda frame: ~frame.registers.get(name, undefined)
        if have == dtype.itemsize:

            def same(frame):
                value = frame.registers.get(name, undefined)
                return value if value.dtype is dtype else value.view(dtype)

            return same
        wide, narrow = UNSIGNED[have], UNSIGNED[dtype.itemsize]
        return lambda frame: (
            frame.registers.get(name, undefined).view(wide).astype(narrow).view(dtype)
        )

    def write(self, x: Instruction, number: int | Operand | None, kind: str) -> Callable:
        """Sets a register; a wider one gets the value extended by its sign, if it has one."""
        operand = x.operands[number] if isinstance(number, int) else number
        if operand is None:
            return lambda frame, value: None
        if not isinstance(operand, Reg):
            raise self.fail(x, "a register was expected")
        name = operand.name
        have = NUMPY[self.kind(name)].itemsize
        if (kind == "pred") != (self.kind(name) == "pred") or have < NUMPY[kind].itemsize:
            raise self.fail(x, f"register {name} of type .{self.kind(name)} is given a .{kind}")
        if have == NUMPY[kind].itemsize:

            def same(frame, value):
                frame.registers[name] = value

            return same
        wide = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{have}")
        own = NUMPY[kind] if kind[0] == "s" else UNSIGNED[NUMPY[kind].itemsize]

        def extended(frame, value):
            frame.registers[name] = value.view(own).astype(wide)

        return extended

    def items(self, x: Instruction, number: int) -> tuple[Operand | None, ...]:
        """The registers of `{…}`, or the operand itself."""
        operand = x.operands[number]
        return operand.items if isinstance(operand, Vec) else (operand,)

    def address(self, x: Instruction, number: int) -> Callable:
        """The address of `[…]`, as int64."""
        operand = x.operands[number]
        if not isinstance(operand, Mem):
            raise self.fail(x, "an address was expected")
        offset = np.int64(operand.offset)
        if isinstance(operand.base, Reg) and SIZES[self.kind(operand.base.name)] == 4:
            base32 = self.read(x, operand.base, "u32")
            return lambda frame: base32(frame).astype(np.int64) + offset
        base = self.read(x, operand.base, "s64")
        return (lambda frame: base(frame) + offset) if offset else base

    # -- which registers
    # ------------------------------------------------------------------------------------------
    def uses(self, x: Instruction) -> set[str]:
        """Every register and parameter that is named."""
        found: set[str] = set()

        def visit(operand) -> None:
            if isinstance(operand, (Reg, Sym)):
                found.add(operand.name)
            elif isinstance(operand, Mem):
                visit(operand.base)
                visit(operand.index)
            elif isinstance(operand, Vec):
                for item in operand.items:
                    visit(item)

        for operand in (*x.operands, x.guard):
            visit(operand)
        return found

    def results(self, x: Instruction) -> set[str]:
        """Registers that it sets in every thread: the first operand's, where that is no address."""
        if (
            x.guard is not None
            or not x.operands
            or x.opcode in _NO_RESULT
            or isinstance(x.operands[0], Mem)
        ):
            return set()
        return {o.name for o in self.items(x, 0) if isinstance(o, Reg)}


_NO_RESULT = frozenset(
    "st red bar barrier bra call ret exit membar fence trap prefetch prefetchu nanosleep cp"
    " mbarrier wgmma setmaxnreg griddepcontrol".split()
)


def _constant(operand: Imm, kind: str):
    dtype = NUMPY[kind]
    if kind == "pred":
        return np.bool_(operand.value)
    if operand.width or isinstance(operand.value, int) and dtype.kind != "f":
        value = operand.value
        if (
            operand.width == 32
            and dtype.itemsize == 8
            and kind == "f64"
            or operand.width == 64
            and dtype.itemsize == 4
        ):
            raise PtxError(f"a constant of {operand.width} bits as .{kind}")
        unsigned = UNSIGNED[dtype.itemsize]
        return unsigned.type(int(value) & (1 << 8 * dtype.itemsize) - 1).view(dtype)
    return dtype.type(operand.value)


# name -> (type, value of a frame). Section 10.
SPECIAL: dict[str, tuple[str, Callable]] = {
    "%tid.x": ("u32", lambda f: f.tid),
    "%ntid.x": ("u32", lambda f: np.uint32(f.run.threads)),
    "%ctaid.x": ("u32", lambda f: f.ctaid),
    "%nctaid.x": ("u32", lambda f: np.uint32(f.run.groups)),
    "%laneid": ("u32", lambda f: f.tid & np.uint32(31)),
    "%warpid": ("u32", lambda f: f.tid >> np.uint32(5)),
    "%nwarpid": ("u32", lambda f: np.uint32(-(-f.run.threads // 32))),
    "%lanemask_eq": ("u32", lambda f: _lane(f)),
    "%lanemask_lt": ("u32", lambda f: _lane(f) - np.uint32(1)),
    "%lanemask_le": ("u32", lambda f: (_lane(f) << np.uint32(1)) - np.uint32(1)),
    "%lanemask_gt": ("u32", lambda f: ~((_lane(f) << np.uint32(1)) - np.uint32(1))),
    "%lanemask_ge": ("u32", lambda f: ~(_lane(f) - np.uint32(1))),
    "%clock": ("u32", lambda f: np.uint32(f.run.steps & 0xFFFFFFFF)),
    "%clock64": ("u64", lambda f: np.uint64(f.run.steps)),
    "%globaltimer": ("u64", lambda f: np.uint64(f.run.steps)),
    "%smid": ("u32", lambda f: np.uint32(0)),
    "%gridid": ("u64", lambda f: np.uint64(0)),
    "%dynamic_smem_size": ("u32", lambda f: np.uint32(f.run.dynamic_bytes)),
    "%total_smem_size": ("u32", lambda f: np.uint32(f.run.shared.nbytes)),
    "%cluster_ctarank": ("u32", lambda f: np.uint32(0)),
    "%cluster_nctarank": ("u32", lambda f: np.uint32(1)),
    "%cluster_ctaid.x": ("u32", lambda f: np.uint32(0)),
    "%cluster_nctaid.x": ("u32", lambda f: np.uint32(1)),
    "%clusterid.x": ("u32", lambda f: f.ctaid),
    "%nclusterid.x": ("u32", lambda f: np.uint32(f.run.groups)),
    **{
        f"%{n}.{d}": ("u32", lambda f: np.uint32(0))
        for n in ("tid", "ctaid", "cluster_ctaid")
        for d in "yz"
    },
    **{
        f"%{n}.{d}": ("u32", lambda f: np.uint32(1))
        for n in ("ntid", "nctaid", "cluster_nctaid")
        for d in "yz"
    },
}


def _lane(frame):
    return np.uint32(1) << (frame.tid & np.uint32(31))
