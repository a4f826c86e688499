"""Programs of lowerings are verified before their passes and after."""

import pytest

from torch_hlo import config


@pytest.fixture(autouse=True)
def verified():
    with config.override(CHECK=1):
        yield
