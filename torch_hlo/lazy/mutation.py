"""In-place ops: the functional twin is recorded, and its results are written to what the schema says is mutated.

`mutator(op)` makes the handler of any op with written arguments: in-place (`add_`), `out=`, lists (`_foreach_add_`), and ops that
do both (`_native_batch_norm_legit`). Ops that change metadata (`resize_`, `t_`, `set_`) are written by hand.
"""

from __future__ import annotations

import gc
import operator
import sys

import torch
from torch._ops import OpOverload

from torch_hlo.lazy import (
    checks,
    decompose,
    dispatch,
    engine,
    exchange,
    generator,
    optimizer_state,
    plain_sizes,
    views,
)
from torch_hlo.lazy import meta as metas
from torch_hlo.lazy.dispatch import (
    Arguments,
    Handler,
    call,
    handles,
    in_inference_mode,
    operands,
    outside_inference_mode,
)
from torch_hlo.lazy.meta import Meta, aten, meta_tensor
from torch_hlo.lazy.storage import Array, read, write, write_all
from torch_hlo.lazy.tensor import DEVICE, HloTensor, adopt, alias, fresh, make, to_cpu, upload
from torch_hlo.lowering.graph import Node, Out, further, recorded

IDEMPOTENT = frozenset("fill_ zero_".split())  # may write the same element twice


def written(op: OpOverload) -> list:
    """The schema arguments that the op writes to."""
    return [a for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]


def functional_twin(op: OpOverload) -> OpOverload | None:
    """The overload with the same inputs that returns new tensors instead, or None."""
    name = op._schema.name.split("::")[1]
    namespace = getattr(torch.ops, op.namespace)
    base = name.removesuffix("_") if not name.endswith("__") else name
    if name.startswith("__i"):
        base = "__" + name[3:]
    wanted = [
        (a.name, str(a.type))
        for a in op._schema.arguments
        if not (a.kwarg_only and a.alias_info and a.alias_info.is_write)
    ]
    for candidate in dict.fromkeys((base, name, base + "_functional")):
        packet = getattr(namespace, candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            twin = getattr(packet, overload)
            if (
                not written(twin)
                and [(a.name, str(a.type)) for a in twin._schema.arguments] == wanted
            ):
                return twin
    return None


def factory_twin(op: OpOverload) -> OpOverload | None:
    """For `full.out` and the like: the overload that takes dtype and device instead of `out`, or None."""
    namespace = getattr(torch.ops, op.namespace)
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name != "out"]
    packet = getattr(namespace, op._schema.name.split("::")[1])
    for overload in packet.overloads():
        twin = getattr(packet, overload)
        given = [(a.name, str(a.type)) for a in twin._schema.arguments]
        options = ("dtype", "layout", "device", "pin_memory")
        if (
            any(n == "dtype" for n, _ in given)
            and [a for a in given if a[0] not in options] == wanted
        ):
            return twin
    return None


def mutator(op: OpOverload) -> Handler:
    """Handler of an op that writes to arguments."""
    twin = functional_twin(op)
    if twin is None:
        return _factory_out(op) or decompose.in_place(op)
    targets = written(op)
    if not dispatch.has_lowering(twin):
        special = decompose.in_place(op, twin)
        if special is not None:
            return special
    first = op._schema.arguments[0]
    if (
        [t.name for t in targets] == [first.name]
        and str(first.type) == "Tensor"
        and len(op._schema.returns) == 1
    ):
        if dispatch.has_lowering(twin) and twin not in dispatch.WRITTEN_BY_HAND:
            return _in_place(op, twin)
    if not op._schema.returns and all(
        "List[Tensor]" in str(t.type) and not t.kwarg_only for t in targets
    ):
        if dispatch.has_lowering(twin) and twin not in dispatch.WRITTEN_BY_HAND:
            return _in_place_lists(op, twin, targets)
    return _general(op, twin, targets)


