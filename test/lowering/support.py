"""Run one aten op through Node -> lower -> NumPy evaluator and compare it with PyTorch on the
CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import torch_hlo.lowering  # noqa: F401
from torch_hlo.hlo.evaluate.evaluate import evaluate
from torch_hlo.hlo.ir.instruction import Module
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.lowering.core.graph import Leaf, Lift, Node, Out, lower
from torch_hlo.lowering.core.registry import (
    GUARDS,
    HLO_TO_TORCH,
    LOWERINGS,
    TORCH_TO_HLO,
)

aten = torch.ops.aten
TOLERANCE = {
    torch.float32: 3e-5,
    torch.float64: 1e-9,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
    torch.complex64: 5e-5,
    torch.complex128: 1e-9,
}
WIDE = (
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
DECOMPOSITIONS = {**decomposition_table, **core_aten_decompositions()}


def shape_of(t: torch.Tensor | None) -> Shape | None:
    return None if t is None else Shape(TORCH_TO_HLO[t.dtype], tuple(t.shape))


def array(t: torch.Tensor) -> np.ndarray:
    t = t.detach().resolve_conj().resolve_neg()
    return t.float().numpy() if t.dtype in WIDE else t.numpy()


def tensor(a: np.ndarray, shape: Shape) -> torch.Tensor:
    return (
        torch.from_numpy(np.ascontiguousarray(a).copy())
        .reshape(a.shape)
        .to(HLO_TO_TORCH[shape.dtype])
    )


def flatten(result) -> list[torch.Tensor | None]:
    """Results of an op in flat order; numbers among them (sizes) count as undefined."""
    if isinstance(result, (tuple, list)):
        return [r for part in result for r in flatten(part)]
    return [plain(result) if isinstance(result, torch.Tensor) else None]


def plain(t: torch.Tensor) -> torch.Tensor:
    """A tensor with memory: PyTorch's "zero tensors" have none."""
    return torch.zeros(t.shape, dtype=t.dtype) if t._is_zerotensor() else t


def is_random(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


class Lifted(float):
    """Marks a float argument that enters the program as an input."""


def lower_op(
    op: OpOverload, args: tuple, kwargs: dict, results: list[torch.Tensor | None]
) -> tuple[Module, list[np.ndarray], list[Shape | None]]:
    """(module, inputs, shapes of all results) of one op."""
    leaves, inputs = [], []

    def convert(v):
        if isinstance(v, torch.Tensor):
            leaf, value = Leaf(shape_of(v)), array(v)
        elif isinstance(v, Lifted):
            leaf, value = Lift(), np.float64(v)
        elif isinstance(v, (list, tuple)):
            return [convert(e) for e in v]
        else:
            return v
        leaves.append(leaf)
        inputs.append(value)
        return leaf

    shapes = [shape_of(r) for r in results]
    extra = {}
    if is_random(op):
        extra = {"seed": Lift("s64"), "offset": Lift("s64")}
    node = Node(
        op,
        tuple(convert(a) for a in args),
        {k: convert(v) for k, v in kwargs.items()} | extra,
        tuple(shapes),
    )
    leaves += extra.values()
    inputs += [np.int64(1234), np.int64(5)][: len(extra)]
    wanted = [Out(node, i) for i, s in enumerate(shapes) if s is not None]
    return lower([node], wanted, leaves), inputs, shapes


def run_op(op: OpOverload, *args, **kwargs) -> list[torch.Tensor | None]:
    """The op's flat results from the evaluator."""
    plain = tree_map(lambda v: float(v) if isinstance(v, Lifted) else v, (args, kwargs))
    return evaluated(op, args, kwargs, flatten(op(*plain[0], **plain[1])))


def evaluated(
    op: OpOverload, args: tuple, kwargs: dict, want: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    module, inputs, shapes = lower_op(op, args, kwargs, want)
    values = iter(evaluate(module, inputs))
    return [None if s is None else tensor(next(values), s) for s in shapes]


def compare(got: list, want: list, scale: float = 1.0, magnitude: float = 0.0) -> None:
    """Values and dtypes equal, within the tolerance of the dtype; `magnitude`: of the numbers that
    were summed."""
    for g, w in zip(got, want, strict=True):
        if w is None:
            continue
        rtol = atol = TOLERANCE.get(w.dtype, 0) * scale
        w = w.detach().resolve_conj().resolve_neg()
        atol *= max(1.0, magnitude)
        torch.testing.assert_close(g, w, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)


def largest(values) -> float:
    """The largest finite magnitude in a tree of tensors."""
    tensors = [
        v
        for v in tree_leaves(values)
        if isinstance(v, torch.Tensor)
        and v.numel()
        and (v.dtype.is_floating_point or v.is_complex())
    ]
    return max((float(t.abs().float().nan_to_num(0, 0, 0).max()) for t in tensors), default=0.0)


def check(op: OpOverload, *args, scale: float = 1.0, **kwargs) -> None:
    """Assert that the lowering of `op` agrees with PyTorch."""
    plain = tree_map(lambda v: float(v) if isinstance(v, Lifted) else v, (args, kwargs))
    want = flatten(op(*plain[0], **plain[1]))
    compare(evaluated(op, args, kwargs, want), want, scale)


def functional(op: OpOverload) -> OpOverload | None:
    """The overload that does the same without writing to its arguments; None when there is none."""
    schema = op._schema
    written = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if not written:
        return op
    name = schema.name.split("::")[1]
    if any(a.is_out for a in schema.arguments):
        packet, skip = (
            getattr(aten, name, None),
            {a.name for a in schema.arguments if a.is_out},
        )
    else:
        packet, skip = getattr(aten, name.removesuffix("_"), None), set()
    if hasattr(aten, name.removesuffix("_") + "_functional"):
        packet = getattr(aten, name.removesuffix("_") + "_functional")
    if packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in skip]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)._schema
        if [(a.name, str(a.type)) for a in candidate.arguments] == wanted and not any(
            a.alias_info and a.alias_info.is_write for a in candidate.arguments
        ):
            return getattr(packet, overload)
    return None


