"""Kernels of fusions: elementwise loops, rows that are reduced, sums.

In: fusion instructions. Out: loop nests. Imports codegen/, llvm/, fusion/.
"""
