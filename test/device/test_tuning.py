"""Measured choices: what is asked, kept and taken; NVIDIA's library against a stand-in that
computes with NumPy on the stub driver."""

import ctypes

import numpy as np
import pytest

from benchmarks import check_gpu
from test.compiler.matmul.test_gpu_products import kernels, product
from test.device.stub_cuda import StubCuda
from torch_hlo import config
from torch_hlo.compiler import cache, tune
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.device import runtime, tuning
from torch_hlo.device.cuda import cublaslt, cuda_driver, cuda_memory
from torch_hlo.device.cuda.cuda_program import CudaProgram
from torch_hlo.device.gpu.driver import DriverError
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.numeric import decode, encode

NUMPY = {
    0: "f32",
    1: "f64",
    2: "f16",
    3: "s8",
    10: "s32",
    14: "bf16",
    28: "f8e4m3fn",
    29: "f8e5m2",
}


@pytest.fixture
def cached(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    with config.override(CACHE=str(directory), DEVICE="test.ptx.driver:sm_80", TUNE=1000.0):
        yield


def test_the_fastest_way_is_kept_and_taken(cached):
    module = product("bf16 bf16 f32", 64, 64, 64, "kk")
    (before,) = kernels(module)
    tried = []

    def seconds(executable, alone):
        name = executable.kernels[0].name
        tried.append(name)
        return 1.0 if "64x128" in name else 2.0 + len(tried)

    target = runtime.driver().target
    assert tuning.measure(target, module, seconds)
    assert len(set(tried)) == len(tried) > 3
    (after,) = kernels(module)
    assert "64x128" in after and "64x128" not in before
    with config.override(TUNE=0.0):
        assert kernels(module) == [before]
    tried.clear()
    assert tuning.measure(target, module, seconds) and not tried  # known
    inputs = random_inputs(module, seed=1)
    np.testing.assert_allclose(
        check_gpu.run(module, inputs)[0], evaluate(module, inputs)[0], atol=1e-5
    )


def test_choices(cached):
    assert tune.choose("t", "step", ("a", "b")) == "a"
    with tune.collecting() as wanted:
        tune.choose("t", "step", ("a", "b"))
    assert wanted == {"step": ("a", "b")}
    assert tune.record("t", "step", {"a": 2.0, "b": 1.0, "gone": 0.5})
    assert (
        tune.choose("t", "step", ("a", "b")) == "b"
        and tune.choose("other", "step", ("a", "b")) == "a"
    )
    with tune.trying("step", "a"):
        assert (
            tune.choose("t", "step", ("a", "b")) == "a"
            and tune.choose("t", "else", ("x", "y")) == "x"
        )
    cache.store(tune._key("t", "bad"), b"[no json")
    assert tune.choose("t", "bad", ("a", "b")) == "a"


def test_out_of_time_is_not_complete(cached):
    with config.override(TUNE=1e-9):
        assert not tuning.measure(
            runtime.driver().target, product("bf16 bf16 f32", 64, 64, 72, "kk"), None
        )


class Library:
    """cuBLASLt on host memory: column-major C = op(A) op(B). `enqueue(stream, run)`."""

    def __init__(self, enqueue) -> None:
        self.things: dict[int, dict] = {}
        self.enqueue, self.algorithms, self.calls = enqueue, 1, 0
        for name, arguments in cublaslt.FUNCTIONS.items():
            setattr(
                self,
                name,
                ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(getattr(self, f"_{name}")),
            )

    def _new(self, out, **content) -> int:
        self.things[len(self.things) + 1] = content
        ctypes.c_void_p.from_address(out).value = len(self.things)
        return 0

    def _put(self, thing, attribute, address, size) -> int:
        self.things[thing][attribute] = int.from_bytes(ctypes.string_at(address, size), "little")
        return 0

    def _cublasLtCreate(self, out):
        return self._new(out)

    def _cublasLtMatmulDescCreate(self, out, compute, scale):
        return self._new(out, compute=compute, scale=scale)

    def _cublasLtMatrixLayoutCreate(self, out, kind, rows, columns, line):
        return self._new(out, kind=kind, rows=rows, columns=columns, line=line)

    def _cublasLtMatmulPreferenceCreate(self, out):
        return self._new(out)

    _cublasLtMatmulDescSetAttribute = _cublasLtMatrixLayoutSetAttribute = (
        _cublasLtMatmulPreferenceSetAttribute
    ) = _put

    def _cublasLtMatmulAlgoGetHeuristic(
        self, handle, operation, a, b, c, d, preference, wanted, results, found
    ):
        ctypes.c_int.from_address(found).value = self.algorithms
        return 0

    def _matrix(self, layout: int, address: int, number: int):
        """(matrix as float64, its bytes' view) of product `number`."""
        x = self.things[layout]
        dtype = NUMPY[x["kind"]]
        size = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "s8": 1, "s32": 4}[dtype]
        start = address + number * x.get(6, 0) * size
        raw = np.ctypeslib.as_array(
            (ctypes.c_uint8 * (x["line"] * x["columns"] * size)).from_address(start)
        )
        return (
            np.float64(decode(raw.tobytes(), dtype, (x["columns"], x["line"]))).T[: x["rows"]],
            raw,
            dtype,
            x,
        )

    def _cublasLtMatmul(
        self,
        handle,
        operation,
        alpha,
        a,
        left,
        b,
        right,
        beta,
        c,
        out,
        d,
        result,
        algorithm,
        workspace,
        nbytes,
        stream,
    ):
        def run() -> None:
            self.calls += 1
            for i in range(self.things[left].get(5, 1)):
                x, y = self._matrix(left, a, i)[0], self._matrix(right, b, i)[0]
                x, y = (
                    (x.T if self.things[operation][3] else x),
                    (y.T if self.things[operation][4] else y),
                )
                _, raw, dtype, shape = self._matrix(result, d, i)
                assert (
                    shape["line"] == shape["rows"]
                    and x.shape[0] == shape["rows"]
                    and y.shape[1] == shape["columns"]
                )
                raw[:] = np.frombuffer(encode((x @ y).T.astype(np.float32), dtype), np.uint8)

        self.enqueue(stream, run)
        return 0


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    stub = StubCuda()
    library = Library(lambda stream, run: stub._enqueue(stream, ("library",), run))
    monkeypatch.setattr(cublaslt, "find", lambda: library)
    with config.override(CACHE=str(directory), DEVICE="cuda", TUNE=1000.0):
        pool = cuda_memory.CudaPool(cuda_driver.Cuda(0, stub))
        monkeypatch.setattr(cuda_memory, "pool_of", lambda number: pool)
        yield pool, library


