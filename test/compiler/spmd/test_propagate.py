"""Sharding propagation: HLO with a few shardings in, every array placed out."""

import time

from test.support import HloTestCase, hlo, short
from torch_hlo.compiler.spmd.propagate import explain, propagate
from torch_hlo.hlo.ir.instruction import Instruction, Module, postorder
from torch_hlo.hlo.sharding.sharding import sharding_text

HEAD = 'HloModule m, num_partitions=8, frontend_attributes={mesh="x=2,y=4"}\n'


def named(module: Module) -> dict[str, str]:
    """Sharding by name in the text, of the entry computation."""
    return {
        x.meta.name: sharding_text(x["sharding"])
        for x in postorder((module.entry.root,))
        if x.meta.name
    }


def placed(text: str) -> dict[str, str]:
    return named(propagate(hlo(HEAD + text)))


class TestPropagate(HloTestCase):
    def test_megatron(self):
        module = hlo(
            HEAD
            + """
            x = f32[16,32] parameter(0), sharding={[{x}, {}]}
            w1 = f32[32,64] parameter(1), sharding={[{}, {y}]}
            w2 = f32[64,32] parameter(2)
            h = f32[16,64] dot(x, w1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
            a = f32[16,64] tanh(h)
            ROOT r = f32[16,32] dot(a, w2), lhs_contracting_dims={1}, rhs_contracting_dims={0}"""
        )
        self.assertPass(
            propagate,
            module,
            """\
HloModule m, entry_computation_layout={(f32[16,32]{1,0}, f32[32,64]{1,0}, f32[64,32]{1,0})->f32[16,32]{1,0}}, num_partitions=8, frontend_attributes={mesh="x=2,y=4"}

ENTRY %main {
  %0 = f32[16,32] parameter(0), sharding={[{x}, {}]}
  %1 = f32[32,64] parameter(1), sharding={[{}, {y}]}
  %2 = f32[64,32] parameter(2), sharding={[{y}, {}]}
  %3 = f32[16,64] dot(%0, %1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, sharding={[{x}, {y}]}
  %4 = f32[16,64] tanh(%3), sharding={[{x}, {y}]}
  ROOT %5 = f32[16,32] dot(%4, %2), lhs_contracting_dims={1}, rhs_contracting_dims={0}, sharding={[{x}, {}]}
}
""",
        )

    def test_no_mesh_no_change(self):
        self.assertUnchanged(propagate, hlo("x = f32[4] parameter(0)\nROOT y = f32[4] negate(x)"))

    def test_backward_from_the_output(self):
        found = placed(
            "a = f32[8,16] parameter(0)\nb = f32[8,16] negate(a)\nROOT c = f32[16,8] transpose(b),"
            " dimensions={1,0}, sharding={[{y}, {x}]}"
        )
        self.assertEqual(found, {"a": "{[{x}, {y}]}", "b": "{[{x}, {y}]}", "c": "{[{y}, {x}]}"})

    def test_annotations_win(self):
        found = placed("""
            a = f32[8,16] parameter(0), sharding={[{x}, {}]}
            b = f32[8,16] negate(a), sharding={[{}, {x}]}
            ROOT c = f32[8,16] negate(b)""")
        self.assertEqual(found, {"a": "{[{x}, {}]}", "b": "{[{}, {x}]}", "c": "{[{}, {x}]}"})

    def test_closed_and_open_dimensions(self):
        found = placed("""
            a = f32[8,16] parameter(0), sharding={[{x}, {y}]}
            b = f32[8,16] negate(a), sharding={[{?}, {}]}
            ROOT c = f32[8,16] negate(b), sharding={[{?}, {?}], replicated={x}}""")
        self.assertEqual(found, {"a": "{[{x}, {y}]}", "b": "{[{x}, {}]}", "c": "{[{}, {}]}"})

    def test_the_larger_array_wins_a_conflict(self):
        found = placed("""
            a = f32[16,32] parameter(0), sharding={[{x}, {}]}
            b = f32[32,64] parameter(1), sharding={[{}, {x}]}
            ROOT c = f32[16,64] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}""")
        self.assertEqual(found["c"], "{[{}, {x}]}")

    def test_priorities(self):
        text = """
            a = f32[8,8] parameter(0), sharding={[{x}%s, {}]}
            b = f32[8,8] parameter(1), sharding={[{}, {x}%s]}
            ROOT c = f32[8,8] add(a, b)"""
        self.assertEqual(placed(text % ("", "p1"))["c"], "{[{x}, {}]}")
        self.assertEqual(placed(text % ("p1", ""))["c"], "{[{}, {x}]}")

    def test_reshape_splits_and_merges(self):
        found = placed("""
            a = f32[16,8] parameter(0), sharding={[{x, y}, {}]}
            b = f32[4,4,8] reshape(a)
            c = f32[2,64] reshape(b)
            ROOT d = f32[128] reshape(c)""")
        self.assertEqual(
            found,
            {
                "a": "{[{x, y}, {}]}",
                "b": "{[{x, y:(1)2}, {y:(2)2}, {}]}",
                "c": "{[{x}, {y}]}",
                "d": "{[{x, y}]}",
            },
        )

    def test_a_dimension_that_is_too_small_stays_whole(self):
        found = placed(
            "a = f32[8,16] parameter(0), sharding={[{y}, {}]}\nROOT b = f32[3,16] slice(a),"
            " slice={[0:3], [0:16]}"
        )
        self.assertEqual(found["b"], "{[{}, {}]}")

    def test_every_use_of_a_constant_has_its_own(self):
        found = propagate(
            hlo(
                HEAD
                + """
            a = f32[8,4] parameter(0), sharding={[{x}, {}]}
            b = f32[8,4] parameter(1), sharding={[{}, {y}]}
            zero = f32[] constant(0)
            zeros = f32[8,4] broadcast(zero), dimensions={}
            c = f32[8,4] maximum(a, zeros)
            d = f32[8,4] maximum(b, zeros)
            ROOT e = (f32[8,4], f32[8,4]) tuple(c, d)"""
            )
        )
        broadcasts = sorted(
            str(x["sharding"]) for x in postorder((found.entry.root,)) if x.op == "broadcast"
        )
        self.assertEqual(broadcasts, ["{[{x}, {}]}", "{[{}, {y}]}"])

    def test_loop(self):
        """The carried array is placed as the weights inside need it; the value that enters
        follows."""
        module = propagate(
            hlo(
                HEAD
                + """
            body { s = (s32[], f32[8,16]) parameter(0)
                   i = s32[] get-tuple-element(s), index=0
                   c = f32[8,16] get-tuple-element(s), index=1
                   d = f32[8,16] tanh(c), sharding={[{x}, {y}]}
                   ROOT t = (s32[], f32[8,16]) tuple(i, d) }
            condition { s = (s32[], f32[8,16]) parameter(0)
                        i = s32[] get-tuple-element(s), index=0
                        ROOT p = pred[] compare(i, i), direction=LT }
            ENTRY main {
              i = s32[] parameter(0)
              x = f32[8,16] parameter(1)
              s = (s32[], f32[8,16]) tuple(i, x)
              w = (s32[], f32[8,16]) while(s), condition=condition, body=body
              ROOT r = f32[8,16] get-tuple-element(w), index=1
            }"""
            )
        )
        self.assertEqual(named(module)["x"], "{[{x}, {y}]}")
        self.assertEqual(named(module)["w"], "{{[]}, {[{x}, {y}]}}")

    def test_aliased_output_follows_its_parameter(self):
        module = hlo(
            """HloModule m, input_output_alias={ {}: (0, {}, may-alias) }, num_partitions=8, frontend_attributes={mesh="x=8"}
            p = f32[16] parameter(0), sharding={[{x}]}
            g = f32[16,16] parameter(1)
            zero = f32[] constant(0)
            ROOT n = f32[16] reduce(g, zero), dimensions={1}, to_apply=sum
            sum { a = f32[] parameter(0)
                  b = f32[] parameter(1)
                  ROOT c = f32[] add(a, b) }"""
        )
        self.assertEqual(named(propagate(module))["n"], "{[{x}]}")

    def test_per_device_regions_let_other_axes_through(self):
        found = placed("""
            a = f32[8,16] parameter(0), sharding={[{x}, {}]}
            b = f32[8,16] custom-call(a), custom_call_target="Sharding", sharding={[{?}, {y, ?}]}
            c = f32[8,4] custom-call(b), custom_call_target="SPMDFullToShardShape", sharding={[{?}, {?}], manual={y}}
            d = f32[8,4] negate(c)
            e = f32[8,4] custom-call(d), custom_call_target="Sharding", sharding={[{?}, {?}], manual={y}}
            f = f32[8,16] custom-call(e), custom_call_target="SPMDShardToFullShape", sharding={[{?}, {y, ?}]}
            ROOT g = f32[8,16] negate(f)""")
        self.assertEqual(
            [found[n] for n in "bdfg"],
            ["{[{x}, {y}]}", "{[{x}, {}], manual={y}}", "{[{x}, {y}]}", "{[{x}, {y}]}"],
        )

    def test_calls_are_inlined(self):
        module = propagate(
            hlo(
                HEAD
                + """
            f { p = f32[8] parameter(0)
                ROOT n = f32[8] negate(p) }
            ENTRY main { x = f32[8] parameter(0), sharding={[{y}]}
                         ROOT c = f32[8] call(x), to_apply=f }"""
            )
        )
        self.assertEqual(
            short(module).splitlines()[-2],
            "  ROOT %1 = f32[8] negate(%0), sharding={[{y}]}",
        )


