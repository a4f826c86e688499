"""Handlers of aten's operations, and what chooses one: `dispatch.handle`.

In: an op that PyTorch dispatches to the device. Out: tensors, recorded. May import record/.
"""
