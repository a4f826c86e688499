"""StableHLO text -> Module.

module = parse_stablehlo(text)         # ParseError with line, column and a caret
"""

from ..ir import Module, Size
from ..sharding.sharding import ShardingError
from ..text.scanner import ErrorAt, Scanner
from . import chlo, collective_ops, control_ops, dynamic, ops, sdy
from .converter import Converter, Unify
from .mlir import parse_text
from .operation import Operation
from .sdy_syntax import SYNTAX
from .shardings import Annotations, Shardings

# Their imports fill RULES.
FAMILIES = (chlo, collective_ops, control_ops, dynamic, ops, sdy)


def parse_stablehlo(text: str) -> Module:
    """The program of StableHLO (or MHLO, with CHLO) text; its entry is @main or the first public
    function. Raises ParseError."""
    s = Scanner(text)
    try:
        return converted(s, *parse_text(s, SYNTAX))
    except RecursionError:
        raise s.error("the text nests too deeply") from None


def converted(
    s: ErrorAt,
    name: str,
    functions: dict[str, Operation],
    meshes: list[Operation],
    given: Annotations,
) -> Module:
    """The program that these functions mean; `s` says where an error is."""
    try:
        shardings = Shardings(meshes, given)
        equal: dict[str, Size] = {}
        for _ in range(200):
            try:
                return Converter(s, functions, equal, shardings).module(name)
            except Unify as found:
                equal[found.name] = found.size
    except ShardingError as error:
        raise s.error(str(error), 0) from None
    raise s.error("the sizes of this program contradict each other")
