"""Passes on collectives, text in and text out; values on all devices are compared."""

from __future__ import annotations

import unittest

from test.support import HloTestCase
from torch_hlo.compiler.collectives.collective_algebra import (
    collective_convert,
    collective_reassociate,
    reduce_scatter_creation,
)
from torch_hlo.compiler.collectives.collective_async import collective_async
from torch_hlo.compiler.collectives.collective_combine import (
    collective_combine,
    combined,
)
from torch_hlo.compiler.collectives.collective_motion import collective_motion
from torch_hlo.compiler.collectives.number_channels import number_channels
from torch_hlo.compiler.cost import cost

ADD = """
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
"""
HEAD = 'HloModule m, num_partitions=4, frontend_attributes={mesh="x=2,y=2"}\n'
Y, X = (
    "replica_groups={{0,1},{2,3}}, use_global_device_ids=true",
    "replica_groups={{0,2},{1,3}}, use_global_device_ids=true",
)


class TestAlgebra(HloTestCase):
    def test_sum_of_all_reduces(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[4] parameter(0)
  y = f32[4] parameter(1)
  a = f32[4] all-reduce(x), channel_id=1, {Y}, to_apply=add
  b = f32[4] all-reduce(y), channel_id=2, {Y}, to_apply=add
  ROOT c = f32[4] add(a, b)
}}"""
        )
        self.assertPass(
            collective_reassociate,
            module,
            """\
HloModule m, entry_computation_layout={(f32[4]{0}, f32[4]{0})->f32[4]{0}}, num_partitions=4, frontend_attributes={mesh="x=2,y=2"}

%add {
  %0 = f32[] parameter(0)
  %1 = f32[] parameter(1)
  ROOT %2 = f32[] add(%0, %1)
}

ENTRY %main {
  %0 = f32[4] parameter(0)
  %1 = f32[4] parameter(1)
  %2 = f32[4] add(%0, %1)
  ROOT %3 = f32[4] all-reduce(%2), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add
}
""",
        )

    def test_sums_that_others_read_stay(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[4] parameter(0)
  y = f32[4] parameter(1)
  a = f32[4] all-reduce(x), channel_id=1, {Y}, to_apply=add
  b = f32[4] all-reduce(y), channel_id=2, {Y}, to_apply=add
  c = f32[4] add(a, b)
  ROOT t = (f32[4], f32[4]) tuple(c, a)
}}"""
        )
        self.assertUnchanged(collective_reassociate, module)

    def test_sums_over_other_devices_stay(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[4] parameter(0)
  y = f32[4] parameter(1)
  a = f32[4] all-reduce(x), channel_id=1, {Y}, to_apply=add
  b = f32[4] all-reduce(y), channel_id=2, {X}, to_apply=add
  ROOT c = f32[4] add(a, b)
}}"""
        )
        self.assertUnchanged(collective_reassociate, module)

    def test_narrow_values_travel(self):
        module = self.hlo(
            HEAD
            + f"""
ENTRY main {{
  x = bf16[4] parameter(0)
  w = f32[4] convert(x)
  g = f32[8] all-gather(w), channel_id=1, {Y}, dimensions={{0}}
  y = f32[4] parameter(1)
  p = f32[4] collective-permute(y), channel_id=2, source_target_pairs={{{{0,1}},{{1,0}},{{2,3}},{{3,2}}}}
  n = bf16[4] convert(p)
  ROOT t = (f32[8], bf16[4]) tuple(g, n)
}}"""
        )
        self.assertPass(
            collective_convert,
            module,
            """\
HloModule m, entry_computation_layout={(bf16[4]{0}, f32[4]{0})->(f32[8]{0}, bf16[4]{0})}, num_partitions=4, frontend_attributes={mesh="x=2,y=2"}

