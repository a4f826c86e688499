"""The builder that every kernel is written with: programs, kernels, loop nests, index algebra, the
tables of emitters.

In: scheduled, fused HLO. Out: LLVM IR text. Imports llvm/, schedule/ and hlo/; no family of
operations."""
