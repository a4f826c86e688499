"""Steps: cut the recorded graph, find or compile its program, run it in the background, give the storages their new values.

    mark_step()          everything recorded so far becomes one program; returns while it runs
    sync()               the same, and wait
    materialize([t])     CPU copies; an implicit cut (print, .item(), .cpu()) evaluates the whole pending graph, so that work is not split

A failure leaves the tensors as they were. While cutting (an op cannot be lowered, no memory, Ctrl-C) nothing has changed yet and the
graph stays pending. While running, the storages get their graph back when the error surfaces: at the next cut or wait, with the name
of the step. A program raises before it writes, so donated inputs are intact.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary, ref

import torch

from torch_hlo import config, metrics
from torch_hlo.device import cpu, runtime, trim
from torch_hlo.device.runtime import Buffer, Memory
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.shape import Shape
from torch_hlo.lazy import (
    conditions,
    dump,
    exchange,
    executor,
    explain,
    generalize,
    log,
    progress,
    spmd,
)
from torch_hlo.lazy import meta as metas
from torch_hlo.lazy.fingerprint import Graph, collect, operands
from torch_hlo.lazy.launch import (
    IN_FLIGHT,
    Compiled,
    InPlace,
    Programs,
    launch,
    leaf_buffer,
    number_buffers,
    stream,
)
from torch_hlo.lazy.storage import (
    RECORDING,
    Array,
    Binding,
    Effect,
    Number,
    Storage,
    after_traces,
    must_run,
    pending,
    pending_storages,
    take_effects,
)
from torch_hlo.lazy.tensor import to_cpu
from torch_hlo.lazy.views import on_host
from torch_hlo.lowering.graph import Leaf, Node, Out, lower
from torch_hlo.lowering.registry import HLO_TO_TORCH
from torch_hlo.lowering.tape import TAPE

_CACHE: OrderedDict[tuple, Compiled] = OrderedDict()
_compiles = 0


# ---- the verbs


def mark_step(wait: bool = False) -> None:
    """Make one program of everything recorded and run it; in the background unless `wait`.

    Raises the error of an earlier step that failed in the background, LoweringError if an op cannot be compiled, MemoryError.
    """
    metrics.count("MarkStep")
    _evaluate()
    if wait:
        _wait_all()


def sync(tensors: Sequence[torch.Tensor] | None = None) -> None:
    """Evaluate everything recorded and wait: for all of it, or until `tensors` are there."""
    _evaluate()
    if tensors is None:
        _wait_all()
        return
    for tensor in tensors:
        value = tensor._storage.value
        if type(value) is Array and value.data is not None:
            executor.wait(value.data)
    _surface()


def synchronize() -> None:
    """Evaluate everything recorded and wait for all work under way."""
    sync()


@contextlib.contextmanager
def step() -> Iterator[None]:
    """A training step: `with torch_hlo.step(): ...` marks it at the end of the block (not when the block raises)."""
    yield
    mark_step()


def upload(tensor: torch.Tensor) -> Buffer:
    """The values of a tensor of the CPU, or of torch.cuda, as a new device array. Later writes to `tensor` do not show."""
    start = time.perf_counter()
    if exchange.shares(tensor.device):
        return exchange.take_in(tensor)
    shape = metas.contiguous(tuple(tensor.shape), tensor.dtype).hlo
    if _is_zeros(tensor):
        buffer = runtime.zeros(shape)
    else:
        trim.uploading(shape.nbytes)
        buffer = runtime.allocate(shape)
        with torch.no_grad():
            _host_view(buffer).copy_(tensor)
    metrics.record("TransferToDeviceTime", time.perf_counter() - start)
    metrics.record("OutboundData", buffer.nbytes, "B")
    return buffer


def _is_zeros(tensor: torch.Tensor) -> bool:
    """True for the number 0 expanded to a size, as new optimizer states are."""
    if (
        tensor.device.type != "cpu"
        or any(tensor.stride())
        or (memory := tensor.untyped_storage()).nbytes() > 16
    ):
        return False
    return tensor.dim() > 0 and not any(bytes(memory))


_ITEM = {
    "f32": struct.Struct("f"),
    "f64": struct.Struct("d"),
    "s64": struct.Struct("q"),
    "s32": struct.Struct("i"),
    "pred": struct.Struct("?"),
}


def items(tensors: Sequence[torch.Tensor]) -> list:
    """The values of tensors with one element, as `.item()` gives them: read where they are, if they have been launched and lie in memory of the CPU."""
    values = [t._storage.value for t in tensors]
    for t, value in zip(tensors, values):
        if (
            t._view is not None
            or type(value) is not Array
            or type(value.data) is not Buffer
            or value.shape.dtype not in _ITEM
        ):
            return [v.item() for v in to_cpu(tensors)]
        executor.wait(value.data)
    start = time.perf_counter()
    with RECORDING:  # nobody overwrites them meanwhile
        found = []
        for t, value in zip(tensors, values):
            buffer = value.data
            if (
                t._storage.value is not value
                or buffer is None
                or buffer.job is not None
                or type(buffer.memory) is not Memory
            ):
                return [v.item() for v in to_cpu(tensors)]
            found.append(_ITEM[value.shape.dtype].unpack_from(buffer.memory.array)[0])
    _forget_done()
    if conditions.EXPECTED:
        conditions.surface()
    metrics.record("TransferFromDeviceTime", time.perf_counter() - start)
    metrics.record("InboundData", sum(v.data.nbytes for v in values), "B")
    return found


def materialize(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous CPU copies of the logical values of hlo tensors. Evaluates what is pending, once.

    If the pending graph cannot be compiled because of an op that these tensors do not need, only their part of it runs, with a
    RuntimeWarning (once for each error) and the counter PartialEvaluation.
    """
    storages = list({id(t._storage): t._storage for t in tensors}.values())
    _evaluate_for(storages)
    start = time.perf_counter()
    leases: dict[int, Lease] = {}
    try:
        for s in storages:
            leases[id(s)] = Lease(s)
        results = [_view_on_host(_host_view(leases[id(t._storage)].buffer), t) for t in tensors]
    finally:
        for lease in leases.values():
            lease.close()
    _forget_done()
    if conditions.EXPECTED:
        conditions.surface()
    metrics.record("TransferFromDeviceTime", time.perf_counter() - start)
    metrics.record("InboundData", sum(r.nbytes for r in results), "B")
    return results


