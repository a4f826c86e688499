"""House rules that a machine can check: import levels, private names, who may import torch, who may read the environment, line length, file size."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torch_hlo"
FILES = sorted(PACKAGE.rglob("*.py"))
# docs/architecture.md; the longest prefix counts
LEVELS = {
    "torch_hlo.config": 0, "torch_hlo.collector": 0, "torch_hlo.metrics": 0, "torch_hlo.hlo": 0,
    "torch_hlo.compiler": 2,
    "torch_hlo.device": 3, "torch_hlo.lowering": 3,
    "torch_hlo.lazy": 4,
    "torch_hlo.distributed": 5, "torch_hlo": 5,
}  # fmt: skip
MAX_LINES = 800


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level(module: str) -> int:
    while module not in LEVELS:
        module = module.rpartition(".")[0]
    return LEVELS[module]


def imports(tree: ast.AST, module: str):
    """(imported module, line) of every import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(module.split(".")[: -node.level] + ([base] if base else []))
            yield base, node.lineno
            for name in node.names:
                if (PACKAGE.parent / base.replace(".", "/") / (name.name + ".py")).exists():
                    yield f"{base}.{name.name}", node.lineno


def private_names(tree: ast.AST):
    """(module of this package, private name of it, line) of every such name that is imported or looked up."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_hlo"):
            folder = PACKAGE.parent / node.module.replace(".", "/")
            modules |= {
                name.asname or name.name: f"{node.module}.{name.name}"
                for name in node.names
                if (folder / f"{name.name}.py").exists()
            }
            yield from (
                (node.module, name.name, node.lineno)
                for name in node.names
                if name.name.startswith("_")
            )
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and node.attr.startswith("_")
            and not node.attr.endswith("__")
        ):
            yield modules[node.value.id], node.attr, node.lineno


def packages_of(imported: str) -> str:
    # `from torch_hlo import config` imports the package first, which is no dependency of the importing module on level 5.
    return imported if imported != "torch_hlo" else "torch_hlo.config"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_file(path):
    text = path.read_text()
    tree = ast.parse(text)
    module = module_name(path)
    mine = level(module)
    problems = []
    for imported, line in imports(tree, module):
        top = imported.split(".")[0]
        if top == "torch_hlo" and level(packages_of(imported)) > mine:
            problems.append(f"line {line}: imports {imported}, which is of a higher level")
        if top == "torch" and mine <= 2 and not module.startswith("torch_hlo.distributed"):
            problems.append(f"line {line}: imports torch")
        if top == "ctypes" and mine < 3:
            problems.append(f"line {line}: imports ctypes below device/")
    if module != "torch_hlo.config":
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("environ", "getenv")
                and getattr(node.value, "id", "") == "os"
            ):
                problems.append(
                    f"line {node.lineno}: reads the environment; add a flag to config.py"
                )
    problems += [
        f"line {line}: {name} is private to {owner}" for owner, name, line in private_names(tree)
    ]
    if text.strip() and not ast.get_docstring(tree):
        problems.append("no module docstring")
    if text.count("\n") > MAX_LINES:
        problems.append(f"{text.count(chr(10))} lines, more than {MAX_LINES}")
    assert not problems, f"{module}:\n" + "\n".join(problems)


def test_levels_cover_the_package():
    for path in FILES:
        level(module_name(path))


def test_flags_are_documented():
    from torch_hlo import config

    for flag in config.FLAGS.values():
        assert flag.doc and flag.name == flag.name.upper()


@pytest.mark.parametrize(
    "name, text",
    [
        ("THREADS", "many"),
        ("THREADS", "-1"),
        ("PROFILE", "1"),
        ("FALLBACK", "eror"),
        ("WINOGRAD", "maybe"),
        ("TUNE", "nan"),
    ],
)
def test_config_rejects_nonsense(name, text, monkeypatch):
    from torch_hlo import config

    monkeypatch.setenv(f"TORCH_HLO_{name}", text)
    monkeypatch.setattr(config, "_values", {})
    with pytest.raises(ValueError, match=f"TORCH_HLO_{name}='{text}'"):
        config.get(name)


def test_config_reads_the_environment(monkeypatch):
    from torch_hlo import config

    monkeypatch.setattr(config, "_values", {})
    for name, text, value in (
        ("WINOGRAD", "off", False),
        ("EAGER", "1", True),
        ("THREADS", "3", 3),
        ("TUNE", "0.5", 0.5),
        ("PROFILE", "wall", "wall"),
    ):
        monkeypatch.setenv(f"TORCH_HLO_{name}", text)
        assert config.get(name) == value
    with pytest.raises(KeyError):
        config.get("NOPE")


def test_config_override():
    from torch_hlo import config

    before = config.get("LOG")
    with pytest.raises(RuntimeError), config.override(LOG=3):
        assert config.get("LOG") == 3
        raise RuntimeError
    assert config.get("LOG") == before
