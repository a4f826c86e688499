"""Training frameworks use the device: where one chooses among devices by a list that it closed,
this is the thinnest change of that list, made when the framework is imported.

In: the modules of a framework, by name. Out: the same modules, in which PyTorch's accelerator, when
it is ours, is chosen, and a step of training is marked. table.py has all changes, hook.py applies
them. Beside them, tensorflow.py is `torch_hlo.tf`. Imports `pytorch` and `lazy.record`; frameworks
only inside functions, or in files that one framework's user loads.
"""
