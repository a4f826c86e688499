"""The builder that every kernel is written with: programs, kernels, loop nests, index algebra, the
tables of emitters.

In: scheduled, fused HLO. Out: LLVM IR text. Imports llvm/, schedule/ and hlo/; no family of
operations."""

from .block import CodegenError, HostCall, Place, leaves
from .index import Index
from .inline import Writer, apply, load, load_real, store
from .kernel import Kernel
from .loop_plan import Planner
from .program import Program
