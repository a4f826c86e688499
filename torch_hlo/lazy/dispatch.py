"""Every operation on hlo tensors arrives here: `handle(op, args, kwargs)`.

`TABLE[op]` is a function `(args, kwargs) -> result` made once from the op's schema by `resolve`:
* hand-written (`@handles`, in the modules dispatch imports at its end),
* a view: new metadata over the same storage,
* a mutation: the functional twin, then a write (mutation.py),
* a recorded function: a Node in the graph,
* an op without a lowering: its decomposition, else the CPU.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch._ops import OpOverload

from torch_hlo import config
from torch_hlo.device import collective as collective_devices
from torch_hlo.hlo.shape import Shape
from torch_hlo.lazy import backend, engine, plain_sizes, sizes, storage, tensor
from torch_hlo.lazy import meta as metas
from torch_hlo.lazy.meta import Meta, Result, aten
from torch_hlo.lazy.storage import RECORDING, Number, holding, read
from torch_hlo.lazy.tensor import DEVICE, HloTensor, blank, fresh, in_inference_mode, make
from torch_hlo.lazy.views import View, chain
from torch_hlo.lowering.graph import NO_KWARGS, Node, Out, further, recorded
from torch_hlo.lowering.registry import GUARDS, LOWERINGS
from torch_hlo.lowering.tape import TAPE

Handler = Callable[[tuple, dict], object]
TABLE: dict[OpOverload, Handler] = {}
_FOUND: dict[int, Handler] = {}  # TABLE by the op's id, which needs no call of OpOverload.__hash__
_ENTRIES: dict[int, Handler] = {}  # the same for ops that arrive from outside: see `entry`
WRITTEN_BY_HAND: set[OpOverload] = set()  # what `@handles` registered
_PENDING = storage.PENDING


class Foreign(Exception):
    """An argument is a tensor subclass that has to handle the op itself."""


def handle(func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None):
    """Record (or run) one op: HloTensor's `__torch_dispatch__`. Raises what PyTorch raises for bad arguments."""
    return (_ENTRIES.get(id(func)) or entry(func))(args, kwargs or NO_KWARGS)


def entry(op: OpOverload) -> Handler:
    """The handler of an op that arrives from outside."""
    _ENTRIES[id(op)] = found = in_turn(find(op))
    return found


def in_turn(handler: Handler) -> Handler:
    """A handler that waits for its turn."""

    def alone(args: tuple, kwargs: dict):
        with RECORDING:
            if storage.TRACING is not None:
                storage.after_traces()
            if len(_PENDING) >= LIMIT:
                cut()
            try:
                return handler(args, kwargs)
            except Foreign:
                return NotImplemented

    return alone


def eager_handle(
    func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
):
    """`handle` for TORCH_HLO_EAGER: evaluate before returning."""
    result = handle(func, types, args, kwargs)
    if not _state.nested:
        engine.current().mark_step(wait=True)
    return result


class _State(threading.local):
    def __init__(self) -> None:
        self.nested = 0  # depth of decompositions
        self.active: set[OpOverload] = set()  # ops being decomposed


_state = _State()
LIMIT = config.get("MAX_NODES")


def cut() -> None:
    """The graph has grown to MAX_NODES: evaluate it."""
    global LIMIT
    LIMIT = config.get("MAX_NODES")
    if len(_PENDING) >= LIMIT:
        storage.forget_bound()
        engine.current().mark_step()


@contextlib.contextmanager
def uncut() -> Iterator[None]:
    """Inside, the graph may grow beyond MAX_NODES: one program is made of all of it."""
    global LIMIT
    before, LIMIT = LIMIT, sys.maxsize
    try:
        yield
    finally:
        LIMIT = before


def set_eager(on: bool) -> None:
    """Evaluate every op at once (True) or record (False)."""
    if on:
        engine.current().mark_step(wait=True)
    tensor.install(eager_handle if on else handle)


# ---- hand-written handlers and their helpers


def handles(*ops: OpOverload) -> Callable[[Handler], Handler]:
    """Register a handler for these overloads."""

    def register(fn: Handler) -> Handler:
        for op in ops:
            if op in TABLE:
                raise ValueError(f"{op} has two handlers")
            TABLE[op] = fn
            WRITTEN_BY_HAND.add(op)
        return fn

    return register


def find(op: OpOverload) -> Handler:
    """The handler of an op."""
    handler = _FOUND[id(op)] = TABLE.get(op) or resolve(op)
    return handler


