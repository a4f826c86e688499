"""Matrix products: canonical dots, kernels for vectors, AMX and GPUs, and what is computed on
finished tiles (epilogues)."""
