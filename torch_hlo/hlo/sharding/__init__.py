"""How arrays lie on many devices, and how devices talk: meshes, shardings, sharding factors of
opcodes, collectives.

In: annotations. Out: plain data that propagation, partitioning and runtimes read. Imports hlo/ir.
"""