class Checker(TorchDispatchMode):
    """Under this mode every aten call is also lowered, evaluated and compared.

    `failures`: op -> first message; `fallbacks`: ops without lowering or decomposition; `seen`: ops
      that were checked.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.failures: dict[str, str] = {}
        self.fallbacks: set[str] = set()
        self.seen: set[str] = set()
        self.scale = scale
        # ops being decomposed: one that comes back to itself has no decomposition
        self.active: set[str] = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.namespace != "aten":
            if op.namespace != "prims" or "copy_to" not in op.name():
                self.fallbacks.add(str(op))
            return op(*args, **kwargs)
        twin = functional(op)
        copies = tree_map(
            lambda v: plain(v.detach()).clone() if isinstance(v, torch.Tensor) else v,
            (args, kwargs),
        )
        if op is not twin:  # the written arguments are those before the call
            kept = {
                k: v
                for k, v in copies[1].items()
                if not any(a.is_out and a.name == k for a in op._schema.arguments)
            }
            defaults = [a.default_value for a in op._schema.arguments if not a.kwarg_only]
            copies = ((*copies[0], *defaults[len(copies[0]) :]), kept)
        result = op(*args, **kwargs)
        with _disabled():
            self._check(twin or op, *copies, missing=twin is None)
        return result

    def _check(self, op: OpOverload, args: tuple, kwargs: dict, missing: bool) -> None:
        name = str(op)
        if name in SKIPPED or self.failures.get(name):
            return
        if not missing and op in LOWERINGS and (op not in GUARDS or GUARDS[op](*args, **kwargs)):
            self.seen.add(name)
            try:
                if name == "aten.as_strided.default" and not _covers_storage(*args):
                    return
                want = flatten(op(*args, **kwargs))
                got = evaluated(op, args, kwargs, want)
                if is_random(op) or name in UNINITIALISED:
                    for g, w in zip(got, want, strict=True):
                        assert w is None or g.dtype == w.dtype and g.shape == w.shape
                else:
                    sums = any(name.startswith(p) for p in NORMWISE)
                    # results that autograd alone reads, or that PyTorch leaves open
                    if name in PARTIAL:
                        got, want = got[: PARTIAL[name]], want[: PARTIAL[name]]
                    compare(got, want, self.scale, largest((args, want)) if sums else 0.0)
            except Exception as error:
                notes = "; ".join(getattr(error, "__notes__", ()))
                shapes = tree_map(
                    lambda v: f"{v.dtype}{list(v.shape)}" if isinstance(v, torch.Tensor) else v,
                    (args, kwargs),
                )
                self.failures[name] = (
                    f"{type(error).__name__}: {str(error)[:300]} {notes[:200]} {str(shapes)[:300]}"
                )
        elif (
            not missing
            and name not in self.active
            and (decomposition := decomposition_of(op)) is not None
        ):
            self.active.add(name)
            try:
                with self:
                    decomposition(*args, **kwargs)
            finally:
                self.active.discard(name)
        else:
            self.fallbacks.add(name)


def decomposition_of(op: OpOverload):
    """What the dispatcher does with an op that has no lowering: PyTorch's decomposition or
    composite kernel."""
    if op in DECOMPOSITIONS:
        return DECOMPOSITIONS[op]
    for key in (
        torch._C.DispatchKey.CompositeExplicitAutograd,
        torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
        torch._C.DispatchKey.CompositeImplicitAutograd,
    ):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            return lambda *args, _key=key, **kwargs: op._op_dk(_key, *args, **kwargs)
    return None


class _disabled:
    """The modes are already off inside __torch_dispatch__; this keeps autograd out, too."""

    def __enter__(self):
        self.guard = torch.no_grad()
        self.guard.__enter__()

    def __exit__(self, *error):
        self.guard.__exit__(*error)


def _covers_storage(x: torch.Tensor, size, stride, offset=None) -> bool:
    """The view stays inside the copy of the tensor that the check works on."""
    return (
        x.is_contiguous()
        and (offset or 0) + sum((n - 1) * s for n, s in zip(size, stride)) < x.numel()
    )


# sums may cancel
NORMWISE = (
    "aten.sum",
    "aten.linalg",
    "aten._linalg",
    "aten.convolution",
    "aten.mm",
    "aten.bmm",
    "aten.addmm",
    "aten.cum",
)
PARTIAL = {
    "aten._embedding_bag.default": 1, "aten.sort.default": 1, "aten.topk.default": 1,
    "aten.kthvalue.default": 1, "aten.median.dim": 1, "aten.nanmedian.dim": 1,
    "aten.argsort.default": 0, "aten.native_dropout.default": 0,
    # its table is not initialised beyond the lengths; the backward pass is compared
    "aten._ctc_loss.Tensor": 1,
}  # fmt: skip
SKIPPED = {
    "aten._local_scalar_dense.default",
    "aten.is_same_size.default",
    "aten.lift_fresh.default",
}
UNINITIALISED = {
    "aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default",
    "aten.empty_strided.default", "aten.new_empty_strided.default", "aten.empty_permuted.default",
}  # fmt: skip
