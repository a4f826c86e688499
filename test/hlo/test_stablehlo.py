"""StableHLO text in and out. samples/jax.json.gz: programs as JAX 0.10.2 printed them, inputs, and
what XLA's CPU backend computed."""

import base64
import gzip
import json
import random
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import Computation, Module, Shape, build, parse_dim
from torch_hlo.hlo.ir.dim import Dim, substitute, symbol
from torch_hlo.hlo.ir.verify import verify
from torch_hlo.hlo.stablehlo import WriteError, parse_stablehlo, stablehlo_text
from torch_hlo.hlo.stablehlo.sizes import sizes_of, value_of
from torch_hlo.hlo.text.parser import ParseError, parse_module
from torch_hlo.hlo.text.printer import module_text

SAMPLES = Path(__file__).parent / "samples"


@cache
def programs() -> dict:
    return json.loads(gzip.decompress((SAMPLES / "jax.json.gz").read_bytes()))


def decoded(item) -> np.ndarray:
    dtype, dims, data = item
    return np.frombuffer(base64.b64decode(data), dtype).reshape(dims)


def check(module, name: str) -> None:
    """The evaluator gives what XLA computed, and the program survives printing and parsing."""
    case = programs()[name]
    verify(module)
    assert parse_module(module_text(module)).entry.root is module.entry.root
    results = evaluate(module, [decoded(a) for a in case["inputs"]])
    normal = 2e-38  # XLA's CPU backend flushes smaller values to zero
    for got, want in zip(results, map(decoded, case["outputs"]), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        if want.dtype.kind in "fc" and "bin_max" not in name:
            loose = {2: 2e-3, 4: 2e-5, 8: 1e-9 if want.dtype.kind == "f" else 2e-5}[
                want.dtype.itemsize
            ]
            loose = 8e-3 if "bf16" in name else loose
            if want.dtype == np.float32:
                got, want = (np.where(np.abs(v) < normal, 0, v) for v in (got, want))
            np.testing.assert_allclose(got, want, rtol=loose, atol=loose / 2)
        elif want.dtype.kind in "fc":
            np.testing.assert_allclose(np.where(np.abs(got) < normal, 0, got), want)
        elif name != "eq_to":  # compares denormals
            np.testing.assert_array_equal(got, want)


NAMES = sorted(programs())


@pytest.mark.parametrize("name", [n for n in NAMES if "hlo" in programs()[n]])
def test_hlo_of_jax(name):
    check(parse_module(programs()[name]["hlo"]), name)


@pytest.mark.parametrize("name", NAMES)
def test_stablehlo_of_jax(name):
    check(parse_stablehlo(programs()[name]["stablehlo"]), name)


@pytest.mark.parametrize("name", [n for n in NAMES if "hlo" in programs()[n]])
def test_written_stablehlo_means_the_same(name):
    case = programs()[name]
    module = parse_module(case["hlo"])
    again = parse_stablehlo(stablehlo_text(module))
    inputs = [decoded(a) for a in case["inputs"]]
    for x, y in zip(evaluate(module, inputs), evaluate(again, inputs), strict=True):
        np.testing.assert_array_equal(x, y)


def test_samples_of_jax_and_tensorflow():
    rng = np.random.default_rng(0)
    x, w = (
        rng.standard_normal((8, 16)).astype("f"),
        rng.standard_normal((16, 32)).astype("f"),
    )
    scores = np.tanh(x @ w) + 1
    expected = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    for file in ("jax_stablehlo.mlir", "tf_stablehlo.txt"):
        (y,) = evaluate(parse_stablehlo((SAMPLES / file).read_text()), [x, w])
        np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_dynamic_program_serves_many_sizes():
    module = parse_stablehlo(programs()["dynamic_softmax"]["stablehlo"])
    assert not module.entry.root.shape.is_static
    for dims in ((1, 3), (4, 2)):
        x = np.random.default_rng(0).standard_normal(dims).astype("f")
        np.testing.assert_allclose(evaluate(module, [x])[0].sum(1), 1, rtol=1e-5)


def function(body: str, args: str, result: str) -> str:
    return f"func.func @main({args}) -> {result} {{\n{body}\n}}"


def run(text: str, *inputs):
    results = evaluate(verify(parse_stablehlo(text)), inputs)
    return results[0] if len(results) == 1 else results


@pytest.mark.parametrize(
    "text, expected",
    [
        ("dense<[[1, 2], [3, 4]]> : tensor<2x2xi32>", [[1, 2], [3, 4]]),
        ("dense<7> : tensor<2x2xui8>", [[7, 7], [7, 7]]),
        ('dense<"0x0000803F0000004000004040"> : tensor<3xf32>', [1, 2, 3]),
        ('dense<"0x0000803F"> : tensor<2xf32>', [1, 1]),
        ("dense<[0x7F800000, 0xBF800000, -1.5]> : tensor<3xf32>", [np.inf, -1, -1.5]),
        ("dense<[true, false]> : tensor<2xi1>", [True, False]),
        ('dense<"0x05"> : tensor<3xi1>', [True, False, True]),
        ("dense<(1.0, -2.0)> : tensor<complex<f32>>", 1 - 2j),
        ("dense<> : tensor<0x3xf32>", np.zeros((0, 3)).tolist()),
        ("dense<[-8, 7]> : tensor<2xi4>", [-8, 7]),
    ],
)
def test_constants(text, expected):
    result = text.rpartition(" : ")[2]
    y = run(function(f"  %0 = stablehlo.constant {text}\n  return %0 : {result}", "", result))
    assert y.tolist() == expected


def test_regions_capture_outer_values():
    body = """
  %c = stablehlo.constant dense<3> : tensor<i32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %acc = %x) : tensor<i32>, tensor<f32>
  cond {
    %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %j = stablehlo.add %i, %one : tensor<i32>
    %v = stablehlo.multiply %acc, %x : tensor<f32>
    stablehlo.return %j, %v : tensor<i32>, tensor<f32>
  }
  return %r#1 : tensor<f32>"""
    assert run(function(body, "%n: tensor<i32>, %x: tensor<f32>", "tensor<f32>"), 3, 2.0) == 16


def test_a_future_is_there_at_once():
    pair = "!stablehlo.future<tensor<4xf32>, tensor<4xf32>>"
    text = f"""module {{
  func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = func.call @start(%x) : (tensor<4xf32>) -> {pair}
    %1:2 = "stablehlo.async_done"(%0) : ({pair}) -> (tensor<4xf32>, tensor<4xf32>)
    %2 = stablehlo.multiply %1#0, %1#1 : tensor<4xf32>
    return %2 : tensor<4xf32>
  }}
  func.func private @start(%x: tensor<4xf32>) -> {pair} {{
    %0 = "stablehlo.async_start"(%x) ({{
    ^bb0(%y: tensor<4xf32>):
      %1 = stablehlo.add %y, %y : tensor<4xf32>
      stablehlo.return %1, %y : tensor<4xf32>, tensor<4xf32>
    }}) : (tensor<4xf32>) -> {pair}
    return %0 : {pair}
  }}
}}"""
    assert run(text, np.float32([1, 2, 3, 4])).tolist() == [2, 8, 18, 32]


def test_quantized_types():
    body = """
  %a = stablehlo.uniform_quantize %x : (tensor<4xf32>) -> tensor<4x!quant.uniform<i8:f32, 0.5:1>>
  %b = stablehlo.add %a, %a : tensor<4x!quant.uniform<i8:f32, 0.5:1>>
  %c = stablehlo.uniform_dequantize %b : (tensor<4x!quant.uniform<i8:f32, 0.5:1>>) -> tensor<4xf32>
  return %c : tensor<4xf32>"""
    y = run(
        function(body, "%x: tensor<4xf32>", "tensor<4xf32>"),
        np.float32([1, 0.3, -2, 100]),
    )
    assert y.tolist() == [2, 1, -4, 63]  # 63 = (127 - 1) * 0.5


def test_composites_and_broadcasting_chlo():
    text = """module {
  func.func @main(%x: tensor<2x3xf32>, %y: tensor<3xf32>) -> tensor<2x3xf32> {
    %0 = chlo.broadcast_add %x, %y : (tensor<2x3xf32>, tensor<3xf32>) -> tensor<2x3xf32>
    %1 = stablehlo.composite "my.twice" %0 {decomposition = @twice, version = 1 : i32} :
        (tensor<2x3xf32>) -> tensor<2x3xf32>
    return %1 : tensor<2x3xf32>
  }
  func.func private @twice(%a: tensor<2x3xf32>) -> tensor<2x3xf32> {
    %0 = stablehlo.add %a, %a : tensor<2x3xf32>
    return %0 : tensor<2x3xf32>
  }
}"""
    x, y = np.ones((2, 3), "f"), np.arange(3, dtype="f")
    assert np.array_equal(run(text, x, y), 2 * (x + y))


def test_a_dynamic_convolution_is_one_of_its_type_and_precision():
    body = """
  %pad = stablehlo.constant dense<1> : tensor<2x2xi64>
  %y = "stablehlo.dynamic_conv"(%x, %k, %pad) {
    dimension_numbers = #stablehlo.conv<[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]>,
    feature_group_count = 1 : i64, batch_group_count = 1 : i64,
    precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]
  } : (tensor<1x4x4x1xbf16>, tensor<3x3x1x1xbf16>, tensor<2x2xi64>) -> tensor<1x4x4x1xf32>
  return %y : tensor<1x4x4x1xf32>"""
    params = "%x: tensor<1x4x4x1xbf16>, %k: tensor<3x3x1x1xbf16>"
    root = parse_stablehlo(function(body, params, "tensor<1x4x4x1xf32>")).entry.root
    assert root.op == "convolution" and root.dtype == "f32"
    assert root["operand_precision"] == ("highest", "highest")


def test_einsum_and_index_select():
    body = """
  %0 = "stablehlo.einsum"(%x, %y) {einsum_config = "bij,bjk->bki"} :
      (tensor<2x3x4xf32>, tensor<2x4x5xf32>) -> tensor<2x5x3xf32>
  return %0 : tensor<2x5x3xf32>"""
    rng = np.random.default_rng(0)
    x, y = (
        rng.standard_normal((2, 3, 4)).astype("f"),
        rng.standard_normal((2, 4, 5)).astype("f"),
    )
    got = run(
        function(body, "%x: tensor<2x3x4xf32>, %y: tensor<2x4x5xf32>", "tensor<2x5x3xf32>"),
        x,
        y,
    )
    np.testing.assert_allclose(got, np.einsum("bij,bjk->bki", x, y), rtol=1e-5)
    body = """
  %0 = "stablehlo.torch_index_select"(%x, %i) {dim = 1 : i64, batch_dims = 0 : i64} :
      (tensor<2x3x4xf32>, tensor<2xi32>) -> tensor<2x2x4xf32>
  return %0 : tensor<2x2x4xf32>"""
    got = run(
        function(body, "%x: tensor<2x3x4xf32>, %i: tensor<2xi32>", "tensor<2x2x4xf32>"),
        x,
        np.int32([2, 0]),
    )
    assert np.array_equal(got, x[:, [2, 0]])


ERRORS = {
    "%0 = stablehlo.add %x, %q : tensor<2xf32>": "%q is not defined",
    "%0 = stablehlo.frobnicate %x : tensor<2xf32>": "'frobnicate' is not supported",
    "%0 = stablehlo.reshape %x : (tensor<2xf32>) -> tensor<3xf32>": "reshape",
    "%0 = stablehlo.constant dense<[1.0, 2.0, 3.0]> : tensor<2xf32>": "3 elements",
    "%0 = stablehlo.constant dense_resource<blob> : tensor<2xf32>": "the bytes of resource 'blob' are not",
    "%0 = func.call @nowhere(%x) : (tensor<2xf32>) -> tensor<2xf32>": "@nowhere is not defined",
    "%0 = func.call @main(%x) : (tensor<2xf32>) -> tensor<2xf32>": "calls itself",
    "%0 = stablehlo.negate %x : tensor<2xf77>": "unknown element type",
}


@pytest.mark.parametrize("line", ERRORS)
def test_errors_point_at_the_place(line):
    with pytest.raises(ParseError, match=re.escape(ERRORS[line])) as caught:
        parse_stablehlo(
            function(
                f"  {line}\n  return %0 : tensor<2xf32>",
                "%x: tensor<2xf32>",
                "tensor<2xf32>",
            )
        )
    assert caught.value.line == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "module",
        "func.func",
        "module {" * 5000,
        "func.func @main(" + "tuple<" * 5000,
        '"' * 100,
        "#a = " + "[" * 5000,
    ],
)
def test_junk(text):
    with pytest.raises(ParseError):
        parse_stablehlo(text)


