"""The machine that code is generated for: its LLVM name and features, vector width, and what a little parallelism costs."""
from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache

import llvmlite.binding as llvm

# Hypervisors mask the model, so the CPU is chosen by what it can do. (feature, LLVM name), best first.
_CPU_BY_FEATURE = (
    ("amx-bf16", "sapphirerapids"), ("avx512bf16", "cooperlake"), ("avx512vl", "skylake-avx512"), ("avx2", "haswell"), ("sse4.2", "nehalem"),
)  # fmt: skip
_UNKNOWN_TO_LLVM = {"prefetchi"}


@dataclass(frozen=True, slots=True)
class Target:
    """`vector_bytes`: width of a vector register. `features`: LLVM's feature string, part of the cache key."""

    cpu: str
    features: str
    vector_bytes: int
    parallel_threshold_ps: int = 3_000_000  # a loop shorter than this is not worth waking another thread for

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")

    def lanes(self, bits: int) -> int:
        """Elements of `bits` in a vector register."""
        return self.vector_bytes * 8 // bits

    def machine(self) -> llvm.TargetMachine:
        """A new TargetMachine: an MCJIT engine takes it over, so each needs its own."""
        initialize()
        return llvm.Target.from_default_triple().create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, codemodel="jitdefault", jit=True)

    @property
    def key(self) -> str:
        return f"{llvm.get_default_triple()} {self.cpu} {self.features} llvm{llvm.llvm_version_info[0]}"


@lru_cache(1)
def initialize() -> None:
    for setup in ("initialize_native_target", "initialize_native_asmprinter", "initialize_native_asmparser"):
        getattr(llvm, setup)()


_denied: set[str] = set()


def deny(prefix: str) -> None:
    """Do not use the features with this prefix: the processor has them, but the operating system does not let this process use them."""
    _denied.add(prefix)
    host.cache_clear()


@lru_cache(1)
def host() -> Target:
    """This machine."""
    initialize()
    found = llvm.get_host_cpu_features()
    on = {k for k, v in found.items() if v} - _UNKNOWN_TO_LLVM
    on = {k for k in on if not k.startswith(tuple(_denied))}
    features = ",".join(("+" if k in on else "-") + k for k in sorted(found) if k not in _UNKNOWN_TO_LLVM)
    if platform.machine() not in ("x86_64", "AMD64"):
        return Target(llvm.get_host_cpu_name(), features, 16)
    cpu = next((name for feature, name in _CPU_BY_FEATURE if feature in on), "x86-64")
    return Target(cpu, features, 64 if "avx512vl" in on and "avx512dq" in on else 32 if "avx2" in on and "fma" in on else 16)
