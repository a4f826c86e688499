"""Shardy's dialect and mhlo.sharding in StableHLO text, in and out."""

import pytest

from test.support import short
from torch_hlo.hlo.ir.verify import verify
from torch_hlo.hlo.stablehlo import parse_stablehlo, stablehlo_text
from torch_hlo.hlo.text.parser import ParseError


def read(
    body: str,
    args: str = "%a: tensor<8x16xf32>",
    result: str = "tensor<8x16xf32>",
    mesh: str = 'sdy.mesh @mesh = <["x"=2, "y"=4]>',
):
    return verify(
        parse_stablehlo(
            f"module @m {{\n {mesh}\n func.func public @main({args}) -> ({result}) {{\n {body}\n"
            " }\n}"
        )
    )


def lines(module) -> list[str]:
    return [
        line.strip()
        for line in short(module).splitlines()
        if " = " in line and "HloModule" not in line
    ]


def test_arguments_and_results():
    module = read(
        "return %a, %a : tensor<8x16xf32>, tensor<8x16xf32>",
        '%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x", ?}, {"y":(1)2}p1],'
        ' replicated={"y":(2)2}>}',
        'tensor<8x16xf32> {jax.result_info = "r", sdy.sharding = #sdy.sharding<@mesh, [{},'
        ' {"x"}]>}, tensor<8x16xf32>',
    )
    assert str(module.mesh) == "x=2,y=4"
    assert lines(module) == [
        "%0 = f32[8,16] parameter(0), sharding={[{x, ?}, {y:(1)2}p1], replicated={y:(2)2}}",
        "ROOT %1 = (f32[8,16], f32[8,16]) tuple(%0, %0), sharding={{[{}, {x}]}, {[{?}, {?}]}}",
    ]


def test_single_result():
    module = read(
        "%0 = stablehlo.negate %a : tensor<8x16xf32>\nreturn %0 : tensor<8x16xf32>",
        result='tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}',
    )
    assert (
        lines(module)[-1]
        == 'ROOT %2 = f32[8,16] custom-call(%1), custom_call_target="Sharding", sharding={[{x},'
        " {}]}"
    )


@pytest.mark.parametrize(
    "operation",
    [
        'sdy.sharding_constraint %a <@mesh, [{"x"}, {?}]> : tensor<8x16xf32>',
        'sdy.reshard %a <@mesh, [{"x"}, {?}]> : tensor<8x16xf32>',
        (
            '"sdy.sharding_constraint"(%a) <{sharding = #sdy.sharding<@mesh, [{"x"}, {?}]>}> :'
            " (tensor<8x16xf32>) -> tensor<8x16xf32>"
        ),
        'sdy.all_gather [{}, {"y"}] %a out_sharding=<@mesh, [{"x"}, {?}]> : tensor<8x16xf32>',
    ],
)
def test_constraints(operation):
    module = read(f"%0 = {operation}\nreturn %0 : tensor<8x16xf32>")
    assert (
        lines(module)[-1]
        == 'ROOT %1 = f32[8,16] custom-call(%0), custom_call_target="Sharding", sharding={[{x},'
        " {?}]}"
    )


def test_values_of_operations():
    module = read("""
        %0 = stablehlo.add %a, %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"y"}, {}]>]>} :
            tensor<8x16xf32>
        %1 = stablehlo.negate %0 {mhlo.sharding = "{devices=[2,4]<=[8]}"} : tensor<8x16xf32>
        %2 = sdy.propagation_barrier %1 allowed_direction=NONE : tensor<8x16xf32>
        sdy.sharding_group %2 group_id=1 : tensor<8x16xf32>
        return %2 : tensor<8x16xf32>""")
    assert lines(module)[1:] == [
        "%1 = f32[8,16] add(%0, %0), sharding={[{y}, {}]}",
        "ROOT %2 = f32[8,16] negate(%1), sharding={[{x}, {y}]}",
    ]