ENTRY %main {
  %0 = bf16[4] parameter(0)
  %1 = f32[4] parameter(1)
  %2 = bf16[8] all-gather(%0), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, dimensions={0}
  %3 = f32[8] convert(%2)
  %4 = bf16[4] convert(%1)
  %5 = bf16[4] collective-permute(%4), channel_id=2, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  ROOT %6 = (f32[8], bf16[4]) tuple(%3, %5)
}
""",
        )

    def test_own_part_of_a_sum(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[8,3] parameter(0)
  a = f32[8,3] all-reduce(x), channel_id=1, {Y}, to_apply=add
  t = s32[4] constant({{4, 0, 4, 0}})
  p = u32[] partition-id()
  d = s32[1] dynamic-slice(t, p), dynamic_slice_sizes={{1}}
  i = s32[] reshape(d)
  z = s32[] constant(0)
  ROOT s = f32[4,3] dynamic-slice(a, i, z), dynamic_slice_sizes={{4,3}}
}}"""
        )
        self.assertPass(
            reduce_scatter_creation,
            module,
            """\
HloModule m, entry_computation_layout={(f32[8,3]{1,0})->f32[4,3]{1,0}}, num_partitions=4, frontend_attributes={mesh="x=2,y=2"}

%add {
  %0 = f32[] parameter(0)
  %1 = f32[] parameter(1)
  ROOT %2 = f32[] add(%0, %1)
}

ENTRY %main {
  %0 = f32[8,3] parameter(0)
  ROOT %1 = f32[4,3] reduce-scatter(%0), channel_id=1, replica_groups={{1,0},{3,2}}, use_global_device_ids=true, dimensions={0}, to_apply=%add
}
""",
        )

    def test_the_same_part_on_all_devices_is_no_scatter(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[8] parameter(0)
  a = f32[8] all-reduce(x), channel_id=1, {Y}, to_apply=add
  i = s32[] constant(4)
  ROOT s = f32[4] dynamic-slice(a, i), dynamic_slice_sizes={{4}}
}}"""
        )
        self.assertUnchanged(reduce_scatter_creation, module)


class TestCombine(HloTestCase):
    def test_independent_all_reduces(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[4] parameter(0)
  y = f32[2,2] parameter(1)
  a = f32[4] all-reduce(x), channel_id=1, {Y}, to_apply=add
  b = f32[2,2] all-reduce(y), channel_id=2, {Y}, to_apply=add
  n = f32[4] negate(a)
  c = f32[4] all-reduce(n), channel_id=3, {Y}, to_apply=add
  ROOT t = (f32[4], f32[2,2]) tuple(c, b)
}}"""
        )
        self.assertPass(
            collective_combine,
            module,
            """\
HloModule m, entry_computation_layout={(f32[4]{0}, f32[2,2]{1,0})->(f32[4]{0}, f32[2,2]{1,0})}, num_partitions=4, frontend_attributes={mesh="x=2,y=2"}

%add {
  %0 = f32[] parameter(0)
  %1 = f32[] parameter(1)
  ROOT %2 = f32[] add(%0, %1)
}

ENTRY %main {
  %0 = f32[4] parameter(0)
  %1 = f32[2,2] parameter(1)
  %2 = f32[4] all-reduce(%0), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add
  %3 = f32[4] negate(%2)
  %4 = (f32[4], f32[2,2]) all-reduce(%3, %1), channel_id=3, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add
  %5 = f32[4] get-tuple-element(%4), index=0
  %6 = f32[2,2] get-tuple-element(%4), index=1
  ROOT %7 = (f32[4], f32[2,2]) tuple(%5, %6)
}
""",
        )

    def test_groups_that_would_wait_for_each_other(self):
        # a -> b in one order, d -> c in the other: combining a with c and b with d would be a
        # cycle.
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[4] parameter(0)
  a = f32[4] all-reduce(x), channel_id=1, {Y}, to_apply=add
  b = f32[4] all-reduce(a), channel_id=2, {X}, to_apply=add
  y = f32[4] parameter(1)
  d = f32[4] all-reduce(y), channel_id=3, {X}, to_apply=add
  c = f32[4] all-reduce(d), channel_id=4, {Y}, to_apply=add
  ROOT t = (f32[4], f32[4]) tuple(b, c)
}}"""
        )
        result = collective_combine(module)
        self.assertEqual(cost(result).collectives["all-reduce"], 3)
        self.assertSameValue(module, result)

    def test_reduce_scatters_share_a_matrix(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[4,3] parameter(0)
  y = f32[2,6] parameter(1)
  a = f32[2,3] reduce-scatter(x), channel_id=1, {Y}, dimensions={{0}}, to_apply=add
  b = f32[2,3] reduce-scatter(y), channel_id=2, {Y}, dimensions={{1}}, to_apply=add
  ROOT t = (f32[2,3], f32[2,3]) tuple(a, b)
}}"""
        )
        self.assertPass(
            collective_combine,
            module,
            """\
HloModule m, entry_computation_layout={(f32[4,3]{1,0}, f32[2,6]{1,0})->(f32[2,3]{1,0}, f32[2,3]{1,0})}, num_partitions=4, frontend_attributes={mesh="x=2,y=2"}

%add {
  %0 = f32[] parameter(0)
  %1 = f32[] parameter(1)
  ROOT %2 = f32[] add(%0, %1)
}

ENTRY %main {
  %0 = f32[4,3] parameter(0)
  %1 = f32[2,6] parameter(1)
  %2 = f32[2,2,3] reshape(%0)
  %3 = f32[2,6] reshape(%2)
  %4 = f32[2,2,3] reshape(%1)
  %5 = f32[2,2,3] transpose(%4), dimensions={1,0,2}
  %6 = f32[2,6] reshape(%5)
  %7 = f32[2,12] concatenate(%3, %6), dimensions={1}
  %8 = f32[1,12] reduce-scatter(%7), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, dimensions={0}, to_apply=%add
  %9 = f32[1,6] slice(%8), slice={[0:1], [0:6]}
  %10 = f32[2,3] reshape(%9)
  %11 = f32[1,6] slice(%8), slice={[0:1], [6:12]}
  %12 = f32[2,3] reshape(%11)
  ROOT %13 = (f32[2,3], f32[2,3]) tuple(%10, %12)
}
""",
        )

    def test_threshold(self):
        module = self.hlo(
            HEAD
            + f"""
ENTRY main {{
  x = f32[4] parameter(0)
  y = f32[4] parameter(1)
  a = f32[8] all-gather(x), channel_id=1, {Y}, dimensions={{0}}
  b = f32[8] all-gather(y), channel_id=2, {Y}, dimensions={{0}}
  ROOT t = (f32[8], f32[8]) tuple(a, b)
}}"""
        )
        self.assertIs(combined(module, 16), module)
        self.assertEqual(cost(combined(module, 32)).collectives["all-gather"], 1)


