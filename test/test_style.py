"""House rules that a machine can check: levels, import circles, the size of rooms, files and
functions, private names, private PyTorch API, who may import torch, who may read the environment."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torch_hlo"
FILES = sorted(PACKAGE.rglob("*.py"))
# Rooms from low to high: a file imports from its own level and from lower ones. The longest prefix
# counts. docs/internals/architecture.md tells the same in words.
LEVELS = (
    "config frozen tables metrics log collector pages progress",
    "hlo",
    "compiler.hlo_pass compiler.cost compiler.conv_forms compiler.cache"
    " compiler.thresholds compiler.llvm",
    "compiler.simplify compiler.fusion",
    "compiler.schedule",
    "compiler.codegen",
    "compiler.gpu",
    # The families of operations: they may use each other's kernels.
    "compiler.loops compiler.window compiler.gather compiler.sort compiler.control"
    " compiler.matmul compiler.convolution compiler.attention compiler.fourier compiler.linalg"
    " compiler.collectives",
    "compiler",
    "compiler.spmd",
    "compiler.aot",
    "device pytorch",
    "lowering.core",
    "lowering.pointwise lowering.spmd",
    "lowering.reduction",
    "lowering.shape",
    "lowering.linalg lowering.random",
    "lowering.nn",
    "lowering.fx",
    "lowering",
    "lazy.record",
    "lazy.aten",
    "lazy.run",
    "lazy.ops",
    "lazy",
    "frameworks",
    "dynamo",
    "export",
    "aot distributed",
    "profiler debug buckets prefetch",
    "tools",
    "compat pjrt",
    "",
)
LEVEL = {
    f"torch_hlo.{name}" if name else "torch_hlo": number
    for number, names in enumerate(LEVELS)
    for name in names.split() or [""]
}
COMPILER = LEVEL["torch_hlo.compiler.aot"]  # up to here torch is unknown
MAX_LINES, MAX_FUNCTION, MAX_FILES = 800, 60, 20
PRIVATE_API = ("torch_hlo/pytorch/", "torch_hlo/dynamo/")  # the rooms that may use what PyTorch
MAX_PRIVATE_API = 12  # does not promise, and how many of their files do


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def level(module: str) -> int:
    while module not in LEVEL:
        module = module.rpartition(".")[0]
    return LEVEL[module]


def origin(node: ast.ImportFrom, package: str) -> str:
    """The module that names are imported from; `package` is the room of the file that does it."""
    parts = package.split(".")[: 1 - node.level or None] if node.level else []
    return ".".join([*parts, *([node.module] if node.module else [])])


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[str, int]]:
    """(imported module, line) of every import, also those inside functions."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = origin(node, package)
            for name in node.names:
                full = f"{base}.{name.name}"
                yield (full if full in MODULES else base), node.lineno


def private_names(tree: ast.AST, package: str):
    """(module of this package, private name of it, line) of every such name that is imported or
    looked up."""
    modules = {}
    for node in ast.walk(tree):
        base = origin(node, package) if isinstance(node, ast.ImportFrom) else ""
        if base.startswith("torch_hlo"):
            modules |= {
                name.asname or name.name: f"{base}.{name.name}"
                for name in node.names
                if f"{base}.{name.name}" in MODULES
            }
            yield from (
                (base, name.name, node.lineno) for name in node.names if name.name.startswith("_")
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


def private_api(tree: ast.AST) -> bool:
    """Whether a file uses a name of torch that begins with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch":
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                return True
        elif isinstance(node, ast.Import):
            if any(name.name.startswith("torch._") for name in node.names):
                return True
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [name.name for name in node.names] if node.module == "torch" else []
            if node.module.startswith("torch._") or any(n.startswith("_") for n in names):
                return True
    return False


def reads_environment(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            if getattr(node.value, "id", "") == "os":
                yield node.lineno


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION:
            yield f"line {node.lineno}: {node.name} has more than {MAX_FUNCTION} lines"


def import_problems(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    mine = level(module)
    for imported, line in imports(tree, module, is_package):
        top = imported.split(".")[0]
        if top == "torch_hlo" and imported != "torch_hlo" and level(imported) > mine:
            yield f"line {line}: imports {imported}, which is of a higher level"
        if top == "torch" and mine <= COMPILER:
            yield f"line {line}: imports torch"
        if top == "ctypes" and mine <= COMPILER:
            yield f"line {line}: imports ctypes below device/"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_file(path):
    text = path.read_text()
    tree = parsed(path)
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    problems = [*import_problems(tree, module, path.name == "__init__.py"), *long_functions(tree)]
    if module != "torch_hlo.config":
        problems += [
            f"line {line}: reads the environment; add a flag to config.py"
            for line in reads_environment(tree)
        ]
    problems += [
        f"line {line}: {name} is private to {owner}"
        for owner, name, line in private_names(tree, package)
    ]
    if text.strip() and not ast.get_docstring(tree):
        problems.append("no module docstring")
    if text.count("\n") > MAX_LINES:
        problems.append(f"{text.count(chr(10))} lines, more than {MAX_LINES}")
    assert not problems, f"{module}:\n" + "\n".join(problems)


def test_rooms():
    """A room can be overseen, says what it is for, and its files have names of their own."""
    sizes = Counter(path.parent for path in FILES)
    assert not {str(room): size for room, size in sizes.items() if size > MAX_FILES}
    for room in sizes:
        assert ast.get_docstring(parsed(room / "__init__.py")), room
    rooms = defaultdict(list)
    for path in FILES:
        if not path.name.startswith("__"):
            rooms[path.name].append(str(path.parent.relative_to(PACKAGE)))
    assert not {name: found for name, found in rooms.items() if len(found) > 2}


def test_no_import_circles():
    graph = {}
    for path in FILES:
        module = module_name(path)
        found = imports(parsed(path), module, path.name == "__init__.py")
        graph[module] = {name for name, _ in found if name in MODULES and name != module}
    while free := [module for module, needed in graph.items() if not needed & graph.keys()]:
        for module in free:
            del graph[module]
    # what is left imports what is left: take away what nobody in it needs
    while unused := graph.keys() - set().union(*graph.values()):
        for module in unused:
            del graph[module]
    assert not graph, f"import circles through {sorted(graph)}"


def test_private_api_stands_in_its_room():
    using = [path for path in FILES if private_api(parsed(path))]
    names = [str(path.relative_to(PACKAGE.parent)) for path in using]
    assert not [name for name in names if not name.startswith(PRIVATE_API)]
    assert len(names) <= MAX_PRIVATE_API


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