@pytest.mark.parametrize("layout", ["kk", "kr", "rk", "rr"])
def test_the_librarys_operands(gpu, layout):
    pool, library = gpu
    module = product("bf16 bf16 f32", 16, 24, 32, layout, (2,))
    with tune.collecting() as wanted:
        compile_module(module, pool.driver.target)
    ((step, names),) = wanted.items()
    assert "library" in names
    tune.record(pool.driver.target.key, step, {"library": 1.0, names[0]: 2.0})
    inputs = random_inputs(module, seed=1)
    given = [
        runtime.from_bytes(p.shape, encode(v, "bf16"))
        for p, v in zip(module.entry.params, inputs, strict=True)
    ]
    result = runtime.allocate(module.entry.root.shape)
    compiled = runtime.compile_program(module)
    assert compiled.executable.kernels[0].library is not None
    for _ in range(3):  # launched, captured, replayed
        compiled.run(given, [result])
    (expected,) = evaluate(module, inputs)
    np.testing.assert_allclose(
        decode(result.bytes.tobytes(), "f32", expected.shape), expected, atol=1e-5
    )
    assert library.calls >= 2


def test_sizes_without_an_algorithm(gpu):
    pool, library = gpu
    library.algorithms = 0
    module = product("bf16 bf16 f32", 16, 24, 32, "kk")
    with tune.collecting() as wanted:
        compile_module(module, pool.driver.target)
    ((step, names),) = wanted.items()
    with tune.trying(step, "library"):
        e = compile_module(module, pool.driver.target)
    program = CudaProgram(e, pool)
    inputs = [runtime.from_bytes(p.shape, bytes(p.shape.nbytes)) for p in module.entry.params]
    with pytest.raises(DriverError, match=r"no algorithm for bf16\[16,32\] x bf16\[32,24\] -> f32"):
        program.run(inputs, [runtime.allocate(module.entry.root.shape)])
