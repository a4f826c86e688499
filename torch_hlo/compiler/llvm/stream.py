"""A native thread that runs programs in order, as LLVM IR: a program starts while Python is busy,
and nobody needs the interpreter's lock for it.

A stream is a block of words: [tail, sleeping, taken, processor that the thread leaves when it wakes
up there, …, records]. Record `number % RECORDS` describes job `number`: [state, entry, block
(when it has run: the time at which it began), nanoseconds].
Whoever waits for a job that nobody has begun runs it himself: no thread has to wake up for that.
Whoever waits for one under way helps (thread_pool.py)."""

from ..thresholds import STREAM_SPINS
from . import system

# words; RECORD words each
TAIL = 0
SLEEPING = 1
TAKEN = 2
AVOIDED = 3
FIRST = 8
RECORD = 4
RECORDS = 64
# states; AWAITED: running, and somebody sleeps until it is done
QUEUED = 0
RUNNING = 1
DONE = 2
AWAITED = 3

_TEXT = """
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare void @torch_hlo_pool_help(ptr, i64)
{clock}
{now}
{waiting}
{processors}
@moment = internal constant [2 x i64] [i64 0, i64 200000000]

; run a record's job unless somebody did or does; returns when it is done, or after a sleep of a
; fifth of a second
define internal void @finish(ptr %record, i64 %spins) {{
entry:
  %claim = cmpxchg ptr %record, i64 {queued}, i64 {running} acq_rel acquire
  %mine = extractvalue {{i64, i1}} %claim, 1
  br i1 %mine, label %run, label %theirs
run:
  %start = call i64 @clock_now(i32 1)
  %p1 = getelementptr i64, ptr %record, i64 1
  %entry_point = load ptr, ptr %p1
  %p2 = getelementptr i64, ptr %record, i64 2
  %block = load ptr, ptr %p2
  call void %entry_point(ptr %block)
  store i64 %start, ptr %p2
  %end = call i64 @clock_now(i32 1)
  %elapsed = sub i64 %end, %start
  %p3 = getelementptr i64, ptr %record, i64 3
  store i64 %elapsed, ptr %p3
  %was = atomicrmw xchg ptr %record, i64 {done} seq_cst
  %awaited = icmp eq i64 %was, {awaited}
  br i1 %awaited, label %rouse, label %out
rouse:
  call void @wake(ptr %record)
  br label %out
theirs:
  %waits = icmp sgt i64 %spins, 0
  br i1 %waits, label %help, label %look
help:
  call void @torch_hlo_pool_help(ptr %record, i64 {done})
  br label %look
look:
  %count = phi i64 [0, %theirs], [0, %help], [%count1, %spin]
  %state = load atomic i64, ptr %record acquire, align 8
  %over = icmp eq i64 %state, {done}
  br i1 %over, label %out, label %waiting
waiting:
  %patient = icmp slt i64 %count, %spins
  br i1 %patient, label %spin, label %tired
spin:
  call void @relax()
  %count1 = add i64 %count, 1
  br label %look
tired:
  %mark = cmpxchg ptr %record, i64 {running}, i64 {awaited} acq_rel acquire
  %seen = extractvalue {{i64, i1}} %mark, 0
  %gone = icmp eq i64 %seen, {done}
  br i1 %gone, label %out, label %asleep
asleep:
  call void @sleep(ptr %record, i32 {awaited}, ptr @moment)
  br label %out
out:
  ret void
}}

define internal ptr @thread(ptr %s) {{
entry:
  %sleeping = getelementptr i64, ptr %s, i64 {sleeping_word}
  %taken = getelementptr i64, ptr %s, i64 {taken_word}
  %avoided_at = getelementptr i64, ptr %s, i64 {avoided_word}
  br label %wait
wait:
  %n = phi i64 [0, %entry], [%n, %asleep], [%n, %move], [%next, %after]
  %tail = load atomic i64, ptr %s seq_cst, align 8
  %empty = icmp eq i64 %tail, %n
  br i1 %empty, label %asleep, label %job
asleep:
  store atomic i64 1, ptr %sleeping seq_cst, align 8
  %low = trunc i64 %n to i32
  call void @sleep(ptr %s, i32 %low, ptr null)
  store atomic i64 0, ptr %sleeping seq_cst, align 8
  %here = call i32 @processor()
  %word = load atomic i64, ptr %avoided_at monotonic, align 8
  %theirs = trunc i64 %word to i32
  %known = icmp sge i32 %here, 0
  %same = icmp eq i32 %here, %theirs
  %stacked = and i1 %known, %same
  br i1 %stacked, label %move, label %wait
move:
  call void @move_away()
  br label %wait
job:
  %slot = urem i64 %n, {records}
  %words = mul i64 %slot, {record}
  %offset = add i64 %words, {first}
  %r = getelementptr i64, ptr %s, i64 %offset
  call void @finish(ptr %r, i64 0)
  %state = load atomic i64, ptr %r acquire, align 8
  %over = icmp eq i64 %state, {done}
  br i1 %over, label %after, label %job
after:
  %next = add i64 %n, 1
  store atomic i64 %next, ptr %taken release, align 8
  br label %wait
}}

; starts the stream's thread; 0 when it worked
define i32 @torch_hlo_stream_start(ptr %s) {{
  %thread = alloca i64
  %rc = call i32 @pthread_create(ptr %thread, ptr null, ptr @thread, ptr %s)
  %ok = icmp eq i32 %rc, 0
  br i1 %ok, label %detach, label %out
detach:
  %t = load i64, ptr %thread
  %rc2 = call i32 @pthread_detach(i64 %t)
  br label %out
out:
  ret i32 %rc
}}

; the next record has been filled in; %long: its job is worth another processor than this one,
; where the thread would wake up while no other is idle
define void @torch_hlo_stream_submit(ptr %s, i32 %long) {{
  %here = call i32 @processor()
  %worth = icmp ne i32 %long, 0
  %avoided = select i1 %worth, i32 %here, i32 -1
  %wide = sext i32 %avoided to i64
  %avoided_at = getelementptr i64, ptr %s, i64 {avoided_word}
  store atomic i64 %wide, ptr %avoided_at monotonic, align 8
  %old = atomicrmw add ptr %s, i64 1 seq_cst
  %sleeping = getelementptr i64, ptr %s, i64 {sleeping_word}
  %is = load atomic i64, ptr %sleeping seq_cst, align 8
  %any = icmp ne i64 %is, 0
  br i1 %any, label %rouse, label %out
rouse:
  call void @wake(ptr %s)
  br label %out
out:
  ret void
}}

; the next record, %record, has been filled in: run it here. The jobs before it must be done
define void @torch_hlo_stream_run(ptr %s, ptr %record) {{
  %old = atomicrmw add ptr %s, i64 1 seq_cst
  %taken = getelementptr i64, ptr %s, i64 {taken_word}
  %passed = load atomic i64, ptr %taken acquire, align 8
  %behind = sub i64 %old, %passed
  %much = icmp ugt i64 %behind, {half}
  br i1 %much, label %rouse, label %run
rouse:  ; the thread has to pass the records before they are used again
  call void @wake(ptr %s)
  br label %run
run:
  call void @finish(ptr %record, i64 {spins})
  ret void
}}

; returns 1 when the record's job is done, now and then 0 before; all jobs before it must be done
define i32 @torch_hlo_stream_wait(ptr %record) {{
  call void @finish(ptr %record, i64 {spins})
  %state = load atomic i64, ptr %record acquire, align 8
  %over = icmp eq i64 %state, {done}
  %result = zext i1 %over to i32
  ret i32 %result
}}
"""


def text() -> str:
    """The stream's IR module for this platform."""
    return _TEXT.format(
        clock=system.CLOCK,
        now=system.NOW,
        waiting=system.waiting(),
        processors=system.PROCESSORS,
        queued=QUEUED,
        running=RUNNING,
        done=DONE,
        awaited=AWAITED,
        sleeping_word=SLEEPING,
        taken_word=TAKEN,
        avoided_word=AVOIDED,
        first=FIRST,
        record=RECORD,
        records=RECORDS,
        half=RECORDS // 2,
        spins=STREAM_SPINS,
    )
