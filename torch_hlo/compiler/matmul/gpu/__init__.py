"""Matrix products on GPUs: which engine takes a product (matrix units, wgmma, fused multiply-adds,
vectors), how operands travel to it, what is computed on finished tiles.

In: dot steps. Out: kernels on a grid of threads. Imports compiler/gpu/, codegen/, and product.py
and epilogue.py beside it."""
