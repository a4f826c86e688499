"""Where JAX finds torch_hlo: it imports the module of each installed plugin in every process.

This one imports nothing until somebody asks for the platform "hlo", with `JAX_PLATFORMS` or
`jax.config.update("jax_platforms", "hlo")`: other users of JAX do not wait for PyTorch."""


def initialize() -> None:
    """Called by JAX before it makes its back ends."""
    from jax._src import config

    if "hlo" in (config.jax_platforms.value or "").split(","):
        from torch_hlo import pjrt

        pjrt.initialize()
