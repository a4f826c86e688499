"""Measuring the ways to compute a program's steps (compiler/tune.py says what is asked and where
answers are kept)."""

import time
from collections.abc import Callable

from torch_hlo import config, metrics, progress
from torch_hlo.compiler import tune
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.llvm import Target
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.text.parser import parse_module


def measure(
    target: Target,
    module: Module,
    seconds: Callable[[Executable, Module], float | None],
) -> bool:
    """Compile `module`, and measure what its emitters ask about, for TORCH_HLO_TUNE seconds.
    Returns whether everything is known now. `seconds`: see programs.compiled; a way that the device
    refuses is not taken."""
    with tune.collecting() as wanted:
        compile_module(module, target)
    end = time.monotonic() + config.get("TUNE")
    for i, (step, names) in enumerate(wanted.items()):
        alone = parse_module(step)
        found: dict[str, float] = {}
        with progress.shown(f"measuring step {i + 1} of {len(wanted)}"):
            for name in names:
                if time.monotonic() > end:
                    return False
                with tune.trying(step, name):
                    executable = compile_module(alone, target)
                took = seconds(executable, alone)
                if took is None:
                    metrics.count("WaysRefused")
                else:
                    found[name] = took
        tune.record(target.cache_key, step, found)
        metrics.count("StepsMeasured")
    return True
