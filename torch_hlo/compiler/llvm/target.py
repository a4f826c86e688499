"""The machine that code is generated for: its LLVM name and features, vector width, and what a
little parallelism costs.

`Target` says what code generation may ask of a machine. `CpuTarget` answers here, `GpuTarget` in
compiler/gpu/target.py."""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import llvmlite.binding as llvm

from torch_hlo import config
from torch_hlo.frozen import frozen

from ..thresholds import PARALLEL_PS

# Hypervisors mask the model, so the CPU is chosen by what it can do. (feature, LLVM name), best
# first.
_CPU_BY_FEATURE = (
    ("amx-bf16", "sapphirerapids"),
    ("avx512bf16", "cooperlake"),
    ("avx512vl", "skylake-avx512"),
    ("avx2", "haswell"),
    ("sse4.2", "nehalem"),
)
_UNKNOWN_TO_LLVM = {"prefetchi"}


@frozen
class Target(ABC):
    """What code is generated for.

    `cpu`, `features`: LLVM's names, part of the cache key.
    `vector_bytes`: of a vector, as `computes_in_vectors` says.
    `parallel_threshold_ps`: a loop shorter than this is not worth waking another thread for.
    `threads`: whether loops may run on several threads.
    `cores`: how many threads work is cut for. Any number may run it, and results do not depend on
      it.
    `excess_precision`: see Module.
    """

    cpu: str
    features: str
    vector_bytes: int
    parallel_threshold_ps: int = PARALLEL_PS
    threads: bool = True
    cores: int = 1
    excess_precision: bool = False

    # vectors are registers that a core computes in, and not just what a thread moves at a time
    computes_in_vectors: ClassVar[bool]
    # vectors can be loaded and stored under a mask, element by element
    masks_vectors: ClassVar[bool]
    # vectors that are not known to be aligned are moved piece by piece
    splits_unaligned: ClassVar[bool]
    # code says what caches shall have: it asks for what it reads later, and stores past them
    steers_caches: ClassVar[bool]
    # arrays are in the memory that code of the host and its libraries use
    shares_memory: ClassVar[bool]
    # a call of a parallel function does one item, and not a range of them
    item_per_call: ClassVar[bool]
    # a step may begin before the one before it has ended
    overlaps_steps: ClassVar[bool]

    @abstractmethod
    def has(self, feature: str) -> bool:
        """Whether LLVM's feature of this name is there."""

    @abstractmethod
    def lanes(self, bits: int) -> int:
        """Elements of `bits` in a vector."""

    @property
    @abstractmethod
    def strip(self) -> int:
        """f32 elements that a loop written by hand handles at a time."""

    @property
    @abstractmethod
    def masks_stores(self) -> bool:
        """Whether a store under a mask costs what another does. (AVX2's takes AMD's processors a
        dozen cycles, and is a branch for each element of 2 bytes, as all are without AVX2.)"""

    @property
    @abstractmethod
    def fuses(self) -> bool:
        """Whether multiply-add with one rounding is an instruction. Otherwise llvm.fma would be a
        call of libm."""

    @property
    @abstractmethod
    def plan_target(self) -> CpuTarget:
        """What runs the program's entry, which calls or launches the rest."""

    @property
    @abstractmethod
    def key(self) -> str:
        """What runs the code."""

    @property
    @abstractmethod
    def cache_key(self) -> str:
        """What programs and measurements are kept under: what the code is best for, besides."""


@frozen
class CpuTarget(Target):
    """`triple`: what code in files is for; empty for code that this process loads."""

    triple: str = ""
    computes_in_vectors = True
    masks_vectors = True
    splits_unaligned = False
    steers_caches = True
    shares_memory = True
    item_per_call = False
    overlaps_steps = False

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")

    def lanes(self, bits: int) -> int:
        return self.vector_bytes * 8 // bits

    @property
    def strip(self) -> int:
        return self.lanes(32)

    @property
    def masks_stores(self) -> bool:
        return self.vector_bytes >= 64

    @property
    def fuses(self) -> bool:
        return self.has("fma") or self.arch == "aarch64"

    @property
    def plan_target(self) -> CpuTarget:
        return self

    @property
    def arch(self) -> str:
        return (
            (self.triple or llvm.get_default_triple()).partition("-")[0].replace("arm64", "aarch64")
        )

    def machine(self, level: int = 2) -> llvm.TargetMachine:
        """A new TargetMachine: an MCJIT engine takes it over, so each needs its own. `level` 0 to
        3: effort of instruction selection."""
        initialize()
        if not self.triple:
            return llvm.Target.from_default_triple().create_target_machine(
                cpu=self.cpu,
                features=self.features,
                opt=level,
                codemodel="jitdefault",
                jit=True,
            )
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu,
            features=self.features,
            opt=level,
            reloc="pic",
            codemodel="default",
        )

    @property
    def key(self) -> str:
        return (
            f"{self.triple or llvm.get_default_triple()} {self.cpu} {self.features}"
            f" llvm{llvm.llvm_version_info[0]}"
        )

    @property
    def cache_key(self) -> str:
        return f"{self.key} {self.cores} cores"


