"""Metadata of tensors (size, strides, dtype, offset), and what an op does to it: learned once by
running the op on meta tensors.

A `Meta` is interned, so that metadata compares and hashes by identity. The cache of `infer` is
keyed by the op, the metas of its tensors, its static arguments with their types (1 == 1.0 == True)
and only the *types* of its floats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_hlo.hlo.ir import Ints, Shape
from torch_hlo.lowering.core import TORCH_TO_HLO, new_form
from torch_hlo.pytorch.operators import OpOverload
from torch_hlo.pytorch.registration import PLACE

aten = torch.ops.aten
META_DEVICE = torch.device("meta")


class Meta:
    """Size, strides, dtype and storage offset of a tensor; `hlo` is the Shape of its value;
    `wrapper` what `_make_wrapper_subclass` takes after the class, `spare` the tensors made ahead
    outside and inside inference mode (see tensor.blank). Made by `intern` only."""

    __slots__ = (
        "size",
        "stride",
        "dtype",
        "offset",
        "hlo",
        "overlaps",
        "shares",
        "wrapper",
        "spare",
    )
    size: Ints
    stride: Ints
    dtype: torch.dtype
    offset: int
    hlo: Shape
    overlaps: bool
    shares: bool

    def __repr__(self) -> str:
        return f"Meta({self.hlo}, strides={list(self.stride)}, offset={self.offset})"


class NoElementType(RuntimeError):
    """The device does not have this dtype. (No TypeError: Python's operators keep those to
    themselves.)"""

    def __init__(self, dtype: torch.dtype) -> None:
        names = sorted(str(d).removeprefix("torch.") for d in TORCH_TO_HLO)
        super().__init__(
            f"the hlo device has no element type {dtype}: convert the tensor to one of"
            f" {', '.join(names)}, or keep it on the CPU"
        )


_interned: dict[tuple, Meta] = {}


def intern(
    size: Ints,
    stride: Ints,
    dtype: torch.dtype,
    offset: int = 0,
) -> Meta:
    """The Meta with these values. Raises NoElementType for a dtype that the device lacks."""
    key = (size, stride, dtype, offset)
    meta = _interned.get(key)
    if meta is None:
        name = TORCH_TO_HLO.get(dtype)
        if name is None:
            raise NoElementType(dtype)
        meta = Meta()
        meta.size, meta.stride, meta.dtype, meta.offset = size, stride, dtype, offset
        meta.hlo = Shape(name, size)
        # An expanded dimension: one element of memory belongs to several indices.
        meta.overlaps = 0 not in size and any(s == 0 and n > 1 for n, s in zip(size, stride))
        meta.shares = meta.overlaps or shares(size, stride)
        # PyTorch takes long to read integers: a dense tensor gets no strides.
        layout = (None, None) if stride == row_major(size) and not offset else (stride, offset)
        meta.wrapper = (size, *layout, None, dtype, torch.strided, PLACE.device)
        meta.spare = ([], [])
        meta = _interned.setdefault(key, meta)
    return meta


def any_tensors() -> bool:
    """Whether this process has had tensors of the device."""
    return bool(_interned)


def of(tensor: Tensor) -> Meta:
    """Meta of any strided tensor."""
    return intern(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset())


@functools.cache
def contiguous(size: Ints, dtype: torch.dtype) -> Meta:
    """Meta of a dense row-major array."""
    return intern(size, row_major(size), dtype)


def row_major(size: Ints) -> Ints:
    """PyTorch's strides of a dense row-major array (a size of 0 counts as 1)."""
    stride = []
    step = 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def numel(size: Ints) -> int:
    n = 1
    for d in size:
        n *= d
    return n


def physical_order(meta: Meta) -> Ints | None:
    """Dimensions from outermost to innermost in memory if the array fills its memory without gaps
    or overlap, else None."""
    order = sorted(range(len(meta.size)), key=lambda d: (-meta.stride[d], d))
    step = 1
    for d in reversed(order):
        if meta.size[d] != 1 and meta.stride[d] != step:
            return None if numel(meta.size) else tuple(range(len(meta.size)))
        step *= meta.size[d]
    return tuple(order)


