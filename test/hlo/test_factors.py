"""Factor rules: the einsum-like notation of each opcode, and that every rule fits its
instruction."""

import math

from test.compiler.random_hlo import Maker
from test.support import HloTestCase
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import postorder
from torch_hlo.hlo.ir.shape import Shape, tuple_shape
from torch_hlo.hlo.ir.window import WindowDim
from torch_hlo.hlo.sharding.factors import factors


def p(*dims, dtype="f32", index=0):
    return h.parameter(index, Shape(dtype, dims))


class TestFactors(HloTestCase):
    def rule(self, x, expected):
        self.assertEqual(str(factors(x)), expected)

    def test_pointwise(self):
        self.rule(h.add(p(4, 8), p(4, 8, index=1)), "ij,ij->ij")
        self.rule(h.clamp(p(), p(4, index=1), p(index=2)), ",i,->i")

    def test_dot(self):
        self.rule(
            h.dot(p(2, 8, 16), p(2, 16, 4), (2,), (1,), (0,), (0,)),
            "ijl,ilk->ijk {l: sum}",
        )

    def test_reshape(self):
        self.rule(h.reshape(p(6, 4), (2, 3, 4)), "(ij)k->ijk")
        self.rule(h.reshape(p(2, 3, 4), (6, 4)), "ijk->(ij)k")
        self.rule(h.reshape(p(4, 6), (8, 3)), "i(jk)->(ij)k")
        self.rule(
            h.reshape(p(2, 3, 5), (3, 2, 5)),
            "ikm->jlm {i: whole, j: whole, k: whole, l: whole}",
        )
        self.rule(
            h.reshape(p(6, 2), (4, 3)),
            "(ij)m->(ik)l {j: whole, k: whole, l: whole, m: whole}",
        )

    def test_moves(self):
        self.rule(h.transpose(p(2, 3, 4), (2, 0, 1)), "ijk->kij")
        self.rule(h.broadcast(p(3), (2, 3), (1,)), "j->ij")
        self.rule(h.iota("s32", (4, 5), 1), "->ij {j: shift}")
        self.rule(h.slice_(p(8, 4), (2, 0), (6, 4)), "ij->ij {i: shift}")
        self.rule(
            h.pad(p(8, 4), h.constant(0, "f32"), ((1, 1, 0), (0, 0, 0))),
            "ij,->ij {i: shift}",
        )
        self.rule(h.concatenate([p(2, 4), p(3, 4, index=1)], 0), "ij,ij->ij {i: shift}")
        start = h.constant(0, "s32")
        self.rule(h.dynamic_slice(p(8, 4), (start, start), (1, 4)), "ij,,->1j {i: sum}")
        self.rule(
            h.dynamic_update_slice(p(8, 4), p(1, 4, index=1), (start, start)),
            "ij,1j,,->ij {i: shift}",
        )

    def test_lookup(self):
        ids = p(5, 7, dtype="s32", index=1)
        rows = h.gather(
            p(100, 16),
            ids,
            offset_dims=(2,),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
            index_vector_dim=2,
            slice_sizes=(1, 16),
        )
        self.rule(rows, "kl,ij->ijl {k: sum}")
        back = h.scatter(
            p(100, 16),
            ids,
            p(5, 7, 16, index=2),
            "add",
            update_window_dims=(2,),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
            index_vector_dim=2,
        )
        self.rule(back, "kl,ij,ijl->kl {i: sum, j: sum, k: shift}")

    def test_convolution(self):
        w = (WindowDim(3, pad_low=1, pad_high=1),) * 2
        self.rule(
            h.convolution(p(2, 4, 8, 8), p(6, 4, 3, 3, index=1), w, "bf01_oi01->bf01"),
            "ijln,kjmo->ikln {j: sum, l: shift, m: whole, n: shift, o: whole}",
        )
        grouped = h.convolution(
            p(2, 4, 8, 8),
            p(6, 2, 3, 3, index=1),
            w,
            "bf01_oi01->bf01",
            feature_group_count=2,
        )
        self.rule(
            grouped,
            "j(ik)mo,(il)knp->j(il)mo {k: sum, m: shift, n: whole, o: shift, p: whole}",
        )

    def test_reductions(self):
        self.rule(h.reduce(p(4, 5), h.constant(0, "f32"), (0,), "add"), "ij,->j {i: sum}")
        self.rule(h.sort(p(4, 5), 1, "LT"), "ij->ij {j: whole}")
        self.rule(h.topk(p(4, 5), 2), "ij->i1,i1 {j: whole}")
        self.rule(h.fft(p(4, 8, dtype="c64"), "FFT", (8,)), "i1->i1")

    def test_batches_of_matrices(self):
        results = tuple_shape(Shape("f32", (8, 6, 4)), Shape("f32", (8, 4)))
        self.rule(h.custom_call("lapack_sgeqrf_ffi", (p(8, 6, 4),), results), "i11->i11,i1")
        self.rule(
            h.custom_call(
                "lapack_sgeqrf_ffi",
                (p(6, 4),),
                tuple_shape(Shape("f32", (6, 4)), Shape("f32", (4,))),
            ),
            "11->11,1",
        )
        self.rule(h.custom_call("mystery", (p(8, 6, 4),), Shape("f32", (8, 6, 4))), "111->111")

    def test_every_rule_fits_its_instruction(self):
        """A dimension's factors divide it, each factor has one size, and no factor appears twice in
        one array."""
        for seed in range(20):
            module = Maker(seed).module(60)
            for x in postorder((module.entry.root,)):
                rule = factors(x)
                self.assertEqual(len(rule.operands), sum(len(o.shape.arrays) for o in x.operands))
                shapes = [
                    (o.shape.dims, dims)
                    for o, dims in zip(x.operands, rule.operands)
                    if not o.shape.is_tuple
                ]
                for sizes, dims in shapes + [
                    (s.dims, d) for s, d in zip(x.shape.arrays, rule.results)
                ]:
                    self.assertEqual(len(sizes), len(dims), x)
                    used = [f for d in dims for f in d]
                    self.assertEqual(len(used), len(set(used)), x)
                    for size, d in zip(sizes, dims):
                        if len(d) > 1:
                            self.assertEqual(math.prod(rule.sizes[f] for f in d), size, x)
