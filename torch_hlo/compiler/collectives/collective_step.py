"""Collectives as steps: the program calls its host, which takes part for this device
(hlo/sharding/collective.py).

The code knows neither the number of devices nor how they are linked, so all runtimes share it.
"""

import json
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from torch_hlo.hlo.ir import Instruction
from torch_hlo.hlo.sharding import collective
from torch_hlo.hlo.sharding.collective import Collective

from ..codegen import Program, leaves


def exchange(program: Program, x: Instruction) -> None:
    text = json.dumps(Collective.of(x).to_json())
    program.host_call(
        "collective",
        list(zip(leaves(program.places(x)), x.shape.arrays)),
        [(program.place(o), o.shape) for o in x.operands],
        text=text,
    )


def start(program: Program, x: Instruction) -> None:
    """The value is the result (all-reduce), or (operands, results, contexts…); the operands are
    where they were."""
    shape = x.shape
    places = program.places(x)
    if x.op != "all-reduce-start":
        assert isinstance(places, tuple), x
        shape = shape.elements[1]
        places = places[1]
    number = program.memo["started", x] = program.number()
    text = json.dumps(Collective.of(x).to_json())
    program.host_call(
        "collective-start",
        list(zip(leaves(places), shape.arrays)),
        [(program.place(o), o.shape) for o in x.operands],
        text=text,
        number=number,
    )


def done(program: Program, x: Instruction) -> None:
    """The value is already where it belongs (compiler/schedule/memory.py)."""
    program.host_call("collective-done", [], [], number=program.memo["started", x.operand])


# by thread, which is one device, and number
_started: dict[tuple[int, int], Callable[[], None]] = {}


def start_on_host(
    outputs: Sequence[np.ndarray],
    inputs: Sequence[np.ndarray],
    text: str,
    number: int,
) -> None:
    _started[threading.get_ident(), number] = collective.current().start(
        _collective(text), inputs, outputs
    )


def done_on_host(outputs: Sequence[np.ndarray], inputs: Sequence[np.ndarray], number: int) -> None:
    _started.pop((threading.get_ident(), number))()


def exchange_on_host(
    outputs: Sequence[np.ndarray], inputs: Sequence[np.ndarray], text: str
) -> None:
    collective.current().exchange(_collective(text), inputs, outputs)


@lru_cache(maxsize=4096)
def _collective(text: str) -> Collective:
    return Collective.from_json(json.loads(text))


def device_id(program: Program, x: Instruction) -> None:
    program.host_call("device-id", [(program.place(x), x.shape)], [], which=x.op)


def device_id_on_host(
    outputs: Sequence[np.ndarray], inputs: Sequence[np.ndarray], which: str
) -> None:
    link = collective.current()
    replica, partition = divmod(link.device, link.partitions)
    outputs[0][...] = np.uint32(partition if which == "partition-id" else replica)
