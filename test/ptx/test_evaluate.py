"""The PTX evaluator: what instructions do, by the formulas of the PTX ISA document, and that
mistakes are found."""

import numpy as np
import pytest

from test.ptx.evaluate import GlobalMemory, Image, PtxError


def run(
    body: str,
    arrays,
    threads: int = 32,
    groups: int = 1,
    target: str = "sm_90a",
    declarations: str = "",
    shared_bytes: int = 0,
) -> None:
    """Runs a kernel with a pointer %rdA0, %rdA1, … per array, the thread's number in %tid and in
    %rdT; arrays change in place."""
    parameters = ",\n".join(f".param .u64 k_param_{i}" for i in range(len(arrays)))
    loads = "\n".join(f"ld.param.b64 %rdA{i}, [k_param_{i}];" for i in range(len(arrays)))
    text = f""".version 8.6
.target {target}
.address_size 64
{declarations}
.visible .entry k({parameters})
{{
.reg .pred %p<50>; .reg .b16 %rs<50>; .reg .b32 %r<100>; .reg .b64 %rd<100>; .reg .b64 %rdA<10>; .reg .b64 %rdT; .reg .b32 %tid; .reg .b32 %lane;
{loads}
mov.u32 %tid, %tid.x;
and.b32 %lane, %tid, 31;
cvt.u64.u32 %rdT, %tid;
{body}
ret;
}}
"""
    memory = GlobalMemory()
    for a in arrays:
        memory.add(a.ctypes.data, a.nbytes)
    Image(text).launch("k", groups, threads, [a.ctypes.data for a in arrays], memory, shared_bytes)


def of(kind, *values):
    """A copy that is aligned to 16 bytes."""
    values = np.asarray(values[0] if len(values) == 1 else values, kind)
    raw = np.zeros(values.nbytes + 16, np.uint8)
    skip = -raw.ctypes.data % 16
    out = raw[skip : skip + values.nbytes].view(values.dtype).reshape(values.shape)
    out[...] = values
    return out


def each(instruction: str, kind: str, result: str, *inputs):
    """The results of an instruction whose operands are %r1…/%rd1… (b32, b64) loaded from arrays:
    `instruction` uses {d}, {a}, {b}, {c}."""
    width = {1: "rs", 2: "rs", 4: "r", 8: "rd"}
    n = len(inputs[0])
    out = of(result, np.zeros(n))
    arrays = [of(i.dtype, i) for i in inputs] + [out]
    lines, names = [], {}
    for i, (a, letter) in enumerate(zip(inputs, "abc")):
        size = a.dtype.itemsize
        names[letter] = f"%{width[size]}{i + 1}"
        lines += [
            f"mad.lo.u64 %rd9{i}, %rdT, {size}, %rdA{i};",
            f"ld.global.b{8 * size} {names[letter]}, [%rd9{i}];",
        ]
    size = out.dtype.itemsize
    names["d"] = f"%{width[size]}9"
    body = "\n".join(
        [
            *lines,
            instruction.format(**names),
            f"mad.lo.u64 %rd99, %rdT, {size}, %rdA{len(inputs)};",
            f"st.global.b{8 * size} [%rd99], {names['d']};",
        ]
    )
    run(body, arrays, threads=n)
    return out


F32, F64, U32, S32, U64, S64, U16 = (
    np.float32,
    np.float64,
    np.uint32,
    np.int32,
    np.uint64,
    np.int64,
    np.uint16,
)
NAN, INF = np.nan, np.inf


def f(*values):
    return np.array(values, F32)


def u(*values):
    return np.array([v & 0xFFFFFFFF for v in values], U32)


def q(*values):
    return np.array([v & (1 << 64) - 1 for v in values], U64)


