"""Module -> StableHLO text, in MLIR's generic form (every StableHLO parser reads it), with CHLO for
what StableHLO lacks. Shardings are Shardy's."""

import re

from ..ir import Module, instr
from . import write_ops
from .writer import Program, WriteError, mesh_text

__all__ = ["WriteError", "stablehlo_text"]
FAMILIES = (write_ops,)  # its import fills WRITERS


def stablehlo_text(module: Module, attributes: str = "") -> str:
    """The program as StableHLO text, with these attributes of the module. Raises WriteError on
    opcodes without a StableHLO form, and on symbolic sizes where StableHLO has no operand for
    them."""
    params = module.entry.params
    program = Program(
        {
            name: instr("get-dimension-size", (params[i],), dimensions=(d,))
            for name, i, d in module.symbols
        }
    )
    program.function(
        "main",
        module.entry,
        public=True,
        aliases=dict((p, o) for o, p in module.aliases),
    )
    name = re.sub(r"[^\w.]", "_", module.name) or "module"
    head = ""
    if module.mesh is not None:
        attributes = attributes or f"mhlo.num_partitions = {module.mesh.size} : i32"
        head = f"  sdy.mesh @mesh = <{mesh_text(module.mesh)}>\n"
    name += f" attributes {{{attributes}}}" if attributes else ""
    return f"module @{name} {{\n" + head + "\n".join(program.functions) + "\n}\n"
