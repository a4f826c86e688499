"""The partitioner: random annotated programs against one device, and the collectives that
well-known programs must have."""

from __future__ import annotations

import unittest
from collections import Counter

import numpy as np

from test.compiler.spmd.support import (
    MESHES,
    annotated,
    check,
    random_module,
    run_partitioned,
)
from torch_hlo import metrics
from torch_hlo.compiler.collectives.weight_update import shard_weight_update
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.compiler.spmd.partitioner import (
    COUNTER,
    PartitionError,
    PartitionWarning,
    partition,
)
from torch_hlo.compiler.spmd.spmd_pipeline import spmd
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import Computation, Instruction, Module, called
from torch_hlo.hlo.ir.intern import interned
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.sharding.sharding import Mesh, Sharding, ShardingError

MESH = Mesh((("x", 2), ("y", 4)))


def put(x: Instruction, *spec, mesh: Mesh = MESH) -> Instruction:
    """`x` annotated with one entry per dimension: None, an axis or several."""
    return interned(
        x.op,
        x.operands,
        tuple(sorted((*x.attrs, ("sharding", Sharding.of(mesh, spec))))),
        x.shape,
    )


def arg(index: int, dims, *spec, dtype="f32", mesh: Mesh = MESH) -> Instruction:
    return put(h.parameter(index, Shape(dtype, dims)), *spec, mesh=mesh)


def program(params, root, mesh: Mesh = MESH) -> Module:
    return Module("test", Computation("main", tuple(params), root), mesh=mesh)


def collectives(module: Module) -> Counter:
    """How often each collective stands in the program."""
    found: Counter = Counter()
    pending, seen = [module.entry], set()
    while pending:
        c = pending.pop()
        if c not in seen:
            seen.add(c)
            for x in c.instructions():
                found[x.op] += x.get("channel_id") is not None
                pending.extend(called(x))
    return +found


