"""The native thread pool, as LLVM IR: `torch_hlo_parallel(fn, args, items, grain, picoseconds per
item)`.

Threads claim ranges from one shared word, `generation << 32 | next << 16 | end`, and the caller
waits only for ranges that were claimed: a worker that the system does not schedule costs nothing
(libgomp's barrier waits for it). The caller claims the first range that is left, workers the last
one: what a core has read or written in one region is mostly what it gets in the next, and still in
its cache. One region runs at a time; a caller that finds the pool busy (another Python thread, or a
nested region) runs its items itself. Workers spin for a while after a region and then sleep on a
futex. Systems wake threads up on the processor of the thread that wakes them while no other is
idle: a worker that is still on the caller's after a millisecond goes to another, and none spins
there.

`torch_hlo_pool_help(record, done)` is for a thread that waits until the stream (stream.py) has done
a job: it is a guest, who takes a worker's place. It is on a processor already, while a worker would
have to be woken up: often onto the one that the stream's thread runs on, as the third thread of two
processors.

`torch_hlo_pool_call(entry, block, threads)` runs a program with the threads of the OpenMP library
that the process has, PyTorch's, as workers until the program ends. After each parallel loop of
PyTorch's those spin for milliseconds, waiting for the next: workers beside them would share their
cores."""

from ..thresholds import GUEST_SPINS, POOL_SPINS, SETTLED_NS
from . import system

_VISIT = 100_000_000  # nanoseconds after which a guest leaves, so that Ctrl-C is heard