class TestMotion(HloTestCase):
    LOOP = (
        HEAD
        + f"""
body {{
  s = (s32[], f32[4], f32[2]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  v = f32[4] get-tuple-element(s), index=1
  w = f32[2] get-tuple-element(s), index=2
  one = s32[] constant(1)
  j = s32[] add(i, one)
  g = f32[4] all-gather(WHAT), channel_id=1, {Y}, dimensions={{0}}
  u = f32[4] add(v, g)
  ROOT r = (s32[], f32[4], f32[2]) tuple(j, u, w)
}}

cond {{
  s = (s32[], f32[4], f32[2]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(3)
  ROOT c = pred[] compare(i, n), direction=LT
}}

ENTRY main {{
  zero = s32[] constant(0)
  v = f32[4] parameter(0)
  w = f32[2] parameter(1)
  t = (s32[], f32[4], f32[2]) tuple(zero, v, w)
  l = (s32[], f32[4], f32[2]) while(t), condition=cond, body=body
  ROOT y = f32[4] get-tuple-element(l), index=1
}}"""
    )

    def test_gather_of_an_invariant(self):
        module = self.hlo(self.LOOP.replace("WHAT", "w"))
        self.assertPass(
            collective_motion,
            module,
            """\
HloModule m, entry_computation_layout={(f32[4]{0}, f32[2]{0})->f32[4]{0}}, num_partitions=4, frontend_attributes={mesh="x=2,y=2"}

%body {
  %0 = (s32[], f32[4], f32[2], f32[4]) parameter(0)
  %1 = s32[] get-tuple-element(%0), index=0
  %2 = s32[] constant(1)
  %3 = s32[] add(%1, %2)
  %4 = f32[4] get-tuple-element(%0), index=1
  %5 = f32[4] get-tuple-element(%0), index=3
  %6 = f32[4] add(%4, %5)
  %7 = f32[2] get-tuple-element(%0), index=2
  ROOT %8 = (s32[], f32[4], f32[2], f32[4]) tuple(%3, %6, %7, %5)
}

%cond {
  %0 = (s32[], f32[4], f32[2], f32[4]) parameter(0)
  %1 = s32[] get-tuple-element(%0), index=0
  %2 = s32[] constant(3)
  ROOT %3 = pred[] compare(%1, %2), direction=LT
}

ENTRY %main {
  %0 = f32[4] parameter(0)
  %1 = f32[2] parameter(1)
  %2 = s32[] constant(0)
  %3 = f32[4] all-gather(%1), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, dimensions={0}
  %4 = (s32[], f32[4], f32[2], f32[4]) tuple(%2, %0, %1, %3)
  %5 = (s32[], f32[4], f32[2], f32[4]) while(%4), condition=%cond, body=%body
  %6 = s32[] get-tuple-element(%5), index=0
  %7 = f32[4] get-tuple-element(%5), index=1
  %8 = f32[2] get-tuple-element(%5), index=2
  %9 = (s32[], f32[4], f32[2]) tuple(%6, %7, %8)
  ROOT %10 = f32[4] get-tuple-element(%9), index=1
}
""",
        )

    def test_gather_of_a_changing_value_stays(self):
        text = self.LOOP.replace("WHAT", "h").replace(
            "  g = ", "  h = f32[2] slice(v), slice={[0:2]}\n  g = "
        )
        self.assertUnchanged(collective_motion, self.hlo(text))

    def test_a_loop_counts_as_often_as_it_runs(self):
        module = self.hlo(self.LOOP.replace("WHAT", "w"))
        self.assertEqual(cost(module).collectives["all-gather"], 3)
        self.assertEqual(cost(collective_motion(module)).bytes * 3, cost(module).bytes)