@pytest.mark.parametrize(
    "mesh, attribute",
    [
        (
            'sdy.mesh @m = <["x"=2]>',
            "sdy.sharding = #sdy.sharding_per_value<[<@m, [{}]>, <@m, [{}]>]>",
        ),
        ('sdy.mesh 7 = <["x"=2]>', "x = 1"),
        ('sdy.mesh @m = <["x"=99999999999999999999]>', "x = 1"),
        ("", f"x = {'9' * 350} : f32"),
    ],
)
def test_hostile_attributes(mesh, attribute):
    body = (
        "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n%b = stablehlo.add %a, %a"
        f" {{{attribute}}} : tensor<2xf32>\nreturn %b : tensor<2xf32>\n}}"
    )
    with pytest.raises(ParseError):
        parse_stablehlo(f"module @m {{\n{mesh}\n{body}\n}}")


SYMBOLIC = """HloModule m
ENTRY e {
  x = f32[s0,4] parameter(0)
  c = f32[] constant(2)
  b = f32[s0,4] broadcast(c), dimensions={}
  y = f32[s0,4] add(x, b)
  r = f32[4*s0] reshape(y)
  i = f32[4*s0] iota(), iota_dimension=0
  z = f32[4*s0] add(r, i)
  s = f32[4*s0-1] slice(z), slice={[1:4*s0]}
  p = f32[2*s0] slice(s), slice={[0:4*s0-1:2]}
  ROOT t = (f32[4*s0-1], f32[2*s0]) tuple(s, p)
}
"""


