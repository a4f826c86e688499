"""The two functions of a model, `plan` and `run`, as IR: every size, type and pointer is checked
before anything is written.

    text = model_functions(interface)      # definitions of @NAME_plan, @NAME_run,
                                           # @NAME_check_weights; they call @entry

A check is straight-line code: a condition, an error code and a message with at most two numbers in
it (`#`). Sizes are polynomials of the symbols, which are read off the inputs; before a polynomial
is evaluated, an upper bound of it is, in floating point, so that no product of hostile sizes wraps
around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Dim, Dims, Size

from ..codegen.block import ARENA, CONSTANTS, FIXED_WORDS, HOST
from ..codegen.program import emit_size
from ..llvm import Function, Int, literal, signature
from .abi import DTYPE_CODES, ERRORS, MESSAGE_BYTES, SLACK, TENSOR, Array

_CODES = {name: i for i, name in enumerate(ERRORS)}
_LARGEST = 2.0**60  # bytes, or elements: more than any machine has, less than what wraps around
# bytes before the data of a weights file: magic, bytes of data, checksum, program
WEIGHTS_HEAD = 64


@frozen
class Condition:
    """Something that sizes have to fulfil: `left predicate right`; `predicate` is icmp's."""

    predicate: str
    left: Size
    right: Size

    def __str__(self) -> str:
        return f"{self.left} {_SIGNS[self.predicate]} {self.right}"


_SIGNS = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}


@frozen
class Interface:
    """All that the functions depend on. `arena`: bytes of scratch memory. `sizes`: every other size
    that the code computes."""

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    symbols: tuple[tuple[str, int, int], ...]
    arena: Size
    sizes: Dims = ()
    conditions: tuple[Condition, ...] = ()
    constants: str = "null"  # of the block: a global, when they are in the library
    weights_head: bytes = b""  # what a weights file starts with; empty when there is none
    weights_bytes: int = 0
    # of the processor, asked for before the program runs (runtime.machine_check)
    features: tuple[str, ...] = ()
    # message -> name of its global, filled here
    strings: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def workspace(self) -> Size:
        return self.arena + SLACK if self.arena != 0 else 0


