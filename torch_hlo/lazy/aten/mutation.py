"""In-place ops: the functional twin is recorded, and its results are written to what the schema
says is mutated.

`mutator(op)` makes the handler of any op with written arguments: in-place (`add_`), `out=`, lists
(`_foreach_add_`), and ops that do both (`_native_batch_norm_legit`). Ops that change metadata
(`resize_`, `t_`, `set_`) are written by hand.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_hlo.lowering.core import Node, Out, further, is_pointwise, recorded
from torch_hlo.pytorch import plain_sizes
from torch_hlo.pytorch.operators import OpOverload, base_name
from torch_hlo.pytorch.registration import PLACE

from ..record import (
    Handler,
    HloTensor,
    Meta,
    adopt,
    aten,
    call,
    checks,
    decompose,
    fallback,
    filled,
    generator,
    handlers,
    inference,
    meta as metas,
    meta_tensor,
    read,
    recording,
    session,
    to_cpu,
    write,
)
from ..record.recording import Arguments, operands
from ..record.storage import write_all
from ..record.views import has_lazy_bits
from .strides import resize

IDEMPOTENT = frozenset("fill_ zero_".split())  # may write the same element twice


def written(op: OpOverload) -> list:
    """The schema arguments that the op writes to."""
    return [a for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]


def functional_twin(op: OpOverload) -> OpOverload | None:
    """The overload with the same inputs that returns new tensors instead, or None."""
    name = base_name(op)
    namespace = getattr(torch.ops, op.namespace)
    base = name.removesuffix("_") if not name.endswith("__") else name
    if name.startswith("__i"):
        base = "__" + name[3:]
    wanted = _signature(a for a in op._schema.arguments if not a.is_out)
    for candidate in dict.fromkeys((base, name, base + "_functional")):
        packet = getattr(namespace, candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            twin = getattr(packet, overload)
            if not written(twin) and _signature(twin._schema.arguments) == wanted:
                return twin
    return None


def _signature(arguments: Iterable) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments]


def factory_twin(op: OpOverload) -> OpOverload | None:
    """For `full.out` and the like: the overload that takes dtype and device instead of `out`, or
    None."""
    namespace = getattr(torch.ops, op.namespace)
    wanted = _signature(a for a in op._schema.arguments if a.name != "out")
    packet = getattr(namespace, base_name(op))
    for overload in packet.overloads():
        twin = getattr(packet, overload)
        given = _signature(twin._schema.arguments)
        options = ("dtype", "layout", "device", "pin_memory")
        if (
            any(n == "dtype" for n, _ in given)
            and [a for a in given if a[0] not in options] == wanted
        ):
            return twin
    return None


def maker(op: OpOverload) -> Handler | None:
    """`mutator(op)` of an op that writes to arguments."""
    return mutator(op) if written(op) else None


def mutator(op: OpOverload) -> Handler:
    """Handler of an op that writes to arguments."""
    twin = functional_twin(op)
    if twin is None:
        return _factory_out(op) or decompose.in_place(op)
    targets = written(op)
    if not handlers.has_lowering(twin):
        return decompose.in_place(op, twin) or _general(op, twin, targets)
    if twin in handlers.WRITTEN_BY_HAND:
        return _general(op, twin, targets)
    first = op._schema.arguments[0]
    if (
        [t.name for t in targets] == [first.name]
        and str(first.type) == "Tensor"
        and len(op._schema.returns) == 1
    ):
        return _in_place(op, twin)
    if not op._schema.returns and all(
        "List[Tensor]" in str(t.type) and not t.kwarg_only for t in targets
    ):
        return _in_place_lists(op, twin, targets)
    return _general(op, twin, targets)


def _in_place(op: OpOverload, twin: OpOverload) -> Handler:
    """`x.op_(...)` whose twin is recorded as it is: no temporary tensor is made."""
    arguments = Arguments(twin)
    cache: dict[tuple, tuple] = inference.remembered()
    check = checks.BOUNDS.get(twin)
    random = generator.is_random(twin)
    idempotent = base_name(op) in IDEMPOTENT
    pointwise = is_pointwise(op) or is_pointwise(twin)
    once = {
        aten.masked_fill_: _fill_expanded,
        aten.index_fill_: _index_fill_expanded,
    }.get(op.overloadpacket)
    defaults = _missing_defaults(op, twin)

    def run(args: tuple, kwargs: dict) -> Tensor:
        x = args[0]
        if defaults and len(args) <= defaults[0]:
            args = (*args, *defaults[1])
        if type(x) is not HloTensor:
            checks.admit_target(x, args)
        if x._meta.shares and not idempotent:
            if x._meta.overlaps and once is not None and not has_lazy_bits(x._view):
                if once(*args):
                    return x
            return on_memory(op, args, kwargs, [x])
        for a in args[1:]:
            if type(a) is HloTensor and a._storage is x._storage:
                if pointwise:
                    if not (has_lazy_bits(x._view) or has_lazy_bits(a._view)):  # those are copied
                        checks.refuse_partial_overlap(x, a)
                elif metas.meet(x._meta, a._meta):
                    return on_memory(op, args, kwargs, [x])
        nodes, keywords, key, base, words = operands(args, kwargs, arguments)
        found = cache.get(key)
        if found is None:
            checks.judge(op, checks.admit_all(args), checks.admit_all(kwargs))
            result = inference.infer(twin, args, kwargs)
            _fits(x, result.metas[0])
            checked(op, args, kwargs)
            convert = _conversion(result.metas[0], x._meta)
            found = cache[key] = (result.outs, convert, result.taped)
        if check is not None:
            check(twin, args, kwargs)
        outs, convert, taped = found
        if random:
            value = recording.drawn(twin, nodes, keywords, outs, kwargs)
        else:
            words[0] = taped
            source = session.current().sources and recording.source()
            value = recorded(twin, tuple(nodes), keywords, outs, source, base, words)
        write(x, _converted(value, convert))
        if idempotent and twin in filled.FILLS and x._view is None:
            filled.note(x._storage)
        return x

    return run


def _unexpanded(x: HloTensor) -> tuple[HloTensor, list[int]]:
    """View of each element of an expanded tensor once, and the dimensions that are then of size
    1."""
    repeated = [d for d, (n, s) in enumerate(zip(x._meta.size, x._meta.stride)) if s == 0 and n > 1]
    size = [1 if d in repeated else n for d, n in enumerate(x._meta.size)]
    return call(aten.as_strided.default, x, size, list(x._meta.stride), x._meta.offset), repeated


def _index_fill_expanded(x: HloTensor, dim: int, index: Tensor, value: float | Tensor) -> bool:
    """`index_fill_` of an expanded tensor. Along an expanded dimension any index names all
    elements."""
    own, repeated = _unexpanded(x)
    if dim % x.dim() in repeated:
        if not index.numel():
            return True
        index = call(aten.zeros_like.default, index)
    call(
        (aten.index_fill_.int_Tensor if isinstance(value, Tensor) else aten.index_fill_.int_Scalar),
        own,
        dim,
        index,
        value,
    )
    return True


def _fill_expanded(x: HloTensor, mask: Tensor, value: float | Tensor) -> bool:
    """`masked_fill_` of an expanded tensor: an element is filled where the mask of any of its
    copies is set. True if done."""
    own, repeated = _unexpanded(x)
    mask = call(aten.expand.default, mask, list(x._meta.size))
    for d in repeated:
        mask = call(aten.any.dim, mask, d, True)
    overload = aten.masked_fill_.Tensor if isinstance(value, Tensor) else aten.masked_fill_.Scalar
    call(overload, own, mask, value)
    return True


def put_expanded(x: HloTensor, indices: list, values: Tensor, accumulate: bool = False) -> bool:
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
        x,
        mask,
        call(aten._to_copy.default, call(aten.view.default, values, []), dtype=x.dtype),
    )


_OWN = {HloTensor}


def _in_place_lists(op: OpOverload, twin: OpOverload, targets: list) -> Handler:
    """`_foreach_add_(xs, ...)`, `_fused_adamw_(...)`: one node, whose results are written to the
    tensors of the lists."""
    arguments = Arguments(twin)
    cache: dict[tuple, tuple] = inference.remembered()
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
            return handlers.nested(one_by_one, args, kwargs)
        nodes, keywords, key, base, words = operands(args, kwargs, arguments)
        found = cache.get(key)
        if found is None:
            if any(t._meta.shares for t in tensors):
                return on_memory(op, args, kwargs, tensors)
            result = inference.infer(twin, args, kwargs)
            if [m.size for m in result.metas] != [t._meta.size for t in tensors]:
                # raises: a result does not fit into the tensor it replaces
                checked(op, args, kwargs)
                raise RuntimeError(
                    f"{op}: the results have other sizes than the tensors they would replace"
                )
            checks.judge(op, checks.admit_all(args), checks.admit_all(kwargs))
            conversions = [_conversion(m, t._meta) for m, t in zip(result.metas, tensors)]
            found = cache[key] = (result.outs, conversions, result.taped)
        outs, conversions, taped = found
        words[0] = taped
        source = session.current().sources and recording.source()
        first = recorded(twin, tuple(nodes), keywords, outs, source, base, words)
        values = [first, *[further(first.node, i) for i in range(1, len(tensors))]]
        if any(conversions):
            values = [*map(_converted, values, conversions)]
        write_all(tensors, values)

    return run


def _order_matters(targets: list[HloTensor], reads: list) -> bool:
    """Whether tensors of a list share memory so that an update sees an earlier one: a tensor given
    twice, overlapping views, operands that are targets too. `reads`: lists of operands by target,
    or operands that every update reads."""
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
    """Position and values of trailing defaults that `op` has and its twin has not (`bernoulli_`'s
    p)."""
    for i, (mine, other) in enumerate(zip(op._schema.arguments, twin._schema.arguments)):
        if not mine.kwarg_only and mine.has_default_value() and not other.has_default_value():
            return i, (mine.default_value,)
    return None


def on_memory(op: OpOverload, args: tuple, kwargs: dict, targets: list[HloTensor]) -> Any:
    """An op that writes to tensors of which several elements are one place in memory, or which
    share memory with other arguments: PyTorch refuses it (RuntimeError), or what becomes of the
    place follows from the order in which its kernel writes."""
    elementwise = is_pointwise(op) or op is aten.copy_.default
    if elementwise and any(t._meta.overlaps for t in targets):
        raise RuntimeError(OVERLAP)
    return fallback.run_fallback(op, args, kwargs, SHARED)


SHARED = (
    "elements that it writes share memory with others, and the result follows from the order in"
    " which they are written. To stay on the device, clone() the tensors"
)
OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single"
    " memory location. Please clone() the tensor before performing the operation."
)


def _conversion(result: Meta, target: Meta) -> tuple | None:
    if result.dtype == target.dtype:
        return None
    return {"dtype": target.dtype}, (target.hlo,)


def _converted(value: Out, convert: tuple | None) -> Out:
    return value if convert is None else Out(Node(aten._to_copy.default, (value,), *convert))


@plain_sizes.answers()
def checked(op: OpOverload, args: tuple, kwargs: dict) -> list[Tensor]:
    """Run the mutating op itself on meta tensors, so that its errors are PyTorch's. Returns the
    meta tensors written to."""
    mirrors: dict[int, Tensor] = {}

    def mirror(a: object) -> object:
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
    targets, _ = fallback.by_use(op, tuple(args), kwargs)
    return [mirrors[id(t)] for t in targets]


def _general(op: OpOverload, twin: OpOverload, targets: list) -> Handler:
    """Any mutating op: run the twin through the table, write its results to the targets: the first
    to `out=` arguments, where there are both, and the last to arguments updated in place."""
    names = [a.name for a in op._schema.arguments]
    out_names = {a.name for a in targets if a.kwarg_only}
    sets = [a.alias_info.before_set for a in targets]
    returns = [
        sets.index(r.alias_info.before_set) if r.alias_info else None for r in op._schema.returns
    ]
    lists = any("List[Tensor]" in str(a.type) for a in targets)
    both = 0 < len(out_names) < len(targets)

    def run(args: tuple, kwargs: dict) -> Tensor | tuple[Tensor, ...] | None:
        given = dict(zip(names, args)) | kwargs
        outs = [given.get(a.name) for a in targets]
        for o in outs:
            if isinstance(o, Tensor) and type(o) is not HloTensor:
                checks.admit_target(o, args)
        tensors = [o for o in outs if type(o) is HloTensor]
        if _share_memory(tensors, given):
            return on_memory(op, args, kwargs, tensors)
        mirrors = ()
        if not lists:
            # The meta run resizes `out=` as PyTorch does (with its warning) and checks shapes and
            # dtypes.
            try:
                mirrors = checked(op, args, kwargs)
            except NotImplementedError:  # no meta kernel: the values tell the sizes
                mirrors = None
            except Exception:
                checks.explain(op, args, kwargs)
                raise
        if out_names:
            checks.judge_out(op, args, kwargs, mirrors or ())
        results = call(twin, *args, **{k: v for k, v in kwargs.items() if k not in out_names})
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        new = [results] if lists and len(targets) == 1 else results[len(results) - len(targets) :]
        if both:
            new = [*results[len(out_names) :], *results[: len(out_names)]]
        if not lists and mirrors is not None:
            for o, m, value in zip([o for o in outs if o is not None], mirrors, new):
                if tuple(m.shape) != o._meta.size:
                    resize(o, tuple(m.shape), value._meta.stride)
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


def _share_memory(targets: list[HloTensor], given: dict) -> bool:
    """Whether a target shares memory with itself or with another argument that is not the same
    view. Those that are conjugated or negated are copied."""
    found: dict[int, HloTensor] = {}
    fallback.collect(list(given.values()), found)
    plain = [t for t in found.values() if not has_lazy_bits(t._view)]
    return any(
        t._meta.shares
        or any(
            o._storage is t._storage and o._meta is not t._meta and metas.meet(o._meta, t._meta)
            for o in plain
            if not has_lazy_bits(t._view)
        )
        for t in targets
    )


def _returned(
    outs: list, results: list, returns: list[int | None]
) -> Tensor | tuple[Tensor, ...] | None:
    """What the op returns: by position the target that it is, or None for the next of the twin's
    results."""
    if not returns:
        return None
    plain = iter(results)
    values = [next(plain) if target is None else outs[target] for target in returns]
    return values[0] if len(values) == 1 else tuple(values)


def _factory_out(op: OpOverload) -> Handler | None:
    twin = factory_twin(op)
    if twin is None:
        return None
    # these only ask for the number of elements
    numbered = base_name(op) in ("arange", "range", "linspace", "logspace")

    def run(args: tuple, kwargs: dict) -> Tensor:
        out = kwargs["out"]
        rest = {k: v for k, v in kwargs.items() if k != "out"}
        if type(out) is not HloTensor:  # numbers from the device may make a tensor elsewhere
            return op(*fetched(args), **fetched(rest), out=out)
        if out._meta.shares:
            return on_memory(op, args, kwargs, [out])
        value = call(twin, *args, **rest, dtype=out._meta.dtype, device=PLACE.device)
        # `torch.arange(n)` begins with an empty tensor
        if out._meta.size == (0,) and sys.getrefcount(out._storage) == 2:
            return adopt(out, value)
        if numbered and value.numel() == out.numel():
            value = call(aten.view.default, value, list(out._meta.size))
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


def assign(target: HloTensor, value: Tensor) -> None:
    """target[...] = value, which has the target's shape; the dtype is converted."""
    if target._meta.overlaps:
        raise RuntimeError(OVERLAP)
    if type(value) is not HloTensor:
        value = checks.admit(value)
    new = read(value)
    _fits(target, value._meta)
    write(target, _converted(new, _conversion(value._meta, target._meta)))


def _fits(target: HloTensor, new: Meta) -> None:
    """What is written has the size of the tensor that it is written to."""
    if new.size != target._meta.size:
        raise RuntimeError(
            f"output with shape {list(target._meta.size)} doesn't match the broadcast shape"
            f" {list(new.size)}"
        )
