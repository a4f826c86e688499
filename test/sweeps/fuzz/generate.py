"""Random programs, made by running them: a statement is chosen that fits the tensors there are,
run on the CPU, and mostly kept if it works. The same seed gives the same program."""

from __future__ import annotations

import functools
import random
import warnings
from collections import Counter
from typing import Any

import torch

from test.sweeps.fuzz import scope as scopes
from test.sweeps.fuzz.statements import CHANGES, DO, NEW, NUMBERS

DTYPES = [
    *["float32"] * 6, "float64", "bfloat16", "float16", "int64", "int64", "int32", "int16", "int8",
    "uint8", "bool", "bool", "complex64",
]  # fmt: skip
LARGEST = 300  # elements of a tensor
WRONG = 0.2  # share kept of the statements that raise
SPECIAL = 0.15  # share of programs with infinities and NaN
CALLS = 7  # of a captured program; what changes stands in lines that begin with BEFORE
BEFORE = "# before "
# groups of statements that programs of a mode do without, and weights that they have instead
WITHOUT = {
    "together": {"reads", "steps", "modules", "copies"},
    "captured": {"steps", "copies", "out"},
}
WEIGHTS = {"captured": {"python": 14, "random": 2, "reads": 1, "modules": 4, "state": 8}}
Scope = dict[str, Any]


