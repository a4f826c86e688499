"""The HLO text parser: everything XLA prints, errors, hostile text."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.verify import verify
from torch_hlo.hlo.text.parser import ParseError, parse_module
from torch_hlo.hlo.text.printer import module_text

SAMPLES = {
    p.stem: p.read_text()
    for p in (Path(__file__).parent / "samples").glob("*.txt")
    if "stablehlo" not in p.stem
}


def run(body: str, *inputs):
    return evaluate(verify(parse_module(body)), inputs)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_samples_parse_and_print_back(name):
    module = verify(parse_module(SAMPLES[name]))
    for style in ("canonical", "full"):
        assert parse_module(module_text(module, style)) == module
    assert parse_module(module_text(module, "short")).entry.root is module.entry.root


def test_samples_of_one_program_agree():
    rng = np.random.default_rng(0)
    x, w = (
        rng.standard_normal((8, 16)).astype("f"),
        rng.standard_normal((16, 32)).astype("f"),
    )
    scores = np.tanh(x @ w) + 1
    expected = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    for name in (
        "jax_hlo_before_opt",
        "jax_hlo_after_opt",
        "tf_hlo",
        "tf_hlo_no_metadata",
    ):
        np.testing.assert_allclose(run(SAMPLES[name], x, w)[0], expected, rtol=1e-5)


def test_names_and_sources_go_to_meta():
    module = parse_module(SAMPLES["jax_hlo_after_opt"])
    metas = [x.meta for x in module.entry.instructions()]
    assert metas[0].name == "x.1" and metas[0].op_name == "x"
    assert metas[-1].op_name == "jit(f)/div" and metas[-1].source == "jx.py:6"


def test_short_style_needs_no_header():
    (y,) = run("%0 = f32[2] parameter(0)\nROOT %1 = f32[2] add(%0, %0)", np.float32([1, 2]))
    assert y.tolist() == [2, 4]


def test_definitions_may_follow_their_calls():
    text = (
        "ENTRY e {\n p = f32[] parameter(0)\n ROOT r = f32[] call(p), to_apply=%inner\n}\n%inner"
        " (q: f32[]) -> f32[] {\n ROOT q = f32[] parameter(0)\n}"
    )
    assert run(text, 3.0)[0] == 3


def test_operand_types_comments_and_async_pairs():
    text = """HloModule m
ENTRY %e (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %t = (f32[4]{0}, /*index=1*/f32[4]{0}) tuple(f32[4]{0} %p, /*index=1*/f32[4]{0} %p)  // two
  %g = f32[4]{0} get-tuple-element((f32[4]{0}, f32[4]{0}) %t), index=1, control-predecessors={%p}
  %s = ((f32[4]{0}), f32[4]{0}, u32[]) custom-call-start(%g), custom_call_target="Sharding",
      async_execution_thread="main"
  ROOT %d = f32[4]{0} custom-call-done(%s)
}"""
    assert run(text, np.arange(4, dtype="f"))[0].tolist() == [0, 1, 2, 3]


def test_layouts_of_the_boundary_are_kept_and_values_stay_logical():
    text = """HloModule m, entry_computation_layout={(f32[2,3]{0,1})->f32[3,2]{0,1}}
