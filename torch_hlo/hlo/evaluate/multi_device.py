"""Programs on several devices.

    evaluate_spmd(module, [inputs of device 0, inputs of device 1, …]) -> [outputs of device 0, …]

Every device runs the program in a thread of its own; collectives are where the threads meet
(hlo/sharding/rendezvous.py). Elsewhere, `evaluate` of a program whose groups have one device only
is all there is to it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..ir import Module
from ..sharding.rendezvous import Rendezvous
from .communication import arrangement
from .evaluate import evaluate


def evaluate_spmd(
    module: Module, inputs: Sequence[Sequence[Any]], timeout: float | None = None
) -> list[list[np.ndarray]]:
    """Run a per-device program on as many devices as there are lists of inputs; the flat outputs of
    each, see `evaluate`.

    Raises CollectiveError, naming devices and collectives, when the devices do not run the same
    collectives in the same order, or one waits for more than `timeout` seconds; EvaluateError as
    `evaluate` does, with a note that names the device."""
    if len(inputs) == 1:
        return [evaluate(module, inputs[0])]
    replicas, partitions = arrangement(module, len(inputs))
    return Rendezvous(module.name, replicas, partitions, timeout).run(
        lambda device: evaluate(module, inputs[device])
    )
