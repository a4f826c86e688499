"""Everything that relies on what PyTorch does not promise, under names of its own.

In: PyTorch 2.11 to 2.13 (version.py). Out: private names that other rooms need (operators.py,
participants.py, tensors.py, graphs.py, tracing.py), the device's registration (registration.py),
changes of PyTorch's behaviour (patches.py, autocast.py, uninitialized.py) and shortcuts, which
stand in one table (shortcuts.py). Imports torch and config only, so that every room that knows
torch may import it; what needs the tensor class gets it as an argument from lazy/install.py.
"""
