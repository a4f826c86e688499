"""Matrix products, factorizations, Fourier transforms, distances.

In: Instructions, in place of the op's tensors. Out: Instructions; LAPACK's routines stay calls.
Imports core/, pointwise/, reduction/ and shape/, and the names of LAPACK's symbols."""
