"""Programs that another compiler has optimised, made ours: XLA's fusions are undone (our own passes
fuse), and library calls that have an opcode become it."""

from collections.abc import Sequence

from torch_hlo.hlo.evaluate import lapack
from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Instructions,
    Module,
    Replacements,
    build as b,
    postorder,
    replace,
)
from torch_hlo.hlo.ir.verify import VerifyError


def adopted(module: Module) -> Module:
    """`module` without foreign fusions; itself when it has none."""
    return module.with_root(_Adopter().computation(module.entry).root)


class _Adopter:
    def __init__(self) -> None:
        self.done: dict[Computation, Computation] = {}

    def computation(self, c: Computation) -> Computation:
        found = self.done.get(c)
        if found is None:
            found = self.done[c] = Computation(c.name, c.params, self.inlined(c, c.params))
        return found

    def inlined(self, c: Computation, arguments: Sequence[Instruction]) -> Instruction:
        """The root of `c` computed on these arguments."""
        values: Replacements = dict(zip(c.params, arguments, strict=True))
        for x in postorder((c.root,)):
            if x not in values:
                values[x] = self.instruction(x, tuple(values[o] for o in x.operands))
        return values[c.root]

    def instruction(self, x: Instruction, operands: Instructions) -> Instruction:
        if x.op == "fusion" and _foreign(x):
            return self.inlined(x["calls"], operands)
        if x.op == "custom-call" and (known := _library_call(x, operands)) is not None:
            return known
        attrs = {k: new for k, v in x.attrs if (new := self._value(v)) is not v}
        if attrs:
            return replace(x, operands, x.shape, **attrs)
        return x if operands == x.operands else replace(x, operands)

    def _value(self, value: object) -> object:
        if isinstance(value, Computation):
            found = self.computation(value)
            return value if found == value else found
        if type(value) is tuple and any(isinstance(v, Computation) for v in value):
            new = tuple(self._value(v) for v in value)
            return value if new == value else new
        return value


def _library_call(x: Instruction, operands: Instructions) -> Instruction | None:
    """The value of a call that has an opcode of its own. Raises VerifyError for one that is not
    well formed."""
    target = x["custom_call_target"]
    rule = _LIBRARY.get(target) or _LIBRARY.get(lapack.routine(target) or "")
    try:
        return rule(x, operands) if rule else None
    except (LookupError, ValueError) as failure:
        shapes = ", ".join(str(o.shape) for o in operands)
        options = x.get("backend_config")
        raise VerifyError(
            f"{target} of ({shapes}) with {options}: {type(failure).__name__}: {failure}"
        ) from failure


def _top_k(x: Instruction, operands: Instructions) -> Instruction | None:
    if len(operands) != 1 or not x.is_tuple:
        return None
    called = [c.root.get("direction") for c in x.get("called_computations") or ()]
    return b.topk(operands[0], x.elements[0].dims[-1], "LT" not in called)


def _approximate_top_k(x: Instruction, operands: Instructions) -> Instruction | None:
    """The exact one, of as many as the result holds: more than k where the call does not aggregate
    what it finds. Of (values, indices, initial value, initial index), an initial value above zero
    asks for the smallest."""
    initial = operands[2] if len(operands) == 4 else None
    if initial is None or initial.op != "constant":
        return None
    values, indices = operands[:2]
    axis = lapack.options(x["backend_config"]).get("reduction_dim", -1) % values.rank
    k = x.elements[0].dims[axis]
    largest = not bool(initial["literal"].numpy() > 0)
    both = b.sort((values, indices), axis, "GT" if largest else "LT")
    return b.tuple_(*(_first(b.get_tuple_element(both, i), axis, k) for i in range(2)))


def _first(x: Instruction, axis: int, k: int) -> Instruction:
    return b.slice_(
        x,
        (0,) * x.rank,
        tuple(k if d == axis else n for d, n in enumerate(x.shape.dims)),
    )


def _cholesky(x: Instruction, operands: Instructions) -> Instruction:
    """(factor, s32: nonzero where the matrix is not positive definite)."""
    (a,) = operands
    factor = b.cholesky(
        a, lapack.options(x.get("backend_config")).get("uplo", ord("L")) == ord("L")
    )
    part = b.real(factor) if factor.kind == "c" else factor
    bad = b.convert(b.compare(part, part, "NE"), "s32")
    rank = a.rank
    return b.tuple_(factor, b.reduce(bad, b.constant(0, "s32"), (rank - 2, rank - 1), "maximum"))


_TRANSPOSE = {"N": "NO_TRANSPOSE", "T": "TRANSPOSE", "C": "ADJOINT"}


def _triangular_solve(x: Instruction, operands: Instructions) -> Instruction:
    options = {name: chr(code) for name, code in lapack.options(x.get("backend_config")).items()}
    return b.triangular_solve(
        *operands[:2],
        left_side=options["side"] == "L",
        lower=options["uplo"] == "L",
        unit_diagonal=options["diag"] == "U",
        transpose_a=_TRANSPOSE[options["trans_x"]],
    )


_LIBRARY = {
    "TopK": _top_k,
    "ApproxTopK": _approximate_top_k,
    "annotate_device_placement": lambda x, operands: operands[0],  # all memory is the host's
    "potrf": _cholesky,
    "trsm": _triangular_solve,
}


def _foreign(x: Instruction) -> bool:
    """XLA's kinds are kLoop, kInput, kOutput, kCustom."""
    kind = x.get("kind")
    return kind is None or str(kind).startswith("k")
