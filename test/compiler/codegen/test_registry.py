"""Every row names a function, every opcode has a row, and there is one place where they stand."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from torch_hlo.compiler.codegen import registry
from torch_hlo.compiler.codegen.registry import CPU, GPU, HOST_CALLS, VALUES, Table
from torch_hlo.hlo.ir.opcodes import OPCODES

FOLDER = Path(registry.__file__).parent.parent
TABLES = {"CPU": CPU, "GPU": GPU, "VALUES": VALUES, "HOST_CALLS": HOST_CALLS}
# the program's edges to other runtimes, old random numbers, and what has a row per form
WITHOUT = set(
    "fusion infeed outfeed recv recv-done rng rng-get-and-update-state send send-done".split()
)
ARGUMENTS = {
    "CPU": ["program", "x"],
    "GPU": ["program", "x"],
    "VALUES": ["k", "x", "index"],
    "HOST_CALLS": ["outputs", "inputs"],
}


def function(place: str) -> ast.FunctionDef | ast.ClassDef | None:
    """The definition that a row names, without importing its module."""
    module, _, name = place.partition(":")
    tree = ast.parse((FOLDER / f"{module.replace('.', '/')}.py").read_text())
    definitions = (n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)))
    return next((n for n in definitions if n.name == name), None)


@pytest.mark.parametrize("name", TABLES)
def test_rows_name_functions_of_the_form_that_their_table_asks_for(name: str) -> None:
    for row, place in TABLES[name].rows.items():
        found = function(place)
        assert found is not None, (row, place)
        if isinstance(found, ast.FunctionDef):
            arguments = [a.arg for a in found.args.args][: len(ARGUMENTS[name])]
            assert arguments == ARGUMENTS[name], (row, place)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_can_be_imported(name: str) -> None:
    table = Table(TABLES[name].rows)
    assert all(callable(table[row]) for row in table)


def test_gpus_have_a_row_wherever_cpus_have_one() -> None:
    assert GPU.rows.keys() == CPU.rows.keys()


def test_rows_are_opcodes_or_forms_of_fusions() -> None:
    forms = {row for row in CPU.rows if row.startswith("fusion:")}
    assert CPU.rows.keys() - forms - {"loop nest", "rows"} <= OPCODES.keys()
    assert VALUES.rows.keys() <= OPCODES.keys()
    simple = {name for name, row in OPCODES.items() if "composite" not in row.traits}
    assert simple - CPU.rows.keys() == WITHOUT


def test_the_tables_import_no_emitter() -> None:
    code = (
        "import sys, torch_hlo.compiler.codegen.registry as e;"
        "rows = [*e.CPU.rows.values(), *e.GPU.rows.values(), *e.VALUES.rows.values()];"
        "print([m for m in {r.split(':')[0] for r in rows} if f'torch_hlo.compiler.{m}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_row_stands_once() -> None:
    with pytest.raises(ValueError, match="dot has two emitters"):
        registry._rows({"a:a": "dot", "b:b": "dot"})
