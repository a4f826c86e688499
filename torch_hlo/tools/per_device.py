"""`partition`: an annotated program, the program of one device, and what its collectives move."""

from collections.abc import Iterator, Sequence

from torch_hlo.compiler.cost import KINDS, cost, sent
from torch_hlo.compiler.spmd import propagate
from torch_hlo.compiler.spmd.spmd_pipeline import spmd
from torch_hlo.hlo.ir import Instruction, Module
from torch_hlo.hlo.text.printer import computations, module_text

from . import UsageError


def program(module: Module, update_axes: Sequence[str] = ()) -> str:
    """The per-device program in XLA's text, and its costs in comments. Raises UsageError for a
    program without shardings."""
    result = partitioned(module, update_axes)
    return (
        module_text(result, style="xla")
        + "\n"
        + "".join(f"// {line}\n" for line in cost(result).table().splitlines())
    )


def explain(module: Module, update_axes: Sequence[str] = ()) -> str:
    """Each array's sharding with the reason for it, each collective with its bytes and devices, and
    the totals."""
    result = partitioned(module, update_axes)
    lines = [
        "shardings",
        *(f"  {line}" for line in propagate.explain(module).splitlines()),
        "collectives",
    ]
    lines += [f"  {line}" for line in _collectives(result)]
    return "\n".join([*lines, cost(result).table()])


def partitioned(module: Module, update_axes: Sequence[str]) -> Module:
    """The program of one device. Raises UsageError for a program without shardings."""
    if module.mesh is None:
        raise UsageError(
            "the program has no shardings: nothing says over how many devices to partition it"
        )
    return spmd(module, update_axes=update_axes)


def _collectives(module: Module) -> Iterator[str]:
    for c in computations(module.entry):
        where = "" if c is module.entry else f" in {c.name}"
        for x in c.instructions():
            if x.op.removesuffix("-start") in KINDS:
                yield (
                    f"{x.op} of {x.operand_shapes}{where}:"
                    f" {sent(x, module.num_partitions):,.0f} bytes, {_members(x)}{_origin(x)}"
                )


def _members(x: Instruction) -> str:
    if x.op.startswith("collective-permute"):
        return f"{sum(a != b for a, b in x['source_target_pairs'])} devices send"
    groups = x["replica_groups"]
    return f"{len(groups)} groups of {len(groups[0])}" if groups else "all devices"


def _origin(x: Instruction) -> str:
    """What the collective is there for, as far as names tell."""
    names = [name for o in x.operands if (name := o.meta.op_name or o.meta.name)]
    return f", of {', '.join(names[:3])}" if names else ""