@pytest.mark.parametrize(
    ("instruction", "inputs", "expected"),
    [
        (
            "mul.hi.s32 {d}, {a}, {b};",
            (u(-3, 1 << 31), u(1 << 30, 1 << 31)),
            u(-1, 1 << 30),
        ),
        ("mul.hi.u64 {d}, {a}, {b};", (q(-1, 1 << 40), q(-1, 1 << 40)), q(-2, 1 << 16)),
        (
            "mul.hi.s64 {d}, {a}, {b};",
            (q(-1, -5), q(7, -(1 << 63))),
            q(-1, (5 << 63) >> 64),
        ),
        ("mul.wide.s32 {d}, {a}, {b};", (u(-2, 5), u(3, -7)), q(-6, -35)),
        ("div.s32 {d}, {a}, {b};", (u(-7, 7), u(2, -2)), u(-3, -3)),
        ("rem.s32 {d}, {a}, {b};", (u(-7, 7), u(2, -2)), u(-1, 1)),
        ("shl.b32 {d}, {a}, {b};", (u(1, 3), u(31, 40)), u(1 << 31, 0)),
        ("shr.s32 {d}, {a}, {b};", (u(-8, -8), u(1, 99)), u(-4, -1)),
        ("bfe.s32 {d}, {a}, {b}, 4;", (u(0xF0, 0x70), u(4, 4)), u(-1, 7)),
        ("bfe.u32 {d}, {a}, {b}, 8;", (u(0xABCD1234, -1), u(8, 28)), u(0x12, 0xF)),
        (
            "bfi.b32 {d}, {a}, {b}, 4, 8;",
            (u(0xFF, 0x12), u(0, -1)),
            u(0xFF0, 0xFFFFF12F),
        ),
        ("clz.b32 {d}, {a};", (u(0, 1, 1 << 31),), u(32, 31, 0)),
        ("popc.b32 {d}, {a};", (u(0, -1, 5),), u(0, 32, 2)),
        ("brev.b32 {d}, {a};", (u(1, 0x80000001),), u(1 << 31, 0x80000001)),
        (
            "prmt.b32 {d}, {a}, {b}, 0x7210;",
            (u(0x33221100, 0x33221100), u(0x77665544, 0xFF665544)),
            u(0x77221100, 0xFF221100),
        ),
        (
            "prmt.b32 {d}, {a}, {b}, 0x9810;",
            (u(0x0080FF7F, 1), u(0, 0)),
            u(0xFF00FF7F, 1),
        ),
        (
            "shf.l.wrap.b32 {d}, {a}, {b}, 8;",
            (u(0x11223344, 0), u(0x55667788, 1)),
            u(0x66778811, 0x100),
        ),
        (
            "lop3.b32 {d}, {a}, {b}, {c}, 0xE8;",
            (u(0b1100, 1), u(0b1010, 1), u(0b0110, 0)),
            u(0b1110, 1),
        ),
        (
            "add.sat.s32 {d}, {a}, {b};",
            (u((1 << 31) - 1, -(1 << 31)), u(5, -5)),
            u((1 << 31) - 1, -(1 << 31)),
        ),
        ("min.f32 {d}, {a}, {b};", (f(NAN, 1, -0.0), f(2, NAN, 0.0)), f(2, 1, -0.0)),
        ("max.NaN.f32 {d}, {a}, {b};", (f(NAN, 1), f(2, 3)), f(NAN, 3)),
        (
            "fma.rn.f32 {d}, {a}, {b}, {c};",
            (f(1 + 2**-12, 3e38), f(1 + 2**-12, 2), f(-1, -3e38)),
            f(2**-11 + 2**-24, 3e38),
        ),
        # rounding to float64 first would make it a tie
        (
            "fma.rn.f32 {d}, {a}, {b}, {c};",
            (f(1 + 2**-12), f(1 + 2**-12), f(2**-60)),
            f(1 + 2**-11 + 2**-23),
        ),
        (
            "add.rz.f32 {d}, {a}, {b};",
            (f(1, -1), f(2**-24 + 2**-26, -(2**-24) - 2**-26)),
            f(1, -1),
        ),
        (
            "add.rp.f32 {d}, {a}, {b};",
            (f(1, -1), f(2**-30, -(2**-30))),
            f(1 + 2**-23, -1),
        ),
        ("add.ftz.f32 {d}, {a}, {b};", (f(1e-40, 1), f(1e-40, 1e-40)), f(0, 1)),
        ("mul.sat.f32 {d}, {a}, {b};", (f(3, NAN, -1), f(3, 1, 1)), f(1, 0, 0)),
        ("copysign.f32 {d}, {a}, {b};", (f(-1, 1), f(5, -6)), f(-5, 6)),
        ("ex2.approx.ftz.f32 {d}, {a};", (f(3, -1),), f(8, 0.5)),
        ("rsqrt.approx.f32 {d}, {a};", (f(4, 0),), f(0.5, INF)),
        (
            "cvt.rni.s32.f32 {d}, {a};",
            (f(2.5, -3.5, 1e20, NAN, -1e20),),
            u(2, -4, (1 << 31) - 1, 0, 1 << 31),
        ),
        ("cvt.rzi.u32.f32 {d}, {a};", (f(2.9, -1, 1e20, NAN),), u(2, 0, -1, 0)),
        ("cvt.rmi.f32.f32 {d}, {a};", (f(2.5, -2.5),), f(2, -3)),
        (
            "cvt.rn.f32.u64 {d}, {a};",
            (q((1 << 40) + (1 << 16) + 1, -1),),
            f((1 << 40) + (1 << 17), 2.0**64),
        ),
        (
            "cvt.rzi.s64.f64 {d}, {a};",
            (np.array([-1.5, 1e30, NAN]),),
            q(-1, (1 << 63) - 1, 1 << 63),
        ),
        (
            "cvt.rn.bf16x2.f32 {d}, {a}, {b};",
            (f(1, 1 + 2**-8), f(2, 1 + 3 * 2**-8)),
            u(0x3F804000, 0x3F803F82),
        ),
        (
            "cvt.rn.f16x2.f32 {d}, {a}, {b};",
            (f(1, -2), f(0.5, 65536)),
            u(0x3C003800, 0xC0007C00),
        ),
        ("cvt.rna.tf32.f32 {d}, {a};", (f(1 + 2**-11, 1 + 2**-12),), f(1 + 2**-10, 1)),
        (
            "cvt.rn.satfinite.e4m3x2.f32 %rs1, {a}, {b}; cvt.u32.u16 {d}, %rs1;",
            (f(1, 1000), f(-2, 2**-9)),
            u(0x38C0, 0x7E01),
        ),
        (
            "setp.lt.f32 %p1, {a}, {b}; selp.b32 {d}, 1, 0, %p1;",
            (f(NAN, 1, 2), f(1, 2, 1)),
            u(0, 1, 0),
        ),
        (
            "setp.ltu.f32 %p1, {a}, {b}; selp.b32 {d}, 1, 0, %p1;",
            (f(NAN, 1, 2), f(1, 2, 1)),
            u(1, 1, 0),
        ),
        (
            "setp.ne.f32 %p1, {a}, {b}; selp.b32 {d}, 1, 0, %p1;",
            (f(NAN, 1), f(1, 1)),
            u(0, 0),
        ),
        (
            "setp.neu.f32 %p1, {a}, {b}; selp.b32 {d}, 1, 0, %p1;",
            (f(NAN, 1), f(1, 1)),
            u(1, 0),
        ),
        (
            "setp.gt.or.u32 %p2|%p3, {a}, {b}, false; selp.b32 {d}, 1, 0, %p3;",
            (u(-1, 1), u(1, 2)),
            u(0, 1),
        ),
        (
            "fma.rn.f16x2 {d}, {a}, {b}, {a};",
            (u(0x3C004000), u(0x40003800)),
            u(0x42004200),
        ),
        ("add.rn.bf16x2 {d}, {a}, {b};", (u(0x3F803F80), u(0x40003B80)), u(0x40403F80)),
        (
            "fma.rn.f32x2 {d}, {a}, {b}, {a};",
            (
                np.array([[2, -1]], F32).view(U64).ravel(),
                np.array([[3, 0.5]], F32).view(U64).ravel(),
            ),
            np.array([[8, -1.5]], F32).view(U64).ravel(),
        ),
        ("mov.b64 {d}, {{{a}, {b}}};", (u(1, 2), u(3, 4)), q(3 << 32 | 1, 4 << 32 | 2)),
        ("slct.s32.s32 {d}, {a}, {b}, {c};", (u(1, 1), u(2, 2), u(-1, 0)), u(2, 1)),
        (
            "dp4a.s32.s32 {d}, {a}, {b}, {c};",
            (u(0x01020304, 0xFF000000), u(0x01010101, 0x02000000), u(5, 0)),
            u(15, -2),
        ),
    ],
)
def test_instruction(instruction, inputs, expected):
    got = each(instruction, "", expected.dtype, *inputs)
    np.testing.assert_array_equal(got, expected)
    if expected.dtype == F32:
        np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