def later(value: torch.Tensor, check: conditions.Check) -> None:
    """Judge a value once it has been computed (see conditions.py)."""
    conditions.EXPECTED.append((value, check))


def clear_cache() -> None:
    """Forget the compiled programs in memory."""
    with RECORDING:
        _CACHE.clear()
        _KNOWN.clear()
        generalize.FAMILIES.clear()


def cache_size() -> int:
    """Number of compiled programs in memory."""
    return len(_CACHE)


# ---- cutting


def _evaluate(only: Sequence[Storage] | None = None) -> None:
    """Run the pending graph: all of it, or what the storages `only` need."""
    executor.throttle()
    with RECORDING:
        after_traces()
        _surface()
        bindings = (
            pending()
            if only is None
            else [
                (s.value.place, i, s, s.value, ref(s))
                for i, s in enumerate(only)
                if type(s.value) is Out
            ]
        )
        for _, _, storage, out, _ in bindings:
            if (
                out.array is not None
            ):  # the value was read by another thread just before it was computed
                storage.bind(out, out.array)
                bindings = [b for b in bindings if b[2] is not storage]
        if only is None and _REFUSED:
            bindings = [b for b in bindings if _REFUSED.get(b[2]) is not b[3]]
        effects = take_effects() if only is None else []
        if effects:
            reached = set(collect([b[3] for b in bindings]).nodes)
            for out in effects:
                if out.node not in reached:
                    effect = Effect(out)
                    bindings.append((out.place, len(bindings), effect, out, ref(effect)))
        if bindings:
            bindings.sort()  # the same program results from the same operations, whichever tensor was written first
            try:
                _submit(bindings, donate=only is None)
            except Exception as error:
                for out in effects:
                    must_run(out)
                _refuse(bindings, getattr(error, "node", None))
                raise
            if not config.get("ASYNC"):
                _surface()
        elif only is None and not _REFUSED:
            TAPE.restart()


# The graph that was cut last, until somebody waits or looks: taking it apart takes half as long as starting its program, and while the device computes
# it costs nothing.
_RECORDED: list[list[Binding]] = []


def _take_apart(enough: Callable[[], bool]) -> None:
    _RECORDED.clear()


executor.MEANWHILE.insert(0, _take_apart)

