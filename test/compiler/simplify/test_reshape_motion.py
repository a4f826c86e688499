"""reshape_motion: rearrangements meet further out."""

from __future__ import annotations

from test.support import HloTestCase
from torch_hlo.compiler.simplify.reshape_motion import reshape_motion
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.dim import symbol
from torch_hlo.hlo.ir.instruction import postorder
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.window import WindowDim


def p(*dims, index=0, dtype="f32"):
    return h.parameter(index, Shape(dtype, dims))


X, Y, V, S = p(4, 6), p(4, 6, index=1), p(6, index=2), p()
ZERO = h.constant(0, "f32")


def take(x, dim):
    """Elements of `x` at a vector of places along `dim`."""
    sizes = [1 if d == dim else n for d, n in enumerate(x.shape.dims)]
    others = [d for d in range(x.shape.rank) if d != dim]
    return h.gather(
        x,
        p(5, index=1, dtype="s32"),
        offset_dims=others,
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        index_vector_dim=1,
        slice_sizes=sizes,
    )


def pool_gradient(x, source, dim):
    """Of windows of 2 along `dim`."""
    window = [
        WindowDim(2, 2, 0, -(n % 2)) if d == dim else WindowDim(1)
        for d, n in enumerate(x.shape.dims)
    ]
    return h.select_and_scatter(x, source, ZERO, window, "GE", "add")


