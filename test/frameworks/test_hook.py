"""Changes of other packages when they are imported."""

import sys
import warnings
from pathlib import Path

import pytest

from torch_hlo.frameworks import hook

SOURCE = """
KIND = "cpu"
class Chooser:
    def choose(self, wanted=None):
        if wanted in ("cuda", "xpu"):
            return wanted
        return "cpu"
    @property
    def last(self):
        return "cpu"
def device():
    return "cpu"
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch):
    def write(name: str, source: str = SOURCE) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    finders = list(sys.meta_path)
    yield write
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        del sys.modules[name]


def rows(name: str) -> list[hook.Row]:
    return [
        hook.Row(name, "Chooser.choose", hook.listed("cuda", "hlo")),
        hook.Row(name, "Chooser.last", hook.exchange("cpu", "hlo")),
        hook.Row(name, "device", hook.exchange("cpu", "hlo")),
        hook.Row(name, "KIND", hook.replaced("cpu", "hlo")),
    ]


def check(module) -> None:
    assert module.Chooser().choose("hlo") == "hlo"
    assert module.Chooser().choose("tpu") == "cpu"
    assert module.Chooser().last == module.device() == module.KIND == "hlo"


def test_before_and_after_the_import(package):
    hook.install(rows(package("framework_later")))
    import framework_later

    check(framework_later)
    import_first = package("framework_first")
    import framework_first

    kept = framework_first.device
    hook.install(rows(import_first))
    check(framework_first)
    assert kept() == "hlo"  # whoever imported the function has the new one


def test_what_is_not_there_is_said(package):
    name = package("framework_other", "def device():\n    return 'gpu'\n")
    hook.install([hook.Row(name, "device", hook.exchange("cpu", "hlo"))])
    with pytest.warns(UserWarning, match="framework_other.device is another.*not the CPU"):
        import framework_other  # noqa: F401
    name = package("framework_empty", "")
    hook.install([hook.Row(name, "Chooser.last", hook.exchange("cpu", "hlo"))])
    with pytest.warns(UserWarning, match="does not know this version"):
        import framework_empty  # noqa: F401


def test_what_the_environment_says_stays(package, monkeypatch):
    monkeypatch.setenv("FRAMEWORK_DEVICE", "cpu")
    name = package("framework_set")
    hook.install([hook.Row(name, "KIND", hook.replaced("cpu", "hlo", unless="FRAMEWORK_DEVICE"))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import framework_set
    assert framework_set.KIND == "cpu"
