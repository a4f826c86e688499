"""Everything that needs a real GPU, in one command: `python -m torch_hlo.device.check_gpu [--device cuda] [--json FILE]`.

    kernels      every family of kernels against the evaluator
    copy         bandwidth of a large elementwise kernel, in percent of the device-to-device copy
    products     rate of matrix products, next to torch.cuda when PyTorch has it
    training     losses of a small transformer and a small CNN next to the CPU, and the time of a step
Each line says PASS, FAIL or SKIP; the exit status is the number of failures. `--device opencl` runs the same on an OpenCL device.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np

from torch_hlo import config
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.hlo.evaluate import evaluate
from torch_hlo.hlo.ir import Module, outputs
from torch_hlo.hlo.numeric import decode, encode
from torch_hlo.hlo.parse import parse_module

_ADD = "add { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] add(a, b) }\n"
_MAX = "max { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] maximum(a, b) }\n"
_LESS = "less { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = pred[] compare(a, b), direction=LT, type=TOTALORDER }\n"


def _softmax(rows: int, columns: int) -> str:
    return f"""{_ADD}{_MAX}ENTRY main {{
  x = f32[{rows},{columns}] parameter(0)
  low = f32[] constant(-inf)
  zero = f32[] constant(0)
  m = f32[{rows}] reduce(x, low), dimensions={{1}}, to_apply=max
  mb = f32[{rows},{columns}] broadcast(m), dimensions={{0}}
  d = f32[{rows},{columns}] subtract(x, mb)
  e = f32[{rows},{columns}] exponential(d)
  s = f32[{rows}] reduce(e, zero), dimensions={{1}}, to_apply=add
  sb = f32[{rows},{columns}] broadcast(s), dimensions={{0}}
  ROOT r = f32[{rows},{columns}] divide(e, sb)
}}"""


def _unary(*opcodes: str) -> str:
    lines = "".join(f"  v{i} = f32[37,8] {op}(x)\n" for i, op in enumerate(opcodes))
    shapes = ", ".join(["f32[37,8]"] * len(opcodes))
    return f"ENTRY main {{\n  x = f32[37,8] parameter(0)\n{lines}  ROOT t = ({shapes}) tuple({', '.join(f'v{i}' for i in range(len(opcodes)))})\n}}"


def _reduce(dtype: str, dims: str, out: str, over: str) -> str:
    return f"""add {{ a = {dtype}[] parameter(0)
 b = {dtype}[] parameter(1)
 ROOT c = {dtype}[] add(a, b) }}
