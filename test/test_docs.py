"""What the documentation says exists: links, files, flags, commands. Its Python blocks run."""

from __future__ import annotations

import ast
import re
import shlex
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import torch

import torch_hlo
from torch_hlo import config
from torch_hlo.distributed import sharding_of
from torch_hlo.tools import cli

ROOT = Path(__file__).parent.parent
MADE = {"api.md", "operators.md", "opcodes.md", "flags.md", "shortcuts.md"}  # docs/generate.py
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (
        *sorted(ROOT.glob("*.md")),
        *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name not in MADE),
    )
}
PRESENT = sorted(PAGES.keys() - {"CHANGELOG.md"})  # history may name what is gone
SOURCES = [
    path.relative_to(ROOT)
    for folder in ("torch_hlo", "test", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    prose = re.sub(r"`[^`]*`", "", PAGES[page].read_text())
    links = re.findall(r"\[[^\]\n]+\]\(([^)\s#]+)", prose)
    here = PAGES[page].parent
    inside = [link for link in links if "://" not in link and Path(link).name not in MADE]
    assert not [link for link in inside if not (here / link).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_lines_can_be_read(page):
    long = [n for n, line in enumerate(PAGES[page].read_text().splitlines(), 1) if len(line) > 200]
    assert not long


@pytest.mark.parametrize("page", PRESENT)
def test_files_and_flags_exist(page):
    text = PAGES[page].read_text()
    files = set(re.findall(r"(?:\.\./)?([\w*/]*[\w*]\.py)\b", text)) - {"train.py"}  # the reader's
    assert not [name for name in files if not any(source.match(name) for source in SOURCES)]
    assert set(re.findall(r"TORCH_HLO_([A-Z_\d]*[A-Z\d])", text)) <= config.FLAGS.keys()


READERS = {"before.json", "found.json", "results.json", "train.py"}  # files that readers make


@cache
def tree() -> set[str]:
    """The files of the project and their folders: the ends of their paths."""
    folders = [ROOT / name for name in ("torch_hlo", "test", "docs", "examples", "benchmarks")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts]
    files += [*ROOT.glob("*.*"), ROOT / ".ci/run"]
    paths = {
        p.relative_to(ROOT) for path in files for p in (path, *path.parents) if ROOT in p.parents
    }
    return {"/".join(path.parts[i:]) for path in paths for i in range(len(path.parts))}


def missing(names: set[str]) -> list[str]:
    """Those of `names` that no path of the project ends with; `gpu_*.py` stands for many."""
    there = tree()
    return sorted(
        name
        for name in names
        if not any(fnmatch(path, name) for path in there if "*" in name)
        and name.removeprefix("../").rstrip("/") not in there
        and Path(name).name not in MADE | READERS
    )


def test_missing():
    there = {"lazy/run/launch.py", "gpu_*.py", "compiler/llvm/", "docs/guide"}
    gone = {"lazy/launch.py", "gpu_nothing_*.py", "compiler/partition/"}
    assert missing(there | gone) == sorted(gone)


@pytest.mark.parametrize("page", PRESENT)
def test_paths_exist(page):
    """`lazy/run/launch.py`, `compiler/llvm/`: what is written like a path is one."""
    marked = re.findall(r"(?<!`)`([\w.*-]+(?:/[\w.*-]+)*/?)`(?!`)", PAGES[page].read_text())
    assert not missing({name for name in marked if re.search(r"/|\.(py|md|json|mlir)$", name)})


ROOMS = [path for path in SOURCES if path.name == "__init__.py" and path.parts[0] == "torch_hlo"]


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_rooms_name_what_is_there(room):
    text = ast.get_docstring(ast.parse((ROOT / room).read_text())) or ""
    words = {word.rstrip(".") for word in re.findall(r"[\w./*]+", text)}
    named = {word for word in words if re.search(r"\w/|\.(py|md)$", word)}
    assert not missing(named)


def commands() -> list[tuple[str, ...]]:
    """Arguments of every `python -m torch_hlo …` that is written out on a page or in the command's
    own help."""
    texts = [cli.EXAMPLES, *(PAGES[page].read_text() for page in PRESENT)]
    lines = [
        line for text in texts for line in re.findall(r"python -m torch_hlo (\w[^\n`|]*)", text)
    ]
    return sorted({tuple(shlex.split(re.split(r"  |\s#", line)[0])) for line in lines})


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_commands_parse(arguments):
    assert callable(cli.parsed(arguments).run)


def run_blocks(page: str, names: dict) -> None:
    """Run the Python blocks of a page, one after another; `names`: what the page leaves out."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", PAGES[page].read_text(), re.MULTILINE | re.DOTALL
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        for block in blocks:
            exec(block, names)
    finally:
        torch.use_deterministic_algorithms(deterministic)


def test_readme_trains(capsys):
    before = torch_hlo.metrics.counter_value("UncachedCompile") or 0
    run_blocks("README.md", {})
    loss, compiles = capsys.readouterr().out.split()[:2]
    assert float(loss) < 5 and int(compiles) - before < 5


def test_distributed(capsys):
    class Perceptron(torch.nn.Sequential):
        def __init__(self, *_):
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    model, batch = Perceptron().to("hlo"), torch.randn(8, 16, device="hlo")
    given = {
        "model": model,
        "batch": batch,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-2),
        "torch": torch,
        "torch_hlo": torch_hlo,
        "GPT": Perceptron,
    }
    given |= {
        "x": torch.empty(64, 16, device="meta"),
        "y": torch.empty(64, 16, device="meta"),
    }
    with config.override(CPU_DEVICES=8):
        run_blocks("docs/guide/many_devices.md", given)
        assert sharding_of(model.up.weight) and sharding_of(batch)
    rows = capsys.readouterr().out
    assert "+ data_parallel('data')" in rows and "+ megatron('model')" in rows


GUIDES = ("tutorial", "index", "guide/training", "guide/captured_steps", "guide/torch_compile")


@pytest.mark.parametrize("page", [*GUIDES, "guide/sizes", "guide/debugging"])
def test_python_blocks_run(page):
    names: dict = {}
    exec("import torch, torch_hlo\nfrom torch_hlo import debug", names)
    run_blocks(f"docs/{page}.md", names)


@pytest.mark.parametrize("page", ["index", "guide/captured_steps"])
def test_comments_say_what_is_printed(page, capsys):
    """`print(...)  # 36.0`: the comment begins with what the line prints."""
    text = PAGES[f"docs/{page}.md"].read_text()
    said = re.findall(r"^print\(.*?\)\s+# (?:.*: )?([\d\[][^:\n]*?)(?::.*)?$", text, re.MULTILINE)
    torch_hlo.metrics.clear_all()
    run_blocks(f"docs/{page}.md", {})
    printed = capsys.readouterr().out.splitlines()
    assert said and all(value in printed for value in said), (said, printed)
