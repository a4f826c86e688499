"""Checks at record time: tensors of another device, index tensors whose values are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torch_hlo import config, metrics
from torch_hlo.frozen import frozen
from torch_hlo.lowering.core import is_pointwise, is_random, looks
from torch_hlo.pytorch.operators import OpOverload, check_convolution, runs_on_cpu
from torch_hlo.pytorch.registration import PLACE

from . import conditions, fallback, handlers, session
from .meta import aten, extent, intern, meta_tensor, numel, physical_order, row_major
from .storage import Array
from .tensor import HloTensor, from_cpu, make, peek, strided
from .views import has_lazy_bits


def admit(tensor: Tensor) -> HloTensor:
    """A tensor argument that is not an hlo tensor as one: as on CUDA, only a rank-0 CPU tensor may
    take part; under the name "xla" any, as in PyTorch/XLA.

    Raises RuntimeError for a tensor of another device, Foreign for a subclass that handles ops
    itself."""
    if isinstance(tensor, HloTensor):
        return tensor
    if not plain(tensor):
        raise handlers.Foreign
    if tensor.device.type == "cpu" and (tensor.dim() == 0 or PLACE.name == "xla"):
        return from_cpu(tensor)
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices,"
        f" {PLACE.device} and {tensor.device}! (a {tensor.dtype} tensor of shape"
        f" {list(tensor.shape)}; move it with .to({PLACE.name!r}))"
    )


def plain(tensor: Tensor) -> bool:
    """Its class leaves operators to PyTorch: it has memory of its own."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def admit_all(value):
    """`value` with every tensor admitted; lists, tuples and dictionaries are searched."""
    if isinstance(value, Tensor):
        return value if type(value) is HloTensor else admit(value)
    if isinstance(value, (list, tuple)):
        return [admit_all(v) for v in value]
    if isinstance(value, dict):
        return {k: admit_all(v) for k, v in value.items()}
    return value


# ---- dtypes


def judge(op: OpOverload, args, kwargs: dict) -> None:
    """Let the CPU's kernel judge dtypes, dimension numbers, numbers and empty dimensions, which
    meta kernels often do not check: run it on tensors of the same dtypes and ranks with every size
    at most 1 (2, where one number is special). Only for ops for which such sizes are always
    valid."""
    if not judged(op):
        return
    small, keywords = _units(op, args, kwargs)
    try:
        _run(op, small, keywords)
    except NotImplementedError:  # no kernel for the dtype: shapes are judged before that
        if is_pointwise(op):
            torch.broadcast_shapes(
                *[a._meta.size for a in (*args, *kwargs.values()) if isinstance(a, HloTensor)]
            )
        raise
    except (RuntimeError, IndexError):
        if op.overloadpacket not in _SIZED:
            run_on_cpu(op, args, kwargs)  # the same error, with the true sizes in its text
        raise


def _run(op: OpOverload, args: Sequence, kwargs: dict) -> object:
    """Run an op of the CPU for its errors. The CPU's generator stays as it is."""
    with torch.random.fork_rng((), enabled=is_random(op)):
        return op(*args, **kwargs)


def explain(op: OpOverload, args, kwargs: dict) -> object:
    """The meta kernel has refused the arguments: let the CPU's kernel say why, in the words that
    users know. What it returns if it accepts them; None if it cannot be asked."""
    judge(op, args, kwargs)
    return None if not runs_on_cpu(op) else run_on_cpu(op, args, kwargs)


