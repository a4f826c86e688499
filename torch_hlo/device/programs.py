"""Modules become loaded programs: compiled for a target, or found in the disk cache; the same way
for the CPU and for GPUs."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch_hlo import config, metrics
from torch_hlo.compiler import cache
from torch_hlo.compiler.codegen.profile import Profile
from torch_hlo.compiler.compile import compile_module
from torch_hlo.compiler.executable import Executable
from torch_hlo.compiler.llvm import Target
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.text.printer import module_text

from . import multi_device
from .interfaces import Observe, Program
from .memory import Buffer


class CompiledProgram(Program):
    """A loaded Executable. `profile`: the counters it was compiled with."""

    def __init__(self, executable: Executable, profile: Profile | None = None) -> None:
        self.name = executable.name
        self.executable = executable
        self.aliases = executable.aliases
        self.profile = profile
        self.info: multi_device.Info | None = None  # of a program that speaks to other devices

    def sizes(self, inputs: Sequence[Buffer]) -> list[int]:
        """The values of the executable's symbols."""
        return [inputs[i].shape.dims[d] for _, i, d in self.executable.symbols]

    @abstractmethod
    def counts(self) -> list[tuple[int, int, int]]:
        """(calls, total ns, least ns) of each of `profile.steps`."""

    def times(self) -> list[list[tuple[int, int]]]:
        """(when it began, ns) of the last calls of each of `profile.steps`, where that is known."""
        return []


P = TypeVar("P", bound=CompiledProgram, covariant=True)


class Load(Protocol[P]):
    """What makes a program of an Executable. Raises ValueError, RuntimeError or OSError for one
    that this process cannot use."""

    def __call__(self, executable: Executable, profile: Profile | None = None) -> P: ...


class Profiled:
    """The programs that were compiled with the PROFILE flag."""

    def __init__(self) -> None:
        self.programs: list[CompiledProgram] = []

    def add(self, program: CompiledProgram) -> None:
        program.name = f"{program.name}.{len(self.programs)}"
        self.programs.append(program)


PROFILED = Profiled()


def compiled(
    module: Module,
    target: Target,
    load: Load[P],
    observe: Observe | None = None,
    profile: type[Profile] = Profile,
) -> P:
    """The program of `module` for `target`, from the disk cache if it is there. What is observed,
    checked or profiled is always compiled anew.

    `profile`: the counters that this kind of program has."""
    if config.get("PROFILE"):
        return _profiled(module, target, load, profile(config.get("PROFILE")))
    text = module_text(module)
    key = cache.fingerprint(text, target.cache_key, config.code_flags())
    program = _stored(key, load) if observe is None and not config.get("CHECK") else None
    if program is None:
        executable = compile_module(module, target, dump=observe)
        cache.store(key, executable.to_bytes())
        program = load(executable)
    calls = {call.name for call in program.executable.host_calls}
    if not calls.isdisjoint(("collective", "collective-start")):
        program.info = multi_device.Info(module, text)
    return program


def _profiled(module: Module, target: Target, load: Load[P], profile: Profile) -> P:
    program = load(compile_module(module, target, profile=profile), profile)
    PROFILED.add(program)
    return program


def _stored(key: str, load: Load[P]) -> P | None:
    """The program in the disk cache; None if there is none that this process can use."""
    data = cache.load(key)
    if data is None:
        return None
    try:
        program = load(Executable.from_bytes(data))
    except (ValueError, RuntimeError, OSError):
        # another version, or a library that the code needs is not here
        metrics.count("DiskCacheUnreadable")
        return None
    program.from_disk = True
    return program