def test_fma_is_rounded_once():
    """Against exact rational arithmetic, with many cancellations."""
    from fractions import Fraction

    g = np.random.default_rng(0)
    a, b = ((1 + g.integers(0, 1 << 23, 60) * 2.0**-23).astype(F32) for _ in range(2))
    c = (-(a.astype(F64) * b)).astype(F32)
    c[::3] = (g.standard_normal(20) * 2.0**-24).astype(F32)
    got = each("fma.rn.f32 {d}, {a}, {b}, {c};", "", F32, a, b, c)
    double = [v.astype(F64) * np.float64(1 + 2**-30) for v in (a, b, c)]
    got64 = each("fma.rn.f64 {d}, {a}, {b}, {c};", "", F64, *double)
    for values, results, dtype in (((a, b, c), got, F32), (double, got64, F64)):
        for x, y, z, r in zip(*values, results):
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            near = [
                dtype(r),
                np.nextafter(dtype(r), dtype(-np.inf)),
                np.nextafter(dtype(r), dtype(np.inf)),
            ]
            assert min(near, key=lambda v: abs(Fraction(float(v)) - exact)) == r


# -- threads
# -------------------------------------------------------------------------------------------------------------------
LOOP = """
mov.b32 %r1, 0;
mov.b32 %r2, %tid;
AGAIN:
setp.eq.s32 %p1, %r2, 0;
@%p1 bra DONE;
add.s32 %r1, %r1, %r2;
sub.s32 %r2, %r2, 1;
bra AGAIN;
DONE:
mad.lo.u64 %rd1, %rdT, 4, %rdA0;
st.global.b32 [%rd1], %r1;
"""


def test_threads_leave_a_loop_one_by_one():
    out = of(U32, np.zeros(70))
    run(LOOP, [out], threads=70)
    np.testing.assert_array_equal(out, [n * (n + 1) // 2 for n in range(70)])


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("bfly", 5, 0x1F, lambda i: i ^ 5),
        ("up", 3, 0, lambda i: i - 3 if i >= 3 else i),
        ("down", 3, 0x1F, lambda i: i + 3 if i + 3 < 32 else i),
        ("idx", 7, 0x1F, lambda i: 7),
        ("idx", 1, 0x181F, lambda i: i & 24 | 1),
        ("down", 2, 0x1807, lambda i: i + 2 if i % 8 < 6 else i),
    ],
)
def test_shuffle(mode, b, c, source):
    """c: limit in bits 0-4, segment mask in bits 8-12."""
    out = of(U32, np.zeros(64))
    run(
        f"shfl.sync.{mode}.b32 %r1|%p1, %tid, {b}, {c}, -1; mad.lo.u64 %rd1, %rdT, 4, %rdA0;"
        " st.global.b32 [%rd1], %r1;",
        [out],
        threads=64,
    )
    np.testing.assert_array_equal(out, [w + source(i) for w in (0, 32) for i in range(32)])


def test_shuffles_wait_for_lanes_that_took_another_way():
    out = of(U32, np.zeros(32))
    run(
        """setp.lt.u32 %p1, %tid, 10; mov.b32 %r1, 1;
@%p1 bra SHUFFLE;
mov.b32 %r1, 2;
SHUFFLE:
shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1; mad.lo.u64 %rd1, %rdT, 4, %rdA0; st.global.b32 [%rd1], %r2;""",
        [out],
    )
    np.testing.assert_array_equal(out, [1 if (i ^ 16) < 10 else 2 for i in range(32)])


def test_votes():
    out = of(U32, np.zeros(32))
    run(
        """setp.lt.u32 %p1, %tid, 5; vote.sync.ballot.b32 %r1, %p1, -1; vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1;
selp.b32 %r2, 256, 0, %p2; selp.b32 %r3, 512, 0, %p3; or.b32 %r1, %r1, %r2; or.b32 %r1, %r1, %r3; mad.lo.u64 %rd1, %rdT, 4, %rdA0; st.global.b32 [%rd1], %r1;""",
        [out],
    )
    assert (out == 0x1F + 256).all()


def test_atomics_take_every_thread():
    out = of(U32, np.zeros(4))
    run(
        """and.b32 %r1, %tid, 3; cvt.u64.u32 %rd1, %r1; mad.lo.u64 %rd1, %rd1, 4, %rdA0; atom.global.add.u32 %r2, [%rd1], %tid;""",
        [out],
        threads=64,
        groups=2,
    )
    np.testing.assert_array_equal(out, [2 * sum(range(k, 64, 4)) for k in range(4)])


# -- what hardware would not say
# -----------------------------------------------------------------------------------------------------
SHARED = ".shared .align 16 .b8 buffer[256];"
WRITE = "mov.b32 %r1, buffer; mad.lo.u32 %r2, %tid, 4, %r1; st.shared.b32 [%r2], %tid;"
READ = "xor.b32 %r3, %tid, {0}; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.b32 %r4, [%r3];"