def judge_out(op: OpOverload, args: tuple, kwargs: dict, results: Sequence[Tensor]) -> None:
    """What meta kernels do not ask of `out=` tensors, which become `results`: whether the dtype
    fits, and that they do not share memory with what is read (an elementwise op may read the very
    elements that it writes)."""
    judge(op, args, kwargs)
    outs, others = fallback.by_use(op, args, kwargs)
    plain = [t for t in outs if not has_lazy_bits(t._view)]  # PyTorch copies the others
    shared = {
        t._meta
        for t in others
        for out in plain
        if t._storage is out._storage and not has_lazy_bits(t._view)
    }
    same = is_pointwise(op) and all(
        shared <= {out._meta} and out._meta.size == tuple(result.shape)
        for out, result in zip(outs, results)
    )
    if shared and not same or any(out._meta.overlaps for out in outs):
        tensors = [*outs, *others]
        holders = [t._storage for t in tensors]
        form = [(t._meta, has_lazy_bits(t._view), holders.index(t._storage)) for t in tensors]
        call = op, fallback.describe(args, kwargs), *form
        # of other tensors the kernel looks at the values
        floats = all(t.dtype.is_floating_point and t.dim() for t in tensors)
        if not floats or call not in _ADMITTED:
            run_on_cpu(op, args, kwargs)
            _ADMITTED.add(call)


# calls with `out=` that the CPU's kernel has let pass: it computes the whole result
_ADMITTED: set[tuple] = set()