class TestPartition(unittest.TestCase):
    def test_random_programs(self):
        for seed in range(60):
            with self.subTest(seed=seed):
                check(
                    annotated(random_module(seed), MESHES[seed % len(MESHES)], seed),
                    seed,
                )

    def test_megatron_mlp_has_one_all_reduce(self):
        x, up, down = (
            arg(0, (16, 32), "x", None),
            arg(1, (32, 64), None, "y"),
            arg(2, (64, 32), "y", None),
        )
        hidden = put(h.tanh(put(h.dot(x, up, (1,), (0,)), "x", "y")), "x", "y")
        per_device = check(program((x, up, down), put(h.dot(hidden, down, (1,), (0,)), "x", None)))
        self.assertEqual(collectives(per_device), {"all-reduce": 1})

    def test_fsdp_gathers_weights_and_scatters_gradients(self):
        mesh = Mesh((("x", 8),))
        x, w, g = (
            arg(0, (64, 32), "x", None, mesh=mesh),
            arg(1, (32, 16), "x", None, mesh=mesh),
            arg(2, (64, 16), "x", None, mesh=mesh),
        )
        forward = put(h.dot(x, w, (1,), (0,)), "x", None, mesh=mesh)
        gradient = put(h.dot(x, g, (0,), (0,)), "x", None, mesh=mesh)
        per_device = check(program((x, w, g), h.tuple_(forward, gradient), mesh))
        self.assertEqual(collectives(per_device), {"all-gather": 1, "reduce-scatter": 1})

    def test_moving_an_axis_is_one_all_to_all(self):
        x = arg(0, (16, 32), "y", None)
        self.assertEqual(
            collectives(check(program((x,), put(h.negate(x), None, "y")))),
            {"all-to-all": 1},
        )

    def test_changing_the_axis_is_one_permute(self):
        x = arg(0, (16, 32), ("x", "y"), None)
        self.assertEqual(
            collectives(check(program((x,), put(h.negate(x), ("y", "x"), None)))),
            {"collective-permute": 1},
        )

    def test_convolution_takes_edges_from_neighbours(self):
        from torch_hlo.hlo.ir.window import WindowDim

        x, k = (
            arg(0, (2, 3, 16, 8), None, None, "y", None),
            arg(1, (4, 3, 3, 3), None, None, None, None),
        )
        window = (WindowDim(3, 1, 1, 1),) * 2
        y = put(h.convolution(x, k, window, "bf01_oi01->bf01"), None, None, "y", None)
        self.assertEqual(collectives(check(program((x, k), y))), {"collective-permute": 2})

    def test_products_per_group_are_dots(self):
        """On one device these sizes have a kernel (simplify/legalize.py); on blocks they have none."""
        x, w = arg(0, (8, 4), "x", None), arg(1, (3, 4, 5), None, None, None)
        y = h.ragged_dot(
            x,
            w,
            h.constant([3, 1, 4], "s32"),
            lhs_contract=(1,),
            rhs_contract=(1,),
            lhs_ragged=(0,),
            rhs_group=(0,),
        )
        check(program((x, w), put(y, "x", None)))

    def test_rows_of_a_split_table_are_summed(self):
        table, ids = arg(0, (40, 16), "y", None), arg(1, (8,), "x", dtype="s32")
        y = h.gather(
            table,
            ids,
            offset_dims=(1,),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
            index_vector_dim=1,
            slice_sizes=(1, 16),
        )
        self.assertEqual(
            collectives(check(program((table, ids), put(y, "x", None)))),
            {"all-reduce": 1},
        )

    def test_sums_of_partial_results_are_reduced_once(self):
        x, a, b = (
            arg(0, (16, 32), None, "y"),
            arg(1, (32, 16), "y", None),
            arg(2, (32, 16), "y", None),
        )
        both = [put(h.dot(x, w, (1,), (0,)), None, None) for w in (a, b)]
        self.assertEqual(
            collectives(check(program((x, a, b), put(h.add(*both), None, None)))),
            {"all-reduce": 1},
        )

    def test_iota_and_masks_need_no_collective(self):
        rows, columns = (put(h.iota("s32", (16, 16), d), None, None) for d in range(2))
        mask = put(h.compare(rows, columns, "GE"), ("x", "y"), None)
        self.assertEqual(collectives(check(program((), mask))), {})

    def test_weight_update_sharding(self):
        """SGD with momentum, data parallel: gradients are scattered, weights gathered, momentum
        stays split between steps."""
        mesh = Mesh((("x", 8),))
        x, y = (
            arg(0, (16, 8), "x", None, mesh=mesh),
            arg(1, (16, 4), "x", None, mesh=mesh),
        )
        w, m = (
            arg(2, (8, 4), None, None, mesh=mesh),
            arg(3, (8, 4), None, None, mesh=mesh),
        )
        error = h.subtract(h.dot(x, w, (1,), (0,)), y)
        momentum = h.add(h.multiply(m, h.full_like(m, 0.9)), h.dot(x, error, (0,), (0,)))
        weights = h.subtract(w, h.multiply(momentum, h.full_like(m, 0.1)))
        root = h.tuple_(weights, momentum)
        module = Module(
            "step", Computation("main", (x, y, w, m), root), ((0, 2), (1, 3)), mesh=mesh
        )
        self.assertEqual(collectives(spmd(module)), {"all-reduce": 1})
        split = shard_weight_update(module, ["x"])
        per_device = spmd(split)
        self.assertEqual(collectives(per_device), {"reduce-scatter": 1, "all-gather": 1})
        self.assertEqual(
            [p.shape.dims for p in per_device.entry.params],
            [(2, 8), (2, 4), (8, 4), (1, 4)],
        )
        self.assertEqual(per_device.aliases, ((0, 2), (1, 3)))
        inputs = random_inputs(module)
        for want, got in zip(
            evaluate(module, inputs),
            run_partitioned(per_device, inputs, [(8, 4)] * 2),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4)
        with self.assertRaisesRegex(ShardingError, "no axis 'q'"):
            shard_weight_update(module, ["q"])

    def test_what_has_no_rule_is_gathered_and_counted(self):
        x = arg(0, (16, 8), "x", None)
        y = put(h.custom_call("mystery", (x,), Shape("f32", (16, 8))), "x", None)
        before = metrics.counter_value(COUNTER) or 0
        with self.assertWarnsRegex(PartitionWarning, r"custom-call 'mystery'\(f32\[16,8\]\)"):
            per_device = partition(program((x,), y))
        self.assertEqual(metrics.counter_value(COUNTER), before + 1)
        self.assertEqual(collectives(per_device), {"all-gather": 1})

    def test_what_cannot_run_on_many_devices_is_refused(self):
        token = interned("after-all", (), (), Shape("token"))
        fed = interned(
            "infeed",
            (token,),
            (("serial", 0),),
            Shape("tuple", elements=(Shape("f32", (8,)), Shape("token"))),
        )
        x = arg(0, (8,), "x")
        with self.assertRaisesRegex(PartitionError, "infeed"):
            partition(program((x,), h.add(x, h.get_tuple_element(fed, 0))))


if __name__ == "__main__":
    unittest.main()
