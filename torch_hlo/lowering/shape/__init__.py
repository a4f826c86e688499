"""Operators that make, move or order elements: views, indexing, padding, sorting, running sums.

In: Instructions, in place of the op's tensors. Out: Instructions of the shapes that PyTorch
expects. Imports core/, pointwise/ and reduction/."""