class Slots(dict):
    """What fills a template: `template.format_map(Slots(...))` asks for the slots in order.
    `numbers`: numbers may be arguments of the program."""

    def __init__(self, scope: Scope, r: random.Random, odd: bool, numbers: bool = False) -> None:
        self.scope, self.r, self.odd, self.arguments = scope, r, odd, numbers
        self.x: torch.Tensor = torch.zeros(())

    def __missing__(self, slot: str) -> str:
        text = str(getattr(self, "slot_" + slot)())
        if slot not in ("n", "i", "j", "seed"):
            self[slot] = text
        return text

    def pick(self, fits: Any = lambda t: True) -> str:
        names = [n for n, v in self.scope.items() if is_variable(n) and isinstance(v, torch.Tensor)]
        chosen = [n for n in names if fits(self.scope[n])] or names
        # the newest half is twice as likely
        name = self.r.choice(chosen[len(chosen) // 2 :] if self.r.random() < 0.3 else chosen)
        self.x = self.scope[name]
        return name

    def slot_a(self) -> str:
        return self.pick()

    def slot_f(self) -> str:
        return self.pick(lambda t: t.is_floating_point())

    def slot_g(self) -> str:
        return self.pick(lambda t: t.requires_grad)

    def slot_l(self) -> str:
        if not any(map(is_leaf, self.scope.values())):
            return self._made((2, 3), "float32")
        return self.pick(is_leaf)

    def slot_s(self) -> str:
        """PyTorch leaves what cannot be resized with the new shape, and without memory for it; and
        views of what has been resized cannot always be differentiated."""
        tensors = [v for v in self.scope.values() if isinstance(v, torch.Tensor)]
        memory = Counter(v.untyped_storage().data_ptr() for v in tensors if v.numel())
        names = [
            name
            for name, t in self.scope.items()
            if is_variable(name)
            and isinstance(t, torch.Tensor)
            and t.untyped_storage().resizable()
            and not t.requires_grad
            and (memory[t.untyped_storage().data_ptr()] < 2 or not t.is_floating_point())
        ]
        return self.r.choice(names) if names else self._made((3,))

    def slot_b(self) -> str:
        return self._fitting(broadcasts)

    def slot_t(self) -> str:
        x = self.x
        names = [n for n, v in self.scope.items() if is_variable(n) and isinstance(v, torch.Tensor)
                 and not v.requires_grad]  # fmt: skip
        return self.r.choice(names) if names else self._made(tuple(x.shape))

    def slot_o(self) -> str:
        x = self.x
        memory = x.untyped_storage().data_ptr()
        names = [n for n, v in self.scope.items() if is_variable(n) and isinstance(v, torch.Tensor)
                 and v.untyped_storage().data_ptr() != memory and v.dtype == x.dtype
                 and not v.requires_grad]  # fmt: skip
        if not names or self.r.random() < 0.3:
            return self._made(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        return self.r.choice(names)

    def slot_w(self) -> str:
        return self._fitting(expands)

    def _fitting(self, fits: Any) -> str:
        x = self.x
        fitting = [n for n, v in self.scope.items() if is_variable(n)
                   and isinstance(v, torch.Tensor) and fits(v.shape, x.shape)]  # fmt: skip
        if self.r.random() < 0.25 or not fitting:
            shape = tuple(n if self.r.random() < 0.8 else 1 for n in x.shape)
            return self._made(shape[self.r.randint(0, len(shape)) if len(shape) > 1 else 0 :])
        return self.r.choice(fitting)

    def _made(self, shape: tuple[int, ...], dtype: str = "") -> str:
        dtype = dtype or self.r.choice(DTYPES)
        odd = ", True" if self.odd and self.r.random() < 0.3 else ""
        return f"make({self.r.randrange(10**6)}, {shape}, torch.{dtype}{odd})"

    def slot_m(self) -> str:
        if self.r.random() < 0.4 and not self.x.is_complex():
            names = [n for n, v in self.scope.items() if v is self.x]
            if names:
                return f"({names[0]} > 0)"
        return self._made(tuple(self.x.shape), "bool")

    def slot_d(self) -> int:
        rank = max(self.x.dim(), 1)
        return self.r.randint(-rank, rank - 1)

    slot_e = slot_d

    def slot_i(self) -> int:
        size = self.x.shape[0] if self.x.dim() else 1
        return self.r.randint(-size, size - 1) if size else 0

    def slot_j(self) -> str:
        return self.r.choice(["1:", ":-1", "::2", ":", ":1", "1:3", "1::2", "-2:", "0:0"])

    def _along(self, dim: int) -> int:
        return self.x.shape[dim] if -self.x.dim() <= dim < self.x.dim() else 1

    def _indices(self, size: int, count: int) -> str:
        return f"ints({[self.r.randrange(size) for _ in range(count if size else 0)]})"

    def slot_k(self) -> str:
        return self._indices(
            self._along(int(self["d"]) if "d" in self else 0), self.r.randint(0, 4)
        )

    def slot_k0(self) -> str:
        return self._indices(self._along(0), self.r.randint(1, 3))

    def slot_k1(self) -> str:
        return self._indices(self._along(-1), self.r.randint(1, 3))

    def slot_u(self) -> str:
        size = self._along(int(self["d"]))
        return f"ints({self.r.sample(range(size), self.r.randint(0, size))})"

    def slot_n(self) -> str:
        if self.arguments and self.r.random() < 0.4:
            return f"num({self.r.randrange(24)})"
        read = [n for n in self.scope if n[0] == "n" and n[1:].isdigit()]
        if read and self.r.random() < 0.2:
            return self.r.choice(read)
        return self.r.choice(NUMBERS if self.r.random() < 0.3 else NUMBERS[:7])

    def slot_seed(self) -> int:
        return self.r.randrange(10**6)

    def slot_dtype(self) -> str:
        return self.r.choice(DTYPES)

    def slot_perm(self) -> str:
        return ", ".join(map(str, self.r.sample(range(self.x.dim()), self.x.dim()))) or "()"

    def slot_sizes(self) -> tuple[int, ...]:
        n = self.x.numel()
        ways = [(n,), (-1,) if n else (0,), (1, n), tuple(self.x.shape)[::-1], (n, 1)]
        ways += [(k, n // k) for k in (2, 3) if n % k == 0]
        return self.r.choice(ways)

    def slot_expanded(self) -> str:
        grown = [self.r.randint(1, 3) if n == 1 else n for n in self.x.shape]
        return ", ".join(map(str, [self.r.randint(1, 3)] * self.r.randint(0, 1) + grown)) or "2"

    def slot_strided(self) -> str:
        x, r = self.x, self.r
        # a result that begins behind the beginning of its memory, as select_scatter's may on the CPU
        if (x._base if x._is_view() else x).storage_offset():
            return "(0,), (1,), 0"
        if r.random() < 0.4:
            return f"{tuple(x.shape)}, {x.stride()}, {x.storage_offset()}"
        # the CPU's storages may have bytes behind the end of what they were made for
        base = x._base if x._is_view() else x
        reach = min(x.untyped_storage().nbytes(), base.nbytes) // x.element_size()
        offset = r.randint(0, min(reach, 3))
        rows, step = r.randint(0, 3), r.randint(0, 3)
        columns, gap = r.randint(0, 3), r.randint(0, 2)
        end = offset + 1 + (rows - 1) * step + (columns - 1) * gap
        if rows and columns and end > reach and x.untyped_storage().nbytes() > base.nbytes:
            return f"{tuple(x.shape)}, {x.stride()}, {x.storage_offset()}"
        return f"({rows}, {columns}), ({step}, {gap}), {offset}"


def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(n == m or n == 1 or m == 1 for n, m in zip(reversed(a), reversed(b)))


def expands(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) <= len(b) and all(n in (m, 1) for n, m in zip(reversed(a), reversed(b)))


def is_leaf(value: Any) -> bool:
    """Whether it is a tensor of floats that is no view."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not value._is_view()


def is_variable(name: str) -> bool:
    return name[0] == "v" and name[1:].isdigit()


def described(error: Exception) -> str:
    """What it says, and the line that raised it."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    line = f" [{where.tb_frame.f_code.co_filename}:{where.tb_lineno}]" if where else ""
    return f"{str(error)[:300]}{line}"


@functools.lru_cache(4096)
def parsed(statement: str) -> Any:
    """Its code: each runs on two devices."""
    return compile(statement, "<string>", "exec")


def execute(statement: str, scope: Scope) -> str | None:
    """Run a statement. The name of the type of the exception that it raised, or None."""
    try:
        exec(parsed(statement), scope)
    except Exception as error:
        scope["raised"] = described(error)
        return type(error).__name__
    return None


class Generator:
    """Makes one program, for a mode."""

    def __init__(self, seed: int, mode: str = "", only: tuple[str, ...] = ()) -> None:
        self.captured = mode == "captured"
        self.r = r = random.Random(seed)
        self.kind = r.randrange(60)
        self.scope = scopes.new_scope("cpu", self.kind)
        self.odd = r.random() < SPECIAL
        self.lines: list[str] = []
        self.errors: list[str | None] = []  # what they raised
        self.messages: list[str] = []
        self.count = self.numbers = 0
        silent, weights = WITHOUT.get(mode, set()), WEIGHTS.get(mode, {})
        if self.captured and r.random() < 0.5:
            silent = {*silent, "reads", "random"}
        groups = [(g, weights.get(g, w), t, new) for table, new in ((NEW, True), (DO, False))
                  for g, (w, t) in table.items()
                  if g not in silent and weights.get(g, w) and (not only or g in only)]  # fmt: skip
        self.groups = groups
        # a program prefers some groups
        self.weights = [w * r.choice([0.3, 1, 1, 3]) for _, w, _, _ in groups]

    def program(self) -> list[str]:
        """The statements; variables are v0, v1, … and numbers n0, n1, …"""
        r = self.r
        for _ in range(r.randint(1, 3)):
            limit = r.choice([2, 3, 3, 4, 5])
            shape = tuple(
                0 if r.random() < 0.04 else r.randint(1, limit)
                for _ in range(r.choice([0, 1, 2, 2, 2, 3]))
            )
            self.keep(Slots(self.scope, r, self.odd)._made(shape), True)
        for _ in range(r.randint(3, 10) if self.captured else r.randint(5, 25)):
            _, _, templates, new = r.choices(self.groups, self.weights)[0]
            self.statement(r.choice(templates), new)
        if r.random() < 0.7:  # who else sees a write?
            name = r.choice([n for n in self.scope if is_variable(n)] or ["v0"])
            self.note(f"with torch.no_grad():\n    {name}[...] = 5")
        for _ in range(r.randint(0, 4) if self.captured else 0):
            self.note(f"{BEFORE}{r.randint(2, CALLS - 1)}: {self.change(r.choice(CHANGES))}")
        return self.lines

    def change(self, template: str) -> str:
        r = self.r
        return template.format(
            seed=r.randrange(10**6), n=r.choice(NUMBERS[:7]), i=r.randint(0, 2), j=r.randint(0, 2)
        )

    def statement(self, template: str, new: bool) -> None:
        if not any(is_variable(n) and isinstance(v, torch.Tensor) for n, v in self.scope.items()):
            return
        text = template.format_map(Slots(self.scope, self.r, self.odd, self.captured))
        if not new and self.r.random() < 0.02:
            self.keep(f"({text}.sum()).item()" if " = " not in text else text, False)
        else:
            self.keep(text, new)

    def keep(self, text: str, new: bool) -> None:
        line = f"v{self.count} = {text}" if new else text
        raised = execute(line, self.scope)
        if raised and self.r.random() > WRONG or raised in ("AttributeError", "SyntaxError"):
            return
        value = self.scope.get(f"v{self.count}") if new and not raised else None
        if isinstance(value, torch.Tensor) and value.numel() > LARGEST:
            del self.scope[f"v{self.count}"]
            return
        self.count += new and not raised
        self.lines.append(line)
        self.errors.append(raised)
        if raised:
            self.messages.append(self.scope["raised"])
        if not new and self.r.random() < 0.05:
            self.note("log.append(state.count)")

    def note(self, line: str) -> None:
        """Run and keep a statement."""
        self.lines.append(line)
        self.errors.append(execute(line, self.scope))
        if self.errors[-1]:
            self.messages.append(self.scope["raised"])


def program(seed: int, mode: str = "") -> Generator:
    """What has made a program and, on the way, run it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = Generator(seed, mode)
        generator.program()
        return generator