# Storages whose pending value cannot be lowered: the step that found out has raised. Later steps leave them out, so that one such tensor
# that is still alive does not end all work; reading it raises again.
_REFUSED: WeakKeyDictionary[Storage, Out] = WeakKeyDictionary()


def _refuse(bindings: list[Binding], culprit: Node | None) -> None:
    """Remember which storages need the node that could not be lowered."""
    if culprit is None:
        return
    tainted = {culprit}
    for node in collect([b[3] for b in bindings]).nodes:  # operands come first
        if not tainted.isdisjoint(operands(node)):
            tainted.add(node)
    for _, _, storage, out, _ in bindings:
        if out.node in tainted:
            _REFUSED[storage] = out


def _evaluate_for(storages: Sequence[Storage]) -> None:
    if not any(type(s.value) is Out for s in storages):
        return
    _surface()
    try:
        _evaluate()
    except Exception as whole:
        try:
            _evaluate(storages)
        except Exception as part:
            raise part from (
                None if type(part) is type(whole) and str(part) == str(whole) else whole
            )
        _tell_partial(whole)
    if any(_REFUSED.get(s) is s.value for s in storages):
        _evaluate(storages)  # raises why


_told: set[str] = set()  # one warning for each error


def _tell_partial(error: Exception) -> None:
    """Warn that other tensors than those read are still pending because of `error`."""
    metrics.count("PartialEvaluation")
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if text in _told:
        return
    _told.add(text)
    warnings.warn(
        f"hlo device: not all of the recorded operations could be run ({text}), so only those that this value needs were. Reading a tensor "
        "that needs the rest raises the error; delete such tensors if they are not wanted.",
        RuntimeWarning,
        stacklevel=2,
    )


class _Plan:
    """A step ready to be run: the arrays and numbers it reads, the program, and which of its outputs each pending storage gets."""

    __slots__ = ("compiled", "leaves", "numbers", "places", "size", "where")

    def __init__(
        self,
        compiled: Compiled,
        leaves: Sequence[Array],
        numbers: Sequence[Number],
        places: Sequence[int],
        size: int,
        where: spmd.Placement | None,
    ) -> None:
        self.compiled, self.leaves, self.numbers, self.places, self.size, self.where = (
            compiled,
            leaves,
            numbers,
            places,
            size,
            where,
        )


class _Known:
    """What a tape needs: where its leaves and numbers stand on it, and the programs by which of the leaves die."""

    __slots__ = ("leaves", "numbers", "places", "programs", "size")

    def __init__(self, leaves: list[int], numbers: list[int], places: list[int], size: int) -> None:
        self.leaves, self.numbers, self.places, self.size = leaves, numbers, places, size
        self.programs: dict[tuple[int, ...], Compiled] = {}


_KNOWN: dict[tuple, _Known] = {}


def _plan(bindings: list[Binding], donate: bool) -> _Plan:
    """Recognize the step by its tape, or look at its graph."""
    base = TAPE.base
    key = None
    if donate and TAPE.exact and bindings[0][0] >= base and not spmd.active:
        key = (tuple(TAPE.words), tuple([b[0] - base for b in bindings]), _variant())
        known = _KNOWN.get(key)
        if known is not None:
            inputs = TAPE.inputs
            leaves = [inputs[place]() for place in known.leaves]
            compiled = known.programs.get(_dead(leaves))
            if compiled is not None:
                metrics.count("CachedCompile")
                return _Plan(
                    compiled,
                    leaves,
                    [inputs[place]() for place in known.numbers],
                    known.places,
                    known.size,
                    None,
                )
    graph, places, dead, aliases = _cut(bindings, donate)
    where = (
        spmd.placement(graph, [(b[2], place) for b, place in zip(bindings, places)])
        if spmd.active
        else None
    )
    compiled = _program(graph, aliases, dead, where)
    if key is not None and TAPE.exact:
        if len(_KNOWN) >= 4 * config.get("PROGRAMS"):
            _KNOWN.clear()
        leaves, numbers = (
            [x.place - base for x in found] for found in (graph.leaves, graph.numbers)
        )
        if not {*leaves, *numbers} - TAPE.inputs.keys():
            known = _KNOWN.setdefault(key, _Known(leaves, numbers, places, len(graph.nodes)))
            known.programs[dead] = compiled
    return _Plan(compiled, graph.leaves, graph.numbers, places, len(graph.nodes), where)


