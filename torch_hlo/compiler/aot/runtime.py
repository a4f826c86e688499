"""C functions that compiled code calls, written in IR: a library brings its own, so that it needs
none of libc or libm."""

import platform
from collections.abc import Iterable, Sequence

from ..llvm import CpuTarget, libm

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18
# LLVM's name -> (leaf, subleaf, register, bit) of cpuid (Intel SDM, volume 2A); features that every
# x86-64 processor has are left out.
X86_FEATURES = {
    "sse3": (1, 0, "c", 0), "ssse3": (1, 0, "c", 9), "fma": (1, 0, "c", 12),
    "sse4.1": (1, 0, "c", 19), "sse4.2": (1, 0, "c", 20), "movbe": (1, 0, "c", 22),
    "popcnt": (1, 0, "c", 23), "avx": (1, 0, "c", 28), "f16c": (1, 0, "c", 29),
    "bmi": (7, 0, "b", 3), "avx2": (7, 0, "b", 5), "bmi2": (7, 0, "b", 8),
    "avx512f": (7, 0, "b", 16), "avx512dq": (7, 0, "b", 17), "avx512cd": (7, 0, "b", 28),
    "avx512bw": (7, 0, "b", 30), "avx512vl": (7, 0, "b", 31), "avx512vnni": (7, 0, "c", 11),
    "avx512fp16": (7, 0, "d", 23), "amx-bf16": (7, 0, "d", 22), "amx-tile": (7, 0, "d", 24),
    "amx-int8": (7, 0, "d", 25), "avx512bf16": (7, 1, "a", 5), "lzcnt": (0x80000001, 0, "c", 5),
}  # fmt: skip
_REGISTERS = "abcd"
# Bits of XCR0: what the operating system saves of the registers.
_STATES = (("avx", 0x6), ("avx512f", 0xE6), ("amx-tile", 0x60000))
# For code that runs before it is known what the processor has.
PLAIN_X86 = (
    'attributes #2 = { nounwind "target-cpu"="x86-64"'
    ' "target-features"="+cx8,+fxsr,+mmx,+sse,+sse2" }\n'
)


def needed(target: CpuTarget, functions: dict[str, str]) -> list[str]:
    """Processor features that code for `target` relies on and whose presence can be asked for. Only
    programs with tiles need tiles."""
    # LLVM reads assembly of its own machine only
    if target.arch != "x86_64" or platform.machine() not in ("x86_64", "AMD64"):
        return []
    tiles = any("llvm.x86.tileload" in text for text in functions.values())
    return [f for f in X86_FEATURES if target.has(f) and (tiles or not f.startswith("amx"))]


class _Checks:
    """Instructions that look whether this machine has features. `last`: an i1, whether it has all
    so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0
        self.last = "true"

    def op(self, expression: str) -> str:
        self.count += 1
        self.lines.append(f"  %t{self.count} = {expression}")
        return f"%t{self.count}"

    def go_on(self, label: str) -> None:
        """To `label` when the machine has what was asked for."""
        self.lines += [
            f"  br i1 {self.last}, label %{label}, label %no",
            f"{label}:",
        ]

    def processor(self, features: Sequence[str]) -> None:
        masks: dict[tuple[int, int], dict[str, int]] = {}
        for f in features:
            leaf, subleaf, register, bit = X86_FEATURES[f]
            masks.setdefault((leaf, subleaf), {}).setdefault(register, 0)
            masks[leaf, subleaf][register] |= 1 << bit
        op = self.op
        for (leaf, subleaf), registers in masks.items():
            all_four = op(
                'call {i32, i32, i32, i32} asm sideeffect "cpuid",'
                ' "={ax},={bx},={cx},={dx},{ax},{cx},~{dirflag},~{fpsr},~{flags}"(i32'
                f" {leaf - (1 << 32) if leaf >> 31 else leaf}, i32 {subleaf})"
            )
            for register, mask in registers.items():
                value = op(
                    f"extractvalue {{i32, i32, i32, i32}} {all_four}, {_REGISTERS.index(register)}"
                )
                mask -= (mask >> 31) << 32
                present = op(f"and i32 {value}, {mask}")
                self.last = op(f"and i1 {self.last}, {op(f'icmp eq i32 {present}, {mask}')}")

    def system(self, features: Sequence[str]) -> None:
        """Whether the system saves the registers, and lets this process use tiles."""
        op = self.op
        states = 0
        for f, bits in _STATES:
            states |= bits if f in features else 0
        if states:
            self.go_on("saved")
            low = op(
                "extractvalue {i32, i32} "
                + op(
                    'call {i32, i32} asm sideeffect "xgetbv",'
                    ' "={ax},={dx},{cx},~{dirflag},~{fpsr},~{flags}"(i32 0)'
                )
                + ", 0"
            )
            self.last = op(f"icmp eq i32 {op(f'and i32 {low}, {states}')}, {states}")
        if "amx-tile" in features:
            self.go_on("ask")
            refused = op(
                'call i64 asm sideeffect "syscall",'
                ' "={rax},{rax},{rdi},{rsi},~{rcx},~{r11},~{memory}"'
                f"(i64 {_ARCH_PRCTL}, i64 {_REQUEST_PERMISSION}, i64 {_TILE_DATA})"
            )
            self.last = op(f"icmp eq i64 {refused}, 0")


def machine_check(features: Sequence[str]) -> str:
    """i1 torch_hlo_machine(): whether processor and system have these features. The answer is kept:
    cpuid is slow in virtual machines.

    Linux lets a process use AMX tiles when it asks for them.
    """
    checks = _Checks()
    checks.processor(features)
    checks.system(features)
    return "\n".join(
        [
            "@torch_hlo_known = internal global i32 0",
            "define internal i1 @torch_hlo_machine() #2 {",
            "  %k = load atomic i32, ptr @torch_hlo_known monotonic, align 4",
            "  %known = icmp ne i32 %k, 0",
            "  br i1 %known, label %yes, label %look",
            "look:",
            *checks.lines,
            f"  br i1 {checks.last}, label %found, label %no",
            "found:",
            "  store atomic i32 1, ptr @torch_hlo_known monotonic, align 4",
            "  br label %yes",
            "yes:",
            "  ret i1 true",
            "no:",
            "  ret i1 false",
            "}",
            "",
        ]
    )


def definitions(names: Iterable[str], target: CpuTarget) -> str:
    """Functions for the C symbols in `names` that have a routine, for what these call, and for what
    LLVM calls unasked."""
    pending = [n for n in names if n in libm.ROUTINES]
    found: dict[str, str] = {}
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = libm.ROUTINES[name](target)
            pending += libm.NEEDS[name]
    size, widen = (
        ("i32", "zext i32 %size to i64") if target.arch == "wasm32" else ("i64", "add i64 %size, 0")
    )
    memory = _MEMORY
    for word, text in (
        ("VECTOR", f"<{target.vector_bytes} x i8>"),
        ("WIDTH", str(target.vector_bytes)),
        ("SIZE", size),
        ("WIDEN", widen),
    ):
        memory = memory.replace(word, text)
    return "\n".join([memory, *found.values()])


# Intrinsics that are instructions on x86 and AArch64, and calls elsewhere.
_CALLED = {
    "llvm.round.": ("round", "roundf"),
    "llvm.maxnum.": ("fmax", "fmaxf"),
    "llvm.minnum.": ("fmin", "fminf"),
}


def called_for(texts: Iterable[str], target: CpuTarget) -> list[str]:
    """C functions that LLVM calls for the intrinsics in `texts`."""
    if target.arch != "wasm32":
        return []
    return [
        name
        for intrinsic, names in _CALLED.items()
        if any(intrinsic in text for text in texts)
        for name in names
    ]


# LLVM makes calls of these from loads, stores and llvm.memcpy. SIZE is C's size_t.
_MEMORY = """
define internal ptr @memcpy(ptr %to, ptr %from, SIZE %size) #0 {
entry:
  %n = WIDEN
  %whole = and i64 %n, -WIDTH
  br label %vectors
