"""Random annotated programs, and whether the per-device program computes what the whole one
does."""

from __future__ import annotations

import random

import numpy as np

from test.compiler.random_hlo import MAKERS, Maker
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.compiler.spmd.partitioner import partition
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.evaluate.multi_device import evaluate_spmd
from torch_hlo.hlo.ir import build as h
from torch_hlo.hlo.ir.instruction import Computation, Instruction, Module, postorder
from torch_hlo.hlo.ir.intern import interned
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.hlo.ir.verify import verify
from torch_hlo.hlo.ir.window import WindowDim
from torch_hlo.hlo.sharding.sharding import (
    Axis,
    DimSharding,
    Mesh,
    Sharding,
    shard,
    unshard,
)

MESHES = (
    Mesh((("x", 8),)),
    Mesh((("x", 2), ("y", 4))),
    Mesh((("x", 2), ("y", 2), ("z", 2))),
    Mesh((("x", 4), ("y", 2)), (3, 1, 0, 2, 7, 5, 4, 6)),
)


class Wide(Maker):
    """Programs with dimensions that are worth splitting, evenly and not, and more of the opcodes
    that are hard to split."""

    def dims(self):
        rank = self.r.choice((1, 2, 2, 3, 3, 4))
        return tuple(
            self.r.choice((1, 2, 3, 4, 5, 6, 8, 8, 10, 12, 16) if rank < 4 else (1, 2, 3, 4, 8))
            for _ in range(rank)
        )

    def halo(self, x):
        if not x.shape.rank or x.shape.kind not in "f":
            return None
        windows = []
        for n in x.shape.dims:
            if self.r.random() < 0.5 or n < 2:
                windows.append(WindowDim(1))
            elif self.r.random() < 0.3:
                windows.append(WindowDim(n, 1, n - 1, 0))
            else:
                windows.append(
                    WindowDim(
                        self.r.randint(1, 3),
                        self.r.randint(1, 3),
                        self.r.randint(0, 2),
                        self.r.randint(0, 2),
                        self.r.choice((1, 1, 2)),
                        self.r.choice((1, 1, 2)),
                    )
                )
        op, init = self.r.choice((("add", 0), ("maximum", h.lowest(x.shape.dtype))))
        return h.reduce_window(x, h.constant(init, x.shape.dtype), tuple(windows), op)

    def pool_back(self, x):
        if x.shape.dtype != "f32" or not x.shape.rank or any(n < 3 for n in x.shape.dims):
            return None
        windows = tuple(
            self.r.choice(
                (
                    WindowDim(1),
                    WindowDim(2, 2),
                    WindowDim(3, 2, 1, 1),
                    WindowDim(2, 1),
                    WindowDim(2, 3),
                )
            )
            for _ in x.shape.dims
        )
        sizes = tuple(w.output_size(n) for w, n in zip(windows, x.shape.dims))
        source = h.cosine(h.iota("f32", sizes, 0))
        return h.select_and_scatter(x, source, h.constant(0, "f32"), windows, "GE", "add")

    def conv(self, x):
        if x.shape.dtype != "f32" or x.shape.rank < 3 or 0 in x.shape.dims:
            return None
        order = self.r.sample(range(x.shape.rank), x.shape.rank)
        batch, feature, *spatial = order
        letters = [""] * x.shape.rank
        letters[batch], letters[feature] = "b", "f"
        for i, d in enumerate(spatial):
            letters[d] = str(i)
        labels = "".join(letters)
        groups = self.r.choice([g for g in (1, 1, 2, 4) if x.shape.dims[feature] % g == 0])
        batches = (
            self.r.choice([g for g in (1, 2) if x.shape.dims[batch] % g == 0]) if groups == 1 else 1
        )
        outs = self.r.choice((1, 2, 3, 4)) * max(groups, batches)
        window, sizes = [], []
        for _ in spatial:
            k = self.r.randint(1, 3)
            sizes.append(k)
            window.append(
                WindowDim(
                    k,
                    self.r.randint(1, 2),
                    self.r.randint(0, 2),
                    self.r.randint(1, 2),
                    self.r.choice((1, 1, 2)),
                    self.r.choice((1, 1, 2)),
                )
            )
        kernel = h.cosine(
            h.iota(
                "f32",
                (x.shape.dims[feature] // groups, outs, *sizes),
                self.r.randint(0, 1),
            )
        )
        kernel_labels = "io" + "".join(str(i) for i in range(len(spatial)))
        out = self.r.sample(labels, len(labels))
        try:
            return h.convolution(
                x,
                kernel,
                tuple(window),
                f"{labels}_{kernel_labels}->{''.join(out)}",
                groups,
                batches,
            )
        except ValueError:
            return None

    def lookup(self, x):
        if x.shape.rank < 2 or 0 in x.shape.dims or x.shape.kind == "c":
            return None
        n = self.r.choice((3, 8))
        d = self.r.randrange(x.shape.rank)
        ids = h.convert(h.iota("f32", (n, 2), 0), "s32")
        ids = h.subtract(
            h.multiply(ids, h.full_like(ids, self.r.randint(1, 5))), h.full_like(ids, 1)
        )
        indices = h.reshape(h.slice_(ids, (0, 0), (n, 1)), (n,))
        sizes = [1 if e == d else s for e, s in enumerate(x.shape.dims)]
        if self.r.random() < 0.5:
            return h.gather(
                x,
                indices,
                offset_dims=range(1, x.shape.rank),
                collapsed_slice_dims=[d],
                start_index_map=[d],
                index_vector_dim=1,
                slice_sizes=sizes,
            )
        op = (
            "or"
            if x.shape.kind == "p"
            else self.r.choice(("add", "maximum", "second"))
            if x.shape.kind in "fs"
            else "maximum"
        )
        dims = [n, *(s for e, s in enumerate(x.shape.dims) if e != d)]
        update = self.uniform(h.broadcast(h.constant(0, x.shape.dtype), dims, ()))
        if x.shape.kind == "f" and op != "second":
            update = h.cosine(h.iota(x.shape.dtype, dims, self.r.randrange(len(dims))))
        return h.scatter(
            x,
            indices,
            update,
            op,
            update_window_dims=range(1, x.shape.rank),
            inserted_window_dims=[d],
            scatter_dims_to_operand_dims=[d],
            index_vector_dim=1,
        )

    def strange(self, x):
        """One of the opcodes that look at whole dimensions."""
        if not x.shape.rank or 0 in x.shape.dims:
            return None
        kind = self.r.choice(("topk", "fft", "cholesky", "argmax", "norm", "bits"))
        if kind == "topk" and x.shape.kind == "f":
            return h.get_tuple_element(
                h.topk(x, self.r.randint(1, x.shape.dims[-1])), self.r.randrange(2)
            )
        if kind == "fft" and x.shape.dtype == "c64":
            return h.fft(x, "FFT", x.shape.dims[-1:])
        if kind == "cholesky" and x.shape.dtype == "f32":
            n = x.shape.dims[-1]
            eye = h.convert(
                h.compare(h.iota("s32", (n, n), 0), h.iota("s32", (n, n), 1), "EQ"),
                "f32",
            )
            square = h.broadcast(
                h.multiply(eye, h.full_like(eye, 4)),
                (*x.shape.dims[:-1], n, n),
                (x.shape.rank - 1, x.shape.rank),
            )
            bounded = h.logistic(
                h.broadcast(x, square.shape.dims, (*range(x.shape.rank - 1), x.shape.rank))
            )
            ones = h.multiply(bounded, h.full_like(bounded, 0.01))
            return h.cholesky(
                h.add(
                    square,
                    h.add(
                        ones,
                        h.transpose(
                            ones,
                            (*range(x.shape.rank - 1), x.shape.rank, x.shape.rank - 1),
                        ),
                    ),
                )
            )
        if kind == "argmax" and x.shape.kind == "f":
            d = self.r.randrange(x.shape.rank)
            best = h.computation(
                lambda a, i, b, j: (lambda first: (h.select(first, a, b), h.select(first, i, j)))(
                    h.or_(
                        h.compare(a, b, "GT"),
                        h.and_(h.compare(a, b, "EQ"), h.compare(i, j, "LT")),
                    )
                ),
                [
                    Shape(x.shape.dtype),
                    Shape("s32"),
                    Shape(x.shape.dtype),
                    Shape("s32"),
                ],
                "argmax",
            )
            both = h.reduce(
                [x, h.iota("s32", x.shape.dims, d)],
                [
                    h.constant(h.lowest(x.shape.dtype), x.shape.dtype),
                    h.constant(1 << 30, "s32"),
                ],
                [d],
                best,
            )
            return h.get_tuple_element(both, self.r.randrange(2))
        if kind == "bits":
            bits = h.rng_bit_generator(
                h.constant([1, 2], "u64"), "rng_three_fry", x.shape.with_dtype("u32")
            )
            return h.get_tuple_element(bits, 1)
        return None


WIDE = (
    *MAKERS,
    "halo",
    "halo",
    "pool_back",
    "conv",
    "conv",
    "conv",
    "lookup",
    "lookup",
    "lookup",
    "strange",
    "strange",
)


def random_module(seed: int, count: int = 12) -> Module:
    import test.compiler.random_hlo as base

    before, base.MAKERS = base.MAKERS, WIDE
    try:
        return Wide(seed).module(count)
    finally:
        base.MAKERS = before


def random_sharding(r: random.Random, mesh: Mesh, shape: Shape):
    """Some axes, whole or in parts, on some dimensions."""
    if shape.is_tuple:
        return tuple(random_sharding(r, mesh, e) for e in shape.elements)
    axes: list[Axis] = []
    for name, size in mesh.axes:
        if size == 8 and r.random() < 0.5:
            axes += (
                [Axis(name, 1, 2), Axis(name, 2, 4)]
                if r.random() < 0.5
                else [Axis(name, 1, 4), Axis(name, 4, 2)]
            )
        else:
            axes.append(Axis(name, 1, size))
    r.shuffle(axes)
    dims: list[list[Axis]] = [[] for _ in shape.dims]
    for axis in axes:
        if dims and r.random() < 0.7:
            dims[r.randrange(len(dims))].append(axis)
    return Sharding(mesh, tuple(DimSharding(tuple(d)) for d in dims))


def annotated(module: Module, mesh: Mesh, seed: int, density: float = 0.7) -> Module:
    """`module` with random shardings on most instructions of the entry computation."""
    r = random.Random(seed)
    new: dict[Instruction, Instruction] = {}
    for x in postorder((*module.entry.params, module.entry.root)):
        attrs = x.attrs
        if x.shape.dtype != "token" and (r.random() < density or x.op == "parameter"):
            attrs = tuple(
                sorted(
                    (
                        *((k, v) for k, v in attrs if k != "sharding"),
                        ("sharding", random_sharding(r, mesh, x.shape)),
                    )
                )
            )
        new[x] = interned(x.op, tuple(new[o] for o in x.operands), attrs, x.shape)
    entry = Computation("main", tuple(new[p] for p in module.entry.params), new[module.entry.root])
    return Module(module.name, entry, mesh=mesh)


def run_partitioned(per_device: Module, inputs, dims) -> list[np.ndarray]:
    """Whole outputs (of extents `dims`) of a per-device program on whole inputs."""
    blocks = [shard(v, s) for v, s in zip(inputs, per_device.in_shardings, strict=True)]
    outputs = evaluate_spmd(
        per_device,
        [list(b) for b in zip(*blocks)] if blocks else [[]] * per_device.num_partitions,
    )
    return [
        unshard([o[i] for o in outputs], s, n)
        for i, (s, n) in enumerate(zip(per_device.out_shardings, dims, strict=True))
    ]


def check(module: Module, seed: int = 0, rtol: float = 2e-3) -> Module:
    """Partitions `module` and compares values with those of the whole program on one device; the
    per-device program."""
    per_device = verify(partition(module))
    inputs = random_inputs(module, seed)
    if any(x.shape.dtype in ("bf16", "f16") for x in module.entry.instructions()):
        rtol *= 20
    want = evaluate(module, inputs)
    got = run_partitioned(per_device, inputs, [w.shape for w in want])
    for i, (w, g) in enumerate(zip(want, got, strict=True)):
        if w.dtype.kind in "fc":
            scale = np.max(np.abs(w[np.isfinite(w)]), initial=1e-3)
            np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * scale, err_msg=f"output {i}")
        else:
            np.testing.assert_array_equal(g, w, err_msg=f"output {i}")
    return per_device
