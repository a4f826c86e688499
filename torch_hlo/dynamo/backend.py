"""The Dynamo backend: options, AOTAutograd, one program per graph.

    torch.compile(model, backend="hlo", options={"fallback": "error"})

Tensors on the CPU or on a GPU of torch.cuda, for training and inference, with static and dynamic
sizes; or on the hlo device, where the graph is recorded at each call without Dynamo's or autograd's
Python and becomes part of the step. A new random seed is drawn from PyTorch's CPU generator at each
call of a graph with random ops, so `torch.manual_seed` makes runs repeat.
"""

from __future__ import annotations

import functools
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import fx

from torch_hlo import collector, config, log, metrics, progress
from torch_hlo.device import dump
from torch_hlo.device.interfaces import Program
from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Module
from torch_hlo.lazy import traceable
from torch_hlo.lazy.ops import encoder, recurrent
from torch_hlo.lazy.ops.higher_order import as_looks, check_indices
from torch_hlo.lazy.run import executor
from torch_hlo.lowering.core import LOWERINGS, LoweringError, Node
from torch_hlo.lowering.fx import operators_of_libraries
from torch_hlo.lowering.fx.fx_graph import CHECKS, FxGraph, from_fx
from torch_hlo.pytorch import operators, shortcuts, steps, tracing
from torch_hlo.pytorch.graphs import unset_fake_temporarily
from torch_hlo.pytorch.operators import OpOverload
from torch_hlo.pytorch.registration import PLACE

from . import cut, loops, nan_search, optimizers, shared_results, trace
from .attention_saved import forward_and_backward
from .call import Caller
from .device_graph import DeviceGraph
from .direct import LOSSES, Graphs
from .place import Host, place_of

aten = torch.ops.aten
traceable.enable()
optimizers.register()
steps.trace_loops(loops.IN_PLACE_OF)
# before 2.13 PyTorch leaves out the checks of linear algebra, which have no result
for _check in CHECKS:
    fx.node.has_side_effect(_check)


@frozen
class Option:
    """One entry of `torch.compile(..., options={name: value})`."""

    kind: type
    choices: tuple
    default: Callable[[], object]
    doc: str


OPTIONS: dict[str, Option] = {
    "fallback": Option(
        str,
        ("warn", "allow", "error"),
        lambda: config.get("FALLBACK"),
        "an aten op without a lowering: run it on the CPU inside the program with a warning,"
        " without one, or raise LoweringError; default TORCH_HLO_FALLBACK",
    ),
    "name": Option(str, (), lambda: "graph", "name of the programs in logs, dumps and errors"),
}
# What torch.compile(mode=...) may say: they ask for more or less of what this compiler always does.
MODES = (
    None,
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
)


def hlo(
    graph_module: fx.GraphModule,
    example_inputs: Sequence,
    *,
    options: dict | None = None,
    mode: str | None = None,
) -> Callable:
    """The Dynamo backend. Raises ValueError for an unknown option, value or mode, LoweringError for
    what cannot be compiled."""
    if mode not in MODES:
        raise ValueError(
            f"torch.compile(backend='hlo'): unknown mode {mode!r}; there are"
            f" {', '.join(map(str, MODES[1:]))}"
        )
    settings = checked(options)
    as_looks(graph_module)
    if on_device(graph_module):
        return recorded(graph_module, options or {})
    if shortcuts.on("no_autograd") and not (config.get("NAN") or config.get("CHECK_INDEX")):
        run = without_autograd(graph_module, example_inputs, settings)
        if run is not None:
            return run

    def compiler(graph: fx.GraphModule, inputs: Sequence) -> Callable:
        run = shared_results.rebound(graph, lambda g: compile_graph(g, inputs, settings))
        run._boxed_call = True
        return run

    def inference(graph: fx.GraphModule, inputs: Sequence) -> Callable:
        run = shared_results.viewed(graph, lambda g: compiler(g, inputs))
        run._boxed_call = True
        return run

    recurrent.as_networks(graph_module.graph)
    graph_module.recompile()
    graphs = Graphs(graph_module, example_inputs)
    aot = functools.partial(
        differentiated,
        fw_compiler=graphs.keep("forward", compiler),
        bw_compiler=graphs.keep("backward", compiler),
        inference_compiler=graphs.keep("inference", inference),
        decompositions=decompositions(),
        partition_fn=forward_and_backward,
        keep_inference_input_mutations=True,
    )
    return graphs.direct(aot(graph_module, example_inputs))


