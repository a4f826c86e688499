"""`torch_hlo.compile`: a function recorded once and launched again.

In: a Python function. Out: one that replays. May import record/, run/, ops/.
"""
