"""From the graph of a step to its program: known, known for other sizes, or compiled."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch_hlo import config, log, metrics, progress
from torch_hlo.device import dump, report, runtime
from torch_hlo.device.cpu.workers import WORKERS
from torch_hlo.device.interfaces import Program
from torch_hlo.device.memory import Buffer
from torch_hlo.hlo.ir import Ints, Pairs
from torch_hlo.lowering.core import Leaf, lower
from torch_hlo.pytorch import participants

from ..record import Array, recording, session
from . import executor, explain, generalize, imagine, spmd
from .fingerprint import Graph
from .launch import Compiled


def program_key(graph: Graph, aliases: Pairs) -> tuple:
    return (graph.key, aliases, *variant())


def variant() -> tuple:
    """What a program depends on besides its graph: the back end, the passes left out, and how many
    threads its work is cut for."""
    return config.get("DEVICE"), config.get("DISABLE"), WORKERS.cut()


class ProgramCache:
    """Compiled programs by what they compute; the least recently used leave. `evicted` is called
    when one has left."""

    def __init__(self, evicted: Callable[[], None]) -> None:
        self.programs: OrderedDict[tuple, Compiled] = OrderedDict()
        self.families = generalize.Families()
        self.compiles = 0
        self.line = ""  # of the program that needs what is being compiled
        self.evicted = evicted

    def clear(self) -> None:
        self.programs.clear()
        self.families.clear()
        session.current().varying.clear()

    def find(
        self,
        graph: Graph,
        aliases: Pairs,
        dead: Ints,
        where: spmd.Placement | None,
    ) -> Compiled:
        key = program_key(graph, aliases)
        if where is not None:
            return self._partitioned(graph, aliases, (*key, where))
        found = self.programs.get(key)
        if found is not None:
            metrics.count("CachedCompile")
            self.programs.move_to_end(key)
            return found
        family = None
        ints = ()
        if config.get("DYNAMIC"):
            bones, ints = generalize.split(graph)
            family = self.families.of((bones, *key[2:]))
            symbolic = family.find(ints, aliases, dead)
            if symbolic is not None:
                metrics.count("CachedCompile")
                return self._keep(
                    _compiled(
                        graph,
                        key,
                        symbolic.name,
                        symbolic.program,
                        [ints[p] for p in symbolic.extra],
                    )
                )
            if self._lift(graph, family, ints, key[2:]):
                return self.find(graph, aliases, dead, where)
        return self._on_compiler(graph, aliases, key, family, ints)

    def _lift(self, graph: Graph, family: generalize.Family, ints: Ints, variant: tuple) -> bool:
        """Make numbers that vary inputs of the program; whether there are any."""
        places = family.lifts(graph, ints)
        if places:
            lifted = generalize.lift(graph, places)
            bones, ints = generalize.split(graph)
            if self.families.of((bones, *variant)).inherit(family, places, ints):
                for argument in lifted:
                    recording.vary(*argument)
        return bool(places)

    def _on_compiler(self, *compile: Any) -> Compiled:
        self.line = session.line()
        with participants.block(f"hlo::compile step_{self.compiles + 1}"):
            return executor.call_compiler(lambda: self._compile(*compile))

    def _partitioned(self, graph: Graph, aliases: Pairs, key: tuple) -> Compiled:
        """A program for all devices of a mesh, which may decide where a value lives."""
        found = self._served(graph, key)
        if found is not None:
            return found
        return self._on_compiler(graph, aliases, key, None, ())

    def known(self, graph: Graph, aliases: Pairs, where: spmd.Placement) -> Compiled | None:
        """The program for all devices of a mesh that this process would run without compiling."""
        return self._served(graph, (*program_key(graph, aliases), where))

    def canonical(self, graph: Graph, aliases: Pairs, where: spmd.Placement) -> Compiled:
        """The program for all devices of a mesh that does not depend on what was compiled before:
        all processes have the same."""
        key = (*program_key(graph, aliases), where)
        if (found := self.programs.get(key)) is not None and found.borrowed:
            del self.programs[key]
        return self._on_compiler(graph, aliases, key, None, ())

    def _served(self, graph: Graph, key: tuple) -> Compiled | None:
        """The program with this key. One that decided itself where something lives serves when it
        is known to live there."""
        *base, where = key
        found = self.programs.get(key)
        if found is None:
            for c in list(self.programs.values()):
                if (
                    len(c.key) == len(key)
                    and [*c.key[:-1]] == base
                    and where.allows(c.program.in_shardings, c.program.out_shardings)
                ):
                    found = self._keep(_compiled(graph, key, c.name, c.program))
                    found.borrowed = True
                    break
        if found is not None:
            metrics.count("CachedCompile")
            self.programs.move_to_end(key)
        return found

    def _keep(self, compiled: Compiled) -> Compiled:
        self.programs[compiled.key] = compiled
        while len(self.programs) > max(config.get("PROGRAMS"), 1):
            self.programs.popitem(last=False)
            self.evicted()
        return compiled

    def _compile(
        self,
        graph: Graph,
        aliases: Pairs,
        key: tuple,
        family: generalize.Family | None,
        ints: Ints,
    ) -> Compiled:
        """Compile into the cache: for all sizes if this graph differs from an earlier one only in
        integers, else for its own. On the compiler's thread: when Ctrl-C ended the wait for it, the
        next attempt finds the program there."""
        if key in self.programs:
            return self.programs[key]
        began = time.time()
        self.compiles += 1
        name = f"step_{self.compiles}"
        reason = f"{name}: " + explain.reason(
            key, [n.source for n in graph.nodes], list(self.programs.values())
        )
        compiled = None
        if family is not None:
            compiled, note = self._for_all_sizes(graph, aliases, key, name, family, ints)
            reason += note and f"; {note}"
        told = metrics.Compile(
            reason,
            name,
            where=self.line,
            ops=len(graph.nodes),
            outcome="compiled",
            began=began,
            **explain.judged(reason),
        )
        metrics.explained(told)
        log.say(1, f"compiling {reason}")
        if compiled is None:
            with (
                progress.shown(f"compiling {name} ({len(graph.nodes)} ops)"),
                metrics.timed("CompileTime"),
                dump.recording(name, reason) as observe,
            ):
                try:
                    program = _build(graph, aliases, key, observe)
                except Exception as error:
                    told.outcome = "failed"
                    if not any(n.source for n in graph.nodes):
                        session.current().sources = True
                        error.add_note("from now on errors know the Python lines: try again")
                    error.add_note(
                        f"{name} ({len(graph.nodes)} ops) was not run; its tensors are unchanged"
                        " and"
                        " still pending"
                    )
                    raise
            compiled = _compiled(graph, key, name, program)
        if family is not None:
            family.remember(ints)
        if compiled.program.from_disk:
            told.outcome = "from disk"
        told.seconds = time.time() - began
        return self._keep(compiled)

    def _for_all_sizes(
        self,
        graph: Graph,
        aliases: Pairs,
        key: tuple,
        name: str,
        family: generalize.Family,
        ints: Ints,
    ) -> tuple[Compiled | None, str]:
        """`_generalized` from what was seen with this structure; where nothing was, from what is
        known of the sizes that vary."""
        if family.instances:
            return self._generalized(graph, aliases, key, name, family, ints)
        note = ""
        self.families.see(graph.leaves)
        for imagined in imagine.others(graph, aliases):
            family.remember(imagined)
            found, note = self._generalized(graph, aliases, key, name, family, ints)
            if found is not None:
                return found, note
            family.forget(imagined)
        return None, note

    def _generalized(
        self,
        graph: Graph,
        aliases: Pairs,
        key: tuple,
        name: str,
        family: generalize.Family,
        ints: Ints,
    ) -> tuple[Compiled | None, str]:
        """A program for all sizes, and a note for the compile's reason; None where the integers
        have no
        explanation or a lowering needs them."""
        note = ""
        for proposal in family.proposals(graph, ints):
            if isinstance(proposal, str):
                note = note or f"for these sizes only: {proposal}"
                continue
            found, why = self._symbolic(graph, aliases, key, name, family, ints, proposal)
            if found is not None:
                return found, why
            note = note or why
        return None, note

    def _symbolic(
        self,
        graph: Graph,
        aliases: Pairs,
        key: tuple,
        name: str,
        family: generalize.Family,
        ints: Ints,
        proposal: generalize.Proposal,
    ) -> tuple[Compiled | None, str]:
        """The program of a proposal and a note; None and the reason where it cannot be compiled."""
        note = f"for all sizes, here {proposal.text}"
        with (
            progress.shown(f"compiling {name} ({len(graph.nodes)} ops)"),
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
                program = runtime.compile_program(module, observe)
            except Exception as error:
                # whatever needs a number where it finds a symbol: the exact program is compiled
                # instead
                return (
                    None,
                    (
                        f"for these sizes only: {type(error).__name__}:"
                        f" {str(error).splitlines()[0] if str(error) else ''}"
                    ),
                )
        metrics.count("SymbolicCompile")
        symbolic = generalize.Generalized(program, name, proposal)
        if not symbolic.fits(ints):
            return (
                None,
                "for these sizes only: the expressions found do not give this graph's own sizes",
            )
        family.programs.append(symbolic)
        self.families.vary(proposal.leaves)
        return _compiled(graph, key, name, program, [ints[p] for p in symbolic.extra]), note


def _compiled(
    graph: Graph,
    key: tuple,
    name: str,
    program: Program,
    extra: Sequence[int] = (),
) -> Compiled:
    shapes = tuple(o.node.outs[o.index] for o in graph.outputs)
    return Compiled(
        name,
        program,
        key,
        shapes,
        tuple(n.source for n in graph.nodes),
        tuple(extra),
    )


def _build(graph: Graph, aliases: Pairs, key: tuple, observe) -> Program:
    where = key[-1]
    if isinstance(where, spmd.Placement):
        return spmd.build(graph, where, aliases, observe)
    runtime.expect_writes(
        [leaf.data for _, i in aliases if isinstance((leaf := graph.leaves[i]).data, Buffer)]
    )
    module = lower(
        graph.nodes,
        graph.outputs,
        [*graph.leaves, *graph.numbers],
        aliases,
        name="step",
        constants=_constants(graph.leaves, aliases),
    )
    return report.compiled(module, observe)


def _constants(leaves: Sequence[Array | Leaf], aliases: Pairs) -> Ints:
    """The leaves that may be weights: matrices which the step does not overwrite."""
    overwritten = {i for _, i in aliases}
    return tuple(
        i for i, leaf in enumerate(leaves) if i not in overwritten and leaf.shape.rank >= 2
    )