vectors:
  %i = phi i64 [0, %entry], [%i1, %vector]
  %more = icmp ult i64 %i, %whole
  br i1 %more, label %vector, label %bytes
vector:
  %p = getelementptr i8, ptr %from, i64 %i
  %q = getelementptr i8, ptr %to, i64 %i
  %v = load VECTOR, ptr %p, align 1
  store VECTOR %v, ptr %q, align 1
  %i1 = add i64 %i, WIDTH
  br label %vectors
bytes:
  %j = phi i64 [%whole, %vectors], [%j1, %byte]
  %rest = icmp ult i64 %j, %n
  br i1 %rest, label %byte, label %out
byte:
  %r = getelementptr i8, ptr %from, i64 %j
  %s = getelementptr i8, ptr %to, i64 %j
  %b = load i8, ptr %r
  store i8 %b, ptr %s
  %j1 = add i64 %j, 1
  br label %bytes
out:
  ret ptr %to
}

define internal ptr @memmove(ptr %to, ptr %from, SIZE %size) #0 {
entry:
  %n = WIDEN
  %t = ptrtoint ptr %to to i64
  %f = ptrtoint ptr %from to i64
  %distance = sub i64 %t, %f
  %apart = icmp uge i64 %distance, %n
  br i1 %apart, label %forwards, label %backwards
forwards:
  %same = call ptr @memcpy(ptr %to, ptr %from, SIZE %size)
  ret ptr %to
backwards:
  %i = phi i64 [%n, %entry], [%i1, %byte]
  %more = icmp ne i64 %i, 0
  br i1 %more, label %byte, label %out
byte:
  %i1 = sub i64 %i, 1
  %p = getelementptr i8, ptr %from, i64 %i1
  %q = getelementptr i8, ptr %to, i64 %i1
  %b = load i8, ptr %p
  store i8 %b, ptr %q
  br label %backwards
out:
  ret ptr %to
}

define internal ptr @memset(ptr %to, i32 %value, SIZE %size) #0 {
entry:
  %n = WIDEN
  %b = trunc i32 %value to i8
  %one = insertelement VECTOR poison, i8 %b, i64 0
  %v = shufflevector VECTOR %one, VECTOR poison, <WIDTH x i32> zeroinitializer
  %whole = and i64 %n, -WIDTH
  br label %vectors
vectors:
  %i = phi i64 [0, %entry], [%i1, %vector]
  %more = icmp ult i64 %i, %whole
  br i1 %more, label %vector, label %bytes
vector:
  %q = getelementptr i8, ptr %to, i64 %i
  store VECTOR %v, ptr %q, align 1
  %i1 = add i64 %i, WIDTH
  br label %vectors
bytes:
  %j = phi i64 [%whole, %vectors], [%j1, %byte]
  %rest = icmp ult i64 %j, %n
  br i1 %rest, label %byte, label %out
byte:
  %s = getelementptr i8, ptr %to, i64 %j
  store i8 %b, ptr %s
  %j1 = add i64 %j, 1
  br label %bytes
out:
  ret ptr %to
}
"""
