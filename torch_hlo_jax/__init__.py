"""Where JAX finds torch_hlo: it imports the module of each installed plugin in every process.

This one imports nothing until somebody asks for the platform "hlo", with `JAX_PLATFORMS` or
`jax.config.update("jax_platforms", "hlo")`. Then it imports the compiler, without PyTorch."""

loading = False  # torch_hlo/__init__.py looks


def initialize() -> None:
    """Called by JAX before it makes its back ends."""
    global loading
    from jax._src import config

    if "hlo" in (config.jax_platforms.value or "").split(","):
        loading = True
        try:
            from torch_hlo import pjrt
        finally:
            loading = False
        pjrt.initialize()