def test_explain():
    text = explain(
        hlo(
            HEAD
            + """
        a = f32[8,16] parameter(0), sharding={[{x}, {}]}
        b = f32[8,16] negate(a)
        c = f32[5] parameter(1)
        ROOT t = (f32[8,16], f32[5]) tuple(b, c)"""
        )
    )
    assert (
        text
        == """\
a f32[8,16] {[{x}, {}]}: annotated
c f32[5] {[{}]}: nothing says how to split it
b f32[8,16] {[{x}, {}]}: dimension 0 as a through b"""
    )


def layers(count: int) -> str:
    lines = ["x0 = f32[64,128] parameter(0), sharding={[{x}, {}]}"]
    for i in range(count):
        lines.append(
            f"w{i} = f32[128,128] parameter({i + 1}), sharding={{[{{}}, {{y}}]}}"
            if i % 2 == 0
            else f"w{i} = f32[128,128] parameter({i + 1})"
        )
        lines.append(
            f"h{i} = f32[64,128] dot(x{i}, w{i}), lhs_contracting_dims={{1}},"
            " rhs_contracting_dims={0}"
        )
        lines.append(f"x{i + 1} = f32[64,128] tanh(h{i})")
    return HEAD + "\n".join(lines[:-1] + ["ROOT " + lines[-1]])


def test_time_is_linear():
    """Twice the layers cost about twice the time: steps of equal layers are looked up, not
    computed."""

    def seconds(module: Module) -> float:
        begin = time.process_time()
        propagate(module)
        return time.process_time() - begin

    short_, long = hlo(layers(200)), hlo(layers(1600))
    seconds(short_)
    assert min(seconds(long) for _ in range(2)) < 8 * 4 * max(
        min(seconds(short_) for _ in range(3)), 1e-3
    )


def test_instructions_are_all_annotated():
    module = propagate(hlo(layers(4)))
    assert all(
        isinstance(x, Instruction) and x.get("sharding") is not None
        for x in postorder((module.entry.root,))
    )
