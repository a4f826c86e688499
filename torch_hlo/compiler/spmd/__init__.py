"""One annotated program becomes the program of each device: propagation, then partitioning.

In: a Module with `sharding` attributes. Out: a per-device Module with collectives. Imports hlo/,
simplify/, collectives/, compiler/cost.py and compiler/pipeline.py.
"""