class _Checker(Function):
    """A function that returns an error code."""

    def __init__(
        self,
        model: Interface,
        name: str,
        params: Sequence[tuple[str, str]],
        linkage: str = "",
    ) -> None:
        super().__init__(name, params, "i32", "#2", linkage)
        self.model = model
        self.values: dict[str, str] = {}

    def expect(
        self,
        condition: str,
        code: str,
        message: str,
        got: Int = 0,
        want: Int = 0,
    ) -> None:
        """Return an error unless the i1 `condition` holds; `#` in the message stands for the
        numbers."""
        ok = self.label("ok")
        bad = self.label("bad")
        self.branch(condition, ok, bad)
        self.start(bad)
        text = self.model.strings.setdefault(message, f"@torch_hlo_text{len(self.model.strings)}")
        details = (f"i32 {_CODES[code]}", f"ptr {text}", f"i64 {got}", f"i64 {want}")
        self.ret(f"i32 {self.call('torch_hlo_fail', 'ptr %error', *details, result='i32')}")
        self.start(ok)

    def pass_on(self, result: str) -> None:
        """Return an error that a called function returned."""
        ok = self.label("ok")
        bad = self.label("bad")
        self.branch(self.icmp("eq", result, 0, "i32"), ok, bad)
        self.start(bad)
        self.ret(f"i32 {result}")
        self.start(ok)

    def not_null(self, pointer: str, message: str) -> None:
        self.expect(self.op(f"icmp ne ptr {pointer}, null"), "NULL", message)

    def size(self, size: Size) -> Int:
        """The value of a size as an i64."""
        found = emit_size(size, self.op, self.values.__getitem__)
        return int(found) if isinstance(size, int) else found

    def bound(self, size: Size) -> str:
        """An upper bound of |size|, and of every intermediate result, as a double."""
        if isinstance(size, int):
            return literal("double", abs(size))
        total = ""
        for monomial, coefficient in size.terms:
            product = literal("double", abs(coefficient))
            for atom in monomial:
                if atom[0] == "sym":
                    factor = self.op(f"sitofp i64 {self.values[atom[1]]} to double")
                elif atom[0] in ("floordiv", "mod"):  # divisors are at least 1
                    factor = self.bound(atom[1])
                else:
                    factor = self.op(f"fadd double {self.bound(atom[1])}, {self.bound(atom[2])}")
                product = self.op(f"fmul double {product}, {factor}")
            total = self.op(f"fadd double {total}, {product}") if total else product
        return total

    # -- structures
    def field(self, tensors: str, i: int, number: int, kind: str) -> str:
        """Field `number` of tensor `i` of an array of structures."""
        return self.op(f"load {kind}, ptr {self.address(tensors, i, number)}")

    def address(self, tensors: str, i: int, number: int) -> str:
        return self.op(f"getelementptr {TENSOR}, ptr {tensors}, i64 {i}, i32 {number}")

    def check_kind(self, tensors: str, i: int, what: str, a: Array) -> None:
        """Element type, rank, and that sizes can be read."""
        dtype = self.field(tensors, i, 3, "i32")
        code = DTYPE_CODES[a.shape.dtype]
        self.expect(
            self.icmp("eq", dtype, code, "i32"),
            "DTYPE",
            f"{what}: dtype is #, it must be # ({a.shape.dtype})",
            self.wide(dtype),
            code,
        )
        self.check_rank(tensors, i, what, a)

    def check_rank(self, tensors: str, i: int, what: str, a: Array) -> None:
        rank = self.field(tensors, i, 4, "i32")
        self.expect(
            self.icmp("eq", rank, a.shape.rank, "i32"),
            "RANK",
            f"{what}: rank is #, it must be #",
            self.wide(rank),
            a.shape.rank,
        )
        if a.shape.rank:
            self.not_null(self.field(tensors, i, 2, "ptr"), f"{what}: sizes is a null pointer")

    def dimension(self, tensors: str, i: int, d: int) -> str:
        return self.load_at("i64", self.field(tensors, i, 2, "ptr"), d)

    def wide(self, value: str) -> str:
        return self.op(f"sext i32 {value} to i64")

    def check_data(self, tensors: str, i: int, what: str, a: Array) -> None:
        """That memory of the array's size is there."""
        data = self.field(tensors, i, 0, "ptr")
        nbytes = self.field(tensors, i, 1, "i64")
        need = self.size(a.shape.nbytes)
        self.expect(
            self.icmp("uge", nbytes, need),
            "BYTES",
            f"{what}: nbytes is #, the array takes #",
            nbytes,
            need,
        )
        some = self.op(f"icmp ne ptr {data}, null")
        self.expect(
            self.op(f"or i1 {some}, {self.icmp('eq', need, 0)}"),
            "NULL",
            f"{what}: data is a null pointer",
        )
        align = a.shape.itemsize // (2 if a.shape.dtype in ("c64", "c128") else 1)
        if align > 1:
            low = self.op(f"and i64 {self.op(f'ptrtoint ptr {data} to i64')}, {align - 1}")
            self.expect(
                self.icmp("eq", low, 0),
                "ALIGNMENT",
                f"{what}: data must be a multiple of #",
                align,
            )


def model_functions(model: Interface) -> str:
    """Definitions of NAME_plan, NAME_run, of NAME_check_weights if there is a weights file, and of
    what they share."""
    parts = [_check_inputs(model), _plan(model), _run(model)]
    if model.weights_bytes:
        parts += [_check_weights(model), _CHECKSUM]
    strings = "".join(
        f"{name} = private constant {_text(message)}\n" for message, name in model.strings.items()
    )
    return "\n".join([strings, _FAIL, _OVERLAP, *parts])


def _text(message: str) -> str:
    data = message.encode()[: MESSAGE_BYTES - 1].replace(b"\0", b" ") + b"\0"
    return f'[{len(data)} x i8] c"{escaped(data)}"'


def escaped(data: bytes) -> str:
    """Bytes for an IR string."""
    return "\\" + data.hex("\\") if data else ""


def label(kind: str, i: int, a: Array) -> str:
    """How messages call an array."""
    return f"{kind} {i} ({a.name[:60].replace('#', '_')})"