def _in_place(op: OpOverload, twin: OpOverload) -> Handler:
    """`x.op_(...)` whose twin is recorded as it is: no temporary tensor is made."""
    arguments = Arguments(twin)
    cache: dict[tuple, tuple] = dispatch.remembered({})
    check = checks.BOUNDS.get(twin)
    random = generator.is_random(twin)
    idempotent = op._schema.name.split("::")[1] in IDEMPOTENT
    pointwise = torch.Tag.pointwise in op.tags
    once = {aten.masked_fill_: _fill_expanded, aten.index_fill_: _index_fill_expanded}.get(
        op.overloadpacket
    )
    defaults = _missing_defaults(op, twin)

    def run(args: tuple, kwargs: dict):
        x = args[0]
        if defaults and len(args) <= defaults[0]:
            args = (*args, *defaults[1])
        if type(x) is not HloTensor:
            checks.admit_target(x, args)
        if x._meta.overlaps and not idempotent:
            if once is not None and once(*args):
                return x
            raise RuntimeError(OVERLAP)
        for a in args:
            if type(a) is HloTensor and a._storage is x._storage and a is not x and pointwise:
                checks.refuse_partial_overlap(x, a)
        nodes, keywords, key, base, words = operands(args, kwargs, arguments)
        found = cache.get(key)
        if found is None:
            checks.judge(op, checks.admit_all(args), checks.admit_all(kwargs))
            result = dispatch.infer(twin, args, kwargs)
            checked(op, args, kwargs)
            found = cache[key] = (result.outs, _conversion(result.metas[0], x._meta), result.taped)
        if check is not None:
            check(twin, args, kwargs)
        outs, convert, taped = found
        if random:
            seed, offset = generator.draw(kwargs)
            value = Out(
                Node(
                    twin,
                    tuple(nodes),
                    {**keywords, "seed": seed, "offset": offset},
                    outs,
                    dispatch.SOURCE and dispatch.source(),
                )
            )
        else:
            words[0] = taped
            value = recorded(
                twin,
                tuple(nodes),
                keywords,
                outs,
                dispatch.SOURCE and dispatch.source(),
                base,
                words,
            )
        if convert is not None:
            value = Out(Node(aten._to_copy.default, (value,), convert[0], convert[1]))
        write(x, value)
        if idempotent and twin in optimizer_state.FILLS and x._view is None:
            optimizer_state.note(x._storage)
        return x

    return run


def _unexpanded(x: HloTensor) -> tuple[HloTensor, list[int]]:
    """View of each element of an expanded tensor once, and the dimensions that are then of size 1."""
    repeated = [d for d, (n, s) in enumerate(zip(x._meta.size, x._meta.stride)) if s == 0 and n > 1]
    size = [1 if d in repeated else n for d, n in enumerate(x._meta.size)]
    return call(aten.as_strided.default, x, size, list(x._meta.stride), x._meta.offset), repeated


def _index_fill_expanded(x: HloTensor, dim: int, index: torch.Tensor, value) -> bool:
    """`index_fill_` of an expanded tensor. Along an expanded dimension any index names all elements."""
    own, repeated = _unexpanded(x)
    if dim % x.dim() in repeated:
        if not index.numel():
            return True
        index = call(aten.zeros_like.default, index)
    call(
        aten.index_fill_.int_Tensor
        if isinstance(value, torch.Tensor)
        else aten.index_fill_.int_Scalar,
        own,
        dim,
        index,
        value,
    )
    return True


def _fill_expanded(x: HloTensor, mask: torch.Tensor, value) -> bool:
    """`masked_fill_` of an expanded tensor: an element is filled where the mask of any of its copies is set. True if done."""
    own, repeated = _unexpanded(x)
    mask = call(aten.expand.default, mask, list(x._meta.size))
    for d in repeated:
        mask = call(aten.any.dim, mask, d, True)
    overload = (
        aten.masked_fill_.Tensor if isinstance(value, torch.Tensor) else aten.masked_fill_.Scalar
    )
    call(overload, own, mask, value)
    return True


def put_expanded(
    x: HloTensor, indices: list, values: torch.Tensor, accumulate: bool = False
) -> bool:
    """`x[mask] = number` for an expanded x; False for other indices."""
    mask = indices[0] if len(indices) == 1 else None
    if (
        accumulate
        or mask is None
        or mask.dtype is not torch.bool
        or mask.dim() != x.dim()
        or values.numel() != 1
    ):
        return False
    return _fill_expanded(
        x, mask, call(aten._to_copy.default, call(aten.view.default, values, []), dtype=x.dtype)
    )


_OWN = {HloTensor}


