"""What all GPU kernels share: targets, kernels on a grid of threads, exchange between threads, PTX.

In: steps. Out: kernels as IR, and a plan that launches them. Imports codegen/ and llvm/.
"""