def test_symbolic_sizes_are_computed_where_operations_take_them():
    module = parse_stablehlo(programs()["dynamic_softmax"]["stablehlo"])
    other = parse_module(SYMBOLIC)
    for m, n in (module, 3), (other, 2), (other, 5):
        text = stablehlo_text(m)
        assert "tensor<?x" in text
        shapes = [[n if isinstance(d, Dim) else d for d in p.dims] for p in m.entry.params]
        inputs = [np.random.RandomState(0).randn(*s).astype("f") for s in shapes]
        for got, want in zip(
            evaluate(parse_stablehlo(text), inputs), evaluate(m, inputs), strict=True
        ):
            np.testing.assert_array_equal(got, want)
    ir = pytest.importorskip("jaxlib.mlir.ir")
    from jax._src.interpreters.mlir import make_ir_context

    with make_ir_context():
        assert ir.Module.parse(stablehlo_text(other)).operation.verify()


def test_sizes_that_an_attribute_needs_must_be_known():
    x = build.parameter(0, Shape("f32", (symbol("s0"), 4)))
    y = build.pad(x, build.constant(0.0, "f32"), [(0, symbol("s0"), 0), (0, 0, 0)])
    module = Module("m", Computation("main", (x,), y), (), (("s0", 0, 0),))
    with pytest.raises(WriteError, match="s0.*specialize"):
        stablehlo_text(module)