def _dead(leaves: Sequence[Array]) -> tuple[int, ...]:
    """Which arrays are the value of no live storage (`not array.held()`)."""
    dead = []
    for i, leaf in enumerate(leaves):
        owners = leaf.owners
        if len(owners) == 1:
            storage = owners[0]()
            if storage is None or storage.value is not leaf:
                dead.append(i)
        elif not leaf.held():
            dead.append(i)
    return tuple(dead)


def _cut(
    bindings: list[Binding], donate: bool
) -> tuple[Graph, list[int], tuple[int, ...], tuple[tuple[int, int], ...]]:
    """(the graph, which of its outputs each binding gets, leaves that die with the step, donations) of sorted bindings."""
    distinct: dict[tuple[int, int], Out] = {}
    for _, _, _, out, _ in bindings:
        distinct.setdefault((out.node.serial, out.index), out)
    order = {value: place for place, value in enumerate(distinct)}
    places = [order[out.node.serial, out.index] for _, _, _, out, _ in bindings]
    graph = collect(list(distinct.values()))
    dead = _dead(graph.leaves) if donate else ()
    return graph, places, dead, _aliases(graph, graph.leaves, dead, bindings, places)


def evaluate(storages: Sequence[Storage]) -> None:
    """Run what these storages need, and overwrite nothing: the arrays that they had stay valid."""
    _evaluate(storages)


_ARRAYS = frozenset({Array})


def run_again(
    graph: Graph, leaves: Sequence[Array], numbers: Sequence[Number], storages: Sequence[Storage], places: Sequence[int], known: Programs,
    ending: Sequence[Storage] | None = (),
) -> bool:  # fmt: skip
    """Launch a graph that ran before on other arrays and numbers; storage i gets output `places[i]`. Nothing may be pending. `ending`: storages that end
    with this step, None if nothing may be overwritten. False, and nothing done, where the step has to be recorded."""
    executor.throttle()
    with RECORDING:
        _surface()
        if spmd.active:
            return False
        last = known.in_place.get(ending is not None)
        if last is None or not last.launch(leaves, numbers, storages):
            if not _run_again(graph, leaves, numbers, storages, places, known, ending):
                return False
        metrics.launched(len(graph.nodes))
    return True


def _run_again(
    graph: Graph, leaves: Sequence[Array], numbers: Sequence[Number], storages: Sequence[Storage], places: Sequence[int], known: Programs,
    ending: Sequence[Storage] | None,
) -> bool:  # fmt: skip
    """`run_again`, for a launch that is not like the last one."""
    if not _ARRAYS.issuperset(map(type, leaves)):
        return False  # another thread has just recorded a new value
    if len(set(map(id, leaves))) < len(leaves):
        return False  # one array in two places: donating one would overwrite the other
    given = {*map(id, storages), *map(id, ending or ())}
    dead = []
    for i, leaf in enumerate(leaves if ending is not None else ()):
        for owner in leaf.owners:
            storage = owner()
            if storage is not None and storage.value is leaf and id(storage) not in given:
                break
        else:
            if leaf.owners:
                dead.append(i)
    bindings = [
        (place, i, s, s.value, ref(s)) for i, (s, place) in enumerate(zip(storages, places))
    ]
    found = known.by_dead.get(died := tuple(dead))
    if found is None:  # a graph that has run cannot be compiled again: its values look like inputs
        compiled = _CACHE.get(_key(graph, _aliases(graph, leaves, died, bindings, places)))
        if compiled is None:
            return False
        found = known.by_dead[died] = InPlace(compiled, places)
    inputs = [
        buffer if type(buffer := leaf.data) is Buffer else leaf_buffer(leaf) for leaf in leaves
    ]
    known.in_place[ending is not None] = (
        None
        if found.compiled.extra or ending is not None and found.spares(leaves, storages)
        else found
    )
    return stream(found.compiled, leaves, inputs, numbers, bindings, places)


def pending_step() -> tuple[Module, list[Buffer]]:
    """What `mark_step()` would run now: the module before any pass, with its donations, and the arrays and numbers that it takes. Nothing is run but
    what was under way. Raises ValueError when nothing is pending."""
    _wait_all()
    with RECORDING:
        bindings = sorted(b for b in pending() if b[3].array is None)
        if not bindings:
            raise ValueError("nothing is recorded")
        graph, _, _, aliases = _cut(bindings, donate=True)
        module = executor.call_compiler(
            lambda: lower(graph.nodes, graph.outputs, [*graph.leaves, *graph.numbers], aliases)
        )
        return module, [leaf_buffer(leaf) for leaf in graph.leaves] + (
            number_buffers(graph.numbers) if graph.numbers else []
        )


