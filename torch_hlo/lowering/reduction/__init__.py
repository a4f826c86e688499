"""Reductions: sums, means, extrema and where they are, norms, variances.

In: Instructions, in place of the op's tensors. Out: Instructions, with or without the reduced
dimensions as PyTorch expects. Imports core/ and pointwise/."""