ENTRY e {
  p = f32[2,3]{0,1} parameter(0)
  ROOT t = f32[3,2]{0,1} transpose(p), dimensions={1,0}
}"""
    module = verify(parse_module(text))
    assert module.entry.params[0].shape == Shape("f32", (2, 3), (0, 1))
    assert module.entry.root.shape.layout == (0, 1)
    x = np.arange(6, dtype="f").reshape(2, 3)
    assert np.array_equal(evaluate(module, [x])[0], x.T)
    assert parse_module(str(module)) == module


@pytest.mark.parametrize(
    "source, target, dims",
    [
        ("{0,1}", "{1,0}", (3, 2)),
        ("{1,0}", "{0,1}", (3, 2)),
        ("{0,1}", "{0,1}", (6, 1)),
    ],
)
def test_bitcast_between_layouts(source, target, dims):
    text = (
        f"ENTRY e {{\n p = f32[2,3] parameter(0)\n c = f32[2,3]{source} copy(p)\n"
        f" ROOT b = f32[{dims[0]},{dims[1]}]{target} bitcast(c)\n}}"
    )
    x = np.arange(6, dtype="f").reshape(2, 3)
    memory = x.ravel(order="F" if source == "{0,1}" else "C")
    expected = memory.reshape(dims, order="F" if target == "{0,1}" else "C")
    module = parse_module(text)
    assert np.array_equal(evaluate(module, [x])[0], expected)


def test_bitcast_to_another_type():
    x = np.float32([1, -2])
    (y,) = run("ENTRY e {\n p = f32[2] parameter(0)\n ROOT b = u8[8] bitcast(p)\n}", x)
    assert y.tobytes() == x.tobytes()


LITERALS = [
    ("f32[]", "nan"), ("f32[]", "-nan"), ("f32[]", "-inf"), ("f32[]", "-0"),
    ("f32[2,2]", "{ {1, 2.5}, {1e-07, -3e+20} }"), ("f32[]", "nan(0x12345)"),
    ("pred[2]", "{true, false}"), ("s8[3]", "{-128, 0, 127}"), ("u64[]", "18446744073709551615"),
    ("c64[2]", "{(1, -2), (inf, nan)}"), ("bf16[2]", "{1, 3.140625}"),
    ("f8e4m3fn[2]", "{448, -0.5}"), ("f32[0]", "{}"), ("f32[2,0]", "{ {}, {} }"),
    ("s4[3]", "{-8, 7, 1}"), ("f64[]", "0.1"), ("f16[]", "0.1"),
]  # fmt: skip


@pytest.mark.parametrize("shape, text", LITERALS)
def test_literals_round_trip(shape, text):
    module = parse_module(f"ROOT %0 = {shape} constant({text})")
    assert module_text(module, "short") == f"ROOT %0 = {shape} constant({text})"
    assert parse_module(str(module)).entry.root is module.entry.root


def test_tuple_literal():
    a, b = run("ROOT c = (s32[], (f32[2])) constant((3, ({1, 2})))")
    assert a == 3 and b.tolist() == [1, 2]


def test_symbolic_sizes():
    text = """HloModule m, symbols={s0=(0,0)}
