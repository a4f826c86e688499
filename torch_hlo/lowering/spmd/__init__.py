"""Programs for many devices: PyTorch's functional collectives, and annotations that say where the
elements of a value live.

In: Instructions, with replica groups or shardings as text. Out: HLO's collectives and XLA's
annotations. Imports core/, and hlo/sharding."""
