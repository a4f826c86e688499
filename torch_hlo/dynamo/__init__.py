"""`torch.compile(model, backend="hlo")`: Dynamo's graphs through the same lowering and compiler as
the lazy device.

Found by PyTorch through the entry point `torch_dynamo_backends`, so torch_hlo need not be imported
first.

In: FX graphs, and example inputs. Out: a function that runs their programs. Imports lazy/,
lowering/, pytorch/, device/ and hlo/.
"""

from typing import Any

__all__ = ["OPTIONS", "hlo"]


def __getattr__(name: str) -> Any:
    """`hlo` and `OPTIONS` import Dynamo, which takes longer than a first step."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import backend

    return getattr(backend, name)