def test_constant_and_named_computation():
    module = read("""
        %0 = sdy.constant dense<1.0> : tensor<8x16xf32>
        %1 = sdy.named_computation<"f">(%0, %a)
            in_shardings=[<@mesh, [{}, {"x"}]>, <@mesh, [{?}, {?}]>]
            out_shardings=[<@mesh, [{"y"}, {}]>]
          (%b: tensor<8x16xf32>, %c: tensor<8x16xf32>) {
          %2 = stablehlo.add %b, %c : tensor<8x16xf32>
          sdy.return %2 : tensor<8x16xf32>
        } : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<8x16xf32>
        return %1 : tensor<8x16xf32>""")
    assert [line.rpartition("sharding=")[2] for line in lines(module) if "Sharding" in line] == [
        "{[{}, {x}]}",
        "{[{?}, {?}]}",
        "{[{y}, {}]}",
    ]


def test_manual_computation():
    module = read("""
        %0 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{"x", ?}, {"y", ?}]>]
            out_shardings=[<@mesh, [{?}, {"y"}]>] manual_axes={"y"} (%b: tensor<8x4xf32>) {
          %1 = stablehlo.negate %b : tensor<8x4xf32>
          %2 = sdy.sharding_constraint %1 <@mesh, [{"x"}, {}]> : tensor<8x4xf32>
          sdy.return %2 : tensor<8x4xf32>
        } : (tensor<8x16xf32>) -> tensor<8x16xf32>
        return %0 : tensor<8x16xf32>""")
    assert [line.partition("= ")[2] for line in lines(module)] == [
        "f32[8,16] parameter(0)",
        'f32[8,16] custom-call(%0), custom_call_target="Sharding", sharding={[{x, ?}, {y, ?}]}',
        (
            'f32[8,4] custom-call(%1), custom_call_target="SPMDFullToShardShape", sharding={[{x,'
            " ?}, {?}], manual={y}}"
        ),
        "f32[8,4] negate(%2)",
        'f32[8,4] custom-call(%3), custom_call_target="Sharding", sharding={[{x}, {}], manual={y}}',
        'f32[8,4] custom-call(%4), custom_call_target="Sharding", sharding={[{?}, {}], manual={y}}',
        (
            'f32[8,16] custom-call(%5), custom_call_target="SPMDShardToFullShape", sharding={[{?},'
            " {y}]}"
        ),
    ]


def test_xlas_attributes():
    module = read(
        '%0 = stablehlo.custom_call @Sharding(%a) {mhlo.sharding = "{replicated}"} :'
        " (tensor<8x16xf32>) -> tensor<8x16xf32>\nreturn %0 : tensor<8x16xf32>",
        '%a: tensor<8x16xf32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"}',
        mesh="",
    )
    assert str(module.mesh) == "a=2,b=4"
    assert [line.rpartition("sharding=")[2] for line in lines(module)] == [
        "{[{a}, {}]}",
        "{[{}, {}]}",
    ]


def test_an_empty_attribute_says_nothing():
    """As in XLA. StableHLO's own tests of dynamic sizes have it everywhere."""
    module = read(
        '%0 = stablehlo.negate %a {mhlo.sharding = ""} : tensor<8x16xf32>\n'
        "return %0 : tensor<8x16xf32>",
        '%a: tensor<8x16xf32> {mhlo.sharding = ""}',
        'tensor<8x16xf32> {mhlo.sharding = ""}',
        mesh="",
    )
    assert module.mesh is None
    assert module.entry.root.op == "negate" and module.entry.root.get("sharding") is None
    assert parse_stablehlo(stablehlo_text(module)).entry.root is module.entry.root