ENTRY e {
  p = f32[s0,3] parameter(0)
  z = f32[] constant(1)
  b = f32[2*s0,3] broadcast(z), dimensions={}
  q = f32[2*s0,3] pad(p, z), padding=0_(s0)x0_0
  ROOT r = f32[2*s0,3] add(b, q)
}"""
    module = verify(parse_module(text))
    assert module.symbols == (("s0", 0, 0),)
    assert parse_module(str(module)) == module
    (y,) = evaluate(module, [np.zeros((2, 3), "f")])
    assert y.shape == (4, 3) and y.sum() == 6 + 12


ERRORS = {
    "f32[2] add(%p, %q)": "'q' is not defined before its use",
    "f32[2] frobnicate(%p)": "unknown opcode 'frobnicate'",
    "f32[3] add(%p, %p)": "expected f32[2]",
    "f33[2] add(%p, %p)": "unknown element type 'f33'",
    "f32[2] constant({1, 2, 3})": "3 elements",
    "f32[2] constant({...})": "left out",
    "f32[1000000000000] constant({1})": "1 elements",
    "s8[] constant(200)": "out of range",
    "f32[2] add(%p, %p), color=red": "unknown attribute 'color'",
    "f32[2] broadcast(%p), dimensions={5}": "broadcast",
    "f32[2] reduce(%p, %p), dimensions={0}, to_apply=%nowhere": "'nowhere' is not defined",
    "f32[<=2] add(%p, %p)": "bounded",
    "f32[2] convolution(%p, %p), window={size=0x, pad=1}": "bad",
    "f32[2] all-reduce(%p), to_apply=%e": "calls itself",
    "f32[2] transpose(%p)": "missing attribute dimensions",
    "f32[99999999999999999999] add(%p, %p)": "bad size",
}


@pytest.mark.parametrize("line", ERRORS)
def test_errors_point_at_the_place(line):
    text = f"HloModule m\nENTRY %e {{\n  %p = f32[2] parameter(0)\n  ROOT %r = {line}\n}}"
    with pytest.raises(ParseError, match=re.escape(ERRORS[line])) as caught:
        parse_module(text)
    lines = str(caught.value).splitlines()
    assert caught.value.line == 4 and lines[0].startswith(f"line 4, column {caught.value.column}:")
    assert lines[2].index("^") - 2 == caught.value.column - 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "HloModule m",
        "((((" * 10000,
        "{" * 100000,
        "ENTRY e {",
        "\0",
        '"',
        "ENTRY e { p = " + "(" * 10000,
    ],
)
def test_junk(text):
    with pytest.raises(ParseError):
        parse_module(text)


HEADERS = {
    "num_partitions=-1": "-1 devices",
    "replica_count=9223372036854775807": "devices: there are 1 to",
    "entry_computation_layout={(f32[2]{0 0})->f32[2]{0}}": "bad layout",
    'frontend_attributes={mesh="x=9999999999"}': "at most",
    'frontend_attributes={mesh="x=99999999999999999999"}': "at most",
    'allow_spmd_sharding_propagation_to_output={true,false}, frontend_attributes={mesh="x=2"}': (
        "2 flags for 1 results"
    ),
}


@pytest.mark.parametrize("header", HEADERS)
def test_hostile_headers(header):
    with pytest.raises(ParseError, match=re.escape(HEADERS[header])):
        parse_module(
            f"HloModule m, {header}\nENTRY e {{\n ROOT p = f32[2] parameter(0),"
            " sharding={replicated}\n}"
        )


@pytest.mark.parametrize(
    "sharding",
    [
        "{devices=[99999999999]<=[99999999999]}",
        "{devices=[99999999999]0,1}",
        f"{{devices=[2]<=[2{',1' * 70}]T({','.join(map(str, range(71)))})}}",
    ],
)
def test_hostile_shardings(sharding):
    with pytest.raises(ParseError):
        parse_module(
            f"HloModule m\nENTRY e {{\n ROOT p = f32[2] parameter(0), sharding={sharding}\n}}"
        )


@pytest.mark.parametrize("frame", ["\u00b2", "1" * 5000])
def test_a_frame_that_is_no_number_names_no_source(frame):
    root = parse_module(
        'HloModule m\nFileNames\n1 "a"\nENTRY e {\n ROOT p = f32[2] parameter(0),'
        f" metadata={{stack_frame_id={frame}}}\n}}"
    ).entry.root
    assert root.meta.source == ""


FRAGMENTS = [
    "{", "}", "(", ")", ",", '"', "%", "=", "99999999999999999999", "f32[]",
    "f32[1000000000,1000000000]", "ROOT ", "ENTRY ", "/*", "constant(", "{{{{", "((((", "\0", "é",
    "<=", "f32[s0]", "floordiv(", "to_apply=", "...", "1e999",
]  # fmt: skip


def mutate(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 2)):
        p = rng.randrange(len(text))
        q = min(len(text), p + rng.randint(1, 40))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:p] + rng.choice(FRAGMENTS) + text[p:]
        elif kind == 1:
            text = text[:p] + text[q:]
        elif kind == 2:
            text = text[:q] + text[p:q] + text[q:]
        elif kind == 3:
            numbers = list(re.finditer(r"\d+", text))
            m = rng.choice(numbers)
            text = (
                text[: m.start()]
                + rng.choice(["0", "1", "7", "-3", "4294967296"])
                + text[m.end() :]
            )
        else:
            words = list(re.finditer(r"[a-z][a-z\-]{2,}", text))
            m, other = rng.choice(words), rng.choice(words)
            text = text[: m.start()] + other.group() + text[m.end() :]
    return text


def test_mutated_text_parses_or_raises_parse_error():
    rng = random.Random(7)
    texts = sorted(SAMPLES.values()) + [
        module_text(parse_module(t)) for t in sorted(SAMPLES.values())
    ]
    parsed = 0
    for _ in range(600):
        text = mutate(rng.choice(texts), rng)
        try:
            module = parse_module(text)
        except ParseError:
            continue
        parsed += 1
        assert parse_module(str(module)).entry.root is module.entry.root
    assert parsed > 10