def without_autograd(
    graph_module: fx.GraphModule, example_inputs: Sequence, settings: dict
) -> Callable | None:
    """The compiled function of a graph that needs nothing of AOTAutograd (trace.py), with its
    gradients (cut.py, direct.py); None for others."""
    try:
        with unset_fake_temporarily():
            operators_of_libraries.register()
            graph = trace.record(graph_module, example_inputs)
            with torch.no_grad():
                if isinstance(graph, cut.Joint):
                    forward, saved, backward_graph = cut.cut(graph)
                    callers = [
                        Caller(forward, settings["name"], Host(), len(graph.outputs)),
                        Caller(backward_graph, settings["name"] + "_backward", Host()),
                    ]
                else:
                    callers = [Caller(graph, settings["name"], Host())]
                programs = _compiled(*callers)
    except Exception as reason:
        # PyTorch's errors come back, in the words that users know, on the other way
        _say_why(settings["name"], reason)
        return None
    if isinstance(graph, cut.Joint):
        return Graphs(graph_module, example_inputs).trained(graph, saved, *programs)
    (run,) = programs
    written = [position for position, _ in graph.writes]
    mark = torch.autograd.graph.increment_version

    def call(*args) -> list:
        if written:
            mark([args[i] for i in written])
        return run(list(args))

    return call


def _say_why(name: str, reason: Exception) -> None:
    """Why a graph goes through AOTAutograd is with the reasons of compiles
    (`torch_hlo.metrics.explain()`), and counted. What neither this package nor PyTorch has refused
    in words is a mistake here: that is a warning."""
    text = f"{name} goes through AOTAutograd: {reason or type(reason).__name__}"
    metrics.count("AOTAutograd")
    metrics.add_compile_reason(text)
    log.say(1, text)
    if not isinstance(reason, (trace.Unsuitable, LoweringError, RuntimeError)):
        where = traceback.extract_tb(reason.__traceback__)[-1]
        log.warn_once(
            "AOTAutograd",
            f"torch.compile(backend='hlo'): {text} ({type(reason).__name__} at"
            f" {where.filename}:{where.lineno}); please report it",
        )


def differentiated(graph_module: fx.GraphModule, example_inputs: Sequence, **options) -> Callable:
    """What torch._dynamo.backends.common.aot_autograd does, which imports Inductor's log settings
    for it: AOTAutograd, hidden from Dynamo."""
    if not shortcuts.on("inductor_unneeded"):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(**options)(graph_module, example_inputs)
    from torch._dynamo import disable
    from torch._dynamo.utils import flatten_graph_inputs
    from torch._functorch.aot_autograd import aot_module_simplified

    if any(isinstance(x, (list, tuple, dict)) for x in example_inputs):
        return flatten_graph_inputs(
            graph_module,
            example_inputs,
            functools.partial(differentiated, **options),
        )
    backward = options.pop("bw_compiler")

    def bw_compiler(*args, **kwargs) -> Callable:
        return disable(
            disable(backward, reason="the compiler")(*args, **kwargs),
            reason="a compiled graph",
        )

    with collector.paused():
        return disable(
            aot_module_simplified(graph_module, example_inputs, bw_compiler=bw_compiler, **options),
            reason="a compiled graph",
        )