@lru_cache(1)
def initialize() -> None:
    for setup in (
        "initialize_native_target",
        "initialize_native_asmprinter",
        "initialize_native_asmparser",
    ):
        getattr(llvm, setup)()


_denied: set[str] = set()
# how features begin that a set of instructions does not have
_BEYOND = {"": (), "amx": (), "avx512": ("amx", "avx10")}
_BEYOND["avx2"] = (*_BEYOND["avx512"], "avx512", "avxvnni", "avxifma", "avxneconvert")


def deny(prefix: str) -> None:
    """Do not use the features with this prefix: the processor has them, but the operating system
    does not let this process use them."""
    _denied.add(prefix)
    host.cache_clear()


@lru_cache(1)
def host() -> CpuTarget:
    """This machine, all of its cores."""
    initialize()
    found = llvm.get_host_cpu_features()
    on = {k for k, v in found.items() if v} - _UNKNOWN_TO_LLVM
    on = {k for k in on if not k.startswith((*_denied, *_BEYOND[config.get("ISA")]))}
    features = ",".join(
        ("+" if k in on else "-") + k for k in sorted(found) if k not in _UNKNOWN_TO_LLVM
    )
    if platform.machine() not in ("x86_64", "AMD64"):
        return CpuTarget(llvm.get_host_cpu_name(), features, 16, cores=os.cpu_count() or 1)
    cpu = next((name for feature, name in _CPU_BY_FEATURE if feature in on), "x86-64")
    width = (
        64 if "avx512vl" in on and "avx512dq" in on else 32 if "avx2" in on and "fma" in on else 16
    )
    return CpuTarget(cpu, features, width, cores=os.cpu_count() or 1)


# -- code for other machines
_V2 = "+cx16,+mmx,+fxsr,+popcnt,+sahf,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2"
_V3 = f"{_V2},+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+xsave"
_V4 = f"{_V3},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"


@frozen
class Platform:
    """`cpus`: what code can be generated for: name -> (LLVM's CPU, features, bytes of a vector
    register). The first is the default."""

    triple: str
    cpus: dict[str, tuple[str, str, int]]


PLATFORMS: dict[str, Platform] = {
    "x86_64-linux-gnu": Platform(
        "x86_64-unknown-linux-gnu",
        {
            "x86-64-v3": ("x86-64-v3", _V3, 32),
            "x86-64-v4": ("x86-64-v4", _V4, 64),
            "x86-64-v2": ("x86-64-v2", _V2, 16),
        },
    ),
    "aarch64-linux-gnu": Platform(
        "aarch64-unknown-linux-gnu",
        {
            "armv8-a": ("generic", "+fp-armv8,+neon", 16),
            "neoverse-n1": (
                "neoverse-n1",
                "+fp-armv8,+neon,+fullfp16,+dotprod,+lse",
                16,
            ),
        },
    ),
    "wasm32": Platform(
        "wasm32-unknown-unknown",
        {
            "simd128": ("generic", "+simd128,+bulk-memory", 16),
            "mvp": ("mvp", "", 16),
        },
    ),
}


def platform_target(name: str, cpu: str | None = None, threads: bool = False) -> CpuTarget:
    """Target for code in files. `name`: a key of PLATFORMS, or "host"; `cpu`: one of the
    platform's, or "host" for all that this machine has. Raises ValueError listing what there is."""
    cores = (os.cpu_count() or 1) if threads else 1
    if name == "host":
        own = (
            f"{platform.machine().replace('AMD64', 'x86_64').replace('arm64', 'aarch64')}-linux-gnu"
        )
        if cpu in (None, "host"):
            if own not in PLATFORMS:
                raise ValueError(
                    f"no code in files for {platform.machine()} yet; targets are"
                    f" {', '.join(PLATFORMS)}"
                )
            return replace(host(), triple=PLATFORMS[own].triple, threads=threads, cores=cores)
        name = own
    found = PLATFORMS.get(name)
    if found is None:
        raise ValueError(f"unknown target {name!r}; there are host, {', '.join(PLATFORMS)}")
    if cpu is not None and cpu not in found.cpus:
        raise ValueError(f"unknown cpu {cpu!r} for {name}; there are {', '.join(found.cpus)}")
    llvm_cpu, features, vector_bytes = found.cpus[cpu or next(iter(found.cpus))]
    return CpuTarget(
        llvm_cpu,
        features,
        vector_bytes,
        triple=found.triple,
        threads=threads,
        cores=cores,
    )
