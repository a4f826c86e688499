"""Measuring the ways to compute a program's steps (compiler/tune.py says what is asked and where answers are kept)."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_hlo import config, metrics
from torch_hlo.compiler import tune
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.device import runtime
from torch_hlo.device.gpu import Driver, DriverError
from torch_hlo.device.runtime import Program
from torch_hlo.hlo.ir import Module, outputs
from torch_hlo.hlo.parse import parse_module

RUNS, ROUNDS = 10, 3  # runs that are timed together, of which the fastest round counts


def measure(
    driver,
    load: Callable[[Executable], Program],
    module: Module,
    seconds: Callable[[object, Program, Module], float] | None = None,
) -> bool:
    """Compile `module`, and measure what its emitters ask about, for TORCH_HLO_TUNE seconds. Returns whether everything is known now. A way that the
    device refuses is not taken. `driver`: a GPU's, or with `seconds` anything that has a `target`."""
    with tune.collecting() as wanted:
        compile_module(module, driver.target)
    end = time.monotonic() + config.get("TUNE")
    for step, names in wanted.items():
        alone = parse_module(step)
        found: dict[str, float] = {}
        for name in names:
            if time.monotonic() > end:
                return False
            with tune.trying(step, name):
                executable = compile_module(alone, driver.target)
            try:
                found[name] = (seconds or _seconds)(driver, load(executable), alone)
            except DriverError:
                metrics.count("WaysRefused")
        tune.record(driver.target.cache_key, step, found)
        metrics.count("StepsMeasured")
    return True


def _seconds(driver: Driver, program: Program, module: Module) -> float:
    """Of one run on arrays of zeros."""
    inputs = [runtime.from_bytes(p.shape, bytes(p.shape.nbytes)) for p in module.entry.params]
    results = [runtime.allocate(x.shape) for x in outputs(module)]
    for _ in range(3):  # the second is captured, the third replayed
        program.run(inputs, results)
    best = float("inf")
    for _ in range(ROUNDS):
        driver.synchronize()
        start = time.perf_counter()
        for _ in range(RUNS):
            program.run(inputs, results)
        driver.synchronize()
        best = min(best, (time.perf_counter() - start) / RUNS)
    return best
