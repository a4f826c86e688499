"""Collectives as steps: the program calls its host, which takes part for this device (hlo/collective.py).

The code knows neither the number of devices nor how they are linked, so all runtimes share it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from torch_hlo.compiler.codegen.registry import emits_step, host_call
from torch_hlo.compiler.passes.schedule import DONES, STARTS
from torch_hlo.hlo import collective
from torch_hlo.hlo.collective import Collective
from torch_hlo.hlo.ir import Instruction


@emits_step(
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
def exchange(program, x: Instruction) -> None:
    shapes = x.shape.elements if x.shape.is_tuple else (x.shape,)
    places = program.places(x) if x.shape.is_tuple else (program.place(x),)
    text = json.dumps(Collective.of(x).to_json())
    program.host_call(
        "collective",
        list(zip(places, shapes)),
        [(program.place(o), o.shape) for o in x.operands],
        text=text,
    )


@emits_step(*STARTS)
def start(program, x: Instruction) -> None:
    """The value is the result (all-reduce), or (operands, results, contexts…); the operands are where they were."""
    shape, places = (
        (x.shape, program.places(x))
        if x.op == "all-reduce-start"
        else (x.shape.elements[1], program.places(x)[1])
    )
    shapes, places = (shape.elements, places) if shape.is_tuple else ((shape,), (places,))
    number = program.memo["started", x] = program.number()
    text = json.dumps(Collective.of(x).to_json())
    program.host_call(
        "collective-start",
        list(zip(places, shapes)),
        [(program.place(o), o.shape) for o in x.operands],
        text=text,
        number=number,
    )


@emits_step(*DONES)
def done(program, x: Instruction) -> None:
    """The value is already where it belongs (passes/memory.py)."""
    program.host_call("collective-done", [], [], number=program.memo["started", x.operands[0]])


_started: dict[
    tuple[int, int], Callable[[], None]
] = {}  # by thread, which is one device, and number


@host_call("collective-start")
def _start(outputs, inputs, text: str, number: int) -> None:
    _started[threading.get_ident(), number] = collective.current().start(
        _collective(text), inputs, outputs
    )


@host_call("collective-done")
def _done(outputs, inputs, number: int) -> None:
    _started.pop((threading.get_ident(), number))()


@host_call("collective")
def _exchange(outputs, inputs, text: str) -> None:
    collective.current().exchange(_collective(text), inputs, outputs)


@lru_cache(maxsize=4096)
def _collective(text: str) -> Collective:
    return Collective.from_json(json.loads(text))


@emits_step("partition-id", "replica-id")
def device_id(program, x: Instruction) -> None:
    program.host_call("device-id", [(program.place(x), x.shape)], [], which=x.op)


@host_call("device-id")
def _device_id(outputs, inputs, which: str) -> None:
    link = collective.current()
    replica, partition = divmod(link.device, link.partitions)
    outputs[0][...] = np.uint32(partition if which == "partition-id" else replica)
