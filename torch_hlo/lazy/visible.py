"""Which of a function's variables are only compared, or counted up: `if step % 4 == 0:`, `self.step += 1`.

Numbers in such places are operands of Python's operators and of nothing else, so that tracked.py sees all that is done with them. Whole numbers anywhere else may
be used without a trace (`table[step]`).
"""
from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable


def compared(fn: Callable) -> tuple[set[str], set[str]]:
    """(variables that are only compared, those of them that are counted) in the source of `fn`, as it spells them: `i`, `self.step`, `count[0]`. Nothing where
    there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError):
        return set(), set()
    visitor = _Visitor()
    visitor.visit(tree)
    return visitor.seen - visitor.other, visitor.counted - visitor.other


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.counted: set[str] = set()
        self.other: set[str] = set()
        self._tested = False  # within a comparison, operators only between

    def _use(self, node: ast.expr) -> None:
        name = ast.unparse(node)
        self.seen.add(name)
        if not self._tested or not isinstance(node.ctx, ast.Load):
            self.other.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node)

    def _part(self, node: ast.Attribute | ast.Subscript) -> None:
        self._use(node)
        self._within(node, False)

    visit_Attribute = visit_Subscript = _part

    def _within(self, node: ast.AST, tested: bool) -> None:
        before, self._tested = self._tested, tested
        self.generic_visit(node)
        self._tested = before

    def visit_Compare(self, node: ast.Compare) -> None:
        self._within(node, not any(isinstance(o, ast.In | ast.NotIn | ast.Is | ast.IsNot) for o in node.ops))

    def _operator(self, node: ast.AST) -> None:
        self.generic_visit(node)

    visit_BinOp = visit_UnaryOp = _operator

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            name = ast.unparse(node.target)
            self.seen.add(name)
            self.counted.add(name)
            for child in ast.iter_child_nodes(node.target):
                self.visit(child)
        else:
            self.visit(node.target)
        self.visit(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr) and not isinstance(node, ast.Compare | ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Subscript):
            before, self._tested = self._tested, False
            super().generic_visit(node)
            self._tested = before
        else:
            super().generic_visit(node)