def shares(size: Ints, stride: Ints) -> bool:
    """Whether several elements are one place in memory (of large tensors: whether they may be)."""
    if 0 in size:
        return False
    dims = sorted((s, n) for s, n in zip(stride, size) if n != 1)
    reach = 0
    simple = True
    for s, n in dims:
        simple = simple and s > reach  # beyond what the smaller strides reach
        reach += (n - 1) * s
    if simple or numel(size) > 4096:
        return not simple
    places = {0}
    for s, n in dims:
        places = {p + i * s for p in places for i in range(n)}
    return len(places) < numel(size)


@functools.cache
def meet(a: Meta, b: Meta) -> bool:
    """Whether two views of one storage show the same memory somewhere (if their elements have
    different sizes: whether they may)."""
    if not (numel(a.size) and numel(b.size)):
        return False
    begins = [m.offset * m.dtype.itemsize for m in (a, b)]
    ends = [extent(m) * m.dtype.itemsize for m in (a, b)]
    if max(begins) >= min(ends):
        return False
    if a.dtype.itemsize != b.dtype.itemsize:
        return True
    places = torch.zeros(max(extent(a), extent(b)), dtype=torch.bool, device="cpu")
    places.as_strided(a.size, a.stride, a.offset).fill_(True)
    return bool(places.as_strided(b.size, b.stride, b.offset).any())


def meta_tensor(meta: Meta) -> Tensor:
    """A meta tensor with this metadata, storage large enough."""
    if not meta.offset:
        return aten.empty_strided.default(
            meta.size, meta.stride, dtype=meta.dtype, device=META_DEVICE
        )
    return aten.empty_strided.default(
        (extent(meta),), (1,), dtype=meta.dtype, device=META_DEVICE
    ).as_strided(meta.size, meta.stride, meta.offset)


@functools.cache
def copied(meta: Meta) -> Meta:
    """How a copy lies: the same where that is dense, else without gaps, in the order of strides."""
    if physical_order(meta) is not None:
        return meta
    return intern(meta.size, torch.empty_like(meta_tensor(meta)).stride(), meta.dtype)


def extent(meta: Meta) -> int:
    """Elements of storage that the tensor reaches."""
    if not numel(meta.size):
        return meta.offset
    return meta.offset + 1 + sum((n - 1) * s for n, s in zip(meta.size, meta.stride))


class Result:
    """What an op returns: metas and Shapes of the flat results, and the nesting (`form`: an index
    into the flat results, a list or tuple of forms, or ("value", v) for a result that is not a
    tensor). `form == 0` is the single tensor. `taped`: what stands on the tape for the op with
    these arguments. `flat`: list or tuple, if the form is the results in order in one of those,
    else None."""

    __slots__ = ("metas", "outs", "form", "taped", "flat")

    def __init__(self, returned: Sequence[Tensor | None] | Tensor) -> None:
        self.taped = new_form()
        metas: list[Meta | None] = []

        def walk(
            r: Sequence[Tensor | None] | Tensor | None,
        ) -> int | Ints:
            if isinstance(r, Tensor):
                metas.append(dense(of(r)))
                return len(metas) - 1
            if isinstance(r, (list, tuple)):
                return (
                    type(r)(walk(x) for x in r)
                    if type(r) in (list, tuple)
                    else [walk(x) for x in r]
                )
            if r is None:
                metas.append(None)
                return len(metas) - 1
            return {"value": r}

        self.form = walk(returned)
        self._settle(metas)

    def _settle(self, metas: list[Meta | None]) -> None:
        self.metas = tuple(metas)
        self.outs = tuple(m and m.hlo for m in metas)
        in_order = type(self.form) in (list, tuple) and [*self.form] == list(range(len(metas)))
        self.flat = type(self.form) if in_order else None

    @classmethod
    def of(
        cls,
        found: list[Meta | None],
        single: bool = False,
        form: tuple[dict[str, int] | int, ...] | None = None,
    ) -> Result:
        """A tuple of tensors with these metas, or the single tensor, or the nesting `form`."""
        result = cls(())
        result.form = form if form is not None else 0 if single else tuple(range(len(found)))
        result._settle(found)
        return result


