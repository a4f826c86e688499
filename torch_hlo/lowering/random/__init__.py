"""Random numbers: threefry.py is the generator, distributions.py the operators.

In: Instructions, and the `seed` and `offset` that every recorded random op carries. Out:
Instructions; equal seeds and offsets give equal numbers on every device. Imports core/,
reduction/ and shape/."""