def _in_place_lists(op: OpOverload, twin: OpOverload, targets: list) -> Handler:
    """`_foreach_add_(xs, ...)`, `_fused_adamw_(...)`: one node, whose results are written to the tensors of the lists."""
    arguments = Arguments(twin)
    cache: dict[tuple, tuple] = dispatch.remembered({})
    names = [a.name for a in op._schema.arguments]
    positions = [names.index(t.name) for t in targets]
    reads = [
        i
        for i, a in enumerate(op._schema.arguments)
        if i not in positions and "Tensor" in str(a.type)
    ]
    one_by_one = decompose.composite(op)

    def run(args: tuple, kwargs: dict):
        tensors = []
        for p in positions:
            tensors += args[p]
        if {*map(type, tensors)} != _OWN:
            for t in tensors:
                if type(t) is not HloTensor:
                    checks.admit_target(t, args)
        if one_by_one is not None and _order_matters(
            tensors, [args[i] for i in reads if i < len(args)]
        ):
            return dispatch.nested(one_by_one, args, kwargs)
        nodes, keywords, key, base, words = operands(args, kwargs, arguments)
        found = cache.get(key)
        if found is None:
            if any(t._meta.overlaps for t in tensors):
                raise RuntimeError(OVERLAP)
            result = dispatch.infer(twin, args, kwargs)
            if [m.size for m in result.metas] != [t._meta.size for t in tensors]:
                checked(
                    op, args, kwargs
                )  # raises: a result does not fit into the tensor it replaces
                raise RuntimeError(
                    f"{op}: the results have other sizes than the tensors they would replace"
                )
            checks.judge(op, checks.admit_all(args), checks.admit_all(kwargs))
            found = cache[key] = (
                result.outs,
                [_conversion(m, t._meta) for m, t in zip(result.metas, tensors)],
                result.taped,
            )
        outs, conversions, taped = found
        words[0] = taped
        first = recorded(
            twin, tuple(nodes), keywords, outs, dispatch.SOURCE and dispatch.source(), base, words
        )
        values = [first, *[further(first.node, i) for i in range(1, len(tensors))]]
        if any(conversions):
            values = [
                c and Out(Node(aten._to_copy.default, (v,), *c)) or v
                for v, c in zip(values, conversions)
            ]
        write_all(tensors, values)

    return run


def _order_matters(targets: list[HloTensor], reads: list) -> bool:
    """Whether tensors of a list share memory so that an update sees an earlier one: a tensor given twice, overlapping views, operands that
    are targets too. `reads`: lists of operands by target, or operands that every update reads."""
    storages = {*map(_STORAGE, targets)}
    shared = len(storages) < len(targets)
    for operand in reads:
        tensors = operand if isinstance(operand, (list, tuple)) else [operand] * len(targets)
        if any(
            type(t) is HloTensor and t._storage in storages and t is not target
            for t, target in zip(tensors, targets)
        ):
            return True
    if not shared:
        return False
    blocks = []
    for t in targets:
        size = t._meta.dtype.itemsize
        blocks.append((id(t._storage), t._meta.offset * size, metas.extent(t._meta) * size))
    blocks.sort()
    return any(a[0] == b[0] and b[1] < a[2] for a, b in zip(blocks, blocks[1:]))


_STORAGE = operator.attrgetter("_storage")


def _missing_defaults(op: OpOverload, twin: OpOverload) -> tuple[int, tuple] | None:
    """Position and values of trailing defaults that `op` has and its twin has not (`bernoulli_`'s p)."""
    for i, (mine, other) in enumerate(zip(op._schema.arguments, twin._schema.arguments)):
        if not mine.kwarg_only and mine.has_default_value() and not other.has_default_value():
            return i, (mine.default_value,)
    return None


OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def _conversion(result: Meta, target: Meta) -> tuple | None:
    if result.dtype == target.dtype:
        return None
    return {"dtype": target.dtype}, (target.hlo,)