def resolve(op: OpOverload) -> Handler:
    """Make, remember and return the handler of an op."""
    schema = op._schema
    if op.namespace in COMMUNICATION:
        from torch_hlo.lazy import collective

        handler = collective.handler(op)
    elif any(a.alias_info and a.alias_info.is_write for a in schema.arguments):
        handler = mutation.mutator(op)
    elif op in VIEWS:
        handler = viewer(op)
    elif any(r.alias_info for r in schema.returns):
        handler = aliasing(op)
    elif has_lowering(op) or has_lowering(generator.plain(op)):
        handler = recorder(op)
        if op in optimizer_state.FILLS:
            handler = optimizer_state.noted(handler)
    else:
        handler = lower_or_fall_back(op)
    return TABLE.setdefault(op, handler)


COMMUNICATION = ("c10d", "_c10d_functional", "_dtensor")


def has_lowering(op: OpOverload) -> bool:
    """True if the op may be recorded as it is."""
    return op in LOWERINGS


def lower_or_fall_back(op: OpOverload) -> Handler:
    """The handler of a functional op without a lowering."""

    def on_cpu(args: tuple, kwargs: dict):
        return decompose.on_cpu(op, args, kwargs)

    decomposition = decompose.decomposition(op)
    if decomposition is None:
        return on_cpu

    def decomposed(args: tuple, kwargs: dict):
        if (
            op in _state.active
        ):  # many of PyTorch's decompositions end in a primitive that is the op itself
            TABLE[op] = _FOUND[id(op)] = on_cpu
            _ENTRIES.pop(id(op), None)
            return on_cpu(args, kwargs)
        _state.active.add(op)
        try:
            return nested(decomposition, args, kwargs)
        finally:
            _state.active.discard(op)

    return decomposed


def nested(fn: Callable, args: tuple, kwargs: dict):
    """Call a decomposition: ops on hlo tensors re-enter `handle`; autocast does not apply a second time."""
    _state.nested += 1
    try:
        with backend.without_autocast():
            return fn(*args, **kwargs)
    finally:
        _state.nested -= 1


# ---- recording


class Arguments:
    """How the arguments of one overload are recorded: which positions and keywords take floats as inputs of the program."""

    __slots__ = ("lift", "lift_keywords")

    def __init__(self, op: OpOverload) -> None:
        arguments = op._schema.arguments
        lifted = [lifts(op, a) for a in arguments]
        self.lift = tuple(lifted) + (False,)
        self.lift_keywords = {a.name for a, yes in zip(arguments, lifted) if yes}


# Scalars that choose the structure of the computation or the shape of the result: they stay in the graph.
STATIC_PACKETS = frozenset(
    "pow float_power norm linalg_vector_norm linalg_norm linalg_matrix_norm renorm dist cdist arange range linspace logspace histc histogram "
    "_foreach_pow _foreach_norm native_norm polygamma mvlgamma embedding_renorm constant_pad_nd _pdist_forward pdist full_like".split()
)


def lifts(op: OpOverload, argument) -> bool:
    """True if a float given for this argument travels beside the graph."""
    name = op._schema.name.split("::")[1].removesuffix("_")
    if name.startswith("_fused_"):
        return str(argument.type) in ("float", "number", "Scalar", "Tensor")
    if name in STATIC_PACKETS:
        return False
    kind = str(argument.type)
    return kind in ("number", "Tensor", "List[number]", "Optional[number]")