def test_sizes_are_sums_of_products_quotients_and_more():
    symbols = {n: build.constant(v, "s32") for n, v in (("s0", 7), ("s1", 3))}
    sizes = ["5", "s0*s1-2", "floordiv(s0,2)+mod(s0,4)", "max(s0,2*s1)+min(s0,s1)*s0*s0"]
    for text in sizes:
        x = value_of(parse_dim(text), symbols)
        want = substitute(parse_dim(text), {"s0": 7, "s1": 3})
        assert sizes_of(x, {}) == [want]


FRAGMENTS = [
    "{",
    "}",
    "(",
    ")",
    "<",
    ">",
    ",",
    '"',
    "%",
    "=",
    ":",
    "->",
    "tensor<",
    "dense<",
    "x",
    "?",
    "#",
    "@",
    "-1",
    "99999999999999999999",
    "^bb0",
]


def test_mutated_text_parses_or_raises_parse_error():
    rng = random.Random(3)
    texts = [
        programs()[n]["stablehlo"]
        for n in (
            "while",
            "conv2",
            "maxpool_grad",
            "sort_kv",
            "scatter_add",
            "dynamic_scan",
            "cond",
            "fft",
        )
    ]
    parsed = 0
    for _ in range(400):
        text = rng.choice(texts)
        p = rng.randrange(len(text))
        q = p + rng.randint(1, 30)
        kind = rng.randrange(4)
        if kind == 0:
            text = text[:p] + rng.choice(FRAGMENTS) + text[p:]
        elif kind == 1:
            text = text[:p] + text[q:]
        elif kind == 2:
            text = text[:q] + text[p:q] + text[q:]
        else:
            m = rng.choice(list(re.finditer(r"\d+", text)))
            text = (
                text[: m.start()]
                + rng.choice(["0", "1", "7", "-3", "4294967296"])
                + text[m.end() :]
            )
        try:
            parse_stablehlo(text)
            parsed += 1
        except ParseError:
            pass
    assert parsed > 10


EFFECT = "stablehlo.custom_call @io(%a) {has_side_effect = true} : (tensor<4xf32>) ->"