def cpu_strides(op: OpOverload, args, kwargs: dict) -> tuple[int, ...] | None:
    """Strides of an elementwise result where there are dimensions of size 1 or operands of several
    forms, about which meta kernels and the CPU's differ: by running it, if it is small. None: as
    the meta kernel says."""
    if op.overloadpacket in _CLONED:
        op = aten.clone.default
        args = args[:1]
        kwargs = {}
    if (
        not is_pointwise(op)
        and op.overloadpacket not in _LIKE
        or torch.Tag.nondeterministic_seeded in op.tags
    ):
        return None
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, HloTensor)]
    sizes = [t._meta.size for t in tensors]
    if (
        not any(1 in size for size in sizes)
        and len({t._meta for t in tensors}) < 2
        and all(t._meta.stride == row_major(t._meta.size) for t in tensors)
        or any(0 in size for size in sizes)
        or sum(extent(t._meta) for t in tensors) > 65536
    ):
        return None

    def stand_in(a):
        if isinstance(a, HloTensor):
            memory = torch.ones(extent(a._meta), dtype=a._meta.dtype, device="cpu")
            return memory.as_strided(a._meta.size, a._meta.stride, a._meta.offset)
        return torch.device("cpu") if isinstance(a, torch.device) else a

    kwargs = {k: stand_in(v) for k, v in kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    result = op(*map(stand_in, args), **kwargs)
    return result.stride() if isinstance(result, Tensor) else None


# ops whose CPU kernels write to a clone of their first argument, and whose meta kernels do not
_CLONED = {aten.index_fill}
_LIKE = {
    aten.empty_like,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.flip,
    aten.clone,
    aten._to_copy,
}


def judged(op: OpOverload) -> bool:
    """True if `judge` runs the op."""
    packet = op.overloadpacket
    if packet in _SIZED or is_random(op):
        return packet in _SIZED
    return is_pointwise(op) or packet in _UNIT_SIZES or packet in _INDEXED


_UNIT_SIZES = {
    getattr(aten, name)
    for name in """complex mm bmm addmm baddbmm addbmm mv addmv dot vdot linear outer addr cat stack
    sum nansum mean amax amin aminmax max min argmax argmin any all prod var std var_mean
    std_mean norm linalg_vector_norm logsumexp
    _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort median nanmedian
    mode flip roll tril triu polar isin bucketize searchsorted histc nonzero masked_select
    tril_ triu_ cumsum_ cumprod_ addmm_ baddbmm_ addbmm_ addmv_ addr_ _foreach_add_ _foreach_sub_
    _foreach_mul_ _foreach_div_
    _foreach_sqrt_ _foreach_exp_ _foreach_lerp_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_add
    _foreach_sub _foreach_mul _foreach_div
    _foreach_sqrt _foreach_exp _foreach_lerp _foreach_addcmul _foreach_addcdiv _foreach_neg_
    _foreach_neg""".split()
}
_INDEXED = {
    getattr(aten, name)
    for name in "gather scatter scatter_ scatter_add scatter_add_ index_select index_add"
    " index_add_ index_copy index_copy_ index_fill index_fill_ index index_put index_reduce take"
    " put embedding masked_scatter nll_loss_forward nll_loss2d_forward".split()
}

# Ops with sizes among their arguments: those that make tensors or draw numbers, selections, and
# interpolation.
_SIZED = {
    getattr(aten, name)
    for name in """linspace logspace eye rand randn randint topk kthvalue multinomial native_dropout
    rand_like randn_like randint_like bernoulli normal poisson binomial uniform exponential
    geometric cauchy log_normal random
    bernoulli_ normal_ uniform_ exponential_ geometric_ cauchy_ log_normal_ random_
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _adaptive_avg_pool2d _adaptive_avg_pool3d
    """.split()
}
_LESS: dict[str, Callable] = {
    **dict.fromkeys(("size", "output_size"), lambda sizes: [min(n, 1) for n in sizes]),
    "steps": lambda n: min(n, 2),
    **dict.fromkeys(("n", "m", "k", "num_samples"), lambda n: min(n, 1)),
}
_SPREAD = {aten.var, aten.std, aten.var_mean, aten.std_mean}


def _units(op: OpOverload, args, kwargs: dict) -> tuple[list, dict]:
    """Arguments with small stand-ins for tensors, and small sizes."""
    fill = torch.zeros if op.overloadpacket in _INDEXED else torch.ones
    size = 2 if op.overloadpacket in _SPREAD else 1
    less = _LESS if op.overloadpacket in _SIZED else {}
    outs = {a.name for a in op._schema.arguments if a.is_out}

    def unit(value: object, name: str = "") -> object:
        if isinstance(value, HloTensor):
            sizes = [0] if name in outs else [min(n, size) for n in value._meta.size]
            return fill(sizes, dtype=value._meta.dtype, device="cpu")
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if name in less:
            return less[name](value)
        return [unit(v) for v in value] if isinstance(value, (list, tuple)) else value

    names = [a.name for a in op._schema.arguments]
    small = [unit(a, name) for a, name in zip(args, names)]
    return small, {k: unit(v, k) for k, v in kwargs.items() if k != "generator"}


def _multinomial(probabilities: Tensor, samples: int, replacement: bool = False, **options) -> None:
    size = probabilities._meta.size
    if not replacement and size and samples > size[-1]:
        raise RuntimeError(
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
        )
    if samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if size and size[-1] > 1 << 24:
        raise RuntimeError("number of categories cannot exceed 2^24")


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> None:
    given = (input, weight, bias)
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    # what is refused by the kernels themselves, or before
    wrong = (
        min(*stride, *dilation, groups) <= 0
        or transposed
        and any(o >= max(s, d) for o, s, d in zip(output_padding, stride, dilation))
        or len({t.dtype for t in given if t is not None}) > 1
    )
    if not wrong:
        check_convolution(*[t if t is None else meta_tensor(t._meta) for t in given], *rest)
    else:
        run_on_cpu(aten.convolution.default, (*given, *rest), {})


def _index_select(x: Tensor, dim: int, index: Tensor) -> None:
    if not x._meta.size and numel(index._meta.size) != 1:
        raise RuntimeError(
            f"index_select(): Index to scalar can have only 1 value, got {numel(index._meta.size)}"
            " value(s)"
        )


def _index_put(x: Tensor, indices: list, values: Tensor, accumulate: bool) -> None:
    places = [i if i is None else meta_tensor(i._meta) for i in indices]
    given = values._meta
    try:
        meta_tensor(given).expand(aten.index.Tensor(meta_tensor(x._meta), places).shape)
        wrong = given.dtype != x._meta.dtype
    except (RuntimeError, IndexError):
        wrong = True
    if wrong:
        run_on_cpu(aten.index_put.default, (x, indices, values, accumulate), {})


def _randperm(n: int, dtype: torch.dtype = torch.int64, **options) -> None:
    if dtype.itemsize <= 2:  # which hold few numbers
        _run(aten.randperm.default, (n,), {"dtype": dtype, "device": "cpu"})


def _embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, *options, **keywords) -> None:
    scales = options[3] if len(options) > 3 else keywords.get("per_sample_weights")
    flat = indices.dim() == offsets.dim() == 1
    if not flat or scales is not None and scales.dtype != weight.dtype:
        run_on_cpu(aten._embedding_bag.default, (weight, indices, offsets, *options), keywords)


