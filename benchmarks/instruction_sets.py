"""One machine as several: what restricts each engine to an older instruction set.

    python -m benchmarks --isa avx2,avx512      # a column per engine and set: eager@avx2, ...

Ours reads TORCH_HLO_ISA. PyTorch's own kernels and TorchInductor read ATEN_CPU_CAPABILITY, its
libraries two more; XLA has a flag.
"""

from __future__ import annotations

from torch_hlo.compiler.llvm.target import host

SETS = {
    "avx2": {
        "TORCH_HLO_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    },
    "avx512": {
        "TORCH_HLO_ISA": "avx512",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX512",
    },
    "amx": {},
}
_NEEDS = {"avx2": "avx2", "avx512": "avx512vl", "amx": "amx-bf16"}


def missing(names: list[str]) -> str:
    """Why these sets cannot be measured here; empty where they can."""
    unknown = [n for n in names if n not in SETS]
    if unknown:
        return f"unknown instruction sets {unknown}; there are {', '.join(SETS)}"
    absent = [n for n in names if not host().has(_NEEDS[n])]
    return f"this machine has no {', '.join(absent)}" if absent else ""


def parts(column: str) -> tuple[str, dict[str, str]]:
    """The engine of a column, and the environment variables of its instruction set."""
    engine, _, name = column.partition("@")
    return engine, SETS[name] if name else {}


def columns(engines: list[str], names: list[str]) -> list[str]:
    """A column per set and engine; just the engines without sets."""
    return [f"{e}@{n}" for n in names for e in engines] if names else engines


def beside(ours: str, column: str) -> str:
    """Our column of the same instruction set."""
    _, at, name = column.partition("@")
    return ours.partition("@")[0] + at + name
