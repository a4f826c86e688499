"""The versions of PyTorch whose private API this folder knows."""

import torch

SUPPORTED = ((2, 11), (2, 13))
VERSION = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])


def check() -> None:
    """Raises ImportError for a PyTorch that this folder was not written for."""
    if not SUPPORTED[0] <= VERSION <= SUPPORTED[1]:
        wanted = " to ".join(".".join(map(str, v)) for v in SUPPORTED)
        raise ImportError(
            f"torch_hlo needs PyTorch {wanted}, found {torch.__version__}: its device API is"
            " private and changes between versions"
        )
