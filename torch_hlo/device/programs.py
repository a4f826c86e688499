"""Modules become loaded programs: compiled for a target, or found in the disk cache; the same way for the CPU and for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch_hlo import config, metrics
from torch_hlo.compiler import cache
from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.device import collective
from torch_hlo.device.runtime import Observe, Program
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.text import module_text

PROFILED: list[Program] = []  # what was compiled with the PROFILE flag


class Load(Protocol):
    """What makes a program of an Executable. Raises ValueError, RuntimeError or OSError for one that this process cannot use."""

    def __call__(self, executable: Executable, profile: Profile | None = None) -> Program: ...


def compiled(
    module: Module,
    target,
    load: Load,
    measure: Callable[[], bool],
    observe: Observe | None = None,
    profile: type[Profile] = Profile,
) -> Program:
    """The program of `module` for `target`, from the disk cache if it is there. What is observed, checked or profiled is always compiled anew.

    `measure()`: with TORCH_HLO_TUNE, measures the ways to compute the module's steps; whether all are known, so that the program may be kept on disk.
    `profile`: the counters that this kind of program has.
    """
    if config.get("PROFILE"):
        return _profiled(module, target, load, profile(config.get("PROFILE")))
    text, tuned = module_text(module), config.get("TUNE") > 0
    key = cache.fingerprint(text, target.cache_key, config.code_flags() + " tuned" * tuned)
    program = _stored(key, load) if observe is None and not config.get("CHECK") else None
    if program is None:
        complete = not tuned or measure()
        executable = compile_module(module, target, dump=observe)
        if complete:
            cache.store(key, executable.to_bytes())
        program = load(executable)
    if any(
        call.name in ("collective", "collective-start") for call in program.executable.host_calls
    ):
        program.info = collective.Info(module, text)
    return program


def _profiled(module: Module, target, load: Load, profile: Profile) -> Program:
    program = load(compile_module(module, target, profile=profile), profile)
    program.name = f"{program.name}.{len(PROFILED)}"
    PROFILED.append(program)
    return program


def _stored(key: str, load: Load) -> Program | None:
    """The program in the disk cache; None if there is none that this process can use."""
    data = cache.load(key)
    if data is None:
        return None
    try:
        program = load(Executable.from_bytes(data))
    except (
        ValueError,
        RuntimeError,
        OSError,
    ):  # another version, or a library that the code needs is not here
        metrics.count("DiskCacheUnreadable")
        return None
    program.from_disk = True
    return program
