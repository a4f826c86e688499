"""C functions that compiled code calls, written in IR: a library brings its own, so that it needs none of libc or libm."""
from __future__ import annotations

from collections.abc import Iterable

from torch_hlo.compiler.aot import libm
from torch_hlo.compiler.codegen.target import Target

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def permission(target: Target, functions: dict[str, str]) -> tuple[str, ...]:
    """IR giving %permission when the program has to ask for something: Linux lets a process use AMX tiles on request."""
    if not any("llvm.x86.tileload" in text for text in functions.values()):
        return ()
    return (
        f'%refused = call i64 asm sideeffect "syscall", "={{rax}},{{rax}},{{rdi}},{{rsi}},~{{rcx}},~{{r11}},~{{memory}}"'
        f"(i64 {_ARCH_PRCTL}, i64 {_REQUEST_PERMISSION}, i64 {_TILE_DATA})",
        "%permission = icmp eq i64 %refused, 0",
    )


def definitions(names: Iterable[str], target: Target) -> str:
    """Functions for the C symbols in `names` that have a routine, for what these call, and for what LLVM calls unasked."""
    pending = [n for n in names if n in libm.ROUTINES]
    found: dict[str, str] = {}
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = libm.ROUTINES[name](target)
            pending += libm.NEEDS[name]
    size, widen = ("i32", "zext i32 %size to i64") if target.arch == "wasm32" else ("i64", "add i64 %size, 0")
    memory = _MEMORY
    for word, text in (("VECTOR", f"<{target.vector_bytes} x i8>"), ("WIDTH", str(target.vector_bytes)), ("SIZE", size), ("WIDEN", widen)):
        memory = memory.replace(word, text)
    return "\n".join([memory, *found.values()])


# Intrinsics that are instructions on x86 and AArch64, and calls elsewhere.
_CALLED = {"llvm.round.": ("round", "roundf"), "llvm.maxnum.": ("fmax", "fmaxf"), "llvm.minnum.": ("fmin", "fminf")}


def called_for(texts: Iterable[str], target: Target) -> list[str]:
    """C functions that LLVM calls for the intrinsics in `texts`."""
    if target.arch != "wasm32":
        return []
    return [name for intrinsic, names in _CALLED.items() if any(intrinsic in text for text in texts) for name in names]


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