# Arguments that stay in the graph as they are. In a key their type stands before the value: 1 == 1.0 == True.
_STATIC = frozenset(
    {int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def operand(a, key: list, words: list[int], lift: bool):
    """Operand of a node for the argument `a`, whose contributions to the metadata key and to the tape are appended to `key` and `words`."""
    kind = type(a)
    if kind is HloTensor:
        key.append(a._meta)
        value = read(a)
        words.append(TAPE.place(value))
        return value
    if kind is float:
        key.append(float)
        if lift:
            number = Number(a, "f64")
            words.append(TAPE.place(number))
            return number
        key.append(a.hex())  # 0.0 == -0.0
        return a
    if kind in _STATIC:
        key.append(kind)
        key.append(a)
        return a
    if kind is list or kind is tuple:
        return sequence(a, key, words, lift)
    if isinstance(a, torch.Tensor):
        a = checks.admit(a)
        key.append(a._meta)
        value = read(a)
        words.append(TAPE.place(value))
        return value
    if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError(f"the hlo device cannot record the symbolic value {a}")
    key.append(kind)
    key.append(a if kind is not complex else repr(a))
    return a


def sequence(items: list | tuple, key: list, words: list[int], lift: bool) -> list:
    """Operand for a list: sizes and dimensions at once, the hundreds of tensors of an optimizer in one loop, others one by one."""
    kinds = tuple(map(type, items))
    key.append(kinds)
    one_kind = _UNIFORM.get(kinds)
    if one_kind is None:
        one_kind = _UNIFORM[kinds] = (
            HloTensor if {*kinds} == {HloTensor} else int if {*kinds} <= _STATIC else object
        )
    if one_kind is int:
        key.append(tuple(items))
        return list(items)
    if one_kind is object:
        return [operand(x, key, words, lift) for x in items]
    values = []
    base = TAPE.base
    for t in items:
        key.append(t._meta)
        value = t._storage.value if t._view is None else read(t)
        values.append(value)
        place = value.place - base  # TAPE.place, inlined here and below: this is the hot path
        words.append(place if place >= 0 else TAPE.put(value))
    return values


_UNIFORM: dict[
    tuple[type, ...], type
] = {}  # types of a list's items -> HloTensor for tensors of this device, int for static arguments, else object


_DROPPED = ("device", "layout", "pin_memory", "generator")


def operands(
    args: tuple, kwargs: dict, arguments: Arguments
) -> tuple[list, dict, tuple, int, list[int]]:
    """Node arguments, node keywords, metadata key; start of the tape, and the words for it (the form is left open)."""
    key: list = []
    words = [-1]
    nodes = []
    base = TAPE.base
    for a in args:
        kind = type(a)
        if kind is HloTensor:
            key.append(a._meta)
            value = a._storage.value if a._view is None else read(a)
            nodes.append(value)
            place = value.place - base
            words.append(place if place >= 0 else TAPE.put(value))
        elif kind in _STATIC:
            key.append(kind)
            key.append(a)
            nodes.append(a)
        else:
            nodes.append(operand(a, key, words, arguments.lift[len(nodes)]))
    if not kwargs:
        return nodes, NO_KWARGS, tuple(key), base, words
    keywords = {}
    for name, a in kwargs.items():
        if name in _DROPPED:
            if name == "layout" and a not in (None, torch.strided):
                raise NotImplementedError(f"the hlo device holds strided tensors only, not {a}")
            continue
        key.append(name)
        keywords[name] = operand(a, key, words, name in arguments.lift_keywords)
    return nodes, keywords, tuple(key), base, words


_caches: list[dict] = []


def remembered(cache: dict) -> dict:
    """Register a cache of metadata, which depends on the default dtype."""
    _caches.append(cache)
    return cache


def forget() -> None:
    """The default dtype has changed: what was learned about results is no longer true."""
    for cache in _caches:
        cache.clear()


def recorder(op: OpOverload, random: bool | None = None, first: bool = False) -> Handler:
    """Handler that records a functional op. `random`: whether it draws random numbers, where its name does not say so; `first`: only the first of its results,
    which are tensors, is wanted."""
    arguments = Arguments(op)
    cache: dict[tuple, Result] = remembered({})
    check = checks.BOUNDS.get(op)
    guard = GUARDS.get(op)
    random = generator.is_random(op) if random is None else random
    target = generator.plain(op)
    has_device = any(a.name == "device" for a in op._schema.arguments)

    def record(args: tuple, kwargs: dict):
        if has_device and "device" in kwargs and not on_device(kwargs["device"]):
            return like_on_cpu(op, args, kwargs)
        nodes, keywords, key, base, words = operands(args, kwargs, arguments)
        result = cache.get(key)
        if result is None:
            if guard is not None and not guard(*args, **kwargs):
                return decompose.on_cpu(op, args, kwargs)
            try:
                result = cache[key] = infer(target, args, kwargs)
            except (
                NotImplementedError
            ):  # no meta kernel: the shapes are not known before the op has run
                return decompose.on_cpu(op, args, kwargs)
        if check is not None:
            check(op, args, kwargs)
        if random:
            seed, offset = generator.draw(kwargs)
            value = Out(
                Node(
                    target,
                    tuple(nodes),
                    {**keywords, "seed": seed, "offset": offset},
                    result.outs,
                    SOURCE and source(),
                )
            )
        else:
            words[0] = result.taped
            value = recorded(
                target, tuple(nodes), keywords, result.outs, SOURCE and source(), base, words
            )
        if first or result.form == 0:
            meta = result.metas[0]
            t = blank(meta)  # `fresh`, inlined: this is the hot path
            t._storage = holding(value, meta)
            return t
        node = value.node
        if result.flat is None:
            return build(result.form, result.metas, node)
        results = []
        for meta in result.metas:
            t = None
            if meta is not None:
                t = blank(meta)
                t._storage = holding(further(node, len(results)) if results else value, meta)
            results.append(t)
        return results if result.flat is list else tuple(results)

    return record


def _grouped_mm(a, b, offs=None, bias=None, out_dtype=None) -> list[Meta]:
    """PyTorch's meta kernel has the limits of the CUDA kernel: bfloat16, aligned strides."""
    (*ga, m, k), (*gb, k_, n) = a.shape, b.shape
    if len(ga) > 1 or len(gb) > 1:
        raise RuntimeError(
            f"_grouped_mm takes 2-D and 3-D operands, not {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dtype != b.dtype or bias is not None or out_dtype not in (None, a.dtype):
        raise RuntimeError(
            f"_grouped_mm: {a.dtype} x {b.dtype} -> {out_dtype}{' + bias' if bias is not None else ''}: one dtype, no bias"
        )
    both = bool(ga and gb)
    if (
        k != k_
        or both
        and (ga != gb or offs is not None)
        or not both
        and (offs is None or [*ga, *gb] not in ([], [*offs.shape]))
    ):
        ends = None if offs is None else tuple(offs.shape)
        raise RuntimeError(
            f"_grouped_mm: operands {tuple(a.shape)} and {tuple(b.shape)} do not fit with offsets {ends}"
        )
    groups = tuple(ga) if both else () if ga or gb else tuple(offs.shape)
    return [metas.contiguous((*groups, m, n), a.dtype)]


# Ops whose meta kernel is missing or wrong: arguments -> metas of the results (None: undefined), or a Result.
INFER: dict[OpOverload, Callable] = {
    aten._grouped_mm.default: _grouped_mm,
    aten.multi_margin_loss_backward.default: lambda grad, x, *rest, **options: [
        metas.dense(x._meta)
    ],
    aten.multilabel_margin_loss_backward.default: lambda grad, x, *rest, **options: [
        metas.dense(x._meta)
    ],
}


@plain_sizes.answers()
def infer(op: OpOverload, args: tuple, kwargs: dict) -> Result:
    """Metadata of the results, by running the op on meta tensors; raises PyTorch's own errors."""
    own = INFER.get(op)
    if own is not None:
        found = own(*checks.admit_all(args), **checks.admit_all(kwargs))
        return found if type(found) is Result else Result.of(found, len(op._schema.returns) == 1)
    args, kwargs = checks.admit_all(args), checks.admit_all(kwargs)
    meta = sizes.predict(op, args, kwargs, _dtypes)
    if meta is not None:
        return Result.of([meta], single=True)
    try:
        result = metas.infer(op, args, kwargs, HloTensor)
    except (RuntimeError, IndexError):
        checks.judge(op, args, kwargs)  # the CPU's error has the type that users know
        raise
    validate = checks.VALIDATE.get(op)
    if validate is not None:
        validate(*args, **kwargs)
    checks.judge(op, args, kwargs)
    if result.form == 0 and len(result.metas[0].size) > 1 or op is aten.flip.default:
        strides = checks.cpu_strides(op, args, kwargs)
        if strides is not None and strides != result.metas[0].stride:
            meta = result.metas[0]
            return Result.of([metas.intern(meta.size, strides, meta.dtype)], single=True)
    sizes.learn(op, args, kwargs, result, _dtypes)
    return result


_dtypes: dict[tuple, torch.dtype] = remembered({})


def build(form, metadata: tuple[Meta | None, ...], node: Node):
    """The results of a node in the nesting `form`."""
    kind = type(form)
    if kind is int:
        meta = metadata[form]
        return None if meta is None else fresh(meta, Out(node, form))
    if kind is dict:
        return form["value"]
    return kind(build(f, metadata, node) for f in form)


def call(op: OpOverload, *args, **kwargs):
    """The op through the table, without the dispatcher: for handlers built from other ops."""
    return (_FOUND.get(id(op)) or find(op))(args, kwargs)


def on_device(device) -> bool:
    """True for the hlo device (or no device). Raises for an index that does not exist."""
    if device is None:
        return True
    device = torch.device(device)
    if device.type != DEVICE.type and device.type != "hlo":
        return False
    if device.index and not collective_devices.is_own_index(device.index):
        raise RuntimeError(collective_devices.ORDINAL.format(device.index))
    return True


def like_on_cpu(op: OpOverload, args: tuple, kwargs: dict):
    """`zeros_like(x, device="cpu")` and friends: only the metadata of x counts."""

    def stand_in(a):
        if isinstance(a, HloTensor):
            return aten.empty_strided.default(
                a._meta.size, a._meta.stride, dtype=a._meta.dtype, device="cpu"
            )
        return a

    return op(*map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()})


# ---- views


def outside_inference_mode(handler: Handler, args: tuple, kwargs: dict):
    """A view, made under inference_mode, of a tensor that was made outside: like that tensor it has a version counter and may be written."""
    with torch.inference_mode(False):
        return handler(args, kwargs)


def aliasing(op: OpOverload) -> Handler:
    """Handler of an op that may return a view and is made of other ops (`reshape`, which arrives under inference_mode)."""
    kernel = decompose.composite(op)
    if kernel is None:
        raise NotImplementedError(
            f"the hlo device does not know the view operation {op}; use an operation that copies"
        )
    return lambda args, kwargs: nested(kernel, args, kwargs)


class ViewRule:
    """What a view op does to tensors of one Meta: the resulting metas and, for each, the step of the chain; `views` are those of tensors that are no views."""

    __slots__ = ("metas", "steps", "views", "many")

    def __init__(
        self, metas: list[Meta], steps: list[tuple | None], base: Shape, many: bool
    ) -> None:
        self.metas, self.steps, self.many = metas, [step and (*step, base) for step in steps], many
        self.views = [step and View(None, *step) for step in self.steps]


def viewer(op: OpOverload) -> Handler:
    """Handler of a view op: `op(self, *args)`."""
    names = [a.name for a in op._schema.arguments]
    cache: dict[tuple, ViewRule] = {}
    plan = VIEWS[op]
    lists = sum("List" in str(a.type) for a in op._schema.arguments)  # come first

    def view(args: tuple, kwargs: dict):
        x = args[0]
        if in_inference_mode() and not x.is_inference():
            return outside_inference_mode(view, args, kwargs)
        if kwargs:
            args = (*args, *[kwargs[n] for n in names[len(args) :] if n in kwargs])
        meta = x._meta
        key = (
            (meta, *args[1:])
            if not lists
            else (meta, tuple(args[1]), *args[2:])
            if lists == 1
            else (meta, *map(tuple, args[1:]))
        )
        rule = cache.get(key)
        if rule is None:
            rule = cache[key] = make_rule(op, plan, meta, args[1:])
        base, parent = x._storage, x._view
        if not rule.many:
            t = blank(rule.metas[0])
            t._storage = base
            if parent is None:
                t._view = rule.views[0]
            else:
                step = rule.steps[0]
                t._view = parent if step is None else View(parent, *step)
            return t
        if parent is None:
            return [make(m, base, v) for m, v in zip(rule.metas, rule.views)]
        return [make(m, base, View(parent, *s)) for m, s in zip(rule.metas, rule.steps)]

    return view


@plain_sizes.answers()
def make_rule(op: OpOverload, plan, meta: Meta, args: tuple) -> ViewRule:
    """Run the view on a meta tensor for its metadata; `plan` says what to record."""
    result = op(metas.meta_tensor(meta), *args)
    many = isinstance(result, (list, tuple))
    found = [metas.of(t) for t in (result if many else [result])]
    steps = [step and (*step, TAPE.form_of_view(*step)) for step in plan(op, meta, args, found)]
    if not many and found[0].hlo == meta.hlo and op in _RESHAPES:
        steps = [None]  # nothing changes but strides
    return ViewRule(found, steps, meta.hlo, many)


def _as_is(op, meta, args, found):
    return [(op, tuple(list(a) if isinstance(a, (tuple, list)) else a for a in args), found[0].hlo)]


def _as_reshape(op, meta, args, found):
    return [(aten.view.default, (list(found[0].size),), found[0].hlo)]


def _as_expand(op, meta, args, found):
    return [(aten.expand.default, (list(found[0].size),), found[0].hlo)]


def _as_slices(op, meta, args, found):
    dim = (args[1] if len(args) > 1 else 0) % len(meta.size)
    steps, start = [], 0
    for m in found:
        steps.append((aten.slice.Tensor, (dim, start, start + m.size[dim]), m.hlo))
        start += m.size[dim]
    return steps


def _as_selects(op, meta, args, found):
    dim = (args[0] if args else 0) % len(meta.size)
    return [(aten.select.int, (dim, i), m.hlo) for i, m in enumerate(found)]


def _as_slice(op, meta, args, found):
    dim, start, stop, step = (*args, *(0, None, None, 1)[len(args) :])
    dim %= len(meta.size)
    size = meta.size[dim]
    start = min(max(start + size if start < 0 else start, 0), size) if start is not None else 0
    length = found[0].size[dim]
    stop = min(start + (length - 1) * step + 1, size) if length else start
    if length == size and step == 1:
        return [None]
    return [
        (
            aten.slice.Tensor,
            (dim, start, stop) if step == 1 else (dim, start, stop, step),
            found[0].hlo,
        )
    ]


def _as_select(op, meta, args, found):
    dim, index = args
    dim %= len(meta.size)
    return [(aten.select.int, (dim, index % meta.size[dim]), found[0].hlo)]


_RESHAPES = {
    aten.view.default, aten._reshape_alias.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.expand.default, aten.slice.Tensor,
}  # fmt: skip
VIEWS: dict[OpOverload, Callable] = {
    aten.view.default: _as_reshape, aten._reshape_alias.default: _as_reshape, aten.squeeze.default: _as_reshape,
    aten.squeeze.dim: _as_reshape, aten.squeeze.dims: _as_reshape, aten.unsqueeze.default: _as_reshape,
    aten.expand.default: _as_expand, aten.permute.default: _as_is, aten.t.default: _as_is, aten.transpose.int: _as_is,
    aten.select.int: _as_select, aten.slice.Tensor: _as_slice, aten.diagonal.default: _as_is, aten.unfold.default: _as_is,
    aten.split.Tensor: _as_slices, aten.split_with_sizes.default: _as_slices, aten.unbind.int: _as_selects,
    aten.view_as_real.default: _as_is, aten.view_as_complex.default: _as_is, aten.view.dtype: _as_is,
}  # fmt: skip


@handles(aten._unsafe_view.default)
def unsafe_view(args: tuple, kwargs: dict):
    """A view whose schema does not say so: `kron(out=)` writes through it."""
    return call(aten.view.default, *args)


@handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def detach(args: tuple, kwargs: dict):
    x = args[0]
    if in_inference_mode() and not x.is_inference():
        return outside_inference_mode(detach, args, kwargs)
    t = blank(x._meta)
    t._storage = x._storage
    t._view = x._view
    return t


def _bit_view(op: OpOverload) -> Handler:
    # conj() and _neg_view() are views whose bit other devices keep in the tensor; here the values are computed.
    def view(args: tuple, kwargs: dict):
        x = args[0]
        if in_inference_mode() and not x.is_inference():
            return outside_inference_mode(view, args, kwargs)
        return make(x._meta, x._storage, chain(x._view, x._meta.hlo, (op, (), x._meta.hlo)))

    return view


TABLE[aten._conj.default] = _bit_view(aten._conj_physical.default)
TABLE[aten._neg_view.default] = _bit_view(aten.neg.default)


# ---- where in the user's program


SOURCE = config.get("LOG") >= 1 or bool(config.get("DUMP"))


def source() -> str:
    """`file:line` of the innermost frame outside torch and torch_hlo, or ""."""
    import sys

    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "torch_hlo.")) and name not in ("torch", "torch_hlo"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# These modules use the names above. One line each: a handler made while a later one loads needs the earlier ones.
from torch_hlo.lazy import checks  # noqa: E402, I001
from torch_hlo.lazy import conditions  # noqa: E402, F401
from torch_hlo.lazy import decompose  # noqa: E402
from torch_hlo.lazy import generator  # noqa: E402
from torch_hlo.lazy import optimizer_state  # noqa: E402
from torch_hlo.lazy import mutation  # noqa: E402
from torch_hlo.lazy import sync  # noqa: E402, F401

tensor.install(eager_handle if config.get("EAGER") else handle)
