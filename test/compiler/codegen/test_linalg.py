"""cholesky and triangular-solve, real and complex, batched."""
import re

import numpy as np
import pytest

from test.compiler.codegen.steps import check, module_of
from torch_hlo.compiler.compile import compile_module
from torch_hlo.hlo import build
from torch_hlo.hlo.ir import Computation
from torch_hlo.hlo.shape import Shape


def matrices(dtype, batch, n):
    rng = np.random.default_rng(n)
    a = rng.standard_normal((batch, n, n))
    return (a + 1j * rng.standard_normal((batch, n, n)) if np.dtype(dtype).kind == "c" else a).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("batch,n", [(1, 1), (3, 5), (1, 40)])
@pytest.mark.parametrize("lower", [True, False])
def test_cholesky(dtype, batch, n, lower):
    a = matrices(dtype, batch, n)
    a = (a @ np.conj(np.swapaxes(a, -1, -2)) + n * np.eye(n)).astype(dtype)
    check(lambda x: build.cholesky(x, lower), a, rtol=1e-4)
    check(lambda x: build.cholesky(x, lower), -a)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("transpose", ["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"])
def test_triangular_solve(dtype, left, lower, unit, transpose):
    n = 7
    a = matrices(dtype, 3, n) / n if unit else matrices(dtype, 3, n) + 2 * n * np.eye(n)
    b = matrices(dtype, 3, 9)[:, :n, :] if left else matrices(dtype, 3, 9)[:, :, :n]
    check(lambda x, y: build.triangular_solve(x, y, left_side=left, lower=lower, unit_diagonal=unit, transpose_a=transpose), a.astype(dtype), b, rtol=1e-3)


def test_empty():
    check(lambda x: build.cholesky(x, True), np.ones((0, 3, 3), "float32"))
    check(lambda x, y: build.triangular_solve(x, y), np.ones((2, 3, 3), "float32"), np.ones((2, 3, 0), "float32"))


def test_a_step_made_of_several_does_not_repeat_what_comes_before():
    """A right-sided solve is emitted as transposes around a left-sided one; the loop that computes its operand runs once."""
    seen = {}

    def program(a, b):
        return build.triangular_solve(a, looped(b), left_side=False, lower=True)

    module = module_of(program, [Shape("f32", (3, 3)), Shape("f32", (4, 3))])
    compile_module(module, dump=lambda name, value: seen.setdefault(name, []).append(str(value)))
    assert len(re.findall(r"define void @condition", "".join(seen["llvm"]))) == 1
    a, b = matrices("float32", 1, 3)[0] + 6 * np.eye(3, dtype="float32"), matrices("float32", 1, 4)[0][:, :3]
    check(program, a, b, rtol=1e-4)


def looped(x):
    """x doubled three times, by a loop."""
    start = build.tuple_(build.constant(0, "s64"), x)
    state = build.parameter(0, start.shape)
    count, value = (build.get_tuple_element(state, i) for i in range(2))
    one, three = build.constant(1, "s64"), build.constant(3, "s64")
    condition = Computation("condition", (state,), build.compare(count, three, "LT"))
    body = Computation("body", (state,), build.tuple_(build.add(count, one), build.add(value, value)))
    return build.get_tuple_element(build.while_(condition, body, start), 1)
