"""The names of torch_xla on this device: after `install_as_torch_xla()` scripts written for it run
as they are. docs/guide/torch_xla.md says which names there are.

    import torch_hlo.compat
    torch_hlo.compat.install_as_torch_xla()
    import torch_xla                              # ours from now on
    x = torch.ones(2, device="xla")               # a tensor of the hlo device, called xla:0

or, for a script that is not touched at all, `python -m torch_hlo.compat train.py`.

In: names of torch_xla. Out: our functions under these names; modules.py has the table. What
torch_xla has and this package lacked stands in the room it belongs to: here are only functions that
turn arguments around. Imports every room.
"""

import importlib.util
import sys
from typing import Any


def install_as_torch_xla():
    """Let `import torch_xla` and everything below it find this package, and call the device "xla".

    Call it before the first tensor of the device is made. Raises RuntimeError where the real
    torch_xla is installed or has been imported: it is never shadowed."""
    from torch_hlo.lazy import install

    from . import modules, spawning, xla_model

    found = sys.modules.get("torch_xla")
    if isinstance(found, modules.Names):
        return
    if found is not None or importlib.util.find_spec("torch_xla") is not None:
        raise RuntimeError(
            "torch_xla is installed here, and install_as_torch_xla() does not shadow it: uninstall"
            " it (pip uninstall torch_xla), or use it without install_as_torch_xla()"
        )
    install.rename_to_xla()
    modules.install()
    spawning.install(_Installed())
    xla_model.install()


class _Installed:
    """Unpickled by a new process: it installs the names before it imports the script that uses
    them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install_as_torch_xla, ()


__all__ = ["install_as_torch_xla"]