class ReshapeMotion(HloTestCase):
    def test_moves(self):
        wide = h.reshape(X, (2, 2, 6))
        for before, after in [
            (h.negate(wide), h.reshape(h.negate(X), (2, 2, 6))),
            (h.add(wide, h.reshape(Y, (2, 2, 6))), h.reshape(h.add(X, Y), (2, 2, 6))),
            (
                h.multiply(wide, h.full_like(wide, 2)),
                h.reshape(h.multiply(X, h.full_like(X, 2)), (2, 2, 6)),
            ),
            (
                h.add(wide, h.broadcast(V, (2, 2, 6), (2,))),
                h.reshape(h.add(X, h.broadcast(V, (4, 6), (1,))), (2, 2, 6)),
            ),
            (h.tanh(h.transpose(X, (1, 0))), h.transpose(h.tanh(X), (1, 0))),
            (
                h.add(h.transpose(X, (1, 0)), h.broadcast(V, (6, 4), (0,))),
                h.transpose(h.add(X, h.broadcast(V, (4, 6), (1,))), (1, 0)),
            ),
            (
                h.exponential(h.broadcast(V, (4, 6), (1,))),
                h.broadcast(h.exponential(V), (4, 6), (1,)),
            ),
            (
                h.add(h.broadcast(S, (4,)), h.full(1, "f32", (4,))),
                h.broadcast(h.add(S, h.constant(1, "f32")), (4,)),
            ),
            (
                h.reduce(h.transpose(X, (1, 0)), ZERO, (0,), "add"),
                h.reduce(X, ZERO, (1,), "add"),
            ),
            (
                h.pad(h.transpose(X, (1, 0)), ZERO, [(1, 0, 0), (0, 2, 1)]),
                h.transpose(h.pad(X, ZERO, [(0, 2, 1), (1, 0, 0)]), (1, 0)),
            ),
            (
                h.reverse(h.transpose(X, (1, 0)), (1,)),
                h.transpose(h.reverse(X, (0,)), (1, 0)),
            ),
            (
                h.concatenate([h.transpose(X, (1, 0)), h.transpose(Y, (1, 0))], 0),
                h.transpose(h.concatenate([X, Y], 1), (1, 0)),
            ),
            (
                h.add(h.transpose(X, (1, 0)), h.negate(h.iota("f32", (6, 4), 1))),
                h.transpose(h.add(X, h.negate(h.iota("f32", (4, 6), 0))), (1, 0)),
            ),
            (
                h.reshape(h.transpose(X, (1, 0)), (2, 3, 4)),
                h.transpose(h.reshape(X, (4, 2, 3)), (1, 2, 0)),
            ),
            (
                h.reshape(h.transpose(p(4, 2, 3), (1, 2, 0)), (6, 4)),
                h.transpose(h.reshape(p(4, 2, 3), (4, 6)), (1, 0)),
            ),
            (
                h.reshape(h.broadcast(h.transpose(X, (1, 0)), (6, 2, 4, 3), (0, 2)), (12, 12)),
                h.transpose(h.reshape(h.broadcast(X, (4, 3, 6, 2), (0, 2)), (12, 12)), (1, 0)),
            ),
            (
                h.reduce_window(
                    h.transpose(X, (1, 0)),
                    ZERO,
                    (WindowDim(2), WindowDim(3, 1, 1)),
                    "add",
                ),
                h.transpose(
                    h.reduce_window(X, ZERO, (WindowDim(3, 1, 1), WindowDim(2)), "add"),
                    (1, 0),
                ),
            ),
            (
                pool_gradient(h.transpose(p(2, 8, 9), (0, 2, 1)), p(2, 9, 4, index=1), 2),
                h.transpose(
                    pool_gradient(p(2, 8, 9), h.transpose(p(2, 9, 4, index=1), (0, 2, 1)), 1),
                    (0, 2, 1),
                ),
            ),
            (
                h.opt_barrier(h.transpose(X, (1, 0))),
                h.transpose(h.opt_barrier(X), (1, 0)),
            ),
            (take(h.transpose(X, (1, 0)), 0), h.transpose(take(X, 1), (1, 0))),
            (
                take(h.transpose(p(4, 2, 6), (2, 0, 1)), 2),
                h.transpose(take(p(4, 2, 6), 1), (2, 0, 1)),
            ),
            (
                h.reduce(wide, ZERO, (2,), "add"),
                h.reshape(h.reduce(X, ZERO, (1,), "add"), (2, 2)),
            ),
            (h.reduce(wide, ZERO, (0, 1), "add"), h.reduce(X, ZERO, (0,), "add")),
        ]:
            with self.subTest(str(before)):
                self.assertRewrites(reshape_motion, before, after)

    def test_images_of_a_batch_of_one(self):
        """Transposes beside which a dimension of size 1 was added move through what pads, mirrors
        and takes."""
        x = p(4, 5, 6)  # rows, columns, channels
        image = h.reshape(h.transpose(x, (2, 0, 1)), (1, 6, 4, 5))
        edges = [(0, 0, 0), (0, 0, 0), (1, 1, 0), (0, 0, 0)]
        wide = h.transpose(h.pad(x, ZERO, [(1, 1, 0), (0, 0, 0), (0, 0, 0)]), (2, 0, 1))
        self.assertRewrites(
            reshape_motion, h.pad(image, ZERO, edges), h.reshape(wide, (1, 6, 6, 5))
        )
        self.assertRewrites(
            reshape_motion,
            h.reverse(image, (0, 3)),
            h.reshape(h.transpose(h.reverse(x, (1,)), (2, 0, 1)), (1, 6, 4, 5)),
        )
        taken = h.reshape(h.transpose(take(x, 1), (2, 0, 1)), (1, 6, 4, 5))
        self.assertRewrites(reshape_motion, take(image, 3), taken)
        both = h.transpose(h.concatenate([x, p(4, 5, 7, index=1)], 2), (2, 0, 1))
        other = h.reshape(h.transpose(p(4, 5, 7, index=1), (2, 0, 1)), (1, 7, 4, 5))
        root = self.check(reshape_motion, self.program(h.concatenate([image, other], 1))).entry.root
        assert root.op == "reshape" and [y.op for y in postorder((root,))].count("transpose") == 2
        self.assertRewrites(
            reshape_motion,
            h.concatenate(
                [
                    h.transpose(x, (2, 0, 1)),
                    h.transpose(p(4, 5, 7, index=1), (2, 0, 1)),
                ],
                0,
            ),
            both,
        )
        # The border of a row, in an array of zeros.
        border = h.pad(
            h.reshape(h.transpose(p(4, 6, index=1), (1, 0)), (6, 4, 1)),
            ZERO,
            [(0, 0, 0), (0, 0, 0), (1, 3, 0)],
        )
        after = h.add(
            x,
            h.pad(
                h.reshape(p(4, 6, index=1), (4, 1, 6)),
                ZERO,
                [(0, 0, 0), (1, 3, 0), (0, 0, 0)],
            ),
        )
        self.assertRewrites(
            reshape_motion,
            h.add(h.transpose(x, (2, 0, 1)), border),
            h.transpose(after, (2, 0, 1)),
        )
        y = p(1, 4, 3, index=1)
        after = h.add(X, h.pad(h.reshape(y, (4, 3)), ZERO, [(0, 0, 0), (1, 2, 0)]))
        before = h.add(h.reshape(X, (1, 4, 6)), h.pad(y, ZERO, [(0, 0, 0), (0, 0, 0), (1, 2, 0)]))
        self.assertRewrites(reshape_motion, before, h.reshape(after, (1, 4, 6)))

    def test_kept(self):
        for why, x in {
            "one operand has the dims of the result": h.add(
                h.reshape(X, (2, 2, 6)), p(2, 2, 6, index=1)
            ),
            "different transposes": h.add(h.transpose(p(4, 4), (1, 0)), p(4, 4)),
            "half of a group is reduced": h.reduce(h.reshape(X, (2, 2, 6)), ZERO, (1,), "add"),
            "different repeats": h.add(
                h.broadcast(V, (4, 6), (1,)), h.broadcast(p(4, index=1), (4, 6), (0,))
            ),
            "neighbours in the result only": h.reshape(h.transpose(p(4, 2, 3), (1, 0, 2)), (8, 3)),
            "transposes have no dimensions of size 1": h.reshape(h.transpose(X, (1, 0)), (6, 1, 4)),
            "few bytes are transposed": h.concatenate(
                [h.transpose(p(2, 6), (1, 0)), p(6, 9, index=1)], 1
            ),
            "channels are last": h.reduce_window(
                h.transpose(p(2, 3, 5), (0, 2, 1)),
                ZERO,
                (WindowDim(1), WindowDim(3, 1, 2, 2, 2), WindowDim(1)),
                "add",
            ),
            "channels are last already": pool_gradient(
                h.transpose(p(2, 8, 9), (0, 2, 1)), p(2, 4, 8, index=1), 1
            ),
            "bounds are scalars": h.clamp(ZERO, h.transpose(X, (1, 0)), h.constant(1, "f32")),
        }.items():
            with self.subTest(why):
                self.assertKept(reshape_motion, x)

    def test_maximum_of_repeats(self):
        repeated = h.broadcast(V, (4, 6), (1,))
        low = h.constant(h.lowest("f32"), "f32")
        m = self.program(h.reduce(repeated, low, (0,), "maximum"))
        assert (
            self.check(reshape_motion, m).entry.root.op == "reduce"
            and reshape_motion(m).entry.root["dimensions"] == ()
        )

    def test_positions_of_maxima(self):
        """What a network's maximum over positions and its gradient need of an array whose channels
        are last."""
        pair = (Shape("f32"), Shape("s64"))
        larger = h.computation(
            lambda a, i, b, j: h.tuple_(
                h.select(c := h.compare(a, b, "GT"), a, b), h.select(c, i, j)
            ),
            pair * 2,
            "larger",
        )
        x, last = p(2, 5, 6), h.constant(9, "s64")
        before = h.reduce(
            (h.transpose(x, (0, 2, 1)), h.iota("s64", (2, 6, 5), 2)),
            (ZERO, last),
            (2,),
            larger,
        )
        after = h.reduce((x, h.iota("s64", (2, 5, 6), 1)), (ZERO, last), (1,), larger)
        self.assertRewrites(reshape_motion, before, after)
        before = h.reduce(
            (h.transpose(x, (2, 0, 1)), h.iota("s64", (6, 2, 5), 2)),
            (ZERO, last),
            (2,),
            larger,
        )
        self.assertRewrites(
            reshape_motion,
            before,
            h.tuple_(*(h.transpose(h.get_tuple_element(after, i), (1, 0)) for i in (0, 1))),
        )

        def scattered(dims, at):
            places = {
                "scatter_dims_to_operand_dims": (at,),
                "inserted_window_dims": (at,),
                "input_batching_dims": tuple(d for d in range(3) if d != at),
            }
            zeros, indices, updates = (
                h.full(0, "f32", dims),
                p(2, 6, 1, index=1, dtype="s64"),
                p(2, 6, index=2),
            )
            return h.scatter(
                zeros,
                indices,
                updates,
                "second",
                update_window_dims=(),
                index_vector_dim=2,
                scatter_indices_batching_dims=(0, 1),
                **places,
            )

        before = h.multiply(scattered((2, 6, 5), 2), h.transpose(x, (0, 2, 1)))
        self.assertRewrites(
            reshape_motion,
            before,
            h.transpose(h.multiply(scattered((2, 5, 6), 1), x), (0, 2, 1)),
        )

    def test_weights_of_groups_of_channels(self):
        """The gradient of attention over branches: what is repeated per group and per pixel, beside
        an array whose channels are last."""
        gradient, weights = p(2, 4, 30, index=1), p(2, 3, 4, index=2)
        groups = h.multiply(
            h.broadcast(gradient, (2, 3, 4, 30), (0, 2, 3)),
            h.broadcast(weights, (2, 3, 4, 30), (0, 1, 2)),
        )
        before = h.multiply(h.reshape(groups, (2, 12, 30)), h.transpose(p(2, 30, 12), (0, 2, 1)))
        last = h.multiply(
            h.broadcast(h.transpose(gradient, (0, 2, 1)), (2, 30, 3, 4), (0, 1, 3)),
            h.broadcast(weights, (2, 30, 3, 4), (0, 2, 3)),
        )
        self.assertRewrites(
            reshape_motion,
            before,
            h.transpose(h.multiply(h.reshape(last, (2, 30, 12)), p(2, 30, 12)), (0, 2, 1)),
        )
        # 2 and 3 of 6 do not stay neighbours
        apart = h.add(
            h.broadcast(p(6, index=1), (6, 30), (0,)),
            h.broadcast(p(30, index=2), (6, 30), (1,)),
        )
        self.assertKept(
            reshape_motion,
            h.multiply(h.reshape(apart, (2, 3, 30)), h.transpose(p(2, 30, 3), (0, 2, 1))),
        )

    def test_symbolic_batch(self):
        n = symbol("s0")
        x = p(n * 8, 6)
        before = h.add(h.reshape(x, (n, 8, 6)), h.broadcast(V, (n, 8, 6), (2,)))
        assert reshape_motion(self.program(before)).entry.root is h.reshape(
            h.add(x, h.broadcast(V, (n * 8, 6), (1,))), (n, 8, 6)
        )

    def test_search_beside_a_transpose_is_short(self):
        # Deeper than Python's recursion limit: what stands beside the transpose is no array that is
        # free to turn.
        y = p(6, 4, index=1)
        for _ in range(3000):
            y = h.add(h.tanh(y), y)
        self.assertKept(reshape_motion, h.multiply(h.transpose(X, (1, 0)), y))
