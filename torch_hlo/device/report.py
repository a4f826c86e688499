"""A compile that failed, as a file that fails again: `python -m torch_hlo run report.hlo`.

Shapes and operations are in it, and what custom calls are given. Names, Python lines, arrays of
constants, and numbers that are not whole are left out, unless TORCH_HLO_REPORT=full."""

import re
import tempfile
from dataclasses import replace
from typing import Any

from torch_hlo import config
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.text.printer import module_text

from . import runtime
from .interfaces import Program

_CONSTANT = re.compile(
    r"^(?P<before> *(?:ROOT )?%(?P<name>\S+) = (?P<dtype>\w+)\[(?P<dims>[^\]]*)\]) constant"
    r"\((?P<value>.*)\)(?P<after>.*)$",
    re.M,
)


def compiled(module: Module, *more: Any) -> Program:
    """`runtime.compile_program`; if that fails, the error says where the program is."""
    try:
        return runtime.compile_program(module, *more)
    except MemoryError:
        raise
    except Exception as error:
        if (kind := config.get("REPORT")) != "off":
            shown = module_text(module, "full") if kind == "full" else anonymous(module)
            error.add_note(f"it fails again with: python -m torch_hlo run {_written(shown)}")
        raise


def _written(text: str) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="torch_hlo_", suffix=".hlo", delete=False) as file:
        file.write(text)
    return file.name


def anonymous(module: Module) -> str:
    """The program's text, without what its writer may want to keep."""
    text = module_text(replace(module, name="report"), elide=1)
    names = re.findall(r"^(?:ENTRY )?%(\S+) \(", text, re.M)
    new = {name: f"%c{i}" for i, name in enumerate(names)}
    text = re.sub(r"%([\w.\-]+)", lambda m: new.get(m[1], m[0]), text)
    return _CONSTANT.sub(_constant, re.sub(r", frontend_attributes=\{.*\}$", "", text, flags=re.M))


def _constant(m: re.Match[str]) -> str:
    one = {"p": "true", "c": "(1, 0)"}.get(m["dtype"][0], "1")
    if m["dims"]:
        scalar = f"  %{m['name']}.one = {m['dtype']}[] constant({one})\n"
        return f"{scalar}{m['before']} broadcast(%{m['name']}.one), dimensions={{}}"
    whole = re.fullmatch(r"-?(\d+|inf|nan|true|false)", m["value"])
    return m[0] if whole else f"{m['before']} constant({'0.5' if one == '1' else one})"
