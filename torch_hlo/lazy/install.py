"""Puts the device together, in the order that PyTorch needs. Imported once, by `import
torch_hlo`."""

from collections.abc import Callable

from torch_hlo.device.cpu.engine import constant_function
from torch_hlo.device.cpu.trim import release_code
from torch_hlo.pytorch.operators import OpOverload

_done = False


def _communication(op: OpOverload) -> Callable | None:
    """The handler of an op of torch.distributed."""
    if op.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
        return None
    from .ops import distributed_ops

    return distributed_ops.handler(op)


_HIGHER = """
    associative_scan cond flex_attention flex_attention_backward map_impl print scan while_loop
""".split()


def _higher_order(name: str, *args: object, **kwargs: object) -> object:
    """PyTorch's own loops and branches. What records them imports sympy: not before it is used."""
    from .ops import higher_order

    return higher_order.call(name, args, kwargs)


def register() -> None:
    """Register "hlo" with PyTorch."""
    global _done
    if _done:
        return
    from torch_hlo.pytorch import imports, operators, patches, quick_operators, registration

    from . import device_module, subclasses

    registration.register_device(device_module, constant_function)
    from torch_hlo import (
        lowering,
    )  # fills the table of lowerings, which dispatch consults

    from .aten import dispatch
    from .ops import composites, encoder, optimizer_state
    from .record import exchange, generator, handlers, inference, serialization, session, tensor
    from .run.device_engine import DeviceEngine

    engine = session.current().engine = DeviceEngine()
    handlers.MAKERS.insert(0, _communication)
    dispatch.install()
    patches.patch(
        tensor.HloTensor,
        device_module,
        generator.Generator,
        inference.forget,
        engine.start_collectives,
    )
    serialization.register()
    subclasses.register()
    exchange.register()
    composites.register()
    operators.implement(_HIGHER, tensor.HloTensor, _higher_order)
    quick_operators.register(tensor.HloTensor)
    optimizer_state.register()
    imports.spare_dynamo()
    assert lowering and handlers.TABLE and encoder.Padded
    release_code()
    _done = True


def rename_to_xla() -> None:
    """Tensors of the device say "xla" in place of "hlo" from now on. Raises RuntimeError once there
    are tensors."""
    from torch_hlo.pytorch import registration

    from . import device_module
    from .ops import composites
    from .record import meta

    if registration.PLACE.name == "xla":
        return
    if meta.any_tensors():
        raise RuntimeError(
            "the device is called xla by programs that have no tensor on it yet: do it right after"
            " import torch_hlo"
        )
    registration.rename_to_xla(device_module, constant_function)
    composites.register()