def _check_inputs(model: Interface) -> str:
    """i32 torch_hlo_check(inputs, count, error, symbols): types and sizes of the inputs; stores the
    values of the symbols."""
    f = _Checker(
        model,
        "torch_hlo_check",
        signature("ptr inputs, i32 count, ptr error, ptr symbols"),
        "internal",
    )
    f.expect(
        f.icmp("eq", "%count", len(model.inputs), "i32"),
        "COUNT",
        "input_count is #, it must be #",
        f.wide("%count"),
        len(model.inputs),
    )
    if model.inputs:
        f.not_null("%inputs", "inputs is a null pointer")
    for i, a in enumerate(model.inputs):
        f.check_kind("%inputs", i, label("input", i, a), a)
    for k, (name, i, d) in enumerate(model.symbols):
        value = f.values[name] = f.dimension("%inputs", i, d)
        f.expect(
            f.icmp("sge", value, 0),
            "SIZE",
            f"{label('input', i, model.inputs[i])}: dimension {d} is #, it must not be negative",
            value,
        )
        f.expect(
            f.icmp("sle", value, 1 << 48),
            "SIZE",
            f"{label('input', i, model.inputs[i])}: dimension {d} is #, which is too large",
            value,
        )
        f.store_at("i64", value, "%symbols", k)
    _check_sizes(f)
    origins = {(i, d) for _, i, d in model.symbols}
    for i, a in enumerate(model.inputs):
        for d, size in enumerate(a.shape.dims):
            if (i, d) not in origins:
                got = f.dimension("%inputs", i, d)
                want = f.size(size)
                rule = "" if isinstance(size, int) else f" = {size}"
                f.expect(
                    f.icmp("eq", got, want),
                    "SIZE",
                    f"{label('input', i, a)}: dimension {d} is #, it must be #{rule}",
                    got,
                    want,
                )
    f.ret("i32 0")
    return f.text()


def _check_sizes(f: _Checker) -> None:
    """That the program is meant for these sizes, and that all it computes from them fits."""
    model = f.model
    used = [
        s
        for s in (
            model.arena,
            *model.sizes,
            *(d for a in (*model.inputs, *model.outputs) for d in (*a.shape.dims, a.shape.nbytes)),
        )
    ]
    used += [s for c in model.conditions for s in (c.left, c.right)]
    symbolic = list(dict.fromkeys(s for s in used if isinstance(s, Dim)))
    for divisor in dict.fromkeys(q for s in symbolic for q in _divisors(s)):
        value = f.size(divisor)
        f.expect(
            f.icmp("sge", value, 1),
            "SIZE",
            f"the sizes of the inputs give {divisor} = #, it must be positive",
            value,
        )
    for s in symbolic:
        if not str(s).isidentifier():
            fits = f.op(f"fcmp olt double {f.bound(s)}, {literal('double', _LARGEST)}")
            f.expect(fits, "SIZE", f"the sizes of the inputs are too large: {_short(s)}")
    for c in model.conditions:
        left = f.size(c.left)
        right = f.size(c.right)
        f.expect(
            f.icmp(c.predicate, left, right),
            "SIZE",
            f"the sizes of the inputs must fulfil {c}; the left side is #, the right #",
            left,
            right,
        )
    for s in symbolic:
        if any(c < 0 for _, c in s.terms):
            value = f.size(s)
            f.expect(
                f.icmp("sge", value, 0),
                "SIZE",
                f"the sizes of the inputs give a size of # ({_short(s)})",
                value,
            )


def _short(size: Size) -> str:
    text = str(size)
    return text if len(text) < 100 else f"{text[:97]}..."


def _divisors(size: Size) -> list[Dim]:
    found = []
    if isinstance(size, Dim):
        for monomial, _ in size.terms:
            for atom in monomial:
                if atom[0] != "sym":
                    found += [*_divisors(atom[1]), *_divisors(atom[2])]
                    if atom[0] in ("floordiv", "mod") and isinstance(atom[2], Dim):
                        found.append(atom[2])
    return found


def _begin(f: _Checker) -> None:
    """Check the inputs' types and sizes and read the symbols."""
    model = f.model
    symbols = f.alloca("i64", max(1, len(model.symbols)), 8)
    f.pass_on(
        f.call(
            "torch_hlo_check",
            "ptr %inputs",
            "i32 %input_count",
            "ptr %error",
            f"ptr {symbols}",
            result="i32",
        )
    )
    for k, (name, _, _) in enumerate(model.symbols):
        f.values[name] = f.load_at("i64", symbols, k)
    n = len(model.outputs)
    f.expect(
        f.icmp("eq", "%output_count", n, "i32"),
        "COUNT",
        "output_count is #, it must be #",
        f.wide("%output_count"),
        n,
    )
    if n:
        f.not_null("%outputs", "outputs is a null pointer")


_ARRAYS = signature("ptr inputs, i32 input_count, ptr outputs, i32 output_count")


