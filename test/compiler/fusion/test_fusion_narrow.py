"""narrow_arrays: what lies between kernels is as narrow as its values."""

from test.support import HloTestCase
from torch_hlo.compiler.fusion.fusion import fusion
from torch_hlo.compiler.fusion.fusion_narrow import narrow_arrays
from torch_hlo.hlo.ir import Shape, build as b


def parameter(number, dtype="bf16", dims=(64, 1024)):
    return b.parameter(number, Shape(dtype, dims))


def total(x):
    return b.reduce(x, b.constant(0, x.dtype), tuple(range(x.rank)), "add")


def rounded(x):
    return b.convert(x, "bf16")


class NarrowArrays(HloTestCase):
    def steps(self, *results) -> list[str]:
        """The element types of what kernels write, once the pass has kept all values."""
        fused = fusion(self.program(b.tuple_(*results)))
        after = self.check(narrow_arrays, fused)
        return [
            f"{x.op} {x.dtype}"
            for x in after.entry.instructions()
            if x.op in ("dot", "fusion") and x.size == 65536
        ]

    def test_widened(self):
        x, w = parameter(0), parameter(1, dims=(1024, 1024))
        y = rounded(b.dot(x, w, (1,), (0,), dtype="f32"))
        wide = b.convert(rounded(b.add(b.convert(y, "f32"), b.convert(x, "f32"))), "f32")
        last = b.exponential(b.subtract(wide, b.broadcast(total(wide), wide.dims)))
        self.assertEqual(self.steps(last), ["fusion bf16", "fusion f32"])

    def test_rounded_by_all_readers(self):
        x, w = parameter(0), parameter(1, dims=(1024, 1024))
        sums = b.dot(x, w, (1,), (0,), dtype="f32")
        turned = b.transpose(rounded(b.reshape(sums, (32, 2, 1024))), (1, 0, 2))
        self.assertEqual(self.steps(turned, total(rounded(sums)))[0], "fusion bf16")

    def test_kept(self):
        x, w = parameter(0), parameter(1, dims=(1024, 1024))
        sums = b.dot(x, w, (1,), (0,), dtype="f32")
        for why, results in {
            "a result": (sums, total(rounded(sums))),
            "one reader wants all bits": (total(rounded(sums)), total(b.negate(sums))),
            "readers round in two ways": (total(rounded(sums)), total(b.convert(sums, "f16"))),
        }.items():
            with self.subTest(why):
                self.assertIn("dot f32", self.steps(*results))
