"""Convolution on matrix units: the product of the matrix of patches, which is never in memory, with
the kernel's.

    forward     rows: images x output positions    columns: output features               K:
    positions in the window x input features gradient    rows: output features              columns:
    window x input features       K: images x pixels of the gradient

With features last a run of input features is contiguous, so lines of the operand that is patches
(matmul/gpu/gpu_panel.py) are copied 16 bytes at a time, each from the image element that an
output position and a position in the window meet at; what lies in the padding, or between the
elements of a dilated image, is copied as zeros. The gradient of the kernel is a convolution whose
window is the gradient of the result: its lines of patches are pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Ints, Window, fixed, product

from ..gather.gather_scatter import digits
from ..gpu.gpu_program import GpuProgram, TensorMap
from ..gpu.gpu_writer import GpuWriter
from ..llvm import Int
from ..matmul.gpu import gpu_dot, gpu_gemm, gpu_matrix, gpu_wgmma
from ..matmul.gpu.gpu_blocks import Blocks, Place, Store
from ..matmul.gpu.gpu_panel import CHUNK, LINE, Operand, Panel
from ..matmul.product import Product
from .convolution import Labels


@frozen
class Image:
    """What patches are taken from: `sizes` and `channels` of the input, `outputs`: sizes of the
    result."""

    sizes: Ints
    channels: int
    outputs: Ints
    window: Window


@frozen
class Convolution:
    """An engine (see matmul/gpu/gpu_dot.py): the product of `inner` with patches as the left
    operand, or as the right one in a gradient of the kernel."""

    inner: gpu_matrix.Matrix
    image: Image
    gradient: bool
    resident = 0

    @property
    def blocks(self) -> Blocks:
        return self.inner.blocks

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def threads(self) -> int:
        return self.inner.threads

    @property
    def shared(self) -> int:
        return self.inner.shared

    @property
    def name(self) -> str:
        return self.inner.name.replace("dot", "conv", 1)

    def width(self, most: int) -> int:
        return most

    def maps(self, batch: int) -> tuple[TensorMap, ...]:
        return ()

    def write(self, f: GpuWriter, at: Place, lanes: int, store: Store) -> str:
        m = self.inner
        image = self.image
        side = int(self.gradient)

        whole: Any = gpu_gemm.Product if m.tile.team == 1 else gpu_wgmma.Product

        class Patched(whole):  # type: ignore[misc] # either class, chosen by the tile
            def panels(self, at: Place, bases: list[str]) -> list[Panel]:
                found: list[Panel] = super().panels(at, bases)
                found[side] = (Patches, PixelPatches)[side](
                    f, (m.a, m.b)[side], m.tile.threads, bases[side], at, image
                )
                return found

        bases = [
            f.gep("i8", f"%{q}", f.mul(offset, m.a.unit.itemsize))
            for q, offset in (("A", at.a), ("B", at.b))
        ]
        bases[side] = ("%A", "%B")[side]  # patches know their places
        Patched(f, m.tile, m.a, m.b, lanes).write(at, bases, store)
        declarations: str = Patched.declarations()
        return declarations


class _Patches(Panel):
    """`first`, `size`: of the rows of the product that the operand has, see Panel."""

    def __init__(
        self,
        f: GpuWriter,
        operand: Operand,
        threads: int,
        base: str,
        at: Place,
        image: Image,
        first: Int,
        size: Int,
    ) -> None:
        super().__init__(f, operand, threads, base, 0, first, size, at.k)
        self.at = at
        self.image = image
        self.start = base

    def corner(self, where: list[Int]) -> list[Int]:
        """Where the window of an output position begins."""
        w = self.w
        return [
            w.sub(w.mul(w.narrow(o), d.stride), fixed(d.pad_low))
            for o, d in zip(where, self.image.window, strict=True)
        ]

    def steps(self, taps: list[Int]) -> list[Int]:
        """How far a position in the window is from its beginning."""
        w = self.w
        return [
            w.mul(w.sub(fixed(d.size) - 1, t) if d.reversal else t, d.window_dilation)
            for t, d in zip(taps, self.image.window, strict=True)
        ]

    def image_at(self, number: Int) -> str:
        """Pointer to an image."""
        return self.f.gep(
            "i8",
            self.base,
            self.f.mul(
                number,
                fixed(product(self.image.sizes)) * self.image.channels * self.o.unit.itemsize,
            ),
        )

    def copy_from(
        self,
        to: Int,
        image: str,
        ok: str,
        corner: list[Int],
        steps: list[Int],
        channel: Int,
    ) -> None:
        """Copy the chunk that begins at feature `channel` where a window and a position in it meet;
        zeros unless `ok` and inside."""
        f, w = self.f, self.w
        element: Int = 0
        for size, first, step, d in zip(
            self.image.sizes, corner, steps, self.image.window, strict=True
        ):
            place = w.add(first, step)
            if d.base_dilation > 1:
                quotient = f.op(f"sdiv i32 {place}, {d.base_dilation}")
                whole = f.op(
                    f"and i1 {f.icmp('eq', w.mul(quotient, d.base_dilation), place, 'i32')},"
                    f" {f.icmp('sge', place, 0, 'i32')}"
                )
                ok, place = f.op(f"and i1 {ok}, {whole}"), quotient
            ok = f.op(f"and i1 {ok}, {f.icmp('ult', place, size, 'i32')}")
            element = w.muladd(element, size, place)
        offset = f.op(
            "sext i32"
            f" {w.mul(w.muladd(element, self.image.channels, channel), self.o.unit.itemsize)}"
            " to i64"
        )
        self._copy_async(
            to,
            f.gep("i8", image, f.select(ok, "i64", offset, 0)),
            w.where(ok, CHUNK, 0),
        )


class Patches(_Patches):
    """Lines are output positions."""

    def __init__(
        self,
        f: GpuWriter,
        operand: Operand,
        threads: int,
        base: str,
        at: Place,
        image: Image,
    ) -> None:
        super().__init__(f, operand, threads, base, at, image, at.row, "%m")
        self.images: list[str] = []  # pointers to the images of a thread's rows
        self.corners: list[list[Int]] = []  # where their windows begin, per dimension
        for i in range(self.copies):
            number, *where = digits(
                f,
                f.add(at.row, self.line, i * self.step),
                ["%m", *image.outputs],
            )
            self.images.append(self.image_at(number))
            self.corners.append(self.corner(where))

    def bring(self, to: Int, pointer: str, k: Int) -> str:
        f = self.f
        w = self.w
        image = self.image
        itemsize = self.o.unit.itemsize
        to = w.add(to, self.to)
        inside = f.add(k, f.div(self.chunk, itemsize))
        deep = w.narrow(f.add(inside, self.at.start))
        rest = w.div(deep, image.channels)
        channel = w.rem(deep, image.channels)
        taps: list[Int] = []
        for d in reversed(image.window[1:]):
            taps.insert(0, w.rem(rest, fixed(d.size)))
            rest = w.div(rest, fixed(d.size))
        taps.insert(0, rest)
        steps = self.steps(taps)
        known = f.icmp("slt", inside, self.k)
        for i, (start, corner) in enumerate(zip(self.images, self.corners, strict=True)):
            self.copy_from(
                w.add(to, i * self.step * LINE),
                start,
                f.op(f"and i1 {known}, {self.ok[i]}"),
                corner,
                steps,
                channel,
            )
        return pointer


class PixelPatches(_Patches):
    """Lines are pixels of the gradient, along a line run output positions (the kernel's) and
    features."""

    def __init__(
        self,
        f: GpuWriter,
        operand: Operand,
        threads: int,
        base: str,
        at: Place,
        image: Image,
    ) -> None:
        super().__init__(f, operand, threads, base, at, image, at.column, "%n")
        across = self.chunk
        if self.step > operand.depth:
            across = f.muladd(f.div(f.div("%kernel.t", LINE // CHUNK), operand.depth), LINE, across)
        # slab -> (where windows begin, first feature)
        self.columns_of: dict[int, tuple[list[Int], Int]] = {}
        for slab in dict.fromkeys(s for s, _ in self.places):
            column = f.add(at.column, f.div(f.add(across, slab * LINE), operand.unit.itemsize))
            *where, channel = digits(f, column, [*image.outputs, image.channels])
            self.columns_of[slab] = self.corner(where), self.w.narrow(channel)

    def bring(self, to: Int, pointer: str, k: Int) -> str:
        f, w = self.f, self.w
        to = w.add(to, self.to)
        deep = f.sub(self.k, f.add(k, self.line))
        lines = {}
        for d in dict.fromkeys(d for _, d in self.places):
            number, *taps = digits(
                f,
                f.add(k, self.line, d, self.at.start),
                ["%k", *(fixed(n.size) for n in self.image.window)],
            )
            lines[d] = (
                self.image_at(number),
                self.steps([w.narrow(t) for t in taps]),
                f.icmp("sgt", deep, d),
            )
        for i, ((slab, d), nbytes) in enumerate(zip(self.places, self.widths, strict=True)):
            image, steps, known = lines[d]
            corner, channel = self.columns_of[slab]
            ok = f.op(f"and i1 {known}, {f.icmp('sgt', nbytes, 0, 'i32')}")
            self.copy_from(w.add(to, i * self.step * LINE), image, ok, corner, steps, channel)
        return pointer


def emit(program: GpuProgram, x: Instruction) -> bool:
    """Launch the kernel of a convolution; False when it is not for matrix units: other types,
    layouts (compiler/convolution/conv_layout.py), groups."""
    lhs, rhs = x.operands
    dtypes = [lhs.dtype, rhs.dtype]
    window = x["window"]
    rank = x.rank
    pair = gpu_matrix.units(program.target, dtypes, x.dtype)
    if pair is None or x["feature_group_count"] * x["batch_group_count"] > 1 or not window:
        return False
    at = Labels.parse(x["dim_labels"])
    last = (0, rank - 1, *range(1, rank - 1))
    turned = (last[1], last[0], *last[2:])
    gradient = (at.lhs, at.rhs, at.out) == (turned, turned, turned)
    if not gradient and (at.lhs, at.rhs, at.out) != (last, last, last):
        return False
    images, *sizes, channels = lhs.dims
    outputs, features = x.dims[1:-1], x.dims[0 if gradient else -1]
    static = (
        *sizes,
        channels,
        *outputs,
        features,
        *(n for w in window for n in (w.size, w.pad_low, w.pad_high)),
    )
    if (
        not all(isinstance(n, int) for n in static)
        or channels * pair[0].itemsize % CHUNK
        or fixed(product(sizes)) * fixed(channels) * 4 >= 1 << 31
    ):
        return False
    taps = product(fixed(w.size) for w in window)
    places = product(fixed(n) for n in outputs)
    if gradient:
        columns = places * channels
        depth = images * taps
        if features * pair[0].itemsize % CHUNK:
            return False
        p = Product(features, columns, depth, (1, features), (1, columns), columns, ())
    else:
        depth = taps * channels
        p = Product(images * places, features, depth, (depth, 1), (depth, 1), features, ())
    repeats = (1, fixed(places)) if gradient else (fixed(taps), 1)
    found = gpu_matrix.engines(program.target, p, dtypes, x.dtype, repeats)
    if not found or depth == 0:
        return False
    extents, places_of = (tuple(fixed(n) for n in dims) for dims in (sizes, outputs))
    image = Image(extents, fixed(channels), places_of, window)
    engine = Convolution(replace(found[0], bulk=False), image, gradient)
    operands = [program.pointer(o) for o in (lhs, rhs)]
    gpu_dot.compute(
        program,
        p,
        engine,
        x.dtype,
        operands[::-1] if gradient else operands,
        program.pointer(x),
        x.size,
    )
    return True