def _as_strided_scatter(
    x: HloTensor,
    source: HloTensor,
    size: list[int],
    stride: list[int],
    offset: int | None = None,
) -> None:
    begin = x._meta.offset if offset is None else offset
    strided(x, intern(tuple(size), tuple(stride), x._meta.dtype, begin))


# What else the CPU refuses and meta kernels let pass; called once per kind of arguments.
VALIDATE: dict[OpOverload, Callable] = {
    aten.multinomial.default: _multinomial,
    aten.convolution.default: _convolution,
    aten.index_select.default: _index_select,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten.index_put.default: _index_put,
    aten.randperm.default: _randperm,
    aten.as_strided_scatter.default: _as_strided_scatter,
}


def judge_sum(op: OpOverload, args: Sequence) -> None:
    """What is added to a product must expand to the product's size."""
    size = _SUMS.get(op)
    if size is not None:
        meta_tensor(args[0]._meta).expand(size(args[1]._meta.size, args[2]._meta.size))


# the size of the product of operands of these sizes
_SUMS: dict[OpOverload, Callable[..., tuple[int, ...]]] = {
    aten.addmm.default: lambda a, b: (a[0], b[-1]),
    aten.addbmm.default: lambda a, b: (a[-2], b[-1]),
    aten.baddbmm.default: lambda a, b: (a[0], a[-2], b[-1]),
    aten.addmv.default: lambda a, b: (a[0],),
    aten.addr.default: lambda a, b: (a[0], b[0]),
}


# ---- index values


def bounds(tensor: HloTensor) -> tuple[int, int] | None:
    """Smallest and largest value in the tensor's storage if it came from the CPU, else None."""
    array = tensor._storage.value
    if type(array) is not Array or array.bounds is None:
        return None
    if not array.bounds:
        # spread over devices: looking at it would be a collective
        if getattr(array.data, "sharding", None) is not None:
            return None
        value = peek(make(tensor._storage.meta, tensor._storage))
        metrics.count("IndicesLookedAt")
        if value.numel() == 0 or value.dtype.is_floating_point or value.dtype.is_complex:
            array.bounds = (0, -1)
        else:
            low, high = value.to(torch.int64).aminmax()
            array.bounds = (int(low), int(high))
    return array.bounds


def _along(position: int, negative: bool) -> Callable:
    """(self, dim, index, ...): values of `index` lie in the size of `dim`."""

    def indices(
        args: tuple[int | str | Tensor, ...], kwargs: dict[str, bool]
    ) -> Iterator[tuple[HloTensor, int, int]]:
        shape = args[0].shape
        size = shape[args[1]] if shape else 1
        yield args[position], -size if negative else 0, size

    return indices


def _index(
    args: tuple[bool | list[Tensor] | Tensor, ...], kwargs
) -> Iterator[tuple[int | Tensor, ...]]:
    x = args[0]
    indices = args[1]
    for dim, index in enumerate(indices):
        if index is not None:
            yield index, -x.shape[dim], x.shape[dim]


def _target(args: tuple[int | Tensor | None, ...], kwargs) -> Iterator[tuple[int | Tensor, ...]]:
    # (self, target, weight, reduction, ignore_index)
    size = args[0].shape
    yield args[1], 0, size[0 if len(size) == 1 else 1], args[4]


def _embedding(args: tuple, kwargs: dict) -> Iterator[tuple[int | Tensor, ...]]:
    yield args[1], 0, args[0].shape[0]


def _take(args, kwargs):
    n = args[0].numel()
    yield args[1], -n, n