ENTRY main {{
  x = {dtype}[{dims}] parameter(0)
  zero = {dtype}[] constant(0)
  ROOT r = {dtype}[{out}] reduce(x, zero), dimensions={{{over}}}, to_apply=add
}}"""


def _dot(a: str, out: str, m: int, k: int, n: int) -> str:
    return f"""ENTRY main {{
  x = {a}[{m},{k}] parameter(0)
  y = {a}[{k},{n}] parameter(1)
  ROOT r = {out}[{m},{n}] dot(x, y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}"""


def _attention(kind: str, dtype: str, heads: int, rows: int, columns: int, size: int, width: int) -> str:
    """A call that says what it is (compiler/passes/attention.py), with its meaning."""
    row, tile = f"f32[{heads},{rows}]", f"f32[{heads},{rows},{columns}]"
    q, k, v, out = (f"[{heads},{n},{w}]" for n, w in ((rows, size), (columns, size), (columns, width), (rows, width)))
    names = {"q": dtype + q, "k": dtype + k, "v": dtype + v}
    body = f"""  s0 = {tile} dot(q, k), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, rhs_contracting_dims={{2}}
  c = f32[] constant(0.25)
  cb = {tile} broadcast(c), dimensions={{}}
  s = {tile} multiply(s0, cb)
  zero = f32[] constant(0)
"""
    if kind == "forward":
        results = f"f32{out}", row
        body += f"""  low = f32[] constant(-inf)
  m = {row} reduce(s, low), dimensions={{2}}, to_apply=max
  mb = {tile} broadcast(m), dimensions={{0,1}}
  d = {tile} subtract(s, mb)
  e = {tile} exponential(d)
  t = {row} reduce(e, zero), dimensions={{2}}, to_apply=add
  tb = {tile} broadcast(t), dimensions={{0,1}}
  p = {tile} divide(e, tb)
  pn = {dtype}[{heads},{rows},{columns}] convert(p)
  r0 = f32{out} dot(pn, v), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, rhs_contracting_dims={{1}}
  l = {row} log(t)
  r1 = {row} add(m, l)
"""
    else:
        names = {"g": dtype + out, **names, "o": dtype + out, "l": row}
        results = f"f32{q}", f"f32{k}", f"f32{v}"
        body += f"""  lb = {tile} broadcast(l), dimensions={{0,1}}
  d = {tile} subtract(s, lb)
  p = {tile} exponential(d)
  gf = f32{out} convert(g)
  of = f32{out} convert(o)
  go = f32{out} multiply(gf, of)
  h = {row} reduce(go, zero), dimensions={{2}}, to_apply=add
  hb = {tile} broadcast(h), dimensions={{0,1}}
  dp = {tile} dot(g, v), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, rhs_contracting_dims={{2}}
  x = {tile} subtract(dp, hb)
  y = {tile} multiply(p, x)
  dw = {tile} multiply(y, cb)
  pn = {dtype}[{heads},{rows},{columns}] convert(p)
  ds = {dtype}[{heads},{rows},{columns}] convert(dw)
  r0 = f32{q} dot(ds, k), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, rhs_contracting_dims={{1}}
  r1 = f32{k} dot(ds, q), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  r2 = f32{v} dot(pn, g), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
"""
    params = "".join(f"  {n} = {shape} parameter({i})\n" for i, (n, shape) in enumerate(names.items()))
    shape, roots = f"({', '.join(results)})", ", ".join(f"r{i}" for i in range(len(results)))
    gtes = "".join(f"  r{i} = {r} get-tuple-element(a), index={i}\n" for i, r in enumerate(results))
    config = json.dumps({"attention": kind, "causal": False, "scale": 0.25}, separators=(",", ":"))
    return (f"{_ADD}{_MAX}attention {{\n{params}{body}  ROOT t9 = {shape} tuple({roots})\n}}\nENTRY main {{\n{params}"
            f"  a = {shape} call({', '.join(names)}), to_apply=attention, backend_config={config}\n{gtes}  ROOT t = {shape} tuple({roots})\n}}")


# One program per family of kernels: HLO text after "HloModule name".
PROGRAMS: dict[str, str] = {
    "elementwise": "ENTRY main {\n  x = f32[128,768] parameter(0)\n  y = f32[768] parameter(1)\n  b = f32[128,768] broadcast(y), dimensions={1}\n"
    "  e = f32[128,768] exponential(x)\n  ROOT r = f32[128,768] add(e, b)\n}",
    "odd sizes": "ENTRY main {\n  x = bf16[7,31] parameter(0)\n  c = f32[7,31] convert(x)\n  ROOT r = f32[7,31] multiply(c, c)\n}",
    "functions": _unary("exponential", "tanh", "sine", "cosine", "erf", "cbrt", "logistic"),
    "transpose": "ENTRY main {\n  x = f32[64,96] parameter(0)\n  ROOT r = f32[96,64] transpose(x), dimensions={1,0}\n}",
    "batched transpose": "ENTRY main {\n  x = bf16[3,40,100] parameter(0)\n  ROOT r = bf16[3,100,40] transpose(x), dimensions={0,2,1}\n}",
    "fused transpose": "ENTRY main {\n  x = f32[70,64] parameter(0)\n  y = f32[64,70] parameter(1)\n  t = f32[64,70] transpose(x), dimensions={1,0}\n"
    "  ROOT r = f32[64,70] multiply(t, y)\n}",
    "attention": _attention("forward", "f32", 1, 70, 66, 12, 20), "attention gradient": _attention("backward", "f32", 1, 20, 66, 12, 20),
    "attention bf16": _attention("forward", "bf16", 2, 70, 130, 24, 40), "attention f16": _attention("forward", "f16", 1, 70, 20, 64, 16),
    "attention gradient bf16": _attention("backward", "bf16", 1, 70, 130, 24, 40),
    "row sum": _reduce("f32", "64,1000", "64", "1"), "short rows": _reduce("f32", "500,7", "500", "1"),
    "column sum": _reduce("f32", "300,70", "70", "0"), "shared columns": _reduce("f32", "48,1024", "1024", "0"),
    "few long rows": _reduce("f32", "2,20000", "2", "1"), "whole sum": _reduce("f32", "40000", "", "0"), "sum f64": _reduce("f64", "9,333", "9", "1"),
    "softmax": _softmax(64, 1000), "wide softmax": _softmax(3, 20000),
    "dot f32": _dot("f32", "f32", 70, 50, 90), "dot bf16": _dot("bf16", "f32", 128, 128, 128), "dot f64": _dot("f64", "f64", 33, 65, 17),
    "dot s32": _dot("s32", "s32", 20, 30, 40), "vector product": _dot("f32", "f32", 1, 300, 64),
    "convolution": "ENTRY main {\n  x = f32[2,3,16,16] parameter(0)\n  w = f32[8,3,3,3] parameter(1)\n"
    "  ROOT r = f32[2,8,8,8] convolution(x, w), window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=bf01_oi01->bf01\n}",
    "gather": "ENTRY main {\n  x = f32[50,16] parameter(0)\n  i = s32[20,1] parameter(1)\n"
    "  ROOT r = f32[20,16] gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,16}\n}",
    "scatter": _ADD + "ENTRY main {\n  x = f32[50,16] parameter(0)\n  i = s32[20,1] parameter(1)\n  u = f32[20,16] parameter(2)\n"
    "  ROOT r = f32[50,16] scatter(x, i, u), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add\n}",
    "long scatter": _ADD + "ENTRY main {\n  x = f32[9,12] parameter(0)\n  u = f32[150,12] parameter(1)\n  k = s32[150,1] iota(), iota_dimension=0\n"
    "  q = s32[150,1] multiply(k, k)\n  c = s32[] constant(11)\n  b = s32[150,1] broadcast(c), dimensions={}\n  i = s32[150,1] remainder(q, b)\n"
    "  ROOT r = f32[9,12] scatter(x, i, u), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add\n}",
    "sort": _LESS + "ENTRY main {\n  x = f32[5,400] parameter(0)\n  ROOT r = f32[5,400] sort(x), dimensions={1}, is_stable=true, to_apply=less\n}",
    "long sort": "more { a = s32[] parameter(0)\n b = s32[] parameter(1)\n c = s32[] parameter(2)\n d = s32[] parameter(3)\n"
    " ROOT r = pred[] compare(a, b), direction=GT }\n"
    "ENTRY main {\n  x = s32[2,2500] parameter(0)\n  i = s32[2,2500] iota(), iota_dimension=1\n"
    "  s = (s32[2,2500], s32[2,2500]) sort(x, i), dimensions={1}, is_stable=true, to_apply=more\n  a = s32[2,2500] get-tuple-element(s), index=0\n"
    "  b = s32[2,2500] get-tuple-element(s), index=1\n  ROOT t = (s32[2,2500], s32[2,2500]) tuple(a, b)\n}",
    "scan": _ADD + "ENTRY main {\n  x = f32[6,100] parameter(0)\n  zero = f32[] constant(0)\n"
    "  ROOT r = f32[6,100] reduce-window(x, zero), window={size=1x100 pad=0_0x99_0}, to_apply=add\n}",
    "long scan": _ADD + "ENTRY main {\n  x = f32[2,9000] parameter(0)\n  zero = f32[] constant(0)\n"
    "  ROOT r = f32[2,9000] reduce-window(x, zero), window={size=1x9000 pad=0_0x8999_0}, to_apply=add\n}",
    "scan from the end": _MAX + "ENTRY main {\n  x = f32[3,777] parameter(0)\n  low = f32[] constant(-inf)\n"
    "  ROOT r = f32[3,777] reduce-window(x, low), window={size=1x777 pad=0_0x0_776}, to_apply=max\n}",
    "random bits": "ENTRY main {\n  s = u64[2] parameter(0)\n  g = (u64[2], u32[1000]) rng-bit-generator(s), algorithm=rng_philox\n"
    "  a = u64[2] get-tuple-element(g), index=0\n  b = u32[1000] get-tuple-element(g), index=1\n  ROOT t = (u64[2], u32[1000]) tuple(a, b)\n}",
    "loop": "body { s = f32[16] parameter(0)\n ROOT n = f32[16] add(s, s) }\n"
    "ENTRY main {\n  x = f32[16] parameter(0)\n  ROOT r = f32[16] call(x), to_apply=body\n}",
}  # fmt: skip

TOLERANCES = {"attention bf16": 1e-2, "attention f16": 2e-3, "attention gradient bf16": 1e-2}  # weights are rounded to the operands' type


def program(name: str) -> Module:
    """One of PROGRAMS, parsed."""
    return parse_module(f"HloModule {name.replace(' ', '_')}\n{PROGRAMS[name]}\n")


def run(module: Module, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The module's results on the back end in use (TORCH_HLO_DEVICE)."""
    from torch_hlo.device import runtime

    compiled = runtime.compile_program(module)
    given = [runtime.from_bytes(p.shape, encode(v, p.shape.dtype)) for p, v in zip(module.entry.params, inputs, strict=True)]
    results = [runtime.allocate(x.shape) for x in outputs(module)]
    compiled.run(given, results)
    return [decode(b.bytes.tobytes(), b.shape.dtype, b.shape.dims) for b in results]


def check(name: str) -> float:
    """Largest relative error of a family against the evaluator; raises AssertionError beyond 2e-5 (sums: of their size) or its row in TOLERANCES."""
    module = program(name)
    inputs = random_inputs(module, seed=1)
    expected = evaluate(module, inputs)
    worst = 0.0
    for e, f in zip(expected, run(module, inputs), strict=True):
        if e.dtype.kind in "fc":
            tolerance = TOLERANCES.get(name, 2e-5)
            np.testing.assert_allclose(f, e, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(e).max(initial=0))))
            worst = max(worst, float(np.max(np.abs(f - e) / np.maximum(np.abs(e), 1e-3), initial=0)))
        else:
            np.testing.assert_array_equal(f, e)
    return worst