GLOBAL_WRITE = "mad.lo.u64 %rd1, %rdT, 4, %rdA0; st.global.b32 [%rd1], %tid;"
GLOBAL_READ = "xor.b64 %rd2, %rdT, 33; mad.lo.u64 %rd2, %rd2, 4, %rdA0; ld.global.b32 %r1, [%rd2];"


@pytest.mark.parametrize(
    ("body", "threads", "message"),
    [
        (
            "mad.lo.u64 %rd1, %rdT, 4, %rdA0; ld.global.b32 %r1, [%rd1];",
            65,
            (
                r"line \d+: `ld.global.b32 %r1, \[%rd1\];`: .*outside of every array: 0 bytes"
                r" after.*the first is thread 64 of group 0"
            ),
        ),
        (
            "mad.lo.u64 %rd1, %rdT, 4, %rdA0; ld.global.v2.b32 {%r1, %r2}, [%rd1];",
            32,
            r"not a multiple of 8.*thread 1",
        ),
        (
            "st.global.b32 [%rdA0], %tid;",
            32,
            "several threads write different values to one address",
        ),
        (
            WRITE + READ.format(32),
            64,
            "thread 0 has written, with no barrier in between|thread 32 has written",
        ),
        (WRITE + READ.format(1), 64, "has written, with no barrier"),
        (
            WRITE + "bar.sync 0;" + READ.format(32) + WRITE,
            64,
            "has read, with no barrier in between",
        ),
        ("mov.b32 %r1, buffer;" + READ.format(0), 64, "nobody has written"),
        (
            "mov.b32 %r1, buffer; st.shared.b32 [%r1+256], %tid;",
            1,
            "shared address 0x[0-9a-f]+, 256 bytes after the first variable; there are 256",
        ),
        (
            "setp.lt.u32 %p1, %tid, 32; @%p1 bra L; bar.sync 0; L:",
            64,
            "32 threads wait at the barrier for others that never come",
        ),
        (
            "setp.lt.u32 %p1, %tid, 7; @%p1 ret; shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1;",
            32,
            "wait here or elsewhere for others",
        ),
        (
            "frob.b32 %r1, %r2;",
            32,
            r"line \d+: frob is not evaluated: frob.b32 %r1, %r2;",
        ),
        ("add.rn.f32.wobbly %r1, %r2, %r3;", 32, "is not evaluated"),
        ("trap;", 32, "the kernel traps"),
        (
            GLOBAL_WRITE + GLOBAL_READ,
            64,
            r"reads global memory that thread \d+ has written in this launch",
        ),
        (
            GLOBAL_READ + GLOBAL_WRITE,
            64,
            "writes global memory that group 0 has read in this launch",
        ),
        (
            (
                "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; @%p1 st.global.b32 [%rdA0], 1;"
                " @!%p1 st.global.b32 [%rdA0], 2;"
            ),
            1,
            "writes global memory that thread 0 of group 0 has written in this launch",
        ),
        (
            (
                "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1; ld.global.b32 %r2, [%rdA0]; @%p1"
                " st.global.b32 [%rdA0], 7;"
            ),
            1,
            "writes global memory that several groups have read",
        ),
    ],
)
def test_mistakes_are_found(body, threads, message):
    with pytest.raises(PtxError, match=message):
        run(
            body,
            [of(U32, np.zeros(64))],
            threads=threads,
            declarations=SHARED,
            groups=2 if "ctaid" in body else 1,
        )


def test_clusters_have_one_group():
    kernel = (
        ".version 8.6\n.target sm_90\n.address_size 64\n.visible .entry k() .reqntid 32, 2"
        " .reqnctapercluster {} {{ ret; }}"
    )
    Image(kernel.format("1, 1")).launch("k", 1, 32, [], GlobalMemory(), 0)
    with pytest.raises(PtxError, match="clusters of more than one group are not evaluated"):
        Image(kernel.format("2"))


@pytest.mark.parametrize(
    "body",
    [
        WRITE + "bar.sync 0;" + READ.format(32),
        WRITE + READ.format(0),
        WRITE + "bar.warp.sync -1;" + READ.format(1),
        WRITE + "bar.sync 0;" + READ.format(32) + "bar.sync 0;" + WRITE,
        GLOBAL_WRITE + "bar.sync 0;" + GLOBAL_READ,
        GLOBAL_READ + "bar.sync 0;" + GLOBAL_WRITE,
        GLOBAL_WRITE + GLOBAL_WRITE + "ld.global.b32 %r1, [%rd1];",
        "st.global.b32 [%rdA0], 5;",
    ],
)
def test_ordered_accesses_are_not_mistakes(body):
    run(body, [of(U32, np.zeros(64))], threads=64, declarations=SHARED)


# -- matrices
# -----------------------------------------------------------------------------------------------------------------------
def group_of(lane):
    return lane >> 2


def t_of(lane):
    return lane % 4


# Section 9.7.14.5: (row of A, column of A, row of B) of element i in a lane, as the document has
# them.
FRAGMENTS = {
    ("m16n8k16", 2): (
        lambda n, i: group_of(n) + (0 if i < 2 or 4 <= i < 6 else 8),
        lambda n, i: t_of(n) * 2 + (i & 1) + (0 if i < 4 else 8),
        lambda n, i: t_of(n) * 2 + (i & 1) + (0 if i < 2 else 8),
    ),
    ("m16n8k8", 2): (
        lambda n, i: group_of(n) + (0 if i < 2 else 8),
        lambda n, i: t_of(n) * 2 + (i & 1),
        lambda n, i: t_of(n) * 2 + i,
    ),
    ("m16n8k8", 4): (
        lambda n, i: group_of(n) + (0 if i in (0, 2) else 8),
        lambda n, i: t_of(n) + (0 if i < 2 else 4),
        lambda n, i: t_of(n) + 4 * i,
    ),
    ("m16n8k4", 4): (
        lambda n, i: group_of(n) + 8 * i,
        lambda n, i: t_of(n),
        lambda n, i: t_of(n),
    ),
    ("m16n8k16", 1): (
        lambda n, i: group_of(n) + (0 if i < 4 else 8),
        lambda n, i: t_of(n) * 4 + (i & 3),
        lambda n, i: t_of(n) * 4 + i,
    ),
    ("m16n8k32", 1): (
        lambda n, i: group_of(n) + (0 if i < 4 or 8 <= i < 12 else 8),
        lambda n, i: t_of(n) * 4 + (i & 3) + (0 if i < 8 else 16),
        lambda n, i: t_of(n) * 4 + (i & 3) + (0 if i < 4 else 16),
    ),
}