def _checked(indices: Callable) -> Callable:
    def check(op: OpOverload, args: tuple, kwargs: dict) -> None:
        for index, low, high, *ignored in indices(args, kwargs):
            if not isinstance(index, HloTensor):
                continue
            known = bounds(index)
            if known is None:
                if config.get("CHECK_INDEX"):
                    index = handlers.call(aten.clone.default, index)
                    judge = looks.At(Range(op, low, high, *ignored), session.line(), ordered=False)
                    conditions.expect(index, judge)
            elif (known[0] < low or known[1] >= high) and _outside(index, low, high):
                run_on_cpu(op, args, kwargs)
                return

    return check


@frozen
class Range:
    """Judges indices that the device has computed."""

    op: OpOverload
    low: int
    high: int
    ignored: int | None = None

    def __call__(self, value: Tensor) -> None:
        outside = (value < self.low) | (value >= self.high)
        if self.ignored is not None:
            outside &= value != self.ignored
        if outside.any():
            raise IndexError(
                f"{self.op}: index {int(value[outside][0])}, which the device has computed, is not"
                f" in [{self.low}, {self.high})"
            )


def _outside(index: HloTensor, low: int, high: int) -> bool:
    """Whether a value lies outside; of a view, other values of its storage do not count (rows and
    columns that `nonzero` found together)."""
    value = peek(index) if index._view is not None else None
    return value is None or bool(((value < low) | (value >= high)).any())


