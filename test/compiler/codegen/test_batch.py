"""Independent neighbours as one region: the same bits as one by one, only what is independent, and
really one call."""

from __future__ import annotations

import re

import numpy as np
import pytest

from test.support import hlo
from torch_hlo import config
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.device.cpu.loader import load
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.instruction import Module

SIZES = (1, 7, 1000, 4096, 33333, 100001)


def updates(sizes: tuple[int, ...], aliases: str = "") -> Module:
    """p - lr * g for every size, each with its own shape."""
    lines, n = [f"HloModule updates{aliases}", "ENTRY main {"], len(sizes)
    lines.append("  lr = f32[] parameter(0)")
    for i, s in enumerate(sizes):
        lines += [
            f"  p{i} = f32[{s}] parameter({1 + 2 * i})",
            f"  g{i} = f32[{s}] parameter({2 + 2 * i})",
            f"  l{i} = f32[{s}] broadcast(lr), dimensions={{}}",
            f"  m{i} = f32[{s}] multiply(l{i}, g{i})",
            f"  r{i} = f32[{s}] subtract(p{i}, m{i})",
        ]
    lines += [
        (
            f"  ROOT r = ({', '.join(f'f32[{s}]' for s in sizes)})"
            f" tuple({', '.join(f'r{i}' for i in range(n))})"
        ),
        "}",
    ]
    return hlo("\n".join(lines) + "\n")


def run(module: Module, inputs: list[np.ndarray]) -> list[np.ndarray]:
    program = load(compile_module(module))
    outputs = [
        np.empty(s.dims, x.dtype)
        for s, x in zip(program.executable.outputs, evaluate(module, inputs))
    ]
    program.call([x.ctypes.data for x in inputs], [y.ctypes.data for y in outputs])
    return outputs


def texts(module: Module) -> str:
    found = []
    compile_module(module, dump=lambda name, value: found.append(value) if name == "llvm" else None)
    return "\n".join(found)


def regions(text: str) -> list[str]:
    """What goes to the thread pool."""
    return re.findall(r"@torch_hlo_parallel\(ptr @([\w.]+),", text)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_updates_are_one_region(threads: int) -> None:
    module = updates(SIZES)
    assert regions(texts(module)) == ["batch.task"]
    inputs = random_inputs(module, seed=1)
    with config.override(THREADS=threads):
        for got, want in zip(run(module, inputs), evaluate(module, inputs), strict=True):
            np.testing.assert_array_equal(got, want)


def test_small_ones_need_no_region() -> None:
    assert regions(texts(updates((3, 5, 8)))) == []


def test_in_place_updates() -> None:
    aliases = (
        ", input_output_alias={ "
        + ", ".join(f"{{{i}}}: ({1 + 2 * i}, {{}}, may-alias)" for i in range(len(SIZES)))
        + " }"
    )
    module = updates(SIZES, aliases)
    assert len(module.aliases) == len(SIZES)
    assert regions(texts(module)) == ["batch.task"]
    inputs = random_inputs(module, seed=2)
    wanted = evaluate(module, inputs)
    program = load(compile_module(module))
    given = [x.copy() for x in inputs]
    program.call(
        [x.ctypes.data for x in given],
        [given[1 + 2 * i].ctypes.data for i in range(len(SIZES))],
    )
    for i, want in enumerate(wanted):
        np.testing.assert_array_equal(given[1 + 2 * i], want)


def test_what_depends_waits() -> None:
    # q is transposed and read again, so the second transpose and what reads the first cannot be
    # neighbours' equals.
    module = hlo("""HloModule chain
ENTRY main {
  x = f32[300,200] parameter(0)
  y = f32[300,200] parameter(1)
  a = f32[200,300] transpose(x), dimensions={1,0}
  b = f32[200,300] transpose(y), dimensions={1,0}
  c = f32[200,200] dot(a, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t = f32[60000] reshape(b)
  u = f32[200,300] reshape(t)
  v = f32[300,200] transpose(u), dimensions={1,0}
  w = f32[300,200] exponential(v)
  z = f32[200,300] transpose(w), dimensions={1,0}
  ROOT r = (f32[200,200], f32[200,300], f32[200,300]) tuple(c, b, z)
}
""")
    inputs = random_inputs(module, seed=3)
    for got, want in zip(run(module, inputs), evaluate(module, inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_without_passes_chains_stay_in_order() -> None:
    module = hlo("""HloModule chain
ENTRY main {
  x = f32[50000] parameter(0)
  y = f32[50000] parameter(1)
  a = f32[50000] add(x, y)
  b = f32[50000] multiply(x, y)
  c = f32[50000] subtract(a, b)
  d = f32[50000] negate(y)
  e = f32[50000] multiply(c, d)
  ROOT r = (f32[50000], f32[50000]) tuple(e, d)
}
""")
    executable = compile_module(module, optimize=False)
    inputs = random_inputs(module, seed=4)
    outputs = [np.empty(50000, np.float32) for _ in range(2)]
    load(executable).call([x.ctypes.data for x in inputs], [y.ctypes.data for y in outputs])
    for got, want in zip(outputs, evaluate(module, inputs), strict=True):
        np.testing.assert_array_equal(got, want)