def encode(values, kind):
    from torch_hlo.hlo.ir.numeric import encode as bits

    name = {
        "bf16": "bf16",
        "f16": "f16",
        "tf32": "f32",
        "e4m3": "f8e4m3fn",
        "e5m2": "f8e5m2",
        "s8": "s8",
    }[kind]
    return np.frombuffer(bits(values, name), np.uint8)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("m16n8k16", "bf16"),
        ("m16n8k16", "f16"),
        ("m16n8k8", "f16"),
        ("m16n8k8", "bf16"),
        ("m16n8k8", "tf32"),
        ("m16n8k4", "tf32"),
        ("m16n8k32", "s8"),
        ("m16n8k16", "s8"),
        ("m16n8k32", "e4m3"),
        ("m16n8k32", "e5m2"),
    ],
)
def test_matrix_product(shape, kind):
    """A and B are random; a fragment in a wrong place gives a wrong product."""
    size = {"bf16": 2, "f16": 2, "tf32": 4}.get(kind, 1)
    k = int(shape[shape.index("k") + 1 :])
    rows, columns, deep = FRAGMENTS[shape, size]
    g = np.random.default_rng(0)
    a, b = g.integers(-3, 4, (16, k)), g.integers(-3, 4, (k, 8))
    c = g.integers(-100, 100, (16, 8))
    integer = kind == "s8"
    per_a, per_b = 16 * k // 32, 8 * k // 32
    lanes = range(32)
    fa = np.array(
        [[a[rows(n, i), columns(n, i)] for i in range(per_a)] for n in lanes],
        F32 if not integer else np.int8,
    )
    fb = np.array(
        [[b[deep(n, i), group_of(n)] for i in range(per_b)] for n in lanes],
        F32 if not integer else np.int8,
    )
    at = [
        [(group_of(n) + (0 if i < 2 else 8), t_of(n) * 2 + (i & 1)) for i in range(4)]
        for n in lanes
    ]
    dtype = S32 if integer else F32
    fc = of(dtype, np.array([[c[p] for p in row] for row in at], dtype))
    ra, rb = (
        of(U32, encode(fa, kind).view(U32).reshape(32, -1)),
        of(U32, encode(fb, kind).view(U32).reshape(32, -1)),
    )
    out = of(dtype, np.zeros((32, 4)))
    na, nb = ra.shape[1], rb.shape[1]
    load = "".join(
        f"mad.lo.u64 %rd{j}, %rdT, {4 * n}, %rdA{j};"
        + "".join(f"ld.global.b32 %r{10 * j + i}, [%rd{j}+{4 * i}];" for i in range(n))
        for j, n in enumerate((na, nb, 4))
    )
    reg = lambda j, n: "{" + ", ".join(f"%r{10 * j + i}" for i in range(n)) + "}"
    result = "s32" if integer else "f32"
    body = (
        load + f"mma.sync.aligned.{shape}.row.col.{result}.{kind}.{kind}.{result} {reg(3, 4)},"
        f" {reg(0, na)}, {reg(1, nb)}, {reg(2, 4)};"
    )
    body += "mad.lo.u64 %rd3, %rdT, 16, %rdA3; st.global.v4.b32 [%rd3], {%r30, %r31, %r32, %r33};"
    run(body, [ra, rb, fc, out])
    expected = a @ b + c
    np.testing.assert_array_equal(out, [[expected[p] for p in row] for row in at])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_from_shared_memory(count, transposed):
    """ldmatrix: element (r, c) of matrix m is 64 m + 8 r + c; rows lie 32 bytes apart. stmatrix
    puts them back."""
    out, back = of(U16, np.zeros((32, count, 2))), of(U16, np.zeros((count * 8, 8)))
    trans = ".trans" if transposed else ""
    reg = "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"
    fill = "".join(
        f"shl.b32 %r2, %tid, 3; add.u32 %r2, %r2, {i}; cvt.u16.u32 %rs1, %r2; st.shared.b16"
        f" [%r1+{2 * i}], %rs1;"
        for i in range(8)
    )
    body = f"""mov.b32 %r0, memory; shl.b32 %r1, %tid, 5; add.u32 %r1, %r1, %r0; {fill} bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {reg}, [%r1];
mad.lo.u64 %rd1, %rdT, {4 * count}, %rdA0;""" + "".join(
        f"st.global.b32 [%rd1+{4 * i}], %r{20 + i};" for i in range(count)
    )
    body += f"""bar.warp.sync -1; add.u32 %r1, %r1, 16; stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r1], {reg}; bar.warp.sync -1;
setp.lt.u32 %p1, %tid, {8 * count}; mad.lo.u64 %rd2, %rdT, 16, %rdA1; @%p1 ld.shared.v4.b32 {{%r40, %r41, %r42, %r43}}, [%r1]; @%p1 st.global.v4.b32 [%rd2], {{%r40, %r41, %r42, %r43}};"""
    run(body, [out, back], declarations=".shared .align 16 .b8 memory[1024];")
    for n in range(32):
        for m in range(count):
            places = [
                (2 * (n % 4) + i, n // 4) if transposed else (n // 4, 2 * (n % 4) + i)
                for i in range(2)
            ]
            assert list(out[n, m]) == [64 * m + 8 * r + c for r, c in places]
    np.testing.assert_array_equal(back, np.arange(count * 64).reshape(-1, 8))


def test_whole_warps_meet_between_matrices_too():
    body = (
        "mov.b32 %r1, memory; shl.b32 %r2, %tid, 4; add.u32 %r1, %r1, %r2; mov.b32 %r2, 0;"
        " stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2}; "
    )
    load = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r1];"
    run(
        body + "bar.warp.sync -1;" + load,
        [of(U32, [0])],
        declarations=".shared .align 16 .b8 memory[1024];",
    )
    with pytest.raises(PtxError, match="has written, with no barrier in between"):
        run(
            body + load,
            [of(U32, [0])],
            declarations=".shared .align 16 .b8 memory[1024];",
        )