def _submit(bindings: list[Binding], donate: bool) -> None:
    start = time.perf_counter()
    plan = _plan(bindings, donate)
    metrics.record("TensorsGraphSize", plan.size, "")
    traced = time.perf_counter()
    launch(plan.compiled, plan.leaves, plan.numbers, bindings, plan.places, plan.where)
    _RECORDED.append(bindings)
    if config.get("LOG") >= 2:
        end = time.perf_counter()
        log.say(
            2,
            f"{plan.compiled.name}: {plan.size} ops, cut {(traced - start) * 1e3:.2f} ms, submit {(end - traced) * 1e3:.2f} ms",
        )


def _aliases(
    graph: Graph,
    leaves: Sequence[Array],
    dead: Sequence[int],
    bindings: list[Binding],
    places: list[int],
) -> tuple[tuple[int, int], ...]:
    """(output, leaf) pairs: leaves that die with this step (`dead`) give their memory to an output of the same shape, rather to the one that
    overwrites the same storage. Part of the program's key."""
    if not dead:
        return ()
    heirs = {id(b[2]): place for b, place in zip(bindings, places)}
    shapes = [o.node.outs[o.index] for o in graph.outputs]
    free = dict.fromkeys(range(len(shapes)))
    aliases = []
    rest = []
    for i in dead:
        leaf = leaves[i]
        for owner in leaf.owners:
            place = heirs.get(id(owner()))
            if place in free and shapes[place] == leaf.shape:
                del free[place]
                aliases.append((place, i))
                break
        else:
            rest.append(i)
    by_shape: dict[Shape, list[int]] = {}
    for place in reversed(free):
        by_shape.setdefault(shapes[place], []).append(place)
    for i in rest:
        places_left = by_shape.get(leaves[i].shape)
        if places_left:
            aliases.append((places_left.pop(), i))
    return tuple(sorted(aliases))


# ---- programs


def _key(graph: Graph, aliases: tuple[tuple[int, int], ...]) -> tuple:
    return (graph.key, aliases, *_variant())


def _variant() -> tuple:
    """What a program depends on besides its graph: the back end, the passes left out, and how many threads its work is cut for."""
    return runtime.backend_name(), config.get("DISABLE"), cpu.threads()


def _program(
    graph: Graph,
    aliases: tuple[tuple[int, int], ...],
    dead: tuple[int, ...],
    where: spmd.Placement | None,
) -> Compiled:
    key = _key(graph, aliases)
    if where is not None:
        return _partitioned(graph, aliases, (*key, where))
    found = _CACHE.get(key)
    if found is not None:
        metrics.count("CachedCompile")
        _CACHE.move_to_end(key)
        return found
    family, ints = None, ()
    if config.get("DYNAMIC"):
        bones, ints = generalize.split(graph)
        family = generalize.family((bones, dead, *key[2:]))
        symbolic = family.find(ints)
        if symbolic is not None:
            metrics.count("CachedCompile")
            return _keep(
                _compiled(
                    graph, key, symbolic.name, symbolic.program, [ints[p] for p in symbolic.extra]
                )
            )
    return executor.call_compiler(lambda: _compile(graph, aliases, key, family, ints))


def _partitioned(graph: Graph, aliases: tuple[tuple[int, int], ...], key: tuple) -> Compiled:
    """A program for all devices of a mesh. One that decided itself where something lives serves when it is known to live there."""
    *base, where = key
    found = _CACHE.get(key)
    if found is None:
        for c in list(_CACHE.values()):
            if (
                len(c.key) == len(key)
                and [*c.key[:-1]] == base
                and where.allows(c.program.in_shardings, c.program.out_shardings)
            ):
                found = _keep(_compiled(graph, key, c.name, c.program))
                break
    if found is not None:
        metrics.count("CachedCompile")
        _CACHE.move_to_end(key)
        return found
    return executor.call_compiler(lambda: _compile(graph, aliases, key, None, ()))


def _compiled(
    graph: Graph, key: tuple, name: str, program: runtime.Program, extra: Sequence[int] = ()
) -> Compiled:
    shapes = tuple(o.node.outs[o.index] for o in graph.outputs)
    return Compiled(name, program, key, shapes, tuple(n.source for n in graph.nodes), tuple(extra))