def _best(action: Callable[[], None], finish: Callable[[], None], times: int = 10) -> float:
    """Seconds of the fastest of some repetitions."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        action()
        finish()
        best = min(best, time.perf_counter() - start)
    return best


def _timed(text: str) -> tuple[float, object]:
    """(seconds of a program, its device pool) on uninitialised buffers."""
    from torch_hlo.device import runtime

    module = parse_module(f"HloModule timed\n{text}\n")
    compiled = runtime.compile_program(module)
    given = [runtime.from_bytes(p.shape, bytes(p.shape.nbytes)) for p in module.entry.params]
    results = [runtime.allocate(x.shape) for x in outputs(module)]
    driver = compiled.pool.driver
    for _ in range(3):
        compiled.run(given, results)
    driver.synchronize()
    return _best(lambda: compiled.run(given, results), driver.synchronize), compiled.pool


def bandwidth(megabytes: int) -> str:
    """An elementwise kernel next to a device-to-device copy of the same bytes."""
    n = megabytes << 18
    seconds, pool = _timed(f"ENTRY main {{\n  x = f32[{n}] parameter(0)\n  ROOT r = f32[{n}] negate(x)\n}}")
    driver = pool.driver
    size, a = pool.take(4 * n)
    _, b = pool.take(4 * n)
    copy = _best(lambda: driver.copy(b[1], a[1], 4 * n), driver.synchronize)
    pool.give(size, a)
    pool.give(size, b)
    return f"kernel {8e-9 * n / seconds:.0f} GB/s, copy {8e-9 * n / copy:.0f} GB/s: {copy / seconds:.0%} of the copy (target 90 %)"


def products(size: int) -> str:
    """A square product in bf16 and f32, next to torch.cuda where there is one."""
    parts = []
    for dtype in ("bf16", "f32"):
        seconds, _ = _timed(_dot(dtype, "f32" if dtype == "f32" else "bf16", size, size, size))
        rate = 2e-12 * size**3 / seconds
        text = f"{dtype} {rate:.2f} TFLOP/s"
        import torch

        if torch.cuda.is_available():
            x = torch.randn(size, size, device="cuda", dtype={"bf16": torch.bfloat16, "f32": torch.float32}[dtype])
            for _ in range(3):
                x @ x
            torch.cuda.synchronize()
            theirs = 2e-12 * size**3 / _best(lambda x=x: x @ x, torch.cuda.synchronize)
            text += f" ({rate / theirs:.0%} of torch.cuda's {theirs:.2f})"
        parts.append(text)
    return "; ".join(parts)


def _models():
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 64)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
            self.head = nn.Linear(64, 100)

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    cnn = lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))  # noqa: E731
    return {
        "transformer": (Transformer, torch.randint(0, 100, (4, 32)), torch.randint(0, 100, (4, 32))),
        "cnn": (cnn, torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))),
    }


def training(name: str, steps: int = 4) -> str:
    """Losses of a few AdamW steps next to the CPU's; raises AssertionError when they differ."""
    import torch

    import torch_hlo

    torch.manual_seed(0)
    make, x, y = _models()[name]

    def losses(device: str) -> tuple[list[float], float]:
        torch.manual_seed(0)
        model = make().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        xs, ys, found = x.to(device), y.to(device), []
        for _ in range(steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(xs).flatten(0, -2), ys.flatten())
            loss.backward()
            optimizer.step()
            if device == "hlo":
                torch_hlo.mark_step()
            found.append(loss.item())
        return found, time.perf_counter() - start

    expected, _ = losses("cpu")
    got, seconds = losses("hlo")
    np.testing.assert_allclose(got, expected, rtol=1e-3)
    return f"losses agree to {max(abs(a - b) for a, b in zip(expected, got)):.1e}, {seconds * 1e3:.1f} ms a step"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="a TORCH_HLO_DEVICE: cuda, cuda:1, opencl, opencl:PATH")
    parser.add_argument("--json", help="also write the results here")
    parser.add_argument("--quick", action="store_true", help="kernels only")
    options = parser.parse_args(arguments)
    checks: dict[str, Callable[[], object]] = {f"kernel {name}": lambda name=name: f"largest relative error {check(name):.1e}" for name in PROGRAMS}
    if not options.quick:
        large = options.device.startswith("cuda")
        checks["copy"] = lambda: bandwidth(256 if large else 16)
        checks["products"] = lambda: products(4096 if large else 256)
        checks |= {f"training {name}": lambda name=name: training(name) for name in ("transformer", "cnn")}
    results: dict[str, dict[str, str]] = {}
    with config.override(DEVICE=options.device, CACHE=""):
        for name, action in checks.items():
            try:
                results[name] = {"result": "PASS", "what": str(action())}
            except Exception as error:  # noqa: BLE001 - one check must not hide the others
                results[name] = {"result": "FAIL", "what": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            print(f"{results[name]['result']}  {name}: {results[name]['what']}", flush=True)
    failures = sum(r["result"] == "FAIL" for r in results.values())
    print(f"{len(results) - failures} of {len(results)} passed on {options.device}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": options.device, "results": results}, file, indent=1)
    return failures


if __name__ == "__main__":
    sys.exit(main())