def in_main(body: str) -> str:
    return (
        "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {\n"
        f"{body}\n}}\n"
        "func.func private @outer(%a: tensor<4xf32>) -> tensor<4xf32> {\n"
        f"%0 = {EFFECT} tensor<4xf32>\nreturn %0 : tensor<4xf32>\n}}"
    )


LOOP = f"""
%0 = stablehlo.while(%b = %a) : tensor<4xf32>
cond {{
  %p = stablehlo.constant dense<false> : tensor<i1>
  stablehlo.return %p : tensor<i1>
}} do {{
  %1 = {EFFECT} tensor<4xf32>
  %2 = stablehlo.add %1, %b : tensor<4xf32>
  stablehlo.return %2 : tensor<4xf32>
}}
return %0 : tensor<4xf32>"""


@pytest.mark.parametrize(
    "body",
    [
        f"{EFFECT} ()\nreturn %a : tensor<4xf32>",
        f"%0 = {EFFECT} tensor<4xf32>\nreturn %a : tensor<4xf32>",
        "%0 = call @outer(%a) : (tensor<4xf32>) -> tensor<4xf32>\nreturn %a : tensor<4xf32>",
        LOOP.replace("%1, %b", "%b, %b"),
    ],
)
def test_calls_with_effects_do_not_vanish(body):
    """Results that do not need the call wait for it."""
    text = module_text(parse_stablehlo(in_main(body)))
    assert 'custom_call_target="io", custom_call_has_side_effect=true' in text
    assert "opt-barrier" in text
    assert module_text(parse_module(text)) == text


def test_effects_of_a_program_without_results():
    text = "func.func public @main(%a: tensor<4xf32>) {\n" + EFFECT + " ()\nreturn\n}"
    module = parse_stablehlo(text)
    assert str(module.entry.root.shape) == "((), pred[])"  # that they have run
    assert parse_module(module_text(module)) == module


@pytest.mark.parametrize(
    "body",
    [
        f"%0 = {EFFECT} tensor<4xf32>\nreturn %0 : tensor<4xf32>",
        "%0 = call @outer(%a) : (tensor<4xf32>) -> tensor<4xf32>\nreturn %0 : tensor<4xf32>",
        LOOP,
    ],
)
def test_calls_with_effects_that_results_need(body):
    text = module_text(parse_stablehlo(in_main(body)))
    assert 'custom_call_target="io", custom_call_has_side_effect=true' in text
    assert module_text(parse_module(text)) == text


LOST = """
ENTRY %lost (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  %b = f32[4] custom-call(%a), custom_call_target="io", custom_call_has_side_effect=true
  ROOT %c = f32[4] negate(%a)
}"""


def test_calls_with_effects_do_not_vanish_from_hlo():
    with pytest.raises(ParseError, match=r"line 4.*\n?.*'io' \(f32\[4\]\) has an effect"):
        parse_module(LOST)


def test_calls_keep_what_xla_is_told_of_them():
    text = """
    func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
      %b = call @f(%a) {mhlo.frontend_attributes = {inlineable = "false"}}
          : (tensor<4xf32>) -> tensor<4xf32>
      return %b : tensor<4xf32>
    }
    func.func private @f(%a: tensor<4xf32>) -> tensor<4xf32> {
      %b = stablehlo.sine %a : tensor<4xf32>
      return %b : tensor<4xf32>
    }"""
    module = parse_stablehlo(text)
    assert 'to_apply=%f, frontend_attributes={inlineable="false"}' in module_text(module)
    assert parse_module(module_text(module)) == module
    assert parse_stablehlo(stablehlo_text(module)).entry.root is module.entry.root


def test_annotations_have_no_effect():
    call = EFFECT.replace("@io", "@InspectSharding")
    module = parse_stablehlo(in_main(f"{call} ()\nreturn %a : tensor<4xf32>"))
    assert module.entry.root.operand.op == "opt-barrier"  # it is there when shardings are known


def test_layouts_and_memory_kinds_that_are_asked_for():
    text = """module @m {
  func.func @main(%a: tensor<2x3xf32> {mhlo.layout_mode = "{0,1}"})
      -> (tensor<2x3xf32> {mhlo.layout_mode = "auto"},
          tensor<2x3xf32> {mhlo.memory_kind = "pinned_host"}) {
    return %a, %a : tensor<2x3xf32>, tensor<2x3xf32>
  }
}"""
    wanted = ("{0,1}",), ("auto", ""), ("", "pinned_host"), ()
    assert parse_stablehlo(text).requests == wanted
    assert parse_stablehlo(text.replace("mhlo", "other")).requests == ((), (), (), ())
