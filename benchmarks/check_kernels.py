"""Families of GPU kernels as small programs, and how near to the evaluator's their results are."""

from __future__ import annotations

import json

import numpy as np

from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.instruction import Module, outputs
from torch_hlo.hlo.ir.numeric import decode, encode
from torch_hlo.hlo.text.parser import parse_module

_ADD = "add { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] add(a, b) }\n"
_MAX = "max { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] maximum(a, b) }\n"
_LESS = (
    "less { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = pred[] compare(a, b),"
    " direction=LT, type=TOTALORDER }\n"
)


def softmax(rows: int, columns: int) -> str:
    """Softmax of the rows of an f32 array."""
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
    return (
        f"ENTRY main {{\n  x = f32[37,8] parameter(0)\n{lines}  ROOT t = ({shapes})"
        f" tuple({', '.join(f'v{i}' for i in range(len(opcodes)))})\n}}"
    )


def reduction(dtype: str, dims: str, out: str, over: str) -> str:
    """Sums of `dtype[dims]` over some dimensions."""
    return f"""add {{ a = {dtype}[] parameter(0)
 b = {dtype}[] parameter(1)
 ROOT c = {dtype}[] add(a, b) }}
ENTRY main {{
  x = {dtype}[{dims}] parameter(0)
  zero = {dtype}[] constant(0)
  ROOT r = {dtype}[{out}] reduce(x, zero), dimensions={{{over}}}, to_apply=add
}}"""


def dot(a: str, out: str, m: int, k: int, n: int) -> str:
    """A product of `a[m,k]` and `a[k,n]`."""
    return f"""ENTRY main {{
  x = {a}[{m},{k}] parameter(0)
  y = {a}[{k},{n}] parameter(1)
  ROOT r = {out}[{m},{n}] dot(x, y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}"""


def _attention(
    kind: str, dtype: str, heads: int, rows: int, columns: int, size: int, width: int
) -> str:
    """A call that says what it is (compiler/attention/attention.py), with its meaning."""
    row, tile = f"f32[{heads},{rows}]", f"f32[{heads},{rows},{columns}]"
    q, k, v, out = (
        f"[{heads},{n},{w}]"
        for n, w in ((rows, size), (columns, size), (columns, width), (rows, width))
    )
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
    params = "".join(
        f"  {n} = {shape} parameter({i})\n" for i, (n, shape) in enumerate(names.items())
    )
    shape, roots = (
        f"({', '.join(results)})",
        ", ".join(f"r{i}" for i in range(len(results))),
    )
    gtes = "".join(f"  r{i} = {r} get-tuple-element(a), index={i}\n" for i, r in enumerate(results))
    config = json.dumps({"attention": kind, "causal": False, "scale": 0.25}, separators=(",", ":"))
    return (
        f"{_ADD}{_MAX}attention {{\n{params}{body}  ROOT t9 = {shape} tuple({roots})\n}}\nENTRY"
        f" main {{\n{params}  a = {shape} call({', '.join(names)}), to_apply=attention,"
        f" backend_config={config}\n{gtes}  ROOT t = {shape} tuple({roots})\n}}"
    )


