"""Fourier transforms against NumPy's: every way to compute a line, radices, kinds, types,
dimensions; what needs compiler/fourier/fourier.py, with it."""

from dataclasses import replace

import numpy as np
import pytest

from test.compiler.steps import aligned, check, module_of
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.fourier import fft as codegen
from torch_hlo.compiler.fourier.fft_plan import Plan, plan, radices, split
from torch_hlo.compiler.fourier.fourier import fourier
from torch_hlo.compiler.llvm.target import host, platform_target
from torch_hlo.device.cpu import loader as cpu_device
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.shape import Shape

KINDS = ("FFT", "IFFT", "RFFT", "IRFFT")


def transform(kind, outer, lengths, double=False, optimize=False):
    """Compare with the evaluator."""
    rng = np.random.default_rng(sum(lengths))
    given = (
        *outer,
        *lengths[:-1],
        lengths[-1] // 2 + 1 if kind == "IRFFT" else lengths[-1],
    )
    v = rng.standard_normal(given)
    if kind != "RFFT":
        v = v + 1j * rng.standard_normal(given)
    v = v.astype(
        ("complex128" if double else "complex64")
        if kind != "RFFT"
        else "float64"
        if double
        else "float32"
    )
    size = np.sqrt(np.prod(lengths)) if kind in ("FFT", "RFFT") else 1.0
    check(
        lambda x: build.fft(x, kind, lengths),
        v,
        rtol=0,
        atol=(1e-14 if double else 4e-6) * size,
        optimize=optimize,
    )


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12, 30, 64, 77, 230, 256])
@pytest.mark.parametrize("lines", [1, 17])
@pytest.mark.parametrize("double", [False, True])
def test_radices(n, lines, double):
    transform("FFT", (lines,), (n,), double)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 6, 24, 250])
def test_kinds(kind, n):
    transform(kind, (19,), (n,))
    transform(kind, (2, 3), (n,), double=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1536, 8192, 50000])
def test_lines_that_are_matrices(kind, n):
    assert plan(n // 2, 3, 16).rows
    transform(kind, (3,), (n,), optimize=True)


@pytest.mark.parametrize("kind", KINDS)
def test_many_dimensions(kind):
    transform(kind, (3,), (6, 18))
    transform(kind, (2,), (5, 4, 70), double=True)
    transform(kind, (2,), (1, 30))


def test_the_two_ways_of_a_line_agree(monkeypatch):
    """In one piece, and as a matrix."""
    for way in (lambda n, *_: Plan(n), lambda n, *_: Plan(n, *split(n))):
        monkeypatch.setattr(codegen, "plan", way)
        for kind, n in (("FFT", 100), ("IFFT", 128), ("RFFT", 512), ("IRFFT", 512)):
            transform(kind, (5,), (n,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 9, 31, 58, 97, 202])
def test_odd_lengths_and_large_primes(kind, n):
    transform(kind, (4,), (n,), optimize=True, double=n == 97)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(37, 12), (12, 3), (4, 9), (5, 1)])
