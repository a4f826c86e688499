"""The one IR: immutable instructions; computations and modules made of them.

intern.py makes instructions, build.py has a builder per opcode. Never assign to an Instruction.
Names and source locations are notes (Meta) and never change identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace as with_fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch_hlo.frozen import frozen
from torch_hlo.pages import framed, page

from .dim import Ints, Size
from .shape import DTYPES, Shape

if TYPE_CHECKING:
    from ..sharding.sharding import Mesh, Sharding

# An attribute with this value is left out, as in XLA's text; `x[name]` gives it all the same.
DEFAULTS: dict[str, object] = {
    "lhs_batch_dims": (), "rhs_batch_dims": (), "lhs_contracting_dims": (),
    "rhs_contracting_dims": (), "rhs_group_dims": (), "feature_group_count": 1,
    "batch_group_count": 1, "window": (), "collapsed_slice_dims": (), "operand_batching_dims": (),
    "start_indices_batching_dims": (), "inserted_window_dims": (), "input_batching_dims": (),
    "scatter_indices_batching_dims": (), "indices_are_sorted": False, "unique_indices": False,
    "is_stable": False, "independent": 0, "lower": False, "left_side": False,
    "unit_diagonal": False, "transpose_a": "NO_TRANSPOSE", "replica_groups": (),
    "called_computations": (), "custom_call_has_side_effect": False, "use_global_device_ids": False,
    "is_host_transfer": False,
}  # fmt: skip
Attrs = tuple[tuple[str, Any], ...]  # (name, value) pairs, sorted by name


class Instruction:
    """op (XLA's spelling), operands, shape, attrs (sorted pairs of hashable values, may hold a
    Computation). What is asked most of its shape can be asked of it: `x.dims` is `x.shape.dims`.

    Notes that are no part of identity: `meta`, `settled`, the bits of rewrites (match.py) that
    have nothing left to do here and below, and `below`, the postorder of what it depends on once
    that was asked for (passes that change nothing ask again and again).
    """

    __slots__ = (
        "op",
        "operands",
        "shape",
        "dtype",
        "dims",
        "attrs",
        "meta",
        "settled",
        "below",
        "__weakref__",
    )
    op: str
    operands: tuple[Instruction, ...]
    shape: Shape
    dtype: str  # of the shape
    dims: tuple[Size, ...]  # of the shape
    attrs: Attrs
    meta: Meta
    settled: int
    below: tuple[Instruction, ...] | None

    @property
    def operand(self) -> Instruction:
        """The only operand, or the first."""
        return self.operands[0]

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def kind(self) -> str:
        return DTYPES[self.dtype].kind

    @property
    def bits(self) -> int:
        return DTYPES[self.dtype].bits

    @property
    def size(self) -> Size:
        return self.shape.size

    @property
    def nbytes(self) -> Size:
        return self.shape.nbytes

    @property
    def itemsize(self) -> int:
        return self.shape.itemsize

    @property
    def is_tuple(self) -> bool:
        return self.dtype == "tuple"

    @property
    def elements(self) -> tuple[Shape, ...]:
        return self.shape.elements

    @property
    def is_static(self) -> bool:
        return self.shape.is_static

    @property
    def operand_shapes(self) -> str:
        """For messages: "f32[2,3], s64[]"."""
        return ", ".join(str(o.shape) for o in self.operands)

    def __getitem__(self, name: str) -> Any:
        """Attribute `name`, or its value in DEFAULTS; KeyError when absent."""
        for key, value in self.attrs:
            if key == name:
                return value
        if name in DEFAULTS:
            return DEFAULTS[name]
        raise KeyError(f"{self.op} has no attribute {name}")

    def get(self, name: str, default: Any = None) -> Any:
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    def __str__(self) -> str:
        return _TEXT.instruction(self)

    __repr__ = __str__


Instructions = tuple[Instruction, ...]
Replacements = dict[Instruction, Instruction]
Users = dict[Instruction, list[Instruction]]


@frozen
class Meta:
    """Debug information of an instruction; not part of its identity. Programs share instructions:
    what the one says that began last counts, and of one program what is said first."""

    name: str = ""  # preferred name in text
    op_name: str = ""  # e.g. "aten::add"
    source: str = ""  # "model.py:31"
    age: int = field(compare=False, default_factory=lambda: Meta.newest)
    newest: ClassVar[int] = 1


def begin_program() -> None:
    """What is noted from now on counts more than what other programs say."""
    Meta.newest += 1


def noted(x: Instruction, meta: Meta) -> bool:
    """Note `meta`, unless something as new is known. Whether it is what counts now."""
    new = x.meta.age < meta.age
    if new:
        x.meta = meta
    return new


def carry_meta(old: Instruction, new: Instruction) -> None:
    """Names and source locations follow a rewrite."""
    noted(new, old.meta)


UNKNOWN = Meta(age=0)  # of new instructions


@frozen
class Computation:
    """A function: parameters in order (a parameter may be unused) and one root."""

    name: str = field(compare=False, default="")
    params: tuple[Instruction, ...] = ()
    root: Instruction = None  # type: ignore[assignment]

    def __hash__(self) -> int:  # the name is no part of identity
        return hash((tuple(map(id, self.params)), id(self.root)))

    @property
    def results(self) -> Instructions:
        """What it returns: the operands of a tuple root, else the root itself."""
        return self.root.operands if self.root.op == "tuple" else (self.root,)

    def instructions(self) -> list[Instruction]:
        """All instructions in postorder, parameters first."""
        return postorder((*self.params, self.root))

    def with_root(self, root: Instruction) -> Computation:
        return self if root is self.root else Computation(self.name, self.params, root)


@frozen
class Module:
    """A program. `aliases`: (output index, parameter index) pairs, the output may reuse the
    parameter's memory.

    `symbols`: ((name, parameter index, dimension), …): where the value of each symbolic size is
      read.
    `constants`: parameters that may well hold the same values from run to run: products can keep
      packed copies of them.
    `excess_precision`: bf16 values that nobody stores or compares need not be rounded.
    `mesh`: the devices that the `sharding` attributes of an annotated program speak of.
    `num_partitions`, `num_replicas`: how many devices run a per-device program (XLA's meaning); 1
    and 1 for a program of one device. `in_shardings`, `out_shardings`: of a per-device program, how
    its whole parameters and outputs are cut over `mesh`; () when unknown. `out_dims`: sizes of the
    whole outputs, which the blocks of the last devices may exceed.
    `requests`: of a program as JAX wrote it, the layouts of its parameters and of its results, the
    memory kinds of its results, and which parameters any result may overwrite; each () where
    nothing is said."""

    name: str
    entry: Computation
    aliases: tuple[tuple[int, int], ...] = ()
    symbols: tuple[tuple[str, int, int], ...] = ()
    mesh: Mesh | None = None
    num_partitions: int = 1
    num_replicas: int = 1
    in_shardings: tuple[Sharding, ...] = ()
    out_shardings: tuple[Sharding, ...] = ()
    out_dims: tuple[Ints, ...] = ()
    constants: Ints = ()
    excess_precision: bool = False
    requests: tuple[tuple[str, ...], ...] = ((), (), (), ())

    def with_root(self, root: Instruction) -> Module:
        """This module computing another root; itself when nothing changed."""
        if root is self.entry.root:
            return self
        return with_fields(self, entry=Computation(self.entry.name, self.entry.params, root))

    def __str__(self) -> str:
        return _TEXT.module(self)

    def _repr_html_(self) -> str:
        text = str(self)
        program = {"name": self.name, "passes": [["input", text]], "steps": []}
        return framed(page("view", {"programs": [program]}, self.name, text), 640)


class _Text:
    """How instructions and modules print. The printer reads the opcode table, which stands above
    these classes: intern.py, which makes every instruction, hands it down."""

    instruction: Callable[[Instruction], str]
    module: Callable[[Module], str]


_TEXT = _Text()


def install_text(
    instruction: Callable[[Instruction], str], module: Callable[[Module], str]
) -> None:
    _TEXT.instruction = instruction
    _TEXT.module = module


def outputs(module: Module) -> tuple[Instruction, ...]:
    """The instructions a program returns."""
    return module.entry.results


_LARGE = 256  # instructions


def postorder(
    roots: Iterable[Instruction], known: Iterable[Instruction] = (), mark: int = 0
) -> list[Instruction]:
    """Every instruction reachable from `roots`, operands before users, without recursion, in a
    stable order.

    `known` instructions and those with `mark` in `settled`, and what only they need, are left out.
    """
    whole = (
        roots[0] if type(roots) is tuple and len(roots) == 1 and not known and not mark else None
    )
    if whole is not None and whole.below is not None:
        return [*whole.below, whole]
    seen = set(known)
    order: list[Instruction] = []
    path: list[Instruction] = []  # from a root down; beside it, what is left of each one's operands
    left: list[Iterator[Instruction]] = []
    for root in roots:
        if root in seen or root.settled & mark:
            continue
        seen.add(root)
        path.append(root)
        left.append(iter(root.operands))
        while path:
            for x in left[-1]:
                if x not in seen and not x.settled & mark:
                    seen.add(x)
                    if x.operands:
                        path.append(x)
                        left.append(iter(x.operands))
                        break
                    order.append(x)
            else:
                order.append(path.pop())
                left.pop()
    if len(order) > _LARGE and whole is not None:
        whole.below = tuple(order[:-1])  # without itself: no cycle
    return order


def users(roots: Iterable[Instruction]) -> Users:
    """For each reachable instruction the instructions that use it (once per use), in postorder."""
    table: Users = {}
    for x in postorder(roots):
        table.setdefault(x, [])
        for operand in x.operands:
            table[operand].append(x)
    return table


def called(x: Instruction) -> tuple[Computation, ...]:
    """Computations that `x` calls (to_apply, body, condition, branches, fused computation, …)."""
    found: list[Computation] = []
    for _, value in x.attrs:
        kind = type(value)
        if kind is Computation:
            found.append(value)
        elif kind is tuple and value and type(value[0]) is Computation:
            found += value
    return tuple(found)


# Custom calls that give their operand: what they say is for a compiler.
IDENTITIES = frozenset(
    "Sharding SPMDFullToShardShape SPMDShardToFullShape InspectSharding LayoutConstraint"
    " annotate_device_placement MoveToHost MoveToDevice".split()
)
# custom calls that nothing is made of: checks of shapes, which are made here, and an order for
# XLA's scheduler
IGNORED = frozenset({"shape_assertion", "stablehlo.dynamic_assert", "control_dep"})


def has_effect(x: Instruction) -> bool:
    """Whether the instruction is a custom call that is made for more than its results."""
    return (
        x.op == "custom-call"
        and x.get("custom_call_has_side_effect", False)
        and x["custom_call_target"] not in IDENTITIES | IGNORED
    )


def needs(root: Instruction, x: Instruction) -> bool:
    """Whether `x` runs when `root` does, also in computations that are called."""
    reached: set[Instruction] = set()
    roots = [root]
    while roots:
        below = [y for y in postorder(roots) if y not in reached]
        if x in below:
            return True
        reached.update(below)
        roots = [c.root for y in below for c in called(y)]
    return False


def lost_effect(root: Instruction, x: Instruction) -> str:
    """What runs is what a root needs: an error message if that leaves out an instruction that has
    an effect; else ""."""
    if needs(root, x):
        return ""
    return (
        f"the custom call to {x['custom_call_target']!r} ({x.operand_shapes}) has an effect, and no"
        " result of the program needs it, so it would not run: remove it (it may be jax.debug.print"
        " or io_callback), or return what it returns"
    )