# One program per family of kernels: HLO text after "HloModule name".
PROGRAMS: dict[str, str] = {
    "elementwise": (
        "ENTRY main {\n  x = f32[128,768] parameter(0)\n  y = f32[768] parameter(1)\n  b ="
        " f32[128,768] broadcast(y), dimensions={1}\n  e = f32[128,768] exponential(x)\n  ROOT r ="
        " f32[128,768] add(e, b)\n}"
    ),
    "odd sizes": (
        "ENTRY main {\n  x = bf16[7,31] parameter(0)\n  c = f32[7,31] convert(x)\n  ROOT r ="
        " f32[7,31] multiply(c, c)\n}"
    ),
    "functions": _unary("exponential", "tanh", "sine", "cosine", "erf", "cbrt", "logistic"),
    "transpose": (
        "ENTRY main {\n  x = f32[64,96] parameter(0)\n  ROOT r = f32[96,64] transpose(x),"
        " dimensions={1,0}\n}"
    ),
    "batched transpose": (
        "ENTRY main {\n  x = bf16[3,40,100] parameter(0)\n  ROOT r = bf16[3,100,40] transpose(x),"
        " dimensions={0,2,1}\n}"
    ),
    "fused transpose": (
        "ENTRY main {\n  x = f32[70,64] parameter(0)\n  y = f32[64,70] parameter(1)\n  t ="
        " f32[64,70] transpose(x), dimensions={1,0}\n  ROOT r = f32[64,70] multiply(t, y)\n}"
    ),
    "attention": _attention("forward", "f32", 1, 70, 66, 12, 20),
    "attention gradient": _attention("backward", "f32", 1, 20, 66, 12, 20),
    "attention bf16": _attention("forward", "bf16", 2, 70, 130, 24, 40),
    "attention f16": _attention("forward", "f16", 1, 70, 20, 64, 16),
    "attention gradient bf16": _attention("backward", "bf16", 1, 70, 130, 24, 40),
    "row sum": reduction("f32", "64,1000", "64", "1"),
    "short rows": reduction("f32", "500,7", "500", "1"),
    "column sum": reduction("f32", "300,70", "70", "0"),
    "shared columns": reduction("f32", "48,1024", "1024", "0"),
    "few long columns": reduction("f32", "8192,64", "64", "0"),
    "few long rows": reduction("f32", "2,20000", "2", "1"),
    "whole sum": reduction("f32", "40000", "", "0"),
    "sum f64": reduction("f64", "9,333", "9", "1"),
    "softmax": softmax(64, 1000),
    "wide softmax": softmax(3, 20000),
    "dot f32": dot("f32", "f32", 70, 50, 90),
    "dot bf16": dot("bf16", "f32", 128, 128, 128),
    "dot f64": dot("f64", "f64", 33, 65, 17),
    "dot s32": dot("s32", "s32", 20, 30, 40),
    "vector product": dot("f32", "f32", 1, 300, 64),
    "convolution": (
        "ENTRY main {\n  x = f32[2,3,16,16] parameter(0)\n  w = f32[8,3,3,3] parameter(1)\n  ROOT r"
        " = f32[2,8,8,8] convolution(x, w), window={size=3x3 stride=2x2 pad=1_1x1_1},"
        " dim_labels=bf01_oi01->bf01\n}"
    ),
    "gather": (
        "ENTRY main {\n  x = f32[50,16] parameter(0)\n  i = s32[20,1] parameter(1)\n  ROOT r ="
        " f32[20,16] gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0},"
        " index_vector_dim=1, slice_sizes={1,16}\n}"
    ),
    "scatter": (
        _ADD + "ENTRY main {\n  x = f32[50,16] parameter(0)\n  i = s32[20,1] parameter(1)\n  u ="
        " f32[20,16] parameter(2)\n  ROOT r = f32[50,16] scatter(x, i, u),"
        " update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0},"
        " index_vector_dim=1, to_apply=add\n}"
    ),
    "long scatter": (
        _ADD + "ENTRY main {\n  x = f32[9,12] parameter(0)\n  u = f32[150,12] parameter(1)\n  k ="
        " s32[150,1] iota(), iota_dimension=0\n  q = s32[150,1] multiply(k, k)\n  c = s32[]"
        " constant(11)\n  b = s32[150,1] broadcast(c), dimensions={}\n  i = s32[150,1]"
        " remainder(q, b)\n  ROOT r = f32[9,12] scatter(x, i, u), update_window_dims={1},"
        " inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1,"
        " to_apply=add\n}"
    ),
    "sort": (
        _LESS + "ENTRY main {\n  x = f32[5,400] parameter(0)\n  ROOT r = f32[5,400] sort(x),"
        " dimensions={1}, is_stable=true, to_apply=less\n}"
    ),
    "long sort": (
        "more { a = s32[] parameter(0)\n b = s32[] parameter(1)\n c = s32[] parameter(2)\n d ="
        " s32[] parameter(3)\n ROOT r = pred[] compare(a, b), direction=GT }\nENTRY main {\n  x ="
        " s32[2,2500] parameter(0)\n  i = s32[2,2500] iota(), iota_dimension=1\n  s = (s32[2,2500],"
        " s32[2,2500]) sort(x, i), dimensions={1}, is_stable=true, to_apply=more\n  a = s32[2,2500]"
        " get-tuple-element(s), index=0\n  b = s32[2,2500] get-tuple-element(s), index=1\n  ROOT t"
        " = (s32[2,2500], s32[2,2500]) tuple(a, b)\n}"
    ),
    "scan": (
        _ADD + "ENTRY main {\n  x = f32[6,100] parameter(0)\n  zero = f32[] constant(0)\n  ROOT r ="
        " f32[6,100] reduce-window(x, zero), window={size=1x100 pad=0_0x99_0}, to_apply=add\n}"
    ),
    "long scan": (
        _ADD
        + "ENTRY main {\n  x = f32[2,9000] parameter(0)\n  zero = f32[] constant(0)\n  ROOT r ="
        " f32[2,9000] reduce-window(x, zero), window={size=1x9000 pad=0_0x8999_0},"
        " to_apply=add\n}"
    ),
    "scan from the end": (
        _MAX
        + "ENTRY main {\n  x = f32[3,777] parameter(0)\n  low = f32[] constant(-inf)\n  ROOT r ="
        " f32[3,777] reduce-window(x, low), window={size=1x777 pad=0_0x0_776}, to_apply=max\n}"
    ),
    "random bits": (
        "ENTRY main {\n  s = u64[2] parameter(0)\n  g = (u64[2], u32[1000]) rng-bit-generator(s),"
        " algorithm=rng_philox\n  a = u64[2] get-tuple-element(g), index=0\n  b = u32[1000]"
        " get-tuple-element(g), index=1\n  ROOT t = (u64[2], u32[1000]) tuple(a, b)\n}"
    ),
    "loop": (
        "body { s = f32[16] parameter(0)\n ROOT n = f32[16] add(s, s) }\n"
        "ENTRY main {\n  x = f32[16] parameter(0)\n  ROOT r = f32[16] call(x), to_apply=body\n}"
    ),
}

