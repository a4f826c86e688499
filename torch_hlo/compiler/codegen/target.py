"""The machine that code is generated for: its LLVM name and features, vector width, and what a little parallelism costs."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from functools import lru_cache

import llvmlite.binding as llvm

# Hypervisors mask the model, so the CPU is chosen by what it can do. (feature, LLVM name), best first.
_CPU_BY_FEATURE = (
    ("amx-bf16", "sapphirerapids"), ("avx512bf16", "cooperlake"), ("avx512vl", "skylake-avx512"), ("avx2", "haswell"), ("sse4.2", "nehalem"),
)  # fmt: skip
_UNKNOWN_TO_LLVM = {"prefetchi"}


@dataclass(frozen=True, slots=True)
class Target:
    """`vector_bytes`: width of a vector register. `features`: LLVM's feature string, part of the cache key.

    `triple`: what code in files is for; empty for code that this process loads. `threads`: whether loops may run on the thread pool.
    `cores`: how many of its threads work is cut for. Any number may run it, and results do not depend on it.
    """

    cpu: str
    features: str
    vector_bytes: int
    parallel_threshold_ps: int = (
        3_000_000  # a loop shorter than this is not worth waking another thread for
    )
    grid = False  # see gpu/target.py
    triple: str = ""
    threads: bool = True
    cores: int = 1

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")

    def lanes(self, bits: int) -> int:
        """Elements of `bits` in a vector register."""
        return self.vector_bytes * 8 // bits

    @property
    def strip(self) -> int:
        """f32 elements that a loop written by hand handles at a time."""
        return self.lanes(32)

    @property
    def fuses(self) -> bool:
        """Whether multiply-add with one rounding is an instruction. Otherwise llvm.fma would be a call of libm."""
        return self.has("fma") or self.arch == "aarch64"

    @property
    def arch(self) -> str:
        return (
            (self.triple or llvm.get_default_triple()).partition("-")[0].replace("arm64", "aarch64")
        )

    def machine(self, level: int = 2) -> llvm.TargetMachine:
        """A new TargetMachine: an MCJIT engine takes it over, so each needs its own. `level` 0 to 3: effort of instruction selection."""
        initialize()
        if not self.triple:
            return llvm.Target.from_default_triple().create_target_machine(
                cpu=self.cpu, features=self.features, opt=level, codemodel="jitdefault", jit=True
            )
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=level, reloc="pic", codemodel="default"
        )

    @property
    def key(self) -> str:
        return f"{self.triple or llvm.get_default_triple()} {self.cpu} {self.features} llvm{llvm.llvm_version_info[0]}"

    @property
    def cache_key(self) -> str:
        """What programs and measurements are kept under: `key` says where code runs, but not what it is best for."""
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


def deny(prefix: str) -> None:
    """Do not use the features with this prefix: the processor has them, but the operating system does not let this process use them."""
    _denied.add(prefix)
    host.cache_clear()


@lru_cache(1)
def host() -> Target:
    """This machine, all of its cores."""
    initialize()
    found = llvm.get_host_cpu_features()
    on = {k for k, v in found.items() if v} - _UNKNOWN_TO_LLVM
    on = {k for k in on if not k.startswith(tuple(_denied))}
    features = ",".join(
        ("+" if k in on else "-") + k for k in sorted(found) if k not in _UNKNOWN_TO_LLVM
    )
    if platform.machine() not in ("x86_64", "AMD64"):
        return Target(llvm.get_host_cpu_name(), features, 16, cores=os.cpu_count() or 1)
    cpu = next((name for feature, name in _CPU_BY_FEATURE if feature in on), "x86-64")
    width = (
        64 if "avx512vl" in on and "avx512dq" in on else 32 if "avx2" in on and "fma" in on else 16
    )
    return Target(cpu, features, width, cores=os.cpu_count() or 1)


# -- code for other machines ---------------------------------------------------------------------------------------------
_V2 = "+cx16,+mmx,+fxsr,+popcnt,+sahf,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2"
_V3 = f"{_V2},+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+xsave"
_V4 = f"{_V3},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"


@dataclass(frozen=True, slots=True)
class Platform:
    """`cpus`: what code can be generated for: name -> (LLVM's CPU, features, bytes of a vector register). The first is the default."""

    triple: str
    cpus: dict[str, tuple[str, str, int]]


PLATFORMS: dict[str, Platform] = {
    "x86_64-linux-gnu": Platform("x86_64-unknown-linux-gnu", {
        "x86-64-v3": ("x86-64-v3", _V3, 32), "x86-64-v4": ("x86-64-v4", _V4, 64), "x86-64-v2": ("x86-64-v2", _V2, 16)}),
    "aarch64-linux-gnu": Platform("aarch64-unknown-linux-gnu", {
        "armv8-a": ("generic", "+fp-armv8,+neon", 16), "neoverse-n1": ("neoverse-n1", "+fp-armv8,+neon,+fullfp16,+dotprod,+lse", 16)}),
    "wasm32": Platform("wasm32-unknown-unknown", {"simd128": ("generic", "+simd128,+bulk-memory", 16), "mvp": ("mvp", "", 16)}),
}  # fmt: skip


def platform_target(name: str, cpu: str | None = None, threads: bool = False) -> Target:
    """Target for code in files. `name`: a key of PLATFORMS, or "host"; `cpu`: one of the platform's, or "host" for all that this
    machine has. Raises ValueError listing what there is."""
    cores = (os.cpu_count() or 1) if threads else 1
    if name == "host":
        own = (
            f"{platform.machine().replace('AMD64', 'x86_64').replace('arm64', 'aarch64')}-linux-gnu"
        )
        if cpu in (None, "host"):
            if own not in PLATFORMS:
                raise ValueError(
                    f"no code in files for {platform.machine()} yet; targets are {', '.join(PLATFORMS)}"
                )
            return replace(host(), triple=PLATFORMS[own].triple, threads=threads, cores=cores)
        name = own
    found = PLATFORMS.get(name)
    if found is None:
        raise ValueError(f"unknown target {name!r}; there are host, {', '.join(PLATFORMS)}")
    if cpu is not None and cpu not in found.cpus:
        raise ValueError(f"unknown cpu {cpu!r} for {name}; there are {', '.join(found.cpus)}")
    llvm_cpu, features, vector_bytes = found.cpus[cpu or next(iter(found.cpus))]
    return Target(
        llvm_cpu, features, vector_bytes, triple=found.triple, threads=threads, cores=cores
    )