def checked(options: dict | None) -> dict[str, object]:
    """All options with their values. Raises ValueError naming the option that does not exist or the
    value it cannot have."""
    settings = {name: o.default() for name, o in OPTIONS.items()}
    for name, value in (options or {}).items():
        if name not in OPTIONS:
            raise ValueError(
                f"torch.compile(backend='hlo'): unknown option {name!r}; there are"
                f" {', '.join(OPTIONS)}"
            )
        o = OPTIONS[name]
        if not isinstance(value, o.kind) or o.choices and value not in o.choices:
            raise ValueError(
                f"torch.compile(backend='hlo'): option {name}={value!r}; expected"
                f" {' or '.join(o.choices) or o.kind.__name__}"
            )
        settings[name] = value
    return settings


tracing.trace_networks(hlo)


@functools.cache
def decompositions(composite: bool = False) -> dict:
    """PyTorch's decompositions, and ours, for everything that has no lowering of its own.
    `composite`: of composite ops as well, which exported programs hold. In AOTAutograd's graphs the
    dispatcher has taken them apart, and collecting them takes 0.1 s."""
    core = (
        operators.core_decompositions()
        if composite
        else operators.core_decompositions_after_autograd()
    )
    table = {
        **core,
        **encoder.DECOMPOSITIONS,
    }
    table.update(
        {
            op: fn
            for op, fn in operators.decompositions().items()
            if op not in table
            and op not in LOWERINGS
            and _is_functional(op)
            and (composite or not operators.is_composite(op))
        }
    )
    return {op: fn for op, fn in table.items() if op not in LOWERINGS}


def _is_functional(op: OpOverload) -> bool:
    schema = getattr(op, "_schema", None)
    return (
        schema is not None
        and not any(a.alias_info for a in schema.arguments)
        and torch.Tag.nondeterministic_seeded not in op.tags
    )


def compile_graph(
    graph_module: fx.GraphModule, example_inputs: Sequence, settings: dict
) -> Callable:
    """Compile one FX graph of aten ops into a function of a list of inputs, which it clears
    (AOTAutograd's boxed convention)."""
    with unset_fake_temporarily(), torch.no_grad():
        operators_of_libraries.register()
        if config.get("CHECK_INDEX"):
            check_indices(graph_module)
        run = None
        while run is None:
            try:
                run = _function(graph_module, settings)
            except Exception as error:
                # LoweringError, or whatever needs to know that two sizes are equal
                fixed = fix_sizes(graph_module)
                if not fixed:
                    raise
                log.say(1, f"{settings['name']} is compiled for {', '.join(fixed)} alone: {error}")
    if config.get("NAN"):
        run = nan_search.searched(graph_module, run)
    run._boxed_call = True
    return run


def _function(graph_module: fx.GraphModule, settings: dict) -> Callable:
    graph = from_fx(graph_module)
    report_fallbacks(graph, settings["fallback"])
    (run,) = _compiled(
        Caller(graph, settings["name"], place_of(graph_module), graph_module.meta.get(LOSSES, 0))
    )
    return run


def _compiled(*callers: Caller) -> list[Callable]:
    """The functions of graphs. They are lowered now, and Dynamo writes its guards while they are
    compiled. Who calls first waits, for all of them: compiling backward while forward runs gains
    nothing on two cores, and takes the compiler's memory on top of the step's."""

    def lower() -> Future[list[Program]]:
        modules = [caller.module() for caller in callers]
        return executor.submit_compiler(
            lambda: [_compile(*both, line) for both in zip(callers, modules)]
        )

    line = log.source()
    programs = executor.call_compiler(lower)
    if any(caller.symbols for caller in callers):
        programs.result()  # raises what is answered by other sizes
    return [caller.bind(programs, i) for i, caller in enumerate(callers)]


def fix_sizes(graph_module: fx.GraphModule) -> list[str]:
    """Have Dynamo take symbolic sizes as the numbers that they are in this call, and guard on them:
    the lengths of Fourier transforms; where there are none, all. Returns "symbol=number" of each;
    none if no size is symbolic or it is too late for guards, as for a backward graph."""
    nodes = [n for n in graph_module.graph.nodes if n.target in _TRANSFORMS]
    fixed = _fix(
        v.shape[d] for n in nodes for d in n.args[1] for v in (n.args[0].meta["val"], n.meta["val"])
    )
    if fixed:
        return fixed
    values = [n.meta.get("val") for n in graph_module.graph.find_nodes(op="placeholder")]
    return _fix(s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,)))