def same_place(a: Meta, b: Meta) -> bool:
    """Whether two views of a storage are the same elements in the same order."""
    if (a.size, a.offset, a.dtype) != (b.size, b.offset, b.dtype):
        return False
    return all(s == t for n, s, t in zip(a.size, a.stride, b.stride) if n > 1)


def dense(meta: Meta) -> Meta:
    """Metadata of a new tensor like `meta`: its value fills a storage, so gaps and offsets go (then
    it is contiguous)."""
    if meta.offset or physical_order(meta) is None:
        return contiguous(meta.size, meta.dtype)
    return meta


def to_meta(value, tensor_class: type):
    """`value` with every hlo tensor (instances of tensor_class) replaced by a meta tensor."""
    if isinstance(value, tensor_class):
        return meta_tensor(value._meta)
    if isinstance(value, (list, tuple)):
        return [to_meta(v, tensor_class) for v in value]
    if isinstance(value, torch.device):
        return META_DEVICE
    return value


def infer(op: OpOverload, args: tuple, kwargs: dict, tensor_class: type) -> Result:
    """Run `op` on meta tensors. Errors are PyTorch's own."""
    args = [to_meta(a, tensor_class) for a in args]
    kwargs = {k: to_meta(v, tensor_class) for k, v in kwargs.items() if k != "generator"}
    if "pin_memory" in kwargs:
        del kwargs["pin_memory"]
    if op in _NEEDS_DEVICE or "device" in kwargs:
        kwargs["device"] = META_DEVICE
    return Result(_WITHOUT_META.get(op, op)(*args, **kwargs))


def _like_and_mask(x: Tensor, *rest) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _like_given(op: OpOverload) -> Callable:
    """Of a fused optimizer: the lists that it updates come first."""
    return lambda *args, **kwargs: tuple(
        [torch.empty_like(t) for t in updated] for updated in args[: len(op._schema.returns)]
    )


def _from_bytes(op: OpOverload, position: int, dtype: torch.dtype) -> Callable:
    """Of an op that takes bytes as truth values or as indices, which its meta kernel refuses."""

    def run(*args, **kwargs):
        given = list(args)
        if given[position].dtype is torch.uint8:
            given[position] = given[position].to(dtype)
        return op(*given, **kwargs)

    return run


# Ops of which PyTorch does not know the shapes.
_WITHOUT_META = {
    aten.where.self: _from_bytes(aten.where.self, 0, torch.bool),
    aten.nll_loss_forward.default: _from_bytes(aten.nll_loss_forward.default, 1, torch.int64),
    aten.nll_loss_backward.default: _from_bytes(aten.nll_loss_backward.default, 2, torch.int64),
    **dict.fromkeys(
        (
            aten.fake_quantize_per_tensor_affine_cachemask.default,
            aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
            aten.fake_quantize_per_channel_affine_cachemask.default,
        ),
        _like_and_mask,
    ),
    **{
        getattr(aten, f"_fake_quantize_learnable_per_{kind}_affine{way}").default: rule
        for kind in ("tensor", "channel")
        for way, rule in (
            ("", lambda x, *rest: torch.empty_like(x)),
            ("_backward", lambda grad, *like: tuple(map(torch.empty_like, like[:3]))),
        )
    },
    **{
        getattr(packet, name): _like_given(getattr(packet, name))
        for packet in (
            aten._fused_adam,
            aten._fused_adamw,
            aten._fused_sgd,
            aten._fused_adagrad,
        )
        for name in packet.overloads()
        if name in ("default", "tensor_lr")
    },
}

# Factories: without a device argument they would make a CPU tensor.
_NEEDS_DEVICE = {
    getattr(packet, name)
    for packet in (
        aten.empty,
        aten.empty_strided,
        aten.zeros,
        aten.ones,
        aten.full,
        aten.arange,
        aten.linspace,
        aten.logspace,
        aten.eye,
        aten.rand,
        aten.randn,
        aten.randint,
        aten.randperm,
        aten.scalar_tensor,
        aten.tril_indices,
        aten.triu_indices,
    )
    for name in packet.overloads()
    if any(a.name == "device" for a in getattr(packet, name)._schema.arguments)
}
