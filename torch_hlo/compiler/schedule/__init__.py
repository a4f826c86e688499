"""The order of steps, where every array lives, and what is computed again instead of kept.

In: fused HLO. Out: an order and offsets. Imports hlo/, fusion/, compiler/hlo_pass.py and
compiler/cost.py.
"""