# -- asynchronous copies
# ---------------------------------------------------------------------------------------------------------------
COPY = (
    "mov.b32 %r1, memory; shl.b32 %r2, %tid, 4; add.u32 %r1, %r1, %r2; mad.lo.u64 %rd1, %rdT, 16,"
    " %rdA0; mad.lo.u64 %rd2, %rdT, 16, %rdA1;"
)
BACK = (
    "ld.shared.v4.b32 {{%r3, %r4, %r5, %r6}}, [%r1+{0}]; st.global.v4.b32 [%rd2], {{%r3, %r4, %r5,"
    " %r6}};".format
)


def copies(body):
    source, out = of(U32, np.arange(128)), of(U32, np.zeros(128))
    run(COPY + body, [source, out], declarations=".shared .align 16 .b8 memory[1024];")
    return source, out


def test_copies_in_groups():
    source, out = copies(
        "cp.async.cg.shared.global [%r1], [%rd1], 16; cp.async.commit_group;"
        " cp.async.ca.shared.global [%r1+512], [%rd1], 16, 4;"
        " cp.async.commit_group;cp.async.wait_group 1;" + BACK(0)
    )
    np.testing.assert_array_equal(out, source)
    source, out = copies(
        "cp.async.ca.shared.global [%r1+512], [%rd1], 16, 4; cp.async.wait_all;" + BACK(512)
    )
    # the rest is zeros
    np.testing.assert_array_equal(out.reshape(32, 4), source.reshape(32, 4) * [1, 0, 0, 0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "cp.async.cg.shared.global [%r1], [%rd1], 16; cp.async.commit_group;" + BACK(0),
            "asynchronous copy is still writing",
        ),
        (
            "cp.async.cg.shared.global [%r1], [%rd1], 16; cp.async.commit_group;"
            " cp.async.wait_group 1;" + BACK(0),
            "asynchronous copy is still writing",
        ),
        (
            "cp.async.cg.shared.global [%r1], [%rd1], 16; cp.async.wait_group 0;" + BACK(0),
            "asynchronous copy is still writing",
        ),
        (
            "cp.async.cg.shared.global [%r1], [%rd1], 16; cp.async.wait_all; sub.u32 %r1, %r1, %r2;"
            " xor.b32 %r2, %r2, 16; add.u32 %r1, %r1, %r2;" + BACK(0),
            "has written, with no barrier in between",
        ),
        ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "4, 8 or 16 bytes"),
    ],
)
def test_copies_nobody_waits_for(body, message):
    with pytest.raises(PtxError, match=message):
        copies(body)