@plain_sizes.answers()
def checked(op: OpOverload, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Run the mutating op itself on meta tensors, so that its errors are PyTorch's. Returns the meta tensors written to."""
    mirrors: dict[int, torch.Tensor] = {}

    def mirror(a):
        if isinstance(a, HloTensor):
            if id(a) not in mirrors:
                mirrors[id(a)] = meta_tensor(a._meta)
            return mirrors[id(a)]
        if isinstance(a, (list, tuple)):
            return [mirror(v) for v in a]
        return a

    args = checks.admit_all(args)
    kwargs = {k: v for k, v in checks.admit_all(kwargs).items() if k != "generator"}
    op(*map(mirror, args), **{k: mirror(v) for k, v in kwargs.items()})
    given = dict(zip([a.name for a in op._schema.arguments], args)) | kwargs
    targets = []
    for a in written(op):
        value = given.get(a.name)
        targets += [
            mirrors[id(v)]
            for v in (value if isinstance(value, (list, tuple)) else [value])
            if v is not None
        ]
    return targets


def _general(op: OpOverload, twin: OpOverload, targets: list) -> Handler:
    """Any mutating op: run the twin through the table, write its results to the targets: the first to `out=` arguments, where there are
    both, and the last to arguments updated in place."""
    names = [a.name for a in op._schema.arguments]
    out_names = {a.name for a in targets if a.kwarg_only}
    sets = [a.alias_info.before_set for a in targets]
    returns = [
        sets.index(r.alias_info.before_set) if r.alias_info else None for r in op._schema.returns
    ]
    lists = any("List[Tensor]" in str(a.type) for a in targets)
    both = 0 < len(out_names) < len(targets)

    def run(args: tuple, kwargs: dict):
        given = dict(zip(names, args)) | kwargs
        outs = [given.get(a.name) for a in targets]
        for o in outs:
            if isinstance(o, torch.Tensor) and type(o) is not HloTensor:
                checks.admit_target(o, args)
        mirrors = ()
        if not lists:
            # The meta run resizes `out=` as PyTorch does (with its warning) and checks shapes and dtypes.
            try:
                mirrors = checked(op, args, kwargs)
            except NotImplementedError:  # no meta kernel: the values tell the sizes
                mirrors = None
        results = call(twin, *args, **{k: v for k, v in kwargs.items() if k not in out_names})
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        new = [results] if lists and len(targets) == 1 else results[len(results) - len(targets) :]
        if both:
            new = [*results[len(out_names) :], *results[: len(out_names)]]
        if not lists and mirrors is not None:
            for o, m in zip([o for o in outs if o is not None], mirrors):
                if tuple(m.shape) != o._meta.size:
                    resize(o, tuple(m.shape))
        for argument, target, value in zip(targets, outs, new):
            if isinstance(target, (list, tuple)):
                for t, v in zip(target, value):
                    assign(t, v)
            elif target is not None:
                if argument.kwarg_only and target._meta.size != tuple(value.shape):
                    resize(target, tuple(value.shape))
                assign(target, value)
        return _returned(outs, results, returns)

    return run


def _returned(outs: list, results: list, returns: list[int | None]):
    """What the op returns: by position the target that it is, or None for the next of the twin's results."""
    if not returns:
        return None
    plain = iter(results)
    values = [next(plain) if target is None else outs[target] for target in returns]
    return values[0] if len(values) == 1 else tuple(values)


def _factory_out(op: OpOverload) -> Handler | None:
    twin = factory_twin(op)
    if twin is None:
        return None

    def run(args: tuple, kwargs: dict):
        out = kwargs["out"]
        rest = {k: v for k, v in kwargs.items() if k != "out"}
        if type(out) is not HloTensor:  # numbers from the device may make a tensor elsewhere
            return op(*fetched(args), **fetched(rest), out=out)
        value = call(twin, *args, **rest, dtype=out._meta.dtype, device=DEVICE)
        if (
            out._meta.size == (0,) and sys.getrefcount(out._storage) == 2
        ):  # `torch.arange(n)` begins with an empty tensor
            return adopt(out, value)
        if value._meta.size != out._meta.size:
            resize(out, value._meta.size)
        assign(out, value)
        return out

    return run


def fetched(arguments):
    """The tuple or dictionary with hlo tensors replaced by CPU copies."""
    if isinstance(arguments, dict):
        return dict(zip(arguments, fetched(tuple(arguments.values()))))
    return tuple(to_cpu([a])[0] if type(a) is HloTensor else a for a in arguments)


def assign(target: HloTensor, value: torch.Tensor) -> None:
    """target[...] = value, which has the target's shape; the dtype is converted."""
    if target._meta.overlaps:
        raise RuntimeError(OVERLAP)
    if type(value) is not HloTensor:
        value = checks.admit(value)
    new = read(value)
    if value._meta.size != target._meta.size:
        raise RuntimeError(
            f"output with shape {list(target._meta.size)} doesn't match the broadcast shape {list(value._meta.size)}"
        )
    if value._meta.dtype != target._meta.dtype:
        new = Out(
            Node(aten._to_copy.default, (new,), {"dtype": target._meta.dtype}, (target._meta.hlo,))
        )
    write(target, new)


# ---- copies


@handles(aten.copy_.default)
def copy_(args: tuple, kwargs: dict):
    target, source = args[0], args[1]
    if type(target) is not HloTensor:
        if isinstance(target, HloTensor) or type(target) not in checks.PLAIN:
            raise dispatch.Foreign
        target.copy_(exchange.fetch(source, target.device))
        return target
    to = target._meta
    if to.overlaps:
        raise RuntimeError(OVERLAP)
    if type(source) is HloTensor:
        value, dtype, size = read(source), source._meta.dtype, source._meta.size
    elif source.device.type == "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    elif type(source) in checks.PLAIN:
        plain = source.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        value = upload(plain if plain.dtype == to.dtype else plain.to(to.dtype))
        dtype, size = to.dtype, tuple(source.shape)
    else:
        raise dispatch.Foreign
    if dtype != to.dtype:
        shape = metas.contiguous(size, to.dtype).hlo
        value = Out(Node(aten._to_copy.default, (value,), {"dtype": to.dtype}, (shape,)))
    if size != to.size:
        meta_tensor(to).copy_(torch.empty(size, device="meta"))  # raises if the sizes do not fit
        value = Out(Node(aten.expand.default, (value, list(to.size)), {}, (to.hlo,)))
    write(target, _recorded(value))
    return target


def _recorded(value: Out | Array) -> Out | Array:
    """The value of a whole tensor, for another one. A function that is being captured must see that it computes it, so there a copy is an op."""
    if type(value) is Array and hasattr(engine.current(), "cut"):
        return Out(Node(aten.clone.default, (value,), {}, (value.shape,)))
    return value


def copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """`aten::_copy_from`, which C++ calls where one side is an hlo tensor and `__torch_dispatch__` is off."""
    if type(target) is HloTensor:
        return copy_((target, source), {})
    return target.copy_(exchange.fetch(source, target.device))


@handles(aten.clone.default)
def clone(args: tuple, kwargs: dict):
    x = args[0]
    meta = x._meta
    key = (meta, kwargs.get("memory_format"))
    new = _CLONES.get(key)
    if new is None:
        new = _CLONES[key] = dispatch.infer(aten.clone.default, args, kwargs).metas[0]
    return fresh(
        new, _recorded(read(x))
    )  # a value never changes: the copy is another storage with the same value


_CLONES: dict[tuple, Meta] = {}


@handles(aten._to_copy.default)
def to_copy(args: tuple, kwargs: dict):
    x = args[0]
    device = kwargs.get("device")
    if type(x) is not HloTensor:  # a CPU tensor goes to the device
        from torch_hlo.lazy.tensor import from_cpu

        dispatch.on_device(device)
        rest = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        return from_cpu(aten._to_copy.default(x, **rest) if rest else x)
    if device is not None and not dispatch.on_device(device):
        rest = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format", "layout")}
        if torch.device(device).type == "meta":
            return aten._to_copy.default(meta_tensor(x._meta), **rest)
        value = exchange.fetch(x, torch.device(device))
        if torch.device(device).type != "cpu":
            rest["device"] = device
        return aten._to_copy.default(value, **rest) if rest else value
    if kwargs.get("layout") not in (None, torch.strided):
        raise NotImplementedError(
            f"the hlo device holds strided tensors only, not {kwargs['layout']}"
        )
    dtype = kwargs.get("dtype")
    key = (x._meta, dtype, kwargs.get("memory_format"))
    meta = _COPIES.get(key)
    if meta is None:
        rest = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        meta = _COPIES[key] = dispatch.infer(aten._to_copy.default, args, rest).metas[0]
    if dtype is None or dtype == x._meta.dtype:
        return fresh(meta, read(x))
    source = dispatch.SOURCE and dispatch.source()
    return fresh(
        meta, Out(Node(aten._to_copy.default, (read(x),), {"dtype": dtype}, (meta.hlo,), source))
    )


_COPIES: dict[tuple, Meta] = {}


# ---- metadata


@handles(aten._has_compatible_shallow_copy_type.default)
def _compatible(args: tuple, kwargs: dict) -> bool:
    return isinstance(args[1], HloTensor) == isinstance(args[0], HloTensor)


@handles(aten.as_strided.default)
def as_strided(args: tuple, kwargs: dict):
    x, size, stride, *rest = args
    if in_inference_mode() and not x.is_inference():
        return outside_inference_mode(as_strided, args, kwargs)
    offset = rest[0] if rest else kwargs.get("storage_offset")
    size, stride = tuple(size), tuple(stride)
    if len(size) != len(stride) or min(stride, default=0) < 0 or min(size, default=0) < 0:
        meta_tensor(x._meta).as_strided(size, stride, offset or 0)
    meta = metas.intern(size, stride, x._meta.dtype, x._meta.offset if offset is None else offset)
    return strided(x, meta)


def strided(x: HloTensor, meta: Meta) -> HloTensor:
    """A view of x's storage by strides. Raises RuntimeError if it leaves the storage."""
    base = x._storage
    size = base.meta.dtype.itemsize * metas.numel(base.meta.size)
    needed = metas.extent(meta) * meta.dtype.itemsize
    if needed > size:
        raise RuntimeError(
            f"setStorage: sizes {list(meta.size)}, strides {list(meta.stride)}, storage offset {meta.offset}, and itemsize "
            f"{meta.dtype.itemsize} requiring a storage size of {needed} are out of bounds for storage of size {size}"
        )
    if meta is x._meta:
        return alias(x)
    _refuse_lazy_bits(x)
    return make(meta, base, views.strided(base.meta, meta))


def _refuse_lazy_bits(x: HloTensor) -> None:
    """Strides alone do not describe a conjugated or negated view."""
    view = x._view
    while view is not None:
        if view.op in (aten._conj_physical.default, aten.neg.default):
            raise NotImplementedError(
                "as_strided of a conjugated or negated view: call .clone() first"
            )
        view = view.parent


@handles(aten.empty_strided.default, aten.new_empty_strided.default)
def empty_strided(args: tuple, kwargs: dict):
    args = args if not isinstance(args[0], torch.Tensor) else (*args[1:], args[0])
    size, stride = tuple(args[0]), tuple(args[1])
    like = args[2] if len(args) > 2 else None
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    if "device" in kwargs and not dispatch.on_device(kwargs["device"]):
        return aten.empty_strided.default(size, stride, dtype=dtype, device=kwargs["device"])
    meta = metas.intern(size, stride, dtype)
    if metas.physical_order(meta) is None:
        flat = _empty(metas.contiguous((metas.extent(meta),), dtype))
        return strided(flat, meta)
    return _empty(meta)


@handles(aten._efficientzerotensor.default)
def efficient_zeros(args: tuple, kwargs: dict):
    # Forward-mode AD's tangent that is known to be zero; here an ordinary one.
    meta = metas.contiguous(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
    return fresh(
        meta, Out(Node(aten.zeros.default, (list(meta.size),), {"dtype": meta.dtype}, (meta.hlo,)))
    )


def _empty(meta: Meta) -> HloTensor:
    return fresh(
        meta,
        Out(Node(aten.empty.memory_format, (list(meta.size),), {"dtype": meta.dtype}, (meta.hlo,))),
    )


def resize(
    x: HloTensor, size: tuple[int, ...], memory_format: torch.memory_format | None = None
) -> HloTensor:
    """`x.resize_(size)`: the elements in memory order stay; new ones are undefined (zero). Growing grows the storage, which all tensors
    that alias it go on sharing."""
    meta = metas.of(
        torch.empty(
            size,
            dtype=x.dtype,
            device="meta",
            memory_format=memory_format or torch.contiguous_format,
        )
    )
    meta = metas.intern(meta.size, meta.stride, meta.dtype, x._meta.offset)
    base = x._storage.meta
    have, need = metas.numel(base.size), metas.extent(meta)
    if need > have:
        if base.dtype != meta.dtype:
            raise NotImplementedError(
                f"resize_ of a {meta.dtype} view of a {base.dtype} storage: call .clone() first"
            )
        _grow(x, need)
    return adopt(x, strided(x, meta))


def _grow(x: HloTensor, count: int) -> None:
    """Make x's storage a flat array of `count` elements that begins with the present ones, in memory order."""
    storage = x._storage
    base = storage.meta
    flat = metas.contiguous((count,), base.dtype)
    aliases = [x]
    if (
        sys.getrefcount(storage) > 3
    ):  # more than x, this name and the call: other tensors, which only the collector knows
        aliases = [
            t
            for t in gc.get_objects()
            if issubclass(type(t), HloTensor) and t.__dict__.get("_storage") is storage
        ]
    for t in aliases:
        _refuse_lazy_bits(t)
    order = metas.physical_order(base)
    value, shape = storage.value, base.hlo
    if order != tuple(range(len(order))):
        shape = shape.with_dims([shape.dims[d] for d in order])
        value = Out(Node(aten.permute.default, (value, list(order)), {}, (shape,)))
    have = metas.numel(base.size)
    shape = shape.with_dims([have])
    value = Out(Node(aten.view.default, (value, [have]), {}, (shape,)))
    value = Out(Node(aten.constant_pad_nd.default, (value, [0, count - have]), {}, (flat.hlo,)))
    storage.meta = flat
    storage.replace(value)
    for t in aliases:
        t._view = views.strided(flat, t._meta)


@handles(aten.resize_.default)
def resize_(args: tuple, kwargs: dict):
    x, size = args[0], tuple(args[1])
    if size != x._meta.size or kwargs.get("memory_format"):
        resize(x, size, kwargs.get("memory_format"))
    return x


@handles(aten.resize_as_.default)
def resize_as_(args: tuple, kwargs: dict):
    return resize_((args[0], tuple(args[1].shape)), {})


@handles(aten.set_.source_Tensor)
def set_tensor(args: tuple, kwargs: dict):
    if type(args[1]) is not HloTensor:
        raise RuntimeError(
            f"set_: the source is a {args[1].device} tensor, the target an hlo tensor"
        )
    _same_dtype(args[0], args[1])
    return adopt(args[0], alias(args[1]))


@handles(aten.set_.source_Tensor_storage_offset)
def set_tensor_part(args: tuple, kwargs: dict):
    x, source, offset, size, *stride = args
    _same_dtype(x, source)
    size = tuple(size)
    stride = (
        tuple(stride[0]) if stride and stride[0] else metas.contiguous(size, source.dtype).stride
    )
    return adopt(x, strided(source, metas.intern(size, stride, source.dtype, offset)))


def _same_dtype(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.dtype != source.dtype:
        raise RuntimeError(
            f"set_: could not set a tensor of type {source.dtype} to a tensor of type {target.dtype}"
        )


@handles(aten.set_.default)
def set_empty(args: tuple, kwargs: dict):
    return adopt(args[0], _empty(metas.contiguous((0,), args[0].dtype)))


@handles(aten.detach_.default)
def detach_(args: tuple, kwargs: dict):
    return args[0]


def _metadata(view: OpOverload) -> Handler:
    return lambda args, kwargs: adopt(args[0], call(view, *args, **kwargs))


for _name in (
    "t_",
    "transpose_",
    "squeeze_",
    "unsqueeze_",
    "swapaxes_",
    "swapdims_",
    "as_strided_",
):
    _packet = getattr(aten, _name)
    _view = {"swapaxes_": "transpose", "swapdims_": "transpose"}.get(_name, _name[:-1])
    for _overload in _packet.overloads():
        _other = "int" if _view == "transpose" else _overload
        dispatch.TABLE[getattr(_packet, _overload)] = _metadata(
            getattr(getattr(aten, _view), _other)
        )


# ---- mutation that the schema does not declare


@handles(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(args: tuple, kwargs: dict):
    x, weight, bias, mean, var, training, momentum, eps = args
    if mean is None:
        return call(
            aten._native_batch_norm_legit.no_stats, x, weight, bias, training, momentum, eps
        )
    if not training:
        return call(
            aten._native_batch_norm_legit_no_training.default,
            x,
            weight,
            bias,
            mean,
            var,
            momentum,
            eps,
        )
    results = call(aten._native_batch_norm_legit_functional.default, *args)
    assign(mean, results[3])
    assign(var, results[4])
    return results[:3]


@handles(aten.native_batch_norm.out, aten._native_batch_norm_legit.out)
def native_batch_norm_out(args: tuple, kwargs: dict):
    outs = tuple(kwargs[name] for name in ("out", "save_mean", "save_invstd"))
    for target, value in zip(outs, native_batch_norm(args, {})):
        if target._meta.size != value._meta.size:  # the statistics, which are empty in evaluation
            resize(target, value._meta.size)
        assign(target, value)
    return outs


def _eval_batch_norm_metas(x, weight, bias, mean, var, momentum, eps):
    # PyTorch's meta kernel gives sizes to the statistics that the kernels leave empty.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    empty = metas.contiguous((0,), dtype)
    return [metas.dense(x._meta), empty, empty]


dispatch.INFER[aten._native_batch_norm_legit_no_training.default] = _eval_batch_norm_metas
