"""GPU targets: how a kernel names its threads, meets at a barrier and exchanges registers, and what
is known of the devices.

    target = gpu_target("nvptx:sm_90")

Nothing else in code generation knows the instruction set, but the matrix units (ptx.py).
"""

from dataclasses import KW_ONLY
from functools import lru_cache

import llvmlite.binding as llvm

from torch_hlo import config
from torch_hlo.frozen import frozen

from ..llvm import CpuTarget, Target, host

GLOBAL = 1  # address spaces
SHARED = 3
CONSTANT = 4

# The calling convention of kernels, and the line at which the threads of a group meet (LLVM 20 and
# 22 have no name for it in common).
KERNEL = "ptx_kernel"
BARRIER = 'call void asm sideeffect "bar.sync 0;", "~{memory}"() convergent'

# The LLVM intrinsics that instruction selection has code for, on scalars and vectors of the types
# that kernels use: anything else would abort the process. Those in the last line are taken apart
# into scalar code on the way. (Masked loads are not: they exist for constant masks only.)
INTRINSICS = frozenset(
    """
abs bswap copysign ctlz ctpop cttz exp2 fabs floor ceil trunc fma fmuladd fptosi.sat fptoui.sat
maxnum memcpy memmove memset minnum rint round roundeven smax smin sqrt umax umin fshl fshr nvvm
masked.gather masked.scatter vector.reduce.or
""".split()
)


@frozen
class GpuTarget(Target):
    """Kernels that run on a grid of threads, compiled together with a plan for the host. A vector
    is one access of a thread; one core: loops over time run one after another.

    `warp`: threads that run in step. `tf32`: products of f32 may round their operands to 11 bits.
    """

    _: KW_ONLY
    features: str = ""
    vector_bytes: int = 16
    parallel_threshold_ps: int = 0
    warp: int = 32
    tf32: bool = False
    computes_in_vectors = False
    masks_vectors = False
    splits_unaligned = True
    steers_caches = False
    masks_stores = True
    shares_memory = False
    item_per_call = True
    overlaps_steps = True

    def has(self, feature: str) -> bool:
        """Conversions of f16 and bf16 are instructions, and 2^x; nothing of what CPUs have besides
        is here."""
        return feature in ("f16c", "cvt-bf16", "exp2")

    def lanes(self, bits: int) -> int:
        return max(1, self.vector_bytes * 8 // bits)

    @property
    def strip(self) -> int:
        return 1  # neighbouring threads have neighbouring elements

    @property
    def fuses(self) -> bool:
        return True

    @property
    def plan_target(self) -> CpuTarget:
        return host()

    def machine(self) -> llvm.TargetMachine:
        initialize()
        return llvm.Target.from_triple("nvptx64-nvidia-cuda").create_target_machine(
            cpu=self.cpu,
            features=self.features,
            opt=3,
        )

    @property
    def matrix_types(self) -> frozenset[str]:
        """Element types of products that convolutions are laid out for."""
        return frozenset(("bf16", "f16", "f32") if self.tf32 else ("bf16", "f16"))

    @property
    def name(self) -> str:
        return f"nvptx:{self.cpu}"

    @property
    def capability(self) -> int:
        """Compute capability times ten, of NVIDIA's devices."""
        return int(self.cpu[3:].rstrip("a"))

    @property
    def key(self) -> str:
        return (
            f"{self.name} {self.features}{' tf32' * self.tf32}"
            f" llvm{llvm.llvm_version_info[0]} + {host().key}"
        )

    @property
    def cache_key(self) -> str:
        return self.key


@lru_cache(1)
def initialize() -> None:
    for setup in ("initialize_all_targets", "initialize_all_asmprinters"):
        getattr(llvm, setup)()


@frozen
class Machine:
    """What blocks are chosen by. `cores`: multiprocessors; `shared`: bytes of shared memory that a
    group may have; `rate`: bytes of k times elements of C that a multiprocessor's matrix units go
    through per nanosecond; `bandwidth`: bytes per nanosecond of the whole device."""

    cores: int
    shared: int
    rate: float
    bandwidth: float


# A100, A10, L4/L40, H100 by mma.sync (60 % of its rate) and by wgmma, B200 (mma.sync), RTX 50: from
# data sheets, dense, sums in f32.
MACHINES = {
    "sm_80": Machine(108, 163 << 10, 2890, 1555),
    "sm_86": Machine(84, 99 << 10, 830, 600),
    "sm_89": Machine(128, 99 << 10, 1290, 860),
    "sm_90": Machine(132, 227 << 10, 4500, 3350),
    "sm_90a": Machine(132, 227 << 10, 7490, 3350),
    "sm_100": Machine(148, 227 << 10, 4500, 8000),
    "sm_120": Machine(170, 99 << 10, 1230, 1790),
}


def machine(target: GpuTarget) -> Machine:
    """What is known of a device by its architecture."""
    return MACHINES.get(target.cpu) or MACHINES[target.cpu.rstrip("a")]


# What is accepted after the family's name. PTX versions: the oldest that knows the architecture and
# its matrix units, so that old drivers take the text.
_PTX = {
    "sm_80": "+ptx70",
    "sm_86": "+ptx71",
    "sm_89": "+ptx84",
    "sm_90": "+ptx84",
    "sm_90a": "+ptx84",
    "sm_100": "+ptx86",
    "sm_100a": "+ptx86",
    "sm_120": "+ptx87",
}


def gpu_target(name: str) -> GpuTarget:
    """`nvptx:sm_80` … `nvptx:sm_120`. Raises ValueError naming the choices."""
    family, _, cpu = name.partition(":")
    if family == "nvptx" and cpu in _PTX:
        return GpuTarget(
            cpu=cpu,
            features=_PTX[cpu],
            tf32=config.get("TF32"),
        )
    raise ValueError(f"no GPU target {name!r}: choose {', '.join(f'nvptx:{c}' for c in _PTX)}")


def nvptx_target(major: int, minor: int) -> GpuTarget:
    """The target for a device of this compute capability: its own row, else the newest older one.
    Raises ValueError below 8.0."""
    have = 10 * major + minor
    known = sorted(int(c[3:]) for c in _PTX if c[-1] != "a")
    fitting = [c for c in known if c <= have]
    if not fitting:
        raise ValueError(
            f"compute capability {major}.{minor} is not supported: kernels are written for 8.0"
            " (Ampere) and later"
        )
    return gpu_target(
        f"nvptx:sm_{fitting[-1]}"
        + ("a" if f"sm_{fitting[-1]}a" in _PTX and fitting[-1] == have and have == 90 else "")
    )