def _plan(model: Interface) -> str:
    f = _Checker(
        model,
        f"{model.name}_plan",
        [*_ARRAYS, *signature("ptr workspace_bytes, ptr error")],
    )
    _begin(f)
    f.not_null("%workspace_bytes", "workspace_bytes is a null pointer")
    for i, a in enumerate(model.outputs):
        if a.shape.rank:
            f.not_null(
                f.field("%outputs", i, 2, "ptr"),
                f"{label('output', i, a)}: sizes is a null pointer",
            )
    for i, a in enumerate(model.outputs):
        sizes = f.field("%outputs", i, 2, "ptr") if a.shape.rank else ""
        for d, size in enumerate(a.shape.dims):
            f.store_at("i64", f.size(size), sizes, d)
        f.store("i64", f.size(a.shape.nbytes), f.address("%outputs", i, 1))
        f.store("i32", DTYPE_CODES[a.shape.dtype], f.address("%outputs", i, 3))
        f.store("i32", a.shape.rank, f.address("%outputs", i, 4))
    f.store("i64", f.size(model.workspace), "%workspace_bytes")
    f.ret("i32 0")
    return f.text()


def _run(model: Interface) -> str:
    f = _Checker(
        model,
        f"{model.name}_run",
        [
            *_ARRAYS,
            *signature(
                "ptr workspace, i64 workspace_bytes, ptr weights, i64 weights_bytes, ptr error"
            ),
        ],
    )
    _begin(f)
    for i, a in enumerate(model.inputs):
        f.check_data("%inputs", i, label("input", i, a), a)
    for i, a in enumerate(model.outputs):
        what = label("output", i, a)
        f.check_kind("%outputs", i, what, a)
        for d, size in enumerate(a.shape.dims):
            got = f.dimension("%outputs", i, d)
            want = f.size(size)
            f.expect(
                f.icmp("eq", got, want),
                "SIZE",
                f"{what}: dimension {d} is #, these inputs give #",
                got,
                want,
            )
        f.check_data("%outputs", i, what, a)
    need = f.size(model.workspace)
    f.expect(
        f.icmp("uge", "%workspace_bytes", need),
        "BYTES",
        "workspace_bytes is #, these inputs take #",
        "%workspace_bytes",
        need,
    )
    if model.workspace != 0:
        f.not_null("%workspace", "workspace is a null pointer")
    if model.weights_bytes:
        _check_head(f)
    _check_overlaps(f)
    if model.features:
        f.expect(
            f.call("torch_hlo_machine", result="i1"),
            "MACHINE",
            f"this processor or system lacks one of {', '.join(reversed(model.features))}",
        )
    _enter(f)
    f.ret("i32 0")
    return f.text()


def _check_overlaps(f: _Checker) -> None:
    """Outputs and workspace share memory with nothing."""
    model = f.model
    written = [("%outputs", i, a) for i, a in enumerate(model.outputs)]
    arrays = [*written, *(("%inputs", i, a) for i, a in enumerate(model.inputs))]
    ranges = f.alloca("i64", 2 * (len(arrays) + 2), 8)
    pairs = [("%workspace", f.size(model.workspace))] if model.workspace != 0 else []
    pairs += [(f.field(tensors, i, 0, "ptr"), f.size(a.shape.nbytes)) for tensors, i, a in arrays]
    pairs += [("%weights", model.weights_bytes)] if model.weights_bytes else []
    for k, (pointer, nbytes) in enumerate(pairs):
        low = f.op(f"ptrtoint ptr {pointer} to i64")
        f.store_at("i64", low, ranges, 2 * k)
        f.store_at("i64", f.add(low, nbytes), ranges, 2 * k + 1)
    first = 1 if model.workspace != 0 else 0
    found = f.call(
        "torch_hlo_overlap",
        f"ptr {ranges}",
        f"i64 {first + len(written)}",
        f"i64 {len(pairs)}",
        result="i64",
    )
    names = "numbered " + ", ".join(
        (["workspace"] if first else [])
        + ["outputs", "inputs"]
        + (["weights"] if model.weights_bytes else [])
    )
    number = f.op(f"lshr i64 {found}, 32")
    f.expect(
        f.icmp("slt", found, 0),
        "OVERLAP",
        f"arrays # and # share memory ({names})",
        number,
        f.op(f"and i64 {found}, 4294967295"),
    )