class TestPairs(HloTestCase):
    def test_start_and_done(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[4] parameter(0)
  g = f32[8] all-gather(x), channel_id=2, {Y}, dimensions={{0}}
  r = f32[8] all-reduce(g), channel_id=5, {X}, to_apply=add
  ROOT n = f32[8] negate(r)
}}"""
        )
        self.assertPass(
            collective_async,
            module,
            """\
HloModule m, entry_computation_layout={(f32[4]{0})->f32[8]{0}}, num_partitions=4, frontend_attributes={mesh="x=2,y=2"}

%add {
  %0 = f32[] parameter(0)
  %1 = f32[] parameter(1)
  ROOT %2 = f32[] add(%0, %1)
}

ENTRY %main {
  %0 = f32[4] parameter(0)
  %1 = (f32[4], f32[8]) all-gather-start(%0), channel_id=2, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, dimensions={0}
  %2 = f32[8] all-gather-done(%1)
  %3 = f32[8] all-reduce-start(%2), channel_id=5, replica_groups={{0,2},{1,3}}, use_global_device_ids=true, to_apply=%add
  %4 = f32[8] all-reduce-done(%3)
  ROOT %5 = f32[8] negate(%4)
}
""",
        )

    def test_channels_follow_the_program(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[4] parameter(0)
  g = f32[8] all-gather(x), channel_id=7, {Y}, dimensions={{0}}
  ROOT r = f32[8] all-reduce(g), channel_id=5, {X}, to_apply=add
}}"""
        )
        self.assertPass(
            number_channels,
            module,
            """\
HloModule m, entry_computation_layout={(f32[4]{0})->f32[8]{0}}, num_partitions=4, frontend_attributes={mesh="x=2,y=2"}

%add {
  %0 = f32[] parameter(0)
  %1 = f32[] parameter(1)
  ROOT %2 = f32[] add(%0, %1)
}

ENTRY %main {
  %0 = f32[4] parameter(0)
  %1 = f32[8] all-gather(%0), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, dimensions={0}
  ROOT %2 = f32[8] all-reduce(%1), channel_id=2, replica_groups={{0,2},{1,3}}, use_global_device_ids=true, to_apply=%add
}
""",
        )


class TestCost(HloTestCase):
    def test_bytes_of_every_kind(self):
        module = self.hlo(
            HEAD
            + ADD
            + f"""
ENTRY main {{
  x = f32[8] parameter(0)
  a = f32[16] all-gather(x), channel_id=1, {Y}, dimensions={{0}}
  b = f32[8] reduce-scatter(a), channel_id=2, {Y}, dimensions={{0}}, to_apply=add
  c = f32[8] all-reduce(b), channel_id=3, {Y}, to_apply=add
  d = f32[8] all-to-all(c), channel_id=4, replica_groups={{{{0,1}},{{2,3}}}}, dimensions={{0}}
  ROOT e = f32[8] collective-permute(d), channel_id=5, source_target_pairs={{{{0,1}},{{1,1}}}}
}}"""
        )
        found = cost(module)
        self.assertEqual(
            dict(found.sent),
            {
                "all-gather": 32,
                "reduce-scatter": 32,
                "all-reduce": 32,
                "all-to-all": 16,
                "collective-permute": 8,
            },
        )
        self.assertEqual(found.bytes, 120)


if __name__ == "__main__":
    unittest.main()
