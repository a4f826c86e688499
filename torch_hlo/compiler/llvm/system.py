"""What native code asks of the processor and the operating system, as LLVM IR: pause, sleep on a
word, wake who sleeps there, the time."""

import platform
import sys

_RELAX = {
    "x86_64": (
        "declare void @llvm.x86.sse2.pause()",
        "call void @llvm.x86.sse2.pause()",
    ),
    "aarch64": (
        "declare void @llvm.aarch64.hint(i32)",
        "call void @llvm.aarch64.hint(i32 1)",
    ),
}
_FUTEX = {"x86_64": 202, "aarch64": 98}  # system call numbers on Linux

_WAITING = """
{declarations}

; some cycles, for loops that look at a word
define internal void @relax() alwaysinline {{
  {relax}
  ret void
}}

; sleep while the word is %seen, at most as long as the timespec %timeout (or null); may return
; early
define internal void @sleep(ptr %word, i32 %seen, ptr %timeout) {{
  {sleep}
  ret void
}}

define internal void @wake(ptr %word) {{
  {wake}
  ret void
}}
"""

PROCESSORS = (
    """declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
; the processor that this thread is on
define internal i32 @processor() {
  %n = call i32 @sched_getcpu()
  ret i32 %n
}

; go to another processor if there is one; the thread may be anywhere afterwards as before
define internal void @move_away() {
  %mask = alloca [128 x i8], align 8
  %here = call i32 @sched_getcpu()
  %known = icmp ult i32 %here, 1024
  br i1 %known, label %ask, label %out
ask:
  %rc = call i32 @sched_getaffinity(i32 0, i64 128, ptr %mask)
  %failed = icmp ne i32 %rc, 0
  br i1 %failed, label %out, label %go
go:
  %at = lshr i32 %here, 3
  %byte = getelementptr i8, ptr %mask, i32 %at
  %low = and i32 %here, 7
  %bit = shl i32 1, %low
  %bit8 = trunc i32 %bit to i8
  %all = load i8, ptr %byte
  %others = xor i8 %bit8, -1
  %rest = and i8 %all, %others
  store i8 %rest, ptr %byte
  %moved = call i32 @sched_setaffinity(i32 0, i64 128, ptr %mask)
  %stays = icmp ne i32 %moved, 0
  br i1 %stays, label %out, label %back
back:
  store i8 %all, ptr %byte
  %again = call i32 @sched_setaffinity(i32 0, i64 128, ptr %mask)
  br label %out
out:
  ret void
}
"""
    if sys.platform.startswith("linux")
    else """define internal i32 @processor() {
  ret i32 -1
}

define internal void @move_away() {
  ret void
}
"""
)  # elsewhere threads do not know where they are

CLOCK = "declare i32 @clock_gettime(i32, ptr)"
NOW = """define i64 @clock_now(i32 %clock) {
  %t = alloca [2 x i64], align 8
  %rc = call i32 @clock_gettime(i32 %clock, ptr %t)
  %s = load i64, ptr %t
  %q = getelementptr i64, ptr %t, i64 1
  %ns = load i64, ptr %q
  %a = mul i64 %s, 1000000000
  %r = add i64 %a, %ns
  ret i64 %r
}
"""  # nanoseconds of one of clock_gettime's clocks


def waiting() -> str:
    """The functions relax, sleep and wake for this platform: futexes on Linux, short sleeps
    elsewhere."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    declare_relax, relax = _RELAX.get(machine, ("", ""))
    if sys.platform.startswith("linux") and machine in _FUTEX:
        declare = "declare i64 @syscall(i64, ...)"
        call = (
            f"call i64 (i64, ...) @syscall(i64 {_FUTEX[machine]}, ptr %word, i32 {{}}, i32 {{}},"
            " ptr {}, ptr null, i32 0)"
        )
        sleep = "%r = " + call.format(128, "%seen", "%timeout")
        wake = "%r = " + call.format(129, 2**31 - 1, "null")
    else:
        declare = "declare i32 @usleep(i32)"
        sleep = "%r = call i32 @usleep(i32 50)"
        wake = ""
    return _WAITING.format(
        declarations=f"{declare_relax}\n{declare}",
        relax=relax,
        sleep=sleep,
        wake=wake,
    )