def test_many_dimensions_that_are_taken_apart(kind, lengths):
    transform(kind, (2,), lengths, optimize=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, beside", [(16, 20), (250, 7), (8, 16), (6, 3)])
def test_across(kind, n, beside):
    """A dimension is transformed where it is, between transposes that become one kernel."""
    rng = np.random.default_rng(n)
    v = rng.standard_normal((3, n // 2 + 1 if kind == "IRFFT" else n, beside))
    v = (
        v.astype("float32")
        if kind == "RFFT"
        else (v + 1j * rng.standard_normal(v.shape)).astype("complex64")
    )

    def program(x):
        return build.transpose(build.fft(build.transpose(x, (0, 2, 1)), kind, (n,)), (0, 2, 1))

    check(
        program,
        v,
        rtol=0,
        atol=4e-6 * (np.sqrt(n) if kind in ("FFT", "RFFT") else 1.0),
        optimize=True,
    )


@pytest.mark.parametrize("lengths", [(16,), (15,), (6, 10)])
def test_gradients_of_real_transforms_are_real_transforms(lengths):
    rng = np.random.default_rng(1)
    v = (
        rng.standard_normal((3, *lengths[:-1], lengths[-1] // 2 + 1))
        + 0j
        + 1j * rng.standard_normal(1)
    ).astype("complex64")

    def program(g):
        whole = build.pad(
            g,
            build.constant(0, "c64"),
            ((0, 0, 0),) * len(lengths) + ((0, lengths[-1] - v.shape[-1], 0),),
        )
        y = build.fft(whole, "IFFT", lengths)
        return build.real(
            build.multiply(y, build.broadcast(build.constant(3.0, "c64"), y.shape.dims, ()))
        )

    check(program, v, rtol=0, atol=1e-6, optimize=True)
    text = str(fourier(module_of(program, [Shape("c64", v.shape)])))
    assert ("IRFFT" in text) == (lengths[-1] % 2 == 0) and ("pad" in text) == (lengths[-1] % 2 == 1)


def test_a_slice_that_is_scaled_in_place():
    v = (np.arange(30).reshape(3, 10) * (1 + 2j)).astype("complex64")

    def program(low):
        def build_it(x):
            part = build.multiply(
                build.slice_(y := build.fft(x, "FFT", (10,)), (0, 1), (3, 9)),
                build.broadcast(build.constant(2.0, "c64"), (3, 8), ()),
            )
            return build.dynamic_update_slice(
                y, part, [build.constant(0, "s64"), build.constant(low, "s64")]
            )

        return build_it

    for low in (1, 2):  # at another place it is something else
        check(program(low), v, rtol=0, atol=1e-3, optimize=True)
        assert (
            "dynamic-update-slice" in str(fourier(module_of(program(low), [Shape("c64", v.shape)])))
        ) == (low == 2)


def test_a_table_is_no_number():
    """The real part of an inverse transform that each point is weighted in."""
    v = (np.arange(27).reshape(3, 9) * (1 - 1j)).astype("complex64")
    w = np.arange(16.0)

    def program(g):
        y = build.fft(
            build.pad(g, build.constant(0, "c64"), ((0, 0, 0), (0, 7, 0))),
            "IFFT",
            (16,),
        )
        return build.real(
            build.multiply(y, build.broadcast(build.constant(w, "c64"), y.shape.dims, (1,)))
        )

    check(program, v, rtol=0, atol=1e-4, optimize=True)


def test_gradients_across():
    rng = np.random.default_rng(1)
    v = (rng.standard_normal((2, 9, 20)) + 1j * rng.standard_normal((2, 9, 20))).astype("complex64")

    def program(g):
        zeros = build.broadcast(build.constant(0, "c64"), (2, 16, 20), ())
        whole = build.dynamic_update_slice(zeros, g, [build.constant(0, "s64")] * 3)
        return build.real(
            build.transpose(build.fft(build.transpose(whole, (0, 2, 1)), "IFFT", (16,)), (0, 2, 1))
        )

    check(program, v, rtol=0, atol=1e-6, optimize=True)
    assert "IRFFT" in str(fourier(module_of(program, [Shape("c64", v.shape)])))


def test_host_calls_are_left_to_what_has_no_kernel():
    def calls(kind, n, optimize):
        m = module_of(
            lambda x: build.fft(x, kind, (n,)),
            [Shape("f32" if kind == "RFFT" else "c64", (3, n))],
        )
        return len(compile_module(m, optimize=optimize).host_calls)

    assert [calls("FFT", n, False) for n in (64, 97)] == [0, 1]
    assert [calls("RFFT", n, False) for n in (64, 9, 58)] == [0, 1, 1]
    assert [calls(k, n, True) for k in ("FFT", "RFFT") for n in (97, 9, 58)] == [0] * 6


@pytest.mark.parametrize("cpu", ["x86-64-v2", "x86-64-v3"])
def test_narrower_vectors(cpu):
    """Code for 16- and 32-byte vectors runs here as well."""
    if not host().has("avx2"):
        pytest.skip("this machine has no AVX2")
    rng, target = (
        np.random.default_rng(0),
        replace(platform_target("x86_64-linux-gnu", cpu), triple=""),
    )
    for n in (24, 200, 2048):
        v = (rng.standard_normal((9, n)) + 1j * rng.standard_normal((9, n))).astype("complex64")
        module = module_of(lambda x, n=n: build.fft(x, "FFT", (n,)), [Shape("c64", v.shape)])
        program = cpu_device.load(compile_module(module, target=target), target)
        given, out = aligned(v.nbytes), aligned(v.nbytes)
        given[:] = v.view(np.uint8).ravel()
        program.call([given.ctypes.data], [out.ctypes.data], [])
        np.testing.assert_allclose(
            out.view("complex64").reshape(v.shape),
            np.fft.fft(v),
            rtol=0,
            atol=1e-5 * np.sqrt(n),
        )


def test_plans():
    assert (
        radices(128) == (8, 4, 4)
        and radices(2 * 3 * 5 * 23) == (2, 23, 5, 3)
        and radices(29) is None
    )
    assert (
        plan(64, 512, 16).rows == 0 and plan(1 << 16, 1, 16).rows == 256 and plan(31, 4, 16) is None
    )
