"""Dynamo's graphs on hlo tensors: recorded in their first call, and started with one call after
that.

    call = DeviceGraph(graph_module, name)
    results = call(*args)

A graph of Dynamo's is a function of its arguments: whatever else it depends on, Dynamo's guards
have compared. Its first call runs the graph's operations, which are recorded like any others, and a
`Recording` is kept: the program, which argument each of its inputs came from, and where its results
went. A later call with arguments of the same form launches that program.

That is for graphs of `torch_hlo.compile`. Those of torch.compile become part of the step, as any
other operations do.

What a recording cannot be used for is found when it is made, and then each call is recorded:
gradients that flow from a result, values that are looked at, random numbers of the CPU, a tensor
that neither is an argument nor was made by the graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_hlo import config, log, metrics
from torch_hlo.lazy.ops.higher_order import Lines, lines_wanted
from torch_hlo.lazy.record import generator, pending, session, tracing
from torch_hlo.lowering.fx.fx_graph import any_check
from torch_hlo.pytorch import participants

from . import launcher
from .recording import Recording, Unsuitable, Watching
from .signature import Given, Signature

KINDS = 16  # recordings that are kept: other forms of arguments, other answers
TRIES = 3  # calls of no use, after which none is tried


class DeviceGraph:
    """A graph that is called with hlo tensors, numbers, and nothing else."""

    def __init__(self, graph_module: fx.GraphModule, name: str) -> None:
        self.name = name
        self.plain = graph_module.forward
        self.graph_module = graph_module
        self.signature = Signature(graph_module)
        self.lined = any_check(graph_module)  # errors name lines
        self.recordings: list[Recording] = []
        self.tries = 0
        if self.signature.reason:
            self._useless(self.signature.reason, TRIES)

    def __call__(self, *args: Any) -> Sequence:
        if participants.function_modes():  # Dynamo has traced them
            with participants.without_function_modes():
                return self._call(args)
        return self._call(args)

    def _call(self, args: Sequence) -> Sequence:
        state = session.current()
        # what a recording leaves out may differ on the ranks of a process group
        started = state.here.started and state.journal is None
        started = started and not generator.default.inside  # a loop's body is being recorded
        if config.get("NAN") or self.tries >= TRIES or not started or self._observed():
            lined = self.lined or lines_wanted()
            return (Lines(self.graph_module).run if lined else self.plain)(*args)
        quick = self.recordings[0].quick if self.recordings else None
        if quick is not None and (results := quick(args)) is not None:
            return results
        given = Given(self.signature, self.signature.brought(args))
        for recording in self.recordings:
            storages = recording.serves(given)
            if storages is not None:
                if recording is not self.recordings[0]:
                    self.recordings.remove(recording)
                    self.recordings.insert(0, recording)
                results = recording.launch(storages, given)
                recording.quick = recording.quick or launcher.write(recording)
                return results
        with tracing.tracing() as under_way:
            results, recording = self._recorded(given)
        if recording is not None and not under_way.disturbed:
            self.recordings = [recording, *self.recordings][:KINDS]
        return [self.signature.result(at, x) for at, x in enumerate(results)]

    def _observed(self) -> bool:
        """Whether somebody's Python sees each operation."""
        return participants.transformed() or participants.saved_tensors_hooks() is not None

    def _recorded(self, given: Given) -> tuple[Sequence, Recording | None]:
        """Run the graph's operations; its results, and what was recorded if that can be used
        again."""
        engine = session.engine()
        if session.current().effects or pending():
            engine.mark_step()
        offset = generator.default.get_offset()
        cpu = torch.default_generator.get_state()
        given.watch_versions()
        same = participants.modes_now()
        results, watch = self._run(given, offset)
        try:
            if not torch.equal(cpu, torch.default_generator.get_state()):
                raise Unsuitable("it draws random numbers on the CPU")
            if not same():
                raise Unsuitable("it changes PyTorch's modes")
            if given.rebound():
                raise Unsuitable("an argument gets other memory")
            return results, Recording(watch, given, results, self.signature, offset)
        except Unsuitable as reason:
            self._useless(str(reason), 1)
            return results, None

    def _run(self, given: Given, offset: int) -> tuple[list, Watching]:
        """Run the graph with numbers that are followed, or with plain ones where something in it
        takes no others: those must then be the same in later calls."""
        for plain in (False, True):
            watch = Watching(session.engine(), [*given.storages, *self.signature.constants])
            numbers = watch.hold(given.numbers) if plain else watch.follow(given.numbers)
            args = self.signature.arguments(given, numbers)
            try:
                with session.use(watch, everywhere=False):
                    if self.lined or session.current().sources:
                        return list(Lines(self.signature.module).run(*args)), watch
                    return list(self.signature.run(*args)), watch
            except TypeError:
                if plain or not numbers:
                    raise
                watch.undo()
                generator.default.set_offset(offset)
        raise AssertionError("not reached")

    def _useless(self, reason: str, tries: int) -> None:
        self.tries += tries
        text = f"{self.name} is recorded at this call: {reason}"
        metrics.explained(metrics.Compile(text, kind="recorded at each call"))
        log.say(1, text)