_TRANSFORMS = (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)


def _fix(sizes: Iterable) -> list[str]:
    fixed = []
    for s in sizes:
        if (
            isinstance(s, torch.SymInt)
            and not s.node.expr.is_number
            and s.node.has_hint()
            and not s.node.shape_env.frozen
        ):
            fixed.append(f"{s}={int(s)}")
    return fixed


def _compile(caller: Caller, module: Module, line: str) -> Program:
    sizes = (
        f", for all {', '.join(name for name, _, _ in caller.symbols)}" if caller.symbols else ""
    )
    reason = f"torch.compile: {len(caller.nodes)} ops{sizes}"
    told = metrics.Compile(
        f"{caller.name}: {reason}",
        caller.name,
        f"{caller.name} of torch.compile",
        "Dynamo traced it anew: a size, a Python value or a module's mode changed. TORCH_LOGS="
        "recompiles says which. Let sizes vary with torch.compile(..., dynamic=True).",
        line,
        line,
        len(caller.nodes),
        "compiled",
    )
    metrics.explained(told)
    log.say(1, f"compiling {caller.name}: {reason}")
    with (
        progress.shown(f"compiling {caller.name} ({len(caller.nodes)} ops)"),
        metrics.timed("CompileTime"),
        dump.recording(caller.name, reason) as observe,
    ):
        program = caller.place.compile(module, observe)
        told.seconds = time.time() - told.began
        return program


def on_device(graph_module: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's computes with hlo tensors."""
    values = (n.meta.get("example_value") for n in graph_module.graph.nodes)
    return any(map(PLACE.has, values))


def recorded(graph_module: fx.GraphModule, options: dict) -> Callable:
    """A function that records a graph on hlo tensors, or launches what it has recorded."""
    operators_of_libraries.register()
    collector.want()  # Dynamo's notes on its frame hold the frame's tensors, in circles
    operators.checkpoint_again(graph_module)
    call = DeviceGraph(graph_module, options.get("name", "graph"))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    varying = [(i, dims) for i, n in enumerate(placeholders) if (dims := _symbolic(n))]
    settings = {"FALLBACK": options["fallback"]} if "fallback" in options else {}
    if not varying and not settings:
        return call

    def run(*args: object) -> object:
        for i, dims in varying:
            traceable.vary(args[i], frozenset([args[i].shape[d] for d in dims]))
        with config.override(**settings):
            return call(*args)

    return run


def _symbolic(placeholder: fx.Node) -> list[int]:
    """The dimensions of a graph's input on the device whose sizes vary."""
    value = placeholder.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.device.type not in PLACE.names:
        return []
    return [
        d
        for d, n in enumerate(value.shape)
        if isinstance(n, torch.SymInt) and not n.node.expr.is_number
    ]


def report_fallbacks(graph: FxGraph, fallback: str) -> None:
    """Aten ops without a lowering: with "error" they raise LoweringError, else `lower` turns them
    into custom calls. A user's own operators are meant to be called."""
    missing = {str(n.target): n.source for n in reversed(graph.nodes) if _falls_back(n)}
    if not missing:
        return
    text = ", ".join(
        f"{op}{f' at {where}' if where else ''}" for op, where in sorted(missing.items())
    )
    if fallback == "error":
        raise LoweringError(
            f"no lowering for {text}; options={{'fallback': 'allow'}} runs them on the CPU"
        )
    if fallback == "warn":
        warnings.warn(
            f"torch.compile(backend='hlo'): no lowering for {text}; running on the CPU inside the"
            " program",
            stacklevel=2,
        )


def _falls_back(n: Node) -> bool:
    return n.target not in LOWERINGS and getattr(n.target, "namespace", "") in (
        "aten",
        "prims",
    )