def _keep(compiled: Compiled) -> Compiled:
    _CACHE[compiled.key] = compiled
    while len(_CACHE) > max(config.get("PROGRAMS"), 1):
        _CACHE.popitem(last=False)
        _KNOWN.clear()
    return compiled


def _compile(
    graph: Graph,
    aliases: tuple[tuple[int, int], ...],
    key: tuple,
    family: generalize.Family | None,
    ints: tuple[int, ...],
) -> Compiled:
    """Compile into the cache: for all sizes if this graph differs from an earlier one only in integers, else for its own. On the
    compiler's thread: when Ctrl-C ended the wait for it, the next attempt finds the program there."""
    global _compiles
    if key in _CACHE:
        return _CACHE[key]
    _compiles += 1
    name = f"step_{_compiles}"
    reason = f"{name}: " + explain.reason(
        key, [n.source for n in graph.nodes], list(_CACHE.values())
    )
    compiled = None
    if family is not None and family.instances:
        compiled, note = _generalized(graph, aliases, key, name, family, ints)
        reason += f"; {note}"
    metrics.add_compile_reason(reason)
    log.say(1, f"compiling {reason}")
    if compiled is None:
        with (
            progress.compiling(name, len(graph.nodes)),
            metrics.timed("CompileTime"),
            dump.recording(name, reason) as observe,
        ):
            try:
                program = _build(graph, aliases, key, observe)
            except Exception as error:
                error.add_note(
                    f"{name} ({len(graph.nodes)} ops) was not run; its tensors are unchanged and still pending"
                )
                raise
        compiled = _compiled(graph, key, name, program)
    if family is not None:
        family.remember(ints)
    return _keep(compiled)


def _build(
    graph: Graph, aliases: tuple[tuple[int, int], ...], key: tuple, observe
) -> runtime.Program:
    where = key[-1]
    if isinstance(where, spmd.Placement):
        return spmd.build(graph, where, aliases, observe)
    runtime.expect_writes(
        [
            leaf.data
            for _, i in aliases
            if isinstance((leaf := graph.leaves[i]).data, runtime.Buffer)
        ]
    )
    module = lower(
        graph.nodes,
        graph.outputs,
        [*graph.leaves, *graph.numbers],
        aliases,
        name="step",
        constants=_constants(graph.leaves, aliases),
    )
    if observe is not None:
        observe("hlo:input", module)
    return runtime.compile_program(module, observe)


def _constants(
    leaves: Sequence[Array | Leaf], aliases: tuple[tuple[int, int], ...]
) -> tuple[int, ...]:
    """The leaves that may be weights: matrices which the step does not overwrite."""
    overwritten = {i for _, i in aliases}
    return tuple(
        i for i, leaf in enumerate(leaves) if i not in overwritten and leaf.shape.rank >= 2
    )


def _generalized(
    graph: Graph,
    aliases: tuple[tuple[int, int], ...],
    key: tuple,
    name: str,
    family: generalize.Family,
    ints: tuple[int, ...],
) -> tuple[Compiled | None, str]:
    """A program for all sizes, and a note for the compile's reason; None where the integers have no explanation or a lowering needs them."""
    note = ""
    for proposal in family.proposals(graph, ints):
        if isinstance(proposal, str):
            note = note or f"for these sizes only: {proposal}"
            continue
        found, why = _symbolic(graph, aliases, key, name, family, ints, proposal)
        if found is not None:
            return found, why
        note = note or why
    return None, note