# weights are rounded to the operands' type
TOLERANCES = {
    "attention bf16": 1e-2,
    "attention f16": 2e-3,
    "attention gradient bf16": 1e-2,
}


def program(name: str) -> Module:
    """One of PROGRAMS, parsed."""
    return parse_module(f"HloModule {name.replace(' ', '_')}\n{PROGRAMS[name]}\n")


def run(module: Module, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The module's results on the back end in use (TORCH_HLO_DEVICE)."""
    from torch_hlo.device import runtime

    compiled = runtime.compile_program(module)
    given = [
        runtime.from_bytes(p.shape, encode(v, p.shape.dtype))
        for p, v in zip(module.entry.params, inputs, strict=True)
    ]
    results = [runtime.allocate(x.shape) for x in outputs(module)]
    compiled.run(given, results)
    return [decode(b.bytes.tobytes(), b.shape.dtype, b.shape.dims) for b in results]


def check(name: str) -> float:
    """Largest relative error of a family against the evaluator; raises AssertionError beyond 2e-5
    (sums: of their size) or its row in TOLERANCES."""
    module = program(name)
    inputs = random_inputs(module, seed=1)
    expected = evaluate(module, inputs)
    worst = 0.0
    for e, f in zip(expected, run(module, inputs), strict=True):
        if e.dtype.kind in "fc":
            tolerance = TOLERANCES.get(name, 2e-5)
            np.testing.assert_allclose(
                f,
                e,
                rtol=tolerance,
                atol=tolerance * max(1.0, float(np.abs(e).max(initial=0))),
            )
            worst = max(
                worst,
                float(np.max(np.abs(f - e) / np.maximum(np.abs(e), 1e-3), initial=0)),
            )
        else:
            np.testing.assert_array_equal(f, e)
    return worst
