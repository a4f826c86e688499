"""Products on GPUs: numbers on the PTX evaluator, what ptxas makes of the kernels, and a model of
shared-memory banks and memory sectors."""

import re
import shutil
import subprocess
from unittest import mock

import numpy as np
import pytest

from benchmarks import check_gpu
from torch_hlo import config
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.gpu import ptx, words
from torch_hlo.compiler.gpu.ptx import MATRIX_UNITS
from torch_hlo.compiler.gpu.target import gpu_target
from torch_hlo.compiler.llvm.function import Function
from torch_hlo.compiler.matmul.gpu import gpu_dot, gpu_matrix, gpu_panel
from torch_hlo.compiler.matmul.gpu.gpu_panel import Operand, Panel
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.device import runtime
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.numeric import decode, encode
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.text.parser import parse_module

PTXAS = shutil.which("ptxas")
needs_ptxas = pytest.mark.skipif(
    PTXAS is None,
    reason=(
        "ptxas is not installed (it comes with the CUDA toolkit, or with the package"
        " nvidia-cuda-nvcc)"
    ),
)
# which dimension of A and of B is contiguous: k, or the rows (columns) of the result
LAYOUTS = ("kk", "kr", "rk", "rr")


def product(dtypes: str, m: int, n: int, k: int, layout: str = "kr", batch: tuple[int, ...] = ()):
    """`dtypes`: "A B result"."""
    a, b, out = dtypes.split()
    r, lead = len(batch), "".join(f"{d}," for d in batch)
    x = f"{a}[{lead}{m},{k}]" if layout[0] == "k" else f"{a}[{lead}{k},{m}]"
    y = f"{b}[{lead}{n},{k}]" if layout[1] == "k" else f"{b}[{lead}{k},{n}]"
    dims = ",".join(map(str, range(r)))
    batching = f", lhs_batch_dims={{{dims}}}, rhs_batch_dims={{{dims}}}" if r else ""
    contracting = (
        f"lhs_contracting_dims={{{r + (layout[0] == 'k')}}}",
        f"rhs_contracting_dims={{{r + (layout[1] == 'k')}}}",
    )
    return parse_module(
        f"HloModule product\nENTRY main {{\n  x = {x} parameter(0)\n  y = {y} parameter(1)\n"
        f"  ROOT r = {out}[{lead}{m},{n}] dot(x, y){batching}, {', '.join(contracting)}\n}}"
    )


def check(module, device: str = "test.ptx.driver:sm_80", tolerance: float = 2e-6) -> None:
    inputs = random_inputs(module, seed=3)
    with config.override(DEVICE=device, CACHE=""):
        found = check_gpu.run(module, inputs)
    for e, f in zip(evaluate(module, inputs), found, strict=True):
        np.testing.assert_allclose(
            np.float64(f),
            np.float64(e),
            rtol=0,
            atol=tolerance * max(1.0, float(np.abs(np.float64(e)).max())),
        )


def kernels(module, cpu: str = "sm_80") -> list[str]:
    return [k.name for k in compile_module(module, gpu_target(f"nvptx:{cpu}")).kernels]