# -- products of a warpgroup
# ---------------------------------------------------------------------------------------------------------
def image(matrix, swizzle, major):
    """The bytes of [rows, k] bf16 in shared memory and (leading, stride) offsets, by the figures of
    section 9.7.15.5.1: units of 16 bytes, of row r unit u goes to u ^ (r % 8) for 128 bytes, u ^ (r
    / 2 % 4) for 64, u ^ (r / 4 % 2) for 32, where r counts lines of the swizzle's width."""
    raw = np.frombuffer(encode(matrix if major == "K" else matrix.T, "bf16"), U16).reshape(
        matrix.shape if major == "K" else matrix.T.shape
    )
    lines, length = raw.shape  # a line is contiguous in memory: along K, or along MN
    units = raw.reshape(lines, length // 8, 8)
    if swizzle == 0:  # blocks of 8 lines x 1 unit, 128 bytes each: [block of lines][unit][line]
        out = units.reshape(lines // 8, 8, length // 8, 8).swapaxes(1, 2)
        across, down = 128, 128 * (length // 8)  # unit to unit, 8 lines to the next
        return np.ascontiguousarray(out).view(np.uint8).ravel(), (
            (
                across,
                down,
            )
            if major == "K"
            else (down, across)
        )
    w = swizzle // 16
    out = np.zeros((length // 8 // w, lines, w, 8), U16)  # [block of w units][line][unit]
    for line in range(lines):
        for u in range(length // 8):
            twist = {8: line % 8, 4: line // 2 % 4, 2: line // 4 % 2}[w]
            out[u // w, line, u % w ^ twist] = units[line, u]
    return out.view(np.uint8).ravel(), (
        0 if major == "K" else lines * swizzle,
        8 * swizzle,
    )


SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}
WGMMA = """
.reg .b32 %w; .reg .pred %once;
setp.eq.u32 %once, %tid, 0;
mov.b32 %w, memory;
mov.b32 %r1, %tid;
FILL:
setp.ge.u32 %p1, %r1, {words}; @%p1 bra FILLED;
mad.wide.u32 %rd1, %r1, 4, %rdA0; ld.global.b32 %r2, [%rd1]; mad.lo.u32 %r3, %r1, 4, %w; st.shared.b32 [%r3], %r2;
add.u32 %r1, %r1, 128; bra FILL;
FILLED:
{fence}
bar.sync 0;
cvt.u64.u32 %rd2, %w; shr.u64 %rd2, %rd2, 4; add.u64 %rd3, %rd2, {a}; add.u64 %rd4, %rd2, {second}; or.b64 %rd4, %rd4, {b};
{zero}
setp.ne.u32 %p2, {accumulate}, 0;
{sync}
wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{regs}}}, %rd3, %rd4, %p2, 1, {sign}, {ta}, {tb};
wgmma.commit_group.sync.aligned;
{wait}
{after}
mad.lo.u64 %rd9, %rdT, {row}, %rdA1;
{stores}
"""


def warpgroup(
    swizzle,
    a_major,
    b_major,
    fence="fence.proxy.async;",
    wait="wgmma.wait_group.sync.aligned 0;",
    after="",
    n=64,
    sign=1,
    accumulate=1,
    sync="wgmma.fence.sync.aligned;",
):
    g = np.random.default_rng(1)
    # A line along K is as long as the swizzle is wide; the product takes the second 16 elements of
    # it, where there are so many.
    ka, kb = (max(16, swizzle // 2) if major == "K" else 16 for major in (a_major, b_major))
    a, b = (
        g.integers(-4, 5, (64, ka)).astype(F32),
        g.integers(-4, 5, (n, kb)).astype(F32),
    )
    (ia, (la, sa)), (ib, (lb, sb)) = (
        image(a, swizzle, a_major),
        image(b, swizzle, b_major),
    )
    start_b = -(-len(ia) // 1024) * 1024
    skip_a, skip_b = 32 * (ka > 16), 32 * (kb > 16)
    a, b = a[:, skip_a // 2 :][:, :16], b[:, skip_b // 2 :][:, :16]
    memory = of(np.uint8, np.zeros(start_b + len(ib)))
    memory[: len(ia)], memory[start_b:] = ia, ib
    out = of(F32, np.zeros((128, n // 2)))
    code = lambda leading, stride: (
        (leading >> 4) << 16 | (stride >> 4) << 32 | SWIZZLES[swizzle] << 62
    )
    count = n // 2
    body = WGMMA.format(
        words=len(memory) // 4,
        fence=fence,
        a=code(la, sa) + (skip_a >> 4),
        b=code(lb, sb),
        second=start_b + skip_b >> 4,
        n=n,
        accumulate=accumulate,
        sign=sign,
        zero="".join(f"mov.b32 %d{i}, 0f3F800000;" for i in range(count)),
        regs=", ".join(f"%d{i}" for i in range(count)),
        ta=int(a_major != "K"),
        tb=int(b_major != "K"),
        wait=wait,
        sync=sync,
        after=after,
        row=4 * count,
        stores="".join(f"st.global.b32 [%rd9+{4 * i}], %d{i};" for i in range(count)),
    )
    run(
        f".reg .b32 %d<{count}>;" + body,
        [memory, out],
        threads=128,
        declarations=f".shared .align 1024 .b8 memory[{len(memory)}];",
    )
    return a, b, out


@pytest.mark.parametrize("b_major", ["K", "N"])
@pytest.mark.parametrize("a_major", ["K", "M"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_warpgroup_product(swizzle, a_major, b_major):
    a, b, out = warpgroup(swizzle, a_major, b_major)
    expected = a @ b.T + 1
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        # figure of the D fragment: rows 16 warp + lane / 4 (+ 8), columns 8 j + 2 (lane % 4) (+ 1)
        for i in range(32):
            row, column = (
                16 * warp + lane // 4 + 8 * (i // 2 % 2),
                8 * (i // 4) + 2 * (lane % 4) + i % 2,
            )
            assert out[thread, i] == expected[row, column], (thread, i)


def test_warpgroup_product_replaces_and_negates():
    a, b, out = warpgroup(0, "K", "K", sign=-1, accumulate=0, n=8)
    np.testing.assert_array_equal(out[0], -(a @ b.T)[[0, 0, 8, 8], [0, 1, 0, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fence": ""}, "without a fence.proxy.async"),
        (
            {"wait": "", "after": "add.rn.f32 %d1, %d1, %d1;"},
            "(reads|writes) %d1, which wgmma.mma_async is still working on",
        ),
        (
            {"wait": "", "after": "mov.b32 %d0, %d1; add.u32 %r1, %r1, %d0;"},
            "reads %d0, which wgmma.mma_async",
        ),
        (
            {"wait": "wgmma.wait_group.sync.aligned 1;"},
            "reads %d0, which wgmma.mma_async",
        ),
        ({"sync": ""}, "%d0 was written without a wgmma.fence since"),
        (
            {
                "wait": "",
                "after": "@%once st.shared.b32 [%w], 0; wgmma.wait_group.sync.aligned 0;",
            },
            "still reading asynchronously",
        ),
    ],
)
def test_warpgroup_products_nobody_waits_for(options, message):
    with pytest.raises(PtxError, match=message):
        warpgroup(32, "K", "K", **options)


# -- mbarriers, bulk and tensor copies
# ---------------------------------------------------------------------------------------------------
BARRIER = """
.reg .b32 %m, %w; .reg .b64 %state; .reg .pred %one, %done;
setp.eq.u32 %one, %tid, 0; mov.b32 %m, barrier; mov.b32 %w, memory;
@%one mbarrier.init.shared::cta.b64 [%m], 1;
{sync}
"""
WAIT = (
    """WAIT{0}: mbarrier.try_wait.parity.shared::cta.b64 %done, [%m], {0}; @!%done bra WAIT{0};"""
)
TELL = "@%one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%m], {};"
MEMORY = ".shared .align 8 .b8 barrier[8]; .shared .align 1024 .b8 memory[2048];"
OUT = (
    "mad.lo.u32 %r1, %tid, 4, %w; ld.shared.b32 %r2, [%r1]; mad.lo.u64 %rd1, %rdT, 4, %rdA1;"
    " st.global.b32 [%rd1], %r2;"
)
LOAD = (
    "@%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%w], [%rdA0], 256,"
    " [%m];"
)


def bulk(body, sync="bar.sync 0;", groups=2):
    source, out = of(U32, np.arange(64) + 100), of(U32, np.zeros(64))
    run(
        BARRIER.format(sync=sync) + body,
        [source, out],
        threads=64,
        declarations=MEMORY,
        groups=groups,
    )
    return source, out


def test_bulk_copy():
    source, out = bulk(TELL.format(256) + LOAD + WAIT.format(0) + OUT)
    np.testing.assert_array_equal(out, source)


def test_phases():
    """The second phase's copy overwrites the first's when everybody has read it."""
    source, out = bulk(
        TELL.format(256)
        + LOAD
        + WAIT.format(0)
        + OUT
        + "bar.sync 0;"
        + TELL.format(256)
        + "@%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%w+16],"
        " [%rdA0], 256, [%m];" + WAIT.format(1) + OUT,
        groups=1,
    )
    np.testing.assert_array_equal(out, [*source[:4], *source[:60]])


def test_bulk_copy_to_global_memory():
    source, out = bulk(
        "mad.lo.u32 %r1, %tid, 4, %w; st.shared.b32 [%r1], %tid; fence.proxy.async.shared::cta;"
        " bar.sync 0; @%one cp.async.bulk.global.shared::cta.bulk_group [%rdA1],[%w], 256; @%one"
        " cp.async.bulk.commit_group; @%one cp.async.bulk.wait_group.read 0;"
    )
    np.testing.assert_array_equal(out, np.arange(64))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            TELL.format(256) + LOAD + OUT,
            "asynchronous copy is still writing|has written, with no barrier",
        ),
        (
            TELL.format(512) + LOAD + WAIT.format(0),
            "wait here or elsewhere for others that never come",
        ),
        (
            TELL.format(256)
            + LOAD
            + WAIT.format(0)
            + OUT
            + TELL.format(256)
            + LOAD
            + WAIT.format(1),
            "has read, with no barrier in between",
        ),
        (
            (
                "mad.lo.u32 %r1, %tid, 4, %w; st.shared.b32 [%r1], %tid; bar.sync 0; @%one"
                " cp.async.bulk.global.shared::cta.bulk_group [%rdA1], [%w], 256;"
            ),
            "without a fence.proxy.async",
        ),
        (
            (
                "@%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%w],"
                " [%rdA0], 100, [%m];"
            ),
            "multiples of 16 bytes",
        ),
        (
            "mbarrier.arrive.shared::cta.b64 %state, [%m];",
            "more arrivals at an mbarrier than it expects",
        ),
        (
            "mbarrier.arrive.shared::cta.b64 %state, [%m+8];",
            "shared address|no mbarrier here",
        ),
    ],
)
def test_mistakes_with_mbarriers(body, message):
    with pytest.raises(PtxError, match=message):
        bulk(body)


def test_an_mbarrier_is_used_before_others_know_of_it():
    with pytest.raises(PtxError, match="does not know yet that it was initialized"):
        bulk(WAIT.format(0), sync="")


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_tensor_copies(swizzle):
    """A box of 4 rows that hangs over the edges of an array of 5 x 40 bf16 goes to shared memory
    and, shifted, back to another."""
    from test.ptx import tensor_map

    columns = 64 if swizzle == 3 else 16
    source, target, raw = (
        of(U16, np.arange(200).reshape(5, 40) + 1),
        of(U16, np.zeros((5, 40))),
        of(U16, np.zeros(4 * columns)),
    )
    maps = [
        np.frombuffer(
            tensor_map.encode_tiled(
                tensor_map.BFLOAT16,
                a.ctypes.data,
                (40, 5),
                (80,),
                (columns, 4),
                swizzle=swizzle,
            ),
            np.uint8,
        )
        for a in (source, target)
    ]
    blobs = np.zeros(256 + 64, np.uint8)
    blobs = blobs[-blobs.ctypes.data % 64 :][:256]
    blobs[:] = np.concatenate(maps)
    body = (
        BARRIER.format(sync="bar.sync 0;")
        + TELL.format(8 * columns)
        + """mov.b32 %r10, 30; mov.b32 %r11, -1;
@%one cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%w], [%rdA0, {%r10, %r11}], [%m];
"""
        + WAIT.format(0)
        + f"""mov.b32 %r10, 2; mov.b32 %r11, 3; add.u64 %rd5, %rdA0, 128;
@%one cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd5, {{%r10, %r11}}], [%w]; @%one cp.async.bulk.commit_group; @%one cp.async.bulk.wait_group 0;
mov.b32 %r1, %tid;
AGAIN: setp.ge.u32 %p1, %r1, {2 * columns}; @%p1 bra DONE; mad.lo.u32 %r2, %r1, 4, %w; ld.shared.b32 %r3, [%r2]; mad.wide.u32 %rd1, %r1, 4, %rdA3; st.global.b32 [%rd1], %r3;
add.u32 %r1, %r1, 64; bra AGAIN; DONE:"""
    )
    run(body, [blobs, source, target, raw], threads=64, declarations=MEMORY)
    box = np.zeros((4, columns), U16)
    box[1:, :10] = source[:3, 30:40]
    width = (16, 32, 64, 128)[swizzle] // 16
    lines = box.reshape(-1, max(width, columns // 8) if not swizzle else width, 8)
    expected = lines.copy()
    if swizzle:
        for r in range(len(lines)):
            for unit in range(width):
                expected[r, unit ^ {2: r // 4 % 2, 4: r // 2 % 4, 8: r % 8}[width]] = lines[r, unit]
    np.testing.assert_array_equal(raw, expected.ravel())
    stored = np.zeros((5, 40), U16)
    stored[3:, 2 : 2 + min(columns, 38)] = box[:2, :38]
    np.testing.assert_array_equal(target, stored)