@pytest.mark.parametrize("result", ["()", "tuple<>"])
@pytest.mark.parametrize(
    "attribute",
    [
        'mhlo.sharding = "{maximal device=0}"',
        'mhlo.sharding = "{{maximal device=0}}"',
        'mhlo.sharding = "{replicated}"',
        'mhlo.sharding = ""',
        "sdy.sharding = #sdy.sharding_per_value<[<@one, []>]>",
    ],
)
def test_calls_without_results_may_have_a_place(attribute, result):
    """XLA gives an empty tuple one sharding."""
    name = "" if result == "()" else "%0 = "
    call = (
        f"{name}stablehlo.custom_call @Sharding(%a) {{has_side_effect = true, {attribute}}} :"
        f" (tensor<8x16xf32>) -> {result}\n"
    )
    mesh = 'sdy.mesh @mesh = <["x"=2, "y"=4]>\nsdy.mesh @one = <[], device_ids=[0]>'
    module = read(call + "return %a : tensor<8x16xf32>", mesh=mesh)
    assert parse_stablehlo(stablehlo_text(module)).entry.root is module.entry.root


def test_other_meshes():
    """All shardings are expressed on the largest mesh; a mesh without axes is one device."""
    mesh = (
        'sdy.mesh @mesh = <["x"=2, "y"=4]>\nsdy.mesh @other = <["a"=8]>\nsdy.mesh @one = <[],'
        " device_ids=[3]>"
    )
    module = read(
        '%0 = sdy.sharding_constraint %a <@other, [{}, {"a"}]> : tensor<8x16xf32>\n%1 ='
        " sdy.sharding_constraint %0 <@one, []> : tensor<8x16xf32>\n%2 = sdy.sharding_constraint %1"
        ' <mesh<["q"=4, "r"=2]>, [{"q"}, {}]> : tensor<8x16xf32>\nreturn %2 : tensor<8x16xf32>',
        mesh=mesh,
    )
    assert [line.rpartition("sharding=")[2] for line in lines(module)[1:]] == [
        "{[{}, {x, y}]}",
        "{maximal device=3}",
        "{[{x, y:(1)2}, {}]}",
    ]


@pytest.mark.parametrize(
    "sharding, message",
    [
        ('@nowhere, [{"x"}, {}]', "mesh @nowhere is not defined"),
        ('@mesh, [{"z"}, {}]', "no axis 'z'"),
        ('@mesh, [{"x"}, {"x"}]', "axis x is used twice"),
        ("[{}]", "begins with no mesh"),
        ('@mesh, [{"x"}]', "for 1 dimensions"),
    ],
)
def test_errors(sharding, message):
    with pytest.raises(ParseError, match=message):
        read(
            f"%0 = sdy.sharding_constraint %a <{sharding}> : tensor<8x16xf32>\nreturn %0 :"
            " tensor<8x16xf32>"
        )


def test_written_text_reads_back():
    module = read(
        """
        %0 = stablehlo.tanh %a
            {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"y":(1)2}, {}], replicated={"x"}>]>}
            : tensor<8x16xf32>
        %1 = sdy.sharding_constraint %0 <@mesh, [{"x"}, {?}p2]> : tensor<8x16xf32>
        %2 = stablehlo.custom_call @SPMDFullToShardShape(%1) {mhlo.sharding = "{manual}"} :
            (tensor<8x16xf32>) -> tensor<4x16xf32>
        return %1, %2 : tensor<8x16xf32>, tensor<4x16xf32>""",
        '%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}',
        'tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}, tensor<4x16xf32>',
    )
    text = stablehlo_text(module)
    assert (
        'sdy.mesh @mesh = <["x"=2, "y"=4]>' in text
        and '{sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}' in text
    )
    assert parse_stablehlo(text).entry.root is module.entry.root


def test_members_of_a_group_lie_alike():
    """What follows them sees a choice between both, which is always the member itself."""
    module = read(
        """sdy.sharding_group %a group_id=7 : tensor<8x16xf32>
        sdy.sharding_group %b group_id=7 : tensor<8x16xi32>
        return %b, %a : tensor<8x16xi32>, tensor<8x16xf32>""",
        "%a: tensor<8x16xf32>, %b: tensor<8x16xi32>",
        "tensor<8x16xi32>, tensor<8x16xf32>",
    )
    a, b = module.entry.params
    second, first = module.entry.root.operands
    assert (first.op, second.op) == ("select", "select")
    assert first.operands[1] is a and first.operands[2].operands == (b,)
    assert second.operands[1] is b and second.operands[2].operands == (a,)