# -- numbers
# ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtypes", "sizes", "device"),
    [
        ("bf16 bf16 f32", (64, 64, 72), "test.ptx.driver:sm_80"),
        ("f16 f16 f16", (70, 72, 104), "test.ptx.driver:sm_90"),
        ("bf16 bf16 bf16", (18, 37, 51), "test.ptx.driver:sm_80"),
        ("s8 s8 s32", (40, 132, 80), "test.ptx.driver:sm_80"),
        ("f8e4m3fn f8e5m2 f32", (36, 132, 68), "test.ptx.driver:sm_89"),
        ("f32 f32 f32", (70, 68, 20), "test.ptx.driver:sm_80"),
        ("f64 f64 f64", (9, 65, 17), "test.ptx.driver:sm_80"),
    ],
)
def test_numbers(dtypes, sizes, device, layout):
    check(
        product(dtypes, *sizes, layout),
        device,
        1e-3 if dtypes == "f16 f16 f16" else 1e-2 if dtypes == "bf16 bf16 bf16" else 2e-6,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tf32_rounds_operands_to_eleven_bits(layout, monkeypatch):
    with config.override(DEVICE="test.ptx.driver:sm_80"):
        device = runtime.driver()  # other tests' too: it must not be opened with TF32
    with config.override(TF32=True):
        monkeypatch.setattr(device, "target", gpu_target("nvptx:sm_80"))
    module = product("f32 f32 f32", 40, 68, 44, layout)
    x, y = random_inputs(module, seed=3)

    def rounded(v):
        """Nearest, ties away from zero, of the 13 bits that TF32 lacks."""
        return ((v.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)

    with config.override(DEVICE="test.ptx.driver:sm_80", CACHE=""):
        (found,) = check_gpu.run(module, [x, y])
    (expected,) = evaluate(module, [rounded(x), rounded(y)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtypes", ["f32 f32 f32", "bf16 bf16 f32"])
@pytest.mark.parametrize(
    ("m", "n", "k", "layout"),
    [
        (1, 50, 64, "kk"),
        (3, 37, 40, "kr"),
        (8, 72, 40, "kr"),
        (5, 40, 264, "kk"),
        (100, 1, 64, "kk"),
        (1, 40, 3000, "kr"),
    ],
)
def test_few_rows(m, n, k, layout, dtypes):
    module = product(dtypes, m, n, k, layout)
    assert kernels(module)[0].startswith("k0_gemv")
    check(module)


def test_batches_and_symbolic_sizes():
    check(product("bf16 bf16 f32", 40, 48, 72, "kr", (3, 2)))
    check(product("f32 f32 f32", 20, 24, 36, "rk", (2,)))
    module = parse_module("""HloModule symbolic
ENTRY main { x = bf16[s0,40] parameter(0)
 w = bf16[40,48] parameter(1)
 ROOT r = f32[s0,48] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0} }""")
    inputs = random_inputs(module, seed=3)
    (expected,) = evaluate(module, inputs)
    with config.override(DEVICE="test.ptx.driver:sm_80", CACHE=""):
        given = [runtime.from_bytes(Shape("bf16", v.shape), encode(v, "bf16")) for v in inputs]
        result = runtime.allocate(Shape("f32", expected.shape))
        runtime.compile_program(module).run(given, [result])
    np.testing.assert_allclose(
        decode(result.bytes.tobytes(), "f32", expected.shape), expected, atol=1e-5
    )


def test_deep_products_are_cut_in_k_and_give_the_same_bits():
    module = product("bf16 bf16 bf16", 32, 64, 2048, "kk")
    assert [re.sub(r"^k\d+_", "", k)[:9] for k in kernels(module)] == [
        "dot_32x64",
        "sum_parts",
    ]
    inputs = random_inputs(module, seed=3)
    with config.override(DEVICE="test.ptx.driver:sm_80", CACHE=""):
        first, second = (check_gpu.run(module, inputs)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    check(module, tolerance=1e-2)


@pytest.mark.parametrize(
    "tile",
    [t for t, _ in (*gpu_matrix.TILES, *gpu_matrix.HOPPER_TILES)],
    ids=lambda t: t.name,
)
def test_every_tile(tile, monkeypatch):
    monkeypatch.setattr(gpu_matrix, "tiles", lambda target: ((tile, 1.0),))
    module = product("bf16 bf16 f32", tile.m + 8, 40, 200, "kk" if tile.m < 64 else "rk")
    cpu = "sm_80" if tile.team == 1 else "sm_90a"
    assert tile.name in kernels(module, cpu)[0]
    check(module, f"test.ptx.driver:{cpu}")


@pytest.mark.parametrize(
    ("dtypes", "layout"),
    [
        *(("f16 f16 f32", layout) for layout in LAYOUTS),
        ("s8 s8 s32", "kk"),
        ("f8e5m2 f8e4m3fn f32", "kk"),
    ],
)
def test_warpgroups(dtypes, layout, monkeypatch):
    monkeypatch.setattr(gpu_matrix, "tiles", lambda target: gpu_matrix.HOPPER_TILES)
    module = product(dtypes, 70, 76, 196, layout)
    assert kernels(module, "sm_90a")[0].startswith("k0_dot_w")
    check(module, "test.ptx.driver:sm_90a")


def silu(dtype: str, m: int, n: int, k: int):
    """silu(x w^T + b) + r"""
    t = f"{dtype}[{m},{n}]"
    return parse_module(f"""HloModule silu
ENTRY main {{
  x = {dtype}[{m},{k}] parameter(0)
  w = {dtype}[{n},{k}] parameter(1)
  b = {dtype}[{n}] parameter(2)
  r = {t} parameter(3)
  d = {t} dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  c = {t} broadcast(b), dimensions={{1}}
  h = {t} add(d, c)
  l = {t} logistic(h)
  g = {t} multiply(h, l)
  ROOT o = {t} add(g, r)
}}""")


@pytest.mark.parametrize(
    ("dtype", "m", "n", "k"),
    [
        ("bf16", 40, 48, 64),
        ("f16", 33, 35, 40),
        ("f32", 40, 48, 20),
        ("f32", 2, 48, 64),
    ],
)
def test_what_follows_is_fused(dtype, m, n, k):
    module = silu(dtype, m, n, k)
    assert len(kernels(module)) == 1
    check(module, tolerance={"bf16": 1e-2, "f16": 1e-3, "f32": 2e-6}[dtype])


# -- the assembler
# -----------------------------------------------------------------------------------------------------------
@needs_ptxas
@pytest.mark.parametrize(
    ("dtypes", "layout", "cpu"),
    [
        ("bf16 bf16 bf16", "kr", "sm_80"),
        ("f16 f16 f32", "rr", "sm_86"),
        ("f8e4m3fn f8e4m3fn bf16", "rk", "sm_89"),
        ("s8 s8 s32", "kr", "sm_80"),
        ("f32 f32 f32", "rk", "sm_80"),
        ("bf16 bf16 f32", "rk", "sm_90"),
        ("bf16 bf16 bf16", "kr", "sm_90a"),
        ("s8 s8 s32", "kk", "sm_90a"),
        ("bf16 bf16 f32", "kk", "sm_100"),
    ],
)
def test_nothing_is_spilled(dtypes, layout, cpu):
    e = compile_module(product(dtypes, 4096, 4096, 1024, layout), gpu_target(f"nvptx:{cpu}"))
    assert e.kernels[0].shared <= 99 << 10 or cpu not in ("sm_86", "sm_89")
    no_spills(e.image, cpu)


@needs_ptxas
@pytest.mark.parametrize("cpu", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_nothing_is_spilled_by_what_is_fused(dtype, cpu):
    no_spills(
        compile_module(silu(dtype, 4096, 4096, 512), gpu_target(f"nvptx:{cpu}")).image,
        cpu,
    )


def no_spills(image: bytes, cpu: str) -> None:
    done = subprocess.run(
        [PTXAS, f"-arch={cpu}", "-v", "-", "-o", "/dev/null"],
        input=image,
        capture_output=True,
    )
    report = done.stderr.decode()
    assert done.returncode == 0, report
    assert (
        set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
        and "Potential Performance Loss" not in report
    ), report


# -- banks and sectors
# -------------------------------------------------------------------------------------------------------
class Known(Function):
    """A writer for one thread whose number is known: the emitters then compute every address
    themselves."""

    def __init__(self) -> None:
        super().__init__("known")

    def gep(self, element, pointer, index):
        return pointer + index

    def icmp(self, predicate, a, b, kind="i64"):
        return str({"slt": a < b, "sgt": a > b, "eq": a == b}[predicate]).lower()


def accesses(thread: int, act) -> list[tuple[str, int, int]]:
    """(instruction, shared address, global address) of everything that `act(f)` writes for a
    thread."""
    seen: list[tuple[str, int, int]] = []

    def note(name: str, shared: int, source: int = 0, results: int = 0) -> list[int]:
        seen.append((name, shared, source))
        return [0] * results

    with (
        mock.patch.object(words.Words, "narrow", lambda self, a: thread if a == "%kernel.t" else a),
        mock.patch.object(
            ptx, "copy_async", lambda f, width, to, source, n: note("copy", to, source)
        ),
        mock.patch.object(
            ptx,
            "load_matrices",
            lambda f, address, transposed=False: note("matrices", address, 0, 4),
        ),
        mock.patch.object(
            ptx,
            "load_shared",
            lambda f, kinds, address: note("words", address, 0, len(kinds)),
        ),
        mock.patch.object(ptx, "permute_bytes", lambda *a: 0),
        mock.patch.object(Panel, "_rounded", lambda self, registers: registers),
    ):
        act(Known())
    return seen


def wavefronts(name: str, shared: list[int]) -> float:
    """Accesses of the 32 banks that a warp's instruction takes, over the least that its bytes need.
    16-byte accesses go by eight lanes."""
    width, together = (4, 32) if name == "words" else (16, 8)
    worst = 0
    for start in range(0, 32, together):
        banks: dict[int, set[int]] = {}
        for address in shared[start : start + together]:
            for word in range(address // 4, (address + width) // 4):
                banks.setdefault(word % 32, set()).add(word)
        worst = max(worst, max(map(len, banks.values())))
    return worst


OPERANDS = [
    Operand(MATRIX_UNITS[d], along, rows, 16)
    for d in ("bf16", "tf32", "s8")
    for along in (True, False)
    for rows in (64, 128)
    if along or rows * MATRIX_UNITS[d].itemsize >= 128
]


@pytest.mark.parametrize("operand", OPERANDS, ids=lambda o: f"{o.name}-{o.rows}")
def test_no_bank_is_touched_twice(operand):
    def act(f):
        p = Panel(f, operand, 128, 1 << 20, 4096, 0, 1 << 20, 1 << 20)
        p.prepare(32)
        for i in range(2):
            for step in range(gpu_panel.STEPS):
                p.fragment(0, i, step)
        p.bring(0, p.start, 0)

    # an instruction of the first warp
    for each in zip(*(accesses(thread, act) for thread in range(32)), strict=True):
        name = each[0][0]
        assert wavefronts(name, [shared for _, shared, _ in each]) == 1, (name, each)
        if name == "copy":  # whole sectors of 32 bytes: 512 bytes in 16
            assert len({source // 32 for _, _, source in each}) == 16


@pytest.mark.parametrize("operand", OPERANDS, ids=lambda o: f"{o.name}-{o.rows}")
def test_copies_fill_every_byte_once(operand):
    def act(f):
        p = Panel(f, operand, 128, 0, 4096, 0, 1 << 20, 1 << 20)
        p.bring(0, p.start, 0)

    written = [to for thread in range(128) for _, to, _ in accesses(thread, act)]
    assert sorted(written) == list(range(0, operand.nbytes, 16))


def test_types_that_units_take():
    target = gpu_target("nvptx:sm_80")
    # 8.9 and later
    assert (
        gpu_dot.machine(target).cores == 108
        and gpu_matrix.units(target, ["f8e4m3fn"] * 2, "f32") is None
    )
    assert gpu_matrix.units(gpu_target("nvptx:sm_89"), ["f8e4m3fn"] * 2, "f32") is not None
    # exact unless the target allows TF32
    assert gpu_matrix.units(target, ["f32"] * 2, "f32") is None


# -- the copy engine
# -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtypes", "sizes", "layout", "batch"),
    [
        ("bf16 bf16 f32", (136, 72, 200), "rr", ()),
        ("f16 f16 f16", (70, 40, 104), "kr", ()),
        ("bf16 bf16 bf16", (64, 72, 1056), "rk", ()),
        ("bf16 bf16 f32", (40, 48, 72), "kr", (2, 3)),
        ("s8 s8 s32", (70, 72, 208), "kk", ()),
    ],
)
def test_slices_by_the_copy_engine(dtypes, sizes, layout, batch, monkeypatch):
    monkeypatch.setattr(gpu_matrix, "tiles", lambda target: gpu_matrix.HOPPER_TILES)
    module = product(dtypes, *sizes, layout, batch)
    e = compile_module(module, gpu_target("nvptx:sm_90a"))
    assert (
        e.kernels[0].name.startswith("k0_dot_bulk")
        and len(e.kernels[0].maps) == 2
        and Executable.from_bytes(e.to_bytes()) == e
    )
    check(
        module,
        "test.ptx.driver:sm_90a",
        1e-2 if dtypes.endswith(" bf16") else 1e-3 if dtypes.endswith(" f16") else 2e-6,
    )


def test_an_empty_sum_of_unknown_depth(monkeypatch):
    monkeypatch.setattr(gpu_matrix, "tiles", lambda target: gpu_matrix.HOPPER_TILES)
    module = parse_module("""HloModule symbolic
ENTRY main { x = bf16[s0,64] parameter(0)
 y = bf16[s0,72] parameter(1)
 ROOT r = f32[64,72] dot(x, y), lhs_contracting_dims={0}, rhs_contracting_dims={0} }""")
    with config.override(DEVICE="test.ptx.driver:sm_90a", CACHE=""):
        compiled = runtime.compile_program(module)
        assert "bulk" in compiled.executable.kernels[0].name
        for k in (0, 40):
            inputs = [
                np.random.default_rng(k).standard_normal((k, n)).astype(np.float32).view(np.uint32)
                for n in (64, 72)
            ]
            inputs = [(v & np.uint32(0xFFFF0000)).view(np.float32) for v in inputs]
            result = runtime.allocate(Shape("f32", (64, 72)))
            compiled.run(
                [runtime.from_bytes(Shape("bf16", v.shape), encode(v, "bf16")) for v in inputs],
                [result],
            )
            np.testing.assert_allclose(
                decode(result.bytes.tobytes(), "f32", (64, 72)),
                inputs[0].T @ inputs[1],
                atol=1e-4,
            )


def test_rows_that_are_not_aligned_are_copied_by_threads():
    assert "bulk" not in kernels(product("bf16 bf16 f32", 4096, 4096, 4097, "kk"), "sm_90a")[0]