_TEXT = """
@generation = global i32 0, align 64
@slot = global i64 0, align 64
@done = global i64 0, align 64
@busy = global i32 0, align 64
@sleepers = global i32 0, align 64
@active = global i64 1, align 64
@fn = global ptr null, align 64
@args = global ptr null
@items = global i64 0
@step = global i64 0
@teams = global i32 0, align 64
@guests = global i64 0, align 64
@caller = global i32 -1, align 64 ; the processor on which the last region began
@helping = global i32 -1, align 64 ; and the one on which a range was claimed last by a helper
@parallel = global ptr null
@number = global ptr null

declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare i32 @sched_yield()
{clock}
{now}
{waiting}
{processors}
; claims ranges until none is left: the caller the first, its helpers the last
define internal void @work(i32 %g, i1 %helper) {{
entry:
  %wide = zext i32 %g to i64
  br label %look
look:
  %s = load atomic i64, ptr @slot acquire, align 8
  %generation = lshr i64 %s, 32
  %same = icmp eq i64 %generation, %wide
  br i1 %same, label %mine, label %out
mine:
  %low = lshr i64 %s, 16
  %next = and i64 %low, 65535
  %ranges = and i64 %s, 65535
  %more = icmp ult i64 %next, %ranges
  br i1 %more, label %try, label %out
try:
  %first = add i64 %s, 65536
  %fewer = sub i64 %s, 1
  %claimed = select i1 %helper, i64 %fewer, i64 %first
  %last = sub i64 %ranges, 1
  %range = select i1 %helper, i64 %last, i64 %next
  %exchange = cmpxchg ptr @slot, i64 %s, i64 %claimed acq_rel acquire
  %won = extractvalue {{i64, i1}} %exchange, 1
  br i1 %won, label %run, label %look
run:
  br i1 %helper, label %note, label %range_of
note:
  %here = call i32 @processor()
  store atomic i32 %here, ptr @helping monotonic, align 4
  br label %range_of
range_of:
  ; the region cannot end before this range is done, so its description is stable from here
  %f = load ptr, ptr @fn
  %a = load ptr, ptr @args
  %n = load i64, ptr @items
  %step = load i64, ptr @step
  %lo = mul i64 %range, %step
  %end = add i64 %lo, %step
  %hi = call i64 @llvm.smin.i64(i64 %end, i64 %n)
  call void %f(ptr %a, i64 %lo, i64 %hi)
  %was = atomicrmw add ptr @done, i64 1 acq_rel
  br label %look
out:
  ret void
}}

; whether this thread is on the caller's processor; no where threads do not know
define internal i1 @beside_caller() {{
  %here = call i32 @processor()
  %theirs = load atomic i32, ptr @caller monotonic, align 4
  %known = icmp sge i32 %here, 0
  %same = icmp eq i32 %here, %theirs
  %beside = and i1 %known, %same
  ret i1 %beside
}}

; who spins on the caller's processor keeps it from going on
define internal void @give_way() {{
  %beside = call i1 @beside_caller()
  br i1 %beside, label %yield, label %out
yield:
  %y = call i32 @sched_yield()
  br label %out
out:
  ret void
}}

; whether worker %id is to take part, beside the guests
define internal i1 @wanted(i64 %id) {{
  %active = load atomic i64, ptr @active acquire, align 8
  %guests = load atomic i64, ptr @guests acquire, align 8
  %rank = add i64 %id, %guests
  %wanted = icmp ult i64 %rank, %active
  ret i1 %wanted
}}

; be a guest until the word %record is %done; returns early if there are enough threads, nothing
; to do for a while, or on the caller's processor
define void @torch_hlo_pool_help(ptr %record, i64 %done) {{
entry:
  %active = load atomic i64, ptr @active acquire, align 8
  %teams = load atomic i32, ptr @teams monotonic, align 4
  %before = atomicrmw add ptr @guests, i64 1 seq_cst
  %rank = add i64 %before, 1
  %room = icmp ult i64 %rank, %active
  %own = icmp eq i32 %teams, 0
  %welcome = and i1 %room, %own
  br i1 %welcome, label %begin, label %leave
begin:
  %since = call i64 @clock_now(i32 1)
  %until = add i64 %since, {visit}
  %first = load atomic i32, ptr @generation acquire, align 4
  br label %help
help:
  %seen = phi i32 [%first, %begin], [%now, %look]
  %patience = phi i32 [{few}, %begin], [{spins}, %look]
  call void @work(i32 %seen, i1 true)
  br label %spin
spin:
  %count = phi i32 [0, %help], [%count1, %idle], [%count1, %check]
  %state = load atomic i64, ptr %record acquire, align 8
  %over = icmp eq i64 %state, %done
  br i1 %over, label %leave, label %look
look:
  %now = load atomic i32, ptr @generation seq_cst, align 4
  %changed = icmp ne i32 %now, %seen
  br i1 %changed, label %help, label %idle
idle:
  call void @relax()
  %count1 = add i32 %count, 1
  %turn = and i32 %count1, 255
  %pause = icmp eq i32 %turn, 0
  br i1 %pause, label %check, label %spin
check:
  %time = call i64 @clock_now(i32 1)
  %late = icmp sge i64 %time, %until
  %tired = icmp sge i32 %count1, %patience
  %shared = call i1 @beside_caller()
  %e0 = or i1 %late, %tired
  %enough = or i1 %e0, %shared
  br i1 %enough, label %leave, label %spin
leave:
  %after = atomicrmw sub ptr @guests, i64 1 seq_cst
  ret void
}}

define internal ptr @worker(ptr %number) {{
entry:
  %id = ptrtoint ptr %number to i64
  %first = load atomic i32, ptr @generation acquire, align 4
  %woken = alloca i64
  store i64 0, ptr %woken
  br label %wait
wait:
  %seen = phi i32 [%first, %entry], [%now, %next], [%now, %region]
  %start = phi i32 [0, %entry], [0, %next], [{spins}, %region] ; there are enough threads: sleep
  br label %spin
spin:
  %count = phi i32 [%start, %wait], [%count1, %again], [%count1, %courteous], [0, %asleep]
  %now = load atomic i32, ptr @generation seq_cst, align 4
  %changed = icmp ne i32 %now, %seen
  br i1 %changed, label %region, label %idle
idle:
  %patient = icmp slt i32 %count, {spins}
  br i1 %patient, label %again, label %asleep
again:
  call void @relax()
  %count1 = add i32 %count, 1
  %turn = and i32 %count1, 255
  %pass = icmp eq i32 %turn, 0
  br i1 %pass, label %courteous, label %spin
courteous:
  call void @give_way()
  %needed = call i1 @wanted(i64 %id)
  br i1 %needed, label %spin, label %asleep
asleep:
  %s0 = atomicrmw add ptr @sleepers, i32 1 seq_cst
  call void @sleep(ptr @generation, i32 %seen, ptr null)
  %s1 = atomicrmw sub ptr @sleepers, i32 1 seq_cst
  %t0 = call i64 @clock_now(i32 1)
  store i64 %t0, ptr %woken
  br label %spin
region:
  %wanted = call i1 @wanted(i64 %id)
  br i1 %wanted, label %place, label %wait
place:
  %stacked = call i1 @beside_caller()
  br i1 %stacked, label %judge, label %help
judge:
  %t1 = call i64 @clock_now(i32 1)
  %t2 = load i64, ptr %woken
  %awake = sub i64 %t1, %t2
  %settled = icmp sgt i64 %awake, {settled}
  br i1 %settled, label %move, label %help
move:
  call void @move_away()
  br label %help
help:
  call void @work(i32 %now, i1 true)
  br label %next
next:
  br label %wait
}}

; starts worker number %id; 0 when it worked
define i32 @torch_hlo_pool_add(i64 %id) {{
  %thread = alloca i64
  %number = inttoptr i64 %id to ptr
  %rc = call i32 @pthread_create(ptr %thread, ptr null, ptr @worker, ptr %number)
  %ok = icmp eq i32 %rc, 0
  br i1 %ok, label %detach, label %out
detach:
  %t = load i64, ptr %thread
  %rc2 = call i32 @pthread_detach(i64 %t)
  br label %out
out:
  ret i32 %rc
}}

; GOMP_parallel and omp_get_thread_num
define void @torch_hlo_pool_team(ptr %parallel, ptr %number) {{
  store ptr %number, ptr @number
  store ptr %parallel, ptr @parallel
  ret void
}}

; a thread of a team: record = entry, block, when the program has ended or 0
define internal void @member(ptr %record) {{
start:
  %end = getelementptr i64, ptr %record, i64 2
  %number = load ptr, ptr @number
  %id = call i32 %number()
  %caller = icmp eq i32 %id, 0
  br i1 %caller, label %program, label %help
program:
  %entry = load ptr, ptr %record
  %p = getelementptr i64, ptr %record, i64 1
  %block = load ptr, ptr %p
  call void %entry(ptr %block)
  %time = call i64 @clock_now(i32 1)
  store atomic i64 %time, ptr %end release, align 8
  ret void
help:
  %seen = load atomic i32, ptr @generation acquire, align 4
  call void @work(i32 %seen, i1 true)
  br label %spin
spin:
  %count = phi i32 [0, %help], [%count1, %pause]
  %now = load atomic i32, ptr @generation acquire, align 4
  %changed = icmp ne i32 %now, %seen
  br i1 %changed, label %help, label %idle
idle:
  %ended = load atomic i64, ptr %end acquire, align 8
  %over = icmp ne i64 %ended, 0
  br i1 %over, label %leave, label %wait
wait:
  %count1 = add i32 %count, 1
  %turn = and i32 %count1, 2047
  %give = icmp eq i32 %turn, 0
  br i1 %give, label %yield, label %calm
yield:
  %y = call i32 @sched_yield()
  br label %pause
calm:
  call void @relax()
  br label %pause
pause:
  br label %spin
leave:
  ret void
}}

; entry(block), with the workers, or with a team of %threads threads of PyTorch's; how many
; nanoseconds it has waited for the team in the end
define i64 @torch_hlo_pool_call(ptr %entry, ptr %block, i64 %threads) {{
start:
  %some = icmp sgt i64 %threads, 1
  br i1 %some, label %together, label %alone
alone:
  call void %entry(ptr %block)
  ret i64 0
together:
  %record = alloca [3 x i64], align 64
  %p = getelementptr i64, ptr %record, i64 1
  %end = getelementptr i64, ptr %record, i64 2
  store ptr %entry, ptr %record
  store ptr %block, ptr %p
  store i64 0, ptr %end
  %parallel = load ptr, ptr @parallel
  %n = trunc i64 %threads to i32
  %t0 = atomicrmw add ptr @teams, i32 1 acq_rel
  call void %parallel(ptr @member, ptr %record, i32 %n, i32 0)
  %t1 = atomicrmw sub ptr @teams, i32 1 acq_rel
  %last = load i64, ptr %end
  %time = call i64 @clock_now(i32 1)
  %waited = sub i64 %time, %last
  ret i64 %waited
}}

; how many threads (the caller included) take part in regions
define void @torch_hlo_pool_active(i64 %n) {{
  store atomic i64 %n, ptr @active release, align 8
  ret void
}}

; after fork: the child has no workers
define void @torch_hlo_pool_reset() {{
  store atomic i64 1, ptr @active release, align 8
  store atomic i32 0, ptr @busy release, align 4
  store atomic i32 0, ptr @sleepers release, align 4
  store atomic i32 0, ptr @teams release, align 4
  store atomic i64 0, ptr @guests release, align 8
  ret void
}}

define void @torch_hlo_parallel(ptr %f, ptr %a, i64 %n, i64 %grain, i64 %ps) {{
entry:
  %some = icmp sgt i64 %n, 0
  br i1 %some, label %measure, label %out
measure:
  %threads = load atomic i64, ptr @active monotonic, align 8
  %several = icmp ugt i64 %threads, 1
  %splits = icmp sgt i64 %n, %grain
  %nf = sitofp i64 %n to double
  %pf = sitofp i64 %ps to double
  %time = fmul double %nf, %pf
  %long = fcmp oge double %time, {threshold:e}
  %c0 = and i1 %several, %splits
  %c1 = and i1 %c0, %long
  br i1 %c1, label %plan, label %alone
plan:
  ; ranges of at least a microsecond, four per thread
  %by_time = fdiv double %time, 1.0e6
  %by_time_i = call i64 @llvm.fptosi.sat.i64.f64(double %by_time)
  %four = mul i64 %threads, 4
  %limit = call i64 @llvm.umin.i64(i64 %four, i64 32768)
  %few = call i64 @llvm.smin.i64(i64 %by_time_i, i64 %limit)
  %want = call i64 @llvm.smax.i64(i64 %few, i64 2)
  %r0 = add i64 %n, %want
  %r1 = sub i64 %r0, 1
  %even = udiv i64 %r1, %want
  %g0 = add i64 %even, %grain
  %g1 = sub i64 %g0, 1
  %grains = udiv i64 %g1, %grain
  %step = mul i64 %grains, %grain
  %q0 = add i64 %n, %step
  %q1 = sub i64 %q0, 1
  %ranges = udiv i64 %q1, %step
  %worth = icmp ugt i64 %ranges, 1
  br i1 %worth, label %lock, label %alone
lock:
  %exchange = cmpxchg ptr @busy, i32 0, i32 1 acquire monotonic
  %mine = extractvalue {{i32, i1}} %exchange, 1
  br i1 %mine, label %region, label %alone
region:
  %old = load atomic i32, ptr @generation monotonic, align 4
  %new = add i32 %old, 1
  store ptr %f, ptr @fn
  store ptr %a, ptr @args
  store i64 %n, ptr @items
  store i64 %step, ptr @step
  store atomic i64 0, ptr @done release, align 8
  %here = call i32 @processor()
  store atomic i32 %here, ptr @caller monotonic, align 4
  %wide = zext i32 %new to i64
  %high = shl i64 %wide, 32
  %word = or i64 %high, %ranges
  store atomic i64 %word, ptr @slot release, align 8
  store atomic i32 %new, ptr @generation seq_cst, align 4
  %sleeping = load atomic i32, ptr @sleepers seq_cst, align 4
  %any = icmp sgt i32 %sleeping, 0
  %teams = load atomic i32, ptr @teams monotonic, align 4
  %own = icmp eq i32 %teams, 0
  %guests = load atomic i64, ptr @guests seq_cst, align 8
  %present = add i64 %guests, 1
  %short = icmp ult i64 %present, %threads
  %lone = and i1 %own, %short
  %call = and i1 %any, %lone
  br i1 %call, label %rouse, label %go
rouse:
  call void @wake(ptr @generation)
  br label %go
go:
  call void @work(i32 %new, i1 false)
  br label %join
join:
  %spins = phi i32 [0, %go], [%spins1, %pause]
  %finished = load atomic i64, ptr @done acquire, align 8
  %all = icmp uge i64 %finished, %ranges
  br i1 %all, label %unlock, label %waiting
waiting:
  %spins1 = add i32 %spins, 1
  %helper = load atomic i32, ptr @helping monotonic, align 4
  %shared = icmp eq i32 %helper, %here
  %rarely = select i1 %shared, i32 127, i32 2047
  %turn = and i32 %spins1, %rarely
  %give = icmp eq i32 %turn, 0
  br i1 %give, label %yield, label %calm
yield:
  %y = call i32 @sched_yield()
  br label %pause
calm:
  call void @relax()
  br label %pause
pause:
  br label %join
unlock:
  store atomic i32 0, ptr @busy release, align 4
  br label %out
alone:
  call void %f(ptr %a, i64 0, i64 %n)
  br label %out
out:
  ret void
}}
"""


def text(threshold_ps: int, spins: int = POOL_SPINS) -> str:
    """The pool's IR module for this platform."""
    return _TEXT.format(
        clock=system.CLOCK,
        now=system.NOW,
        waiting=system.waiting(),
        processors=system.PROCESSORS,
        spins=spins,
        few=GUEST_SPINS,
        visit=_VISIT,
        settled=SETTLED_NS,
        threshold=threshold_ps,
    )
