"""Puts the device together, in the order that PyTorch needs. Imported once, by `import torch_hlo`."""

from __future__ import annotations

from torch_hlo.device.trim import release_code

_done = False


def register() -> None:
    """Register "hlo" with PyTorch."""
    global _done
    if _done:
        return
    from torch_hlo.lazy import backend, device_module

    backend.register_device(device_module)
    from torch_hlo import lowering  # noqa: F401  fills the table of lowerings, which dispatch consults
    from torch_hlo.lazy import (
        dispatch,
        encoder,
        generator,
        operators,
        optimizer_state,
        overrides,
        serialization,
        tensor,
    )

    backend.patch(tensor.HloTensor, device_module, generator.Generator, dispatch.forget)
    serialization.register()
    overrides.register()
    operators.register()
    optimizer_state.register()
    backend.spare_dynamo()
    assert dispatch.TABLE and encoder.Padded
    release_code()
    _done = True