def run_on_cpu(op: OpOverload, args: tuple, kwargs: dict) -> object:
    """Let the CPU's kernel judge, and raise, with the real indices. Large operands have no memory,
    but for what is written and what shares memory with that. Returns what the kernel does: only its
    form means something."""
    outs, others = fallback.by_use(op, args, kwargs)
    extents: dict[int, int] = {}
    for t in (*outs, *others):
        bytes_ = extent(t._meta) * t._meta.dtype.itemsize
        extents[id(t._storage)] = max(extents.get(id(t._storage), 0), bytes_)
    memory = {
        # never nothing, so that the kernel sees who shares it
        id(t._storage): torch.zeros(extents[id(t._storage)] + 16, dtype=torch.uint8, device="cpu")
        for t in outs
    }

    shared: dict[int, Tensor] = {}  # a tensor that is given twice is one there, too
    for t in (*outs, *others):
        meta = t._meta
        block = memory.get(id(t._storage))
        if block is not None:
            whole = block[: len(block) // meta.dtype.itemsize * meta.dtype.itemsize]
            view = whole.view(meta.dtype).as_strided(meta.size, meta.stride, meta.offset)
            shared.setdefault(id(t), view)

    def stand_in(
        value: bool | list[Tensor] | Tensor,
    ) -> bool | list[Tensor] | Tensor:
        if isinstance(value, HloTensor):
            if id(value) in shared:
                return shared[id(value)]
            meta = value._meta
            floats = meta.dtype.is_floating_point or meta.dtype.is_complex
            if not (floats and meta.size):  # indices, sizes, and numbers
                known = peek(value)
                if known is not None:
                    return known
            small = numel(meta.size) < 4096
            zeros = torch.zeros(meta.size if small else (), dtype=meta.dtype, device="cpu")
            return zeros.expand(meta.size)
        if isinstance(value, (list, tuple)):
            return [stand_in(v) for v in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    keywords = {k: stand_in(v) for k, v in kwargs.items() if k != "generator"}
    return _run(op, [*map(stand_in, args)], keywords)


def _divided(op: OpOverload, args: tuple, kwargs: dict) -> None:
    """Integers are not divided by zero."""
    x, divisor = args[:2]
    if x.dtype.is_floating_point or x.dtype.is_complex or isinstance(divisor, float):
        return
    if isinstance(divisor, HloTensor):
        known = bounds(divisor)
        if known is None or not known[0] <= 0 <= known[1]:
            return
        divisor = peek(divisor)
    if not (divisor.all() if isinstance(divisor, Tensor) else divisor):
        run_on_cpu(op, args, kwargs)


def _number(position: int) -> Callable:
    """Judges whether the number at that position fits the dtype that it is written as."""

    def check(op: OpOverload, args: tuple, kwargs: dict) -> None:
        value = args[position]
        kind = type(value)
        if kind is bool or kind is int and -128 <= value <= 127:
            return
        dtype = kwargs.get("dtype") or getattr(args[0], "dtype", None)
        if dtype is None or dtype.is_complex:
            return
        if kind is complex or not dtype.is_floating_point or not -65504 <= value <= 65504:
            torch.full((2,), value, dtype=dtype, device="cpu")  # a single number is not judged

    return check


def _slope(slope: int, in_place: int) -> Callable:
    """Judges the gradient of an activation whose result took its operand's place: with a negative
    slope that does not tell what the operand was. The positions of the two."""

    def check(op: OpOverload, args: tuple, kwargs: dict) -> None:
        if args[in_place] and args[slope] < 0:
            run_on_cpu(op, args, kwargs)

    return check


def _both(first: Callable, second: Callable) -> Callable:
    return lambda *call: (first(*call), second(*call))


# Of each operator the index tensors, with the smallest and the first larger number that is allowed,
# and one that is ignored.
INDICES: dict[OpOverload, Callable] = {
    op: indices
    for indices, ops in {
        _embedding: (
            aten.embedding.default,
            aten._embedding_bag.default,
            aten._embedding_bag_forward_only.default,
        ),
        _along(2, False): (
            aten.index_select.default,
            aten.gather.default,
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter.reduce,
            aten.scatter.value_reduce,
            aten.scatter_add.default,
            aten.scatter_reduce.two,
        ),
        _along(2, True): (
            aten.index_add.default,
            aten.index_copy.default,
            aten.index_fill.int_Tensor,
            aten.index_reduce.default,
        ),
        _index: (
            aten.index.Tensor,
            aten.index_put.default,
            aten._unsafe_index.Tensor,
        ),
        _target: (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
        _take: (aten.take.default,),
    }.items()
    for op in ops
}
BOUNDS: dict[OpOverload, Callable] = {op: _checked(x) for op, x in INDICES.items()} | {
    aten.floor_divide.default: _divided,
    aten.remainder.Tensor: _divided,
    aten.fmod.Tensor: _divided,
    aten.div.Tensor_mode: _divided,
    aten.elu_backward.default: _slope(1, 4),
    aten.leaky_relu_backward.default: _slope(2, 3),
    aten.scalar_tensor.default: _number(0),
    aten.full.default: _number(1),
    aten.full_like.default: _number(1),
    aten.new_full.default: _number(2),
    aten.fill.Scalar: _number(1),
    aten.masked_fill.Scalar: _number(2),
    aten.index_fill.int_Scalar: _both(_number(3), _checked(_along(2, True))),
}


def admit_target(target: Tensor, args: tuple) -> None:
    """The tensor written to is not an hlo tensor, but another argument is. Always raises."""
    if not plain(target):
        raise handlers.Foreign
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, hlo:0 and"
        f" {target.device}! (the result would be written to a {target.device} tensor of shape"
        f" {list(target.shape)})"
    )


def refuse_partial_overlap(target: HloTensor, source: HloTensor) -> None:
    """Two tensors of one storage, of which `target` is written elementwise: raises RuntimeError if
    dense blocks of memory overlap without being the same elements in the same order. As in PyTorch,
    tensors with gaps are not judged."""
    a = target._meta
    b = source._meta
    if (
        a is b
        or not numel(a.size)
        or not numel(b.size)
        or physical_order(a) is None
        or physical_order(b) is None
    ):
        return
    begin = a.offset * a.dtype.itemsize
    end = extent(a) * a.dtype.itemsize
    other_begin, other_end = (
        b.offset * b.dtype.itemsize,
        extent(b) * b.dtype.itemsize,
    )
    if (begin, end) == (other_begin, other_end) and a.stride == b.stride:
        return
    if begin < other_end and other_begin < end:
        raise RuntimeError(
            "unsupported operation: some elements of the input tensor and the written-to tensor"
            " refer to a single memory location. Please clone() the tensor before performing the"
            " operation."
        )
