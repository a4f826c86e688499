"""What the source of functions does with variables: numbers that are only compared, counted up or
made fractions of (`if step % 4 == 0:`, `self.step += 1`, `total / self.count`), lists that are only
appended to.

Whole numbers in such places are operands of Python's operators and of nothing else, so that
traced_numbers.py sees all that is done with them; anywhere else they may be used without a trace
(`table[step]`). The length of a list that grows at each call is no matter where nobody asks for it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable


def compared(fn: Callable) -> tuple[set[str], set[str]]:
    """(variables that are only compared, those of them that are counted) in the source of `fn`, as
    it spells them: `i`, `self.step`, `count[0]`. Nothing where there is no source."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    unseen = _unseen(code, _callees(inspect.unwrap(fn)))
    return _uses(code).seen - unseen, _uses(code).counted - unseen


def counted(functions: Iterable[types.FunctionType], name: str) -> bool:
    """Whether the functions count up a whole number of this name, and only compare and divide it
    otherwise. Of `a.b.name`, the last part is compared."""
    functions = list(functions)
    found = [_uses(fn.__code__) for fn in functions]
    return any(_among(name, uses.counted) for uses in found) and not any(
        _among(name, _unseen(fn.__code__, functions)) for fn in functions
    )


def appended(functions: Iterable[types.FunctionType], name: str) -> bool:
    """Whether the functions append to a list of this name, and do nothing else with it."""
    found = [_uses(fn.__code__) for fn in functions]
    return any(_among(name, uses.appended) for uses in found) and not any(
        _among(name, uses.seen) for uses in found
    )


def _callees(fn: Callable) -> list[types.FunctionType]:
    """Functions that `fn` may call by their names: in its closure, its globals, its class."""
    owner = getattr(fn, "__self__", None)
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        return []
    cells = [c.cell_contents for c in fn.__closure__ or () if _filled(c)]
    named = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    return [
        x
        for x in (
            *cells,
            *named,
            *(vars(type(owner)).values() if owner is not None else ()),
        )
        if isinstance(x, types.FunctionType)
    ]


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _among(name: str, names: Iterable[str]) -> bool:
    last = (
        name[name.rindex("['") :]
        if name.endswith("']")
        else name[name.rfind(".") :]
        if "." in name
        else name
    )
    return any(n == last or n.endswith(last if last[0] in ".[" else "." + last) for n in names)


def _unseen(code: types.CodeType | None, functions: Iterable[types.FunctionType]) -> set[str]:
    """Names that are used unseen in the source of `code`, or in those of `functions` to which they
    are passed."""
    uses = _uses(code)
    found, given = set(uses.other), {fn.__name__: fn.__code__ for fn in functions}
    for name, callee, position in uses.passed:
        inner = given.get(callee.rpartition(".")[2])
        position += "." in callee
        if (
            inner is None
            or inner is code
            or position >= inner.co_argcount
            or inner.co_varnames[position] in _unseen(inner, ())
        ):
            found.add(name)
    return found


@functools.lru_cache(maxsize=4096)
def _uses(code: types.CodeType | None) -> _Visitor:
    visitor = _Visitor()
    if code is not None and code.co_name not in _ELSEWHERE:
        try:
            visitor.visit(ast.parse(textwrap.dedent(inspect.getsource(code))))
        except (OSError, TypeError, SyntaxError):
            pass
    return visitor


# not called by what is captured, or its numbers see it
_ELSEWHERE = {"__init__", "__repr__", "__str__", "__format__"}


_VARIABLE = (ast.Name, ast.Attribute, ast.Subscript)


class _Visitor(ast.NodeVisitor):
    """`seen`: variables that are used; `other`: unseen by traced_numbers.py; `counted`: by `+=`
    and `-=`;
    `appended`: to which something is appended;
    `passed`: (variable, function, position) of arguments."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.other: set[str] = set()
        self.counted: set[str] = set()
        self.appended: set[str] = set()
        self.passed: set[tuple[str, str, int]] = set()
        self._followed = False  # within a comparison or a fraction, operators only between

    def _use(self, node: ast.expr) -> None:
        name = ast.unparse(node)
        self.seen.add(name)
        if not self._followed and isinstance(node.ctx, ast.Load):
            self.other.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node)

    def _part(self, node: ast.Attribute | ast.Subscript) -> None:
        self._use(node)
        self._within(node, False)

    visit_Attribute = visit_Subscript = _part

    def _within(self, node: ast.AST, followed: bool) -> None:
        before, self._followed = self._followed, followed
        super().generic_visit(node)
        self._followed = before

    def visit_Compare(self, node: ast.Compare) -> None:
        self._within(
            node,
            not any(isinstance(o, ast.In | ast.NotIn | ast.Is | ast.IsNot) for o in node.ops),
        )

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._within(node, self._followed or _is_float(node))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._within(node, self._followed)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            self.counted.add(ast.unparse(node.target))
        self.visit(node.target)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        target, before = node.func, self._followed
        if (
            isinstance(target, ast.Attribute)
            and target.attr in ("append", "extend")
            and isinstance(target.value, _VARIABLE)
        ):
            self.appended.add(ast.unparse(target.value))
            parts = [*ast.iter_child_nodes(target.value), *node.args]
        else:
            parts = [target, *node.args, *node.keywords]
        for part in parts:
            self._followed = (
                isinstance(part, _VARIABLE)
                and part in node.args
                and isinstance(target, ast.Name | ast.Attribute)
            )
            if self._followed:
                self.passed.add((ast.unparse(part), ast.unparse(target), node.args.index(part)))
            self.visit(part)
        self._followed = before

    def generic_visit(self, node: ast.AST) -> None:
        self._within(node, self._followed and not isinstance(node, ast.expr))


def _is_float(node: ast.expr) -> bool:
    """Whether an expression is certainly no whole number."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow) and not isinstance(node.left, ast.Constant):  # decay**step
            return True
        return (
            isinstance(node.op, ast.Div)
            or not isinstance(node.op, ast.FloorDiv | ast.Mod)
            and (_is_float(node.left) or _is_float(node.right))
        )
    return (
        isinstance(node, ast.UnaryOp)
        and _is_float(node.operand)
        or isinstance(node, ast.Constant)
        and type(node.value) is float
    )
