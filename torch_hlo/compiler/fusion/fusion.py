"""fusion: groups of instructions become `fusion` instructions, one kernel each.

Before, the entry computation is a graph of primitive opcodes; after, it holds only parameters,
constants, tuples, reshapes (views: no memory moves), steps (dot, sort, …) and

    f = (f32[8,768], f32[8]) fusion(x, y), kind=row, calls=fused_0
    m = f32[8] get-tuple-element(f), index=1

kind=loop: no reduction. kind=reduce: results of reductions are not read back. kind=row: they are
(softmax, layernorm). kind=output: a product and elementwise instructions on its result
(fusion_output.py). What loops, conditionals and calls run is fused in the same way.
"""

from __future__ import annotations

from torch_hlo.hlo.ir import (
    Computation,
    Instruction,
    Instructions,
    Module,
    Replacements,
    carry_meta,
    instr,
    replace,
    tuple_shape,
)

from .fusion_output import absorb, is_product, product_arrays
from .fusion_place import place
from .fusion_plan import FULL, Group, Plan
from .fusion_prepare import prepare
from .fusion_table import FREE, REDUCE


def fusion(module: Module) -> Module:
    """Group the fusible instructions of every computation that runs as steps into kernels. Every
    array that is left is in memory exactly once."""
    if any(x.op == "fusion" and x.get("kind") != "custom" for x in module.entry.instructions()):
        return module
    return module.with_root(_fused(module.entry).root)


# their computations are sequences of steps
_CONTROL_FLOW = frozenset(("while", "conditional", "call", "async-start"))


def _fused(computation: Computation) -> Computation:
    root = computation.root
    if root.is_tuple and root.op != "tuple":
        parts = tuple(
            instr("get-tuple-element", (root,), e, index=i) for i, e in enumerate(root.elements)
        )
        root = instr("tuple", parts, root.shape)
    computation = Computation(computation.name, computation.params, prepare(root))
    plan = Plan(computation)
    absorb(plan)
    place(plan)
    return Computation(computation.name, computation.params, _Builder(plan).root(computation.root))


def _step(x: Instruction, operands: Instructions) -> Instruction:
    """`x` on new operands, its computations fused."""
    if x.op not in _CONTROL_FLOW:
        return replace(x, operands) if operands else x

    def fuse(value: object) -> object:
        if isinstance(value, Computation):
            return _fused(value)
        return tuple(map(fuse, value)) if isinstance(value, tuple) else value

    return instr(x.op, operands, x.shape, **{name: fuse(value) for name, value in x.attrs})