def _check_head(f: _Checker) -> None:
    """The start of a weights file."""
    model = f.model
    f.not_null("%weights", "weights is a null pointer; this model needs its weights file in memory")
    f.expect(
        f.icmp("uge", "%weights_bytes", model.weights_bytes),
        "WEIGHTS",
        "weights_bytes is #, this model's file has #",
        "%weights_bytes",
        model.weights_bytes,
    )
    low = f.op(f"and i64 {f.op('ptrtoint ptr %weights to i64')}, 63")
    f.expect(f.icmp("eq", low, 0), "ALIGNMENT", "weights must be at a multiple of 64")
    for k in range(0, len(model.weights_head), 8):
        want = int.from_bytes(model.weights_head[k : k + 8], "little", signed=True)
        got = f.load("i64", f.gep("i8", "%weights", k))
        f.expect(
            f.icmp("eq", got, want),
            "WEIGHTS",
            "these are not the weights that this model was compiled with",
        )


def _check_weights(model: Interface) -> str:
    f = _Checker(
        model,
        f"{model.name}_check_weights",
        signature("ptr weights, i64 weights_bytes, ptr error"),
    )
    _check_head(f)
    data = f.gep("i8", "%weights", WEIGHTS_HEAD)
    got = f.call(
        "torch_hlo_checksum",
        f"ptr {data}",
        f"i64 {(model.weights_bytes - WEIGHTS_HEAD) // 8}",
        result="i64",
    )
    want = int.from_bytes(model.weights_head[24:32], "little", signed=True)
    f.expect(f.icmp("eq", got, want), "WEIGHTS", "the weights are damaged (checksum)")
    f.ret("i32 0")
    return f.text()


def _enter(f: _Checker) -> None:
    """Fill the block of program.py and call the program."""
    model = f.model
    words = FIXED_WORDS + len(model.symbols) + len(model.inputs) + len(model.outputs)
    block = f.alloca("i64", words, 16)

    def put(word: int, kind: str, value: Int) -> None:
        f.store(kind, value, f.gep("i64", block, word))

    if model.workspace != 0:
        past = f.op(f"getelementptr i8, ptr %workspace, i64 {SLACK}")
        address = f.op(f"and i64 {f.op(f'ptrtoint ptr {past} to i64')}, -64")
        arena = f.op(f"inttoptr i64 {address} to ptr")
    else:
        arena = "null"
    put(ARENA, "ptr", arena)
    put(
        CONSTANTS,
        "ptr",
        f.gep("i8", "%weights", WEIGHTS_HEAD) if model.weights_bytes else model.constants,
    )
    put(HOST, "ptr", "null")
    at = FIXED_WORDS
    for name, _, _ in model.symbols:
        put(at, "i64", f.values[name])
        at += 1
    for tensors, arrays in (("%inputs", model.inputs), ("%outputs", model.outputs)):
        for i in range(len(arrays)):
            put(at, "ptr", f.field(tensors, i, 0, "ptr"))
            at += 1
    f.call("entry", f"ptr {block}")


