"""Programs as JAX 0.10.2 emitted them, compiled, against what XLA's CPU backend computed (see
test/sweeps/jax_corpus.py for all)."""

from pathlib import Path

import numpy as np
import pytest

from test.sweeps.jax_corpus import check

DATA = np.load(Path(__file__).parents[1] / "data" / "jax_programs.npz")
NAMES = sorted({key.split("/")[0] for key in DATA.files})


def arrays(name: str, kind: str) -> list[np.ndarray]:
    count = sum(key.startswith(f"{name}/{kind}") for key in DATA.files)
    return [DATA[f"{name}/{kind}{i}"] for i in range(count)]


def text(key: str) -> str:
    return DATA[key].tobytes().decode()


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
@pytest.mark.parametrize("name", NAMES)
def test_program(name, form):
    assert not check(
        text(f"{name}/{form}"),
        arrays(name, "input"),
        arrays(name, "output"),
        text(f"{name}/types").split(","),
    )