class _Builder:
    """Makes the new entry computation from a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.bodies: dict[int, _Body] = {}
        # old instruction in memory -> new instruction
        self.value: Replacements = {}
        self.needed: dict[int, None] = {}  # numbers of members that others read, in program order

    def root(self, root: Instruction) -> Instruction:
        plan = self.plan
        groups = plan.groups()
        for g in groups:
            if g.step:
                for o in plan.order[g.first].operands:
                    self._need(o)
            else:
                self.bodies[id(g)] = body = _Body(plan, g)
                for x in body.inputs:
                    self._need(x)
        if root.op != "tuple":
            self._need(root)
        for g in self._topological(groups):
            if g.step:
                x = plan.order[g.first]
                self.value[x] = _step(x, tuple(map(self._new, x.operands)))
            else:
                self._emit(g)
        return self._new(root)

    def _need(self, x: Instruction) -> None:
        i = self.plan.number[x]
        if self.plan.group(i) is not None:
            self.needed[i] = None
        elif x.op == "reshape":
            self._need(x.operand)

    def _new(self, x: Instruction) -> Instruction:
        """The array in the new entry that holds `x`."""
        found = self.value.get(x)
        if found is None:
            if x.op == "reshape":
                found = instr("reshape", (self._new(x.operand),), x.shape)
                carry_meta(x, found)
            elif x.op == "constant":
                found = x
            else:
                raise AssertionError(
                    f"fusion: {x.op} {x.shape} is read before the kernel that computes it; please"
                    " report the program"
                )
            self.value[x] = found
        return found

    def _topological(self, groups: list[Group]) -> list[Group]:
        """Groups after the groups they read from."""
        done: set[int] = set()
        order: list[Group] = []
        for start in groups:
            if id(start) in done:
                continue
            stack = [(start, iter(self._before(start)))]
            done.add(id(start))
            while stack:
                g, pending = stack[-1]
                for h in pending:
                    if id(h) not in done:
                        done.add(id(h))
                        stack.append((h, iter(self._before(h))))
                        break
                else:
                    order.append(g)
                    stack.pop()
        return order

    def _before(self, g: Group) -> list[Group]:
        plan = self.plan
        inputs = plan.order[g.first].operands if g.step else self.bodies[id(g)].inputs
        found = []
        for x in inputs:
            while plan.group(plan.number[x]) is None and x.op == "reshape":
                x = x.operand
            h = plan.group(plan.number[x])
            if h is not None and h is not g:
                found.append(h)
        return found

    def _emit(self, g: Group) -> None:
        plan = self.plan
        members = sorted(g.roles)
        # A tuple-shaped reduction is used through get-tuple-element, which is a member too.
        results = [
            plan.order[i] for i in members if i in self.needed and not plan.order[i].is_tuple
        ]
        if not results:
            return
        body = self.bodies[id(g)]
        inside = [body.inside[x] for x in results]
        root = (
            inside[0]
            if len(inside) == 1
            else instr("tuple", inside, tuple_shape(*(x.shape for x in inside)))
        )
        computation = Computation("fused", tuple(body.params), root)
        operands = tuple(map(self._new, body.inputs))
        made = instr("fusion", operands, root.shape, kind=_kind(plan, g), calls=computation)
        # its work is the product's; what is inside may stand in other fusions, too
        products = [y for i in g.roles if is_product(y := plan.order[i])]
        for x in (*products, results[0]):
            carry_meta(x, made)
        for k, x in enumerate(results):
            self.value[x] = (
                made if len(results) == 1 else instr("get-tuple-element", (made,), x.shape, index=k)
            )
            carry_meta(x, self.value[x])


class _Body:
    """The computation of one group: `inside` maps old instructions to new ones, `inputs` are the
    arrays it reads."""

    def __init__(self, plan: Plan, g: Group) -> None:
        self.inputs: list[Instruction] = []
        self.params: list[Instruction] = []
        self.inside: Replacements = {}
        # a product reads memory
        self.arrays = {
            a for i in g.roles if is_product(plan.order[i]) for a in product_arrays(plan.order[i])
        }
        # written in place
        self.arrays.update(
            plan.order[i].operand for i in g.roles if plan.order[i].op == "dynamic-update-slice"
        )
        for i in sorted(g.roles):
            self._copy(plan, g, plan.order[i])

    def _copy(self, plan: Plan, g: Group, x: Instruction) -> None:
        stack = [x]
        while stack:
            x = stack[-1]
            if x in self.inside:
                stack.pop()
            elif x in self.arrays or not self._is_inside(plan, g, x):
                parameter = instr("parameter", (), x.shape, index=len(self.params))
                self.inputs.append(x)
                self.params.append(parameter)
                self.inside[x] = parameter
                stack.pop()
            elif missing := [o for o in x.operands if o not in self.inside]:
                stack.extend(reversed(missing))
            else:
                self.inside[x] = (
                    replace(x, tuple(self.inside[o] for o in x.operands)) if x.operands else x
                )
                carry_meta(x, self.inside[x])
                stack.pop()

    def _is_inside(self, plan: Plan, g: Group, x: Instruction) -> bool:
        i = plan.number[x]
        if i in g.roles:
            return True
        if plan.kind[i] != FREE:
            return False
        # A reshape of an array in memory is a view of it: the kernel reads the view.
        while x.op == "reshape":
            x = x.operand
        i = plan.number[x]
        return i in g.roles or plan.kind[i] == FREE


def _kind(plan: Plan, g: Group) -> str:
    if any(is_product(plan.order[i]) for i in g.roles):
        return "output"
    reduces = {i for i in g.roles if plan.kind[i] == REDUCE}
    if not reduces:
        return "loop"
    # Members are in postorder: find out whether anything with one element per point depends on a
    # reduction.
    late = set(reduces)
    for i in sorted(g.roles):
        if any(s in late for s, _ in plan.sources[i]):
            if g.roles[i] is FULL or i in reduces:
                return "row"
            late.add(i)
    return "reduce"