# i32 fail(error, code, text, first, second): fills *error, `#` in the text becomes the next number.
# Returns the code.
_FAIL = f"""
define internal i64 @torch_hlo_put(ptr %to, i64 %at, i8 %c) #2 {{
  %fits = icmp ult i64 %at, {MESSAGE_BYTES - 1}
  br i1 %fits, label %store, label %out
store:
  %p = getelementptr i8, ptr %to, i64 %at
  store i8 %c, ptr %p
  %next = add i64 %at, 1
  ret i64 %next
out:
  ret i64 %at
}}

define internal i64 @torch_hlo_number(ptr %to, i64 %at, i64 %value) #2 {{
entry:
  %digits = alloca [24 x i8]
  %negative = icmp slt i64 %value, 0
  br i1 %negative, label %minus, label %begin
minus:
  %after = call i64 @torch_hlo_put(ptr %to, i64 %at, i8 45)
  %positive = sub i64 0, %value
  br label %begin
begin:
  %start = phi i64 [%at, %entry], [%after, %minus]
  %magnitude = phi i64 [%value, %entry], [%positive, %minus]
  br label %divide
divide:
  %n = phi i64 [0, %begin], [%n1, %divide]
  %rest = phi i64 [%magnitude, %begin], [%quotient, %divide]
  %quotient = udiv i64 %rest, 10
  %ten = mul i64 %quotient, 10
  %digit = sub i64 %rest, %ten
  %small = trunc i64 %digit to i8
  %c = add i8 %small, 48
  %p = getelementptr i8, ptr %digits, i64 %n
  store i8 %c, ptr %p
  %n1 = add i64 %n, 1
  %more = icmp ne i64 %quotient, 0
  br i1 %more, label %divide, label %write
write:
  %k = phi i64 [%n1, %divide], [%k1, %write]
  %to_at = phi i64 [%start, %divide], [%to_next, %write]
  %k1 = sub i64 %k, 1
  %q = getelementptr i8, ptr %digits, i64 %k1
  %d = load i8, ptr %q
  %to_next = call i64 @torch_hlo_put(ptr %to, i64 %to_at, i8 %d)
  %again = icmp ne i64 %k1, 0
  br i1 %again, label %write, label %done
done:
  ret i64 %to_next
}}

define internal i32 @torch_hlo_fail(ptr %error, i32 %code, ptr %text, i64 %first, i64 %second) #2 {{
entry:
  %wanted = icmp ne ptr %error, null
  br i1 %wanted, label %begin, label %out
begin:
  store i32 %code, ptr %error
  %message = getelementptr i8, ptr %error, i64 4
  br label %next
next:
  %i = phi i64 [0, %begin], [%i1, %plain], [%i1, %number]
  %at = phi i64 [0, %begin], [%at1, %plain], [%at2, %number]
  %value = phi i64 [%first, %begin], [%value, %plain], [%second, %number]
  %p = getelementptr i8, ptr %text, i64 %i
  %c = load i8, ptr %p
  %i1 = add i64 %i, 1
  switch i8 %c, label %plain [i8 0, label %end i8 35, label %number]
plain:
  %at1 = call i64 @torch_hlo_put(ptr %message, i64 %at, i8 %c)
  br label %next
number:
  %at2 = call i64 @torch_hlo_number(ptr %message, i64 %at, i64 %value)
  br label %next
end:
  %last = getelementptr i8, ptr %message, i64 %at
  store i8 0, ptr %last
  br label %out
out:
  ret i32 %code
}}
"""

# i64 overlap(ranges, written, all): the first pair of ranges [low, high) that share a byte, one of
# the first `written`, as i << 32 | j; or -1.
_OVERLAP = """
define internal i64 @torch_hlo_overlap(ptr %ranges, i64 %written, i64 %all) #2 {
entry:
  br label %rows
rows:
  %i = phi i64 [0, %entry], [%i1, %row_end]
  %some = icmp slt i64 %i, %written
  br i1 %some, label %row, label %none
row:
  %i2 = shl i64 %i, 1
  %p = getelementptr i64, ptr %ranges, i64 %i2
  %low = load i64, ptr %p
  %ph = getelementptr i64, ptr %p, i64 1
  %high = load i64, ptr %ph
  %i1 = add i64 %i, 1
  br label %columns
columns:
  %j = phi i64 [%i1, %row], [%j1, %apart]
  %more = icmp slt i64 %j, %all
  br i1 %more, label %compare, label %row_end
compare:
  %j2 = shl i64 %j, 1
  %q = getelementptr i64, ptr %ranges, i64 %j2
  %other_low = load i64, ptr %q
  %qh = getelementptr i64, ptr %q, i64 1
  %other_high = load i64, ptr %qh
  %a = icmp ult i64 %low, %other_high
  %b = icmp ult i64 %other_low, %high
  %e = icmp ult i64 %low, %high
  %o = icmp ult i64 %other_low, %other_high
  %ab = and i1 %a, %b
  %eo = and i1 %e, %o
  %shared = and i1 %ab, %eo
  br i1 %shared, label %found, label %apart
apart:
  %j1 = add i64 %j, 1
  br label %columns
found:
  %top = shl i64 %i, 32
  %pair = or i64 %top, %j
  ret i64 %pair
row_end:
  br label %rows
none:
  ret i64 -1
}
"""

# i64 checksum(data, words): see `checksum`.
_CHECKSUM = """
define internal i64 @torch_hlo_checksum(ptr %data, i64 %words) #2 {
entry:
  br label %next
next:
  %i = phi i64 [0, %entry], [%i1, %body]
  %sum = phi i64 [0, %entry], [%sum1, %body]
  %more = icmp slt i64 %i, %words
  br i1 %more, label %body, label %out
body:
  %p = getelementptr i64, ptr %data, i64 %i
  %w = load i64, ptr %p
  %i1 = add i64 %i, 1
  %m = mul i64 %i1, -7046029254386353131
  %s = lshr i64 %m, 29
  %x = xor i64 %m, %s
  %odd = or i64 %x, 1
  %product = mul i64 %w, %odd
  %sum1 = add i64 %sum, %product
  br label %next
out:
  ret i64 %sum
}
"""