def _symbolic(
    graph: Graph,
    aliases: tuple[tuple[int, int], ...],
    key: tuple,
    name: str,
    family: generalize.Family,
    ints: tuple[int, ...],
    proposal: generalize.Proposal,
) -> tuple[Compiled | None, str]:
    """The program of a proposal and a note; None and the reason where it cannot be compiled."""
    note = f"for all sizes, here {proposal.text}"
    with (
        progress.compiling(name, len(graph.nodes)),
        metrics.timed("CompileTime"),
        dump.recording(name, note) as observe,
    ):
        try:
            inputs = [*proposal.leaves, *proposal.extra, *graph.numbers]
            shared = proposal.aliases(aliases)
            module = lower(
                proposal.nodes,
                proposal.outputs,
                inputs,
                shared,
                "step",
                proposal.symbols,
                constants=_constants(proposal.leaves, shared),
            )
            if observe is not None:
                observe("hlo:input", module)
            program = runtime.compile_program(module, observe)
        except Exception as error:  # whatever needs a number where it finds a symbol: the exact program is compiled instead
            return (
                None,
                f"for these sizes only: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            )
    metrics.count("SymbolicCompile")
    symbolic = generalize.Generalized(program, name, proposal)
    if not symbolic.fits(ints):
        return (
            None,
            "for these sizes only: the expressions found do not give this graph's own sizes",
        )
    family.programs.append(symbolic)
    return _compiled(graph, key, name, program, [ints[p] for p in symbolic.extra]), note


# ---- waiting, failing


def _before_fork() -> None:
    # The child has no executor thread: what is under way must be there before memory is copied.
    RECORDING.acquire()
    executor.drain()
    executor.drain_compiler()


os.register_at_fork(
    before=_before_fork, after_in_parent=RECORDING.release, after_in_child=RECORDING.release
)


def _wait_all() -> None:
    executor.drain()
    _surface()


def _surface() -> None:
    """Forget runs that are done. If one failed, give its storages their graph back and raise its error."""
    if not (IN_FLIGHT or _RECORDED or conditions.EXPECTED):
        return
    with RECORDING:
        _forget_done()
        if not IN_FLIGHT or not IN_FLIGHT[0].job.is_done():
            if conditions.EXPECTED:
                conditions.surface()
            return
        executor.drain()  # what came after may have failed with it
        error = IN_FLIGHT[0].job.error
        replaced: dict[int, Out] = {}
        for run in reversed(IN_FLIGHT):
            if run.job.error is not None:
                run.undo(replaced)
        executor.forget_failures()
        IN_FLIGHT.clear()
        _substitute(replaced)
    raise error


def _forget_done() -> None:
    """Let go of the graphs of runs that succeeded, and of the arrays that only those still read."""
    _RECORDED.clear()
    with RECORDING:
        while IN_FLIGHT and IN_FLIGHT[0].job.is_done() and IN_FLIGHT[0].job.error is None:
            IN_FLIGHT.popleft()


def _substitute(replaced: dict[int, Out]) -> None:
    """Pending nodes that read an array that was never computed read the pending value again."""
    TAPE.exact = False
    pending = [s.value for s in pending_storages()]
    stack = [out.node for out in pending if type(out) is Out]
    done: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in done:
            done.add(node)
            node.args = _replace(node.args, replaced)
            node.kwargs = {k: _replace(v, replaced) for k, v in node.kwargs.items()}
            stack += operands(node)


def _replace(x, replaced: dict[int, Out]):
    if type(x) is Array:
        return replaced.get(id(x), x)
    if type(x) is tuple or type(x) is list:
        return type(x)(_replace(v, replaced) for v in x)
    return x


# ---- the host's side


class Lease:
    """A storage's value as a buffer that no step overwrites until `close`. Evaluates what is pending."""

    __slots__ = ("buffer", "_memory")

    def __init__(self, storage: Storage) -> None:
        while True:
            value = storage.value
            if type(value) is not Array:  # another thread, or a failure, made it pending again
                _evaluate_for([storage])
                continue
            buffer = value.data
            if buffer is None:
                with RECORDING:  # nobody is in the middle of a launch
                    if storage.value is value and value.data is None:
                        leaf_buffer(value)  # raises why
                continue
            executor.wait(buffer)
            with RECORDING:
                if buffer.job is not None:
                    _surface()
                elif storage.value is value:
                    self.buffer, self._memory = buffer, buffer.memory
                    with _COUNTING:
                        self._memory.readers += 1
                    return

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            with _COUNTING:
                memory.readers -= 1


_COUNTING = (
    threading.RLock()
)  # of readers; its own, since the collector may close a lease while any other lock is held


def _host_view(buffer: Buffer) -> torch.Tensor:
    shape = buffer.shape
    dtype = HLO_TO_TORCH[shape.dtype]
    if not buffer.nbytes:
        return torch.empty(shape.dims, dtype=dtype, device="cpu")
    data = buffer.bytes if isinstance(buffer, Buffer) else spmd.gather(buffer)
    return torch.from_numpy(data).view(dtype).view(shape.dims)


def _view_on_host(base: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's view operations applied to the storage's value; a fresh contiguous tensor."""
    with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
        if tensor._view is None:
            return base.clone()
        value = on_host(base, tensor._view).contiguous()
        shared = value.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        return value.clone() if shared else value
