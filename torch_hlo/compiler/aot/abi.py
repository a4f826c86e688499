"""The C interface of compiled libraries: element types, error codes, structures, and the text of
headers.

A model NAME is one constant, `NAME_model` (what it takes and gives), and two functions, `NAME_plan`
(sizes of the results for given inputs) and `NAME_run`. docs/guide/ahead_of_time.md says what each
does; `check.py` writes them. Every pointer in a structure has the target's size, every other
field the size named here, so a structure lies in memory as C lays it out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Dim, Shape, Size

VERSION = 1
MESSAGE_BYTES = 252  # of torch_hlo_error.message, the final zero included
SLACK = 63  # workspaces need no alignment: the library rounds their address up to a multiple of 64

# XLA's numbers (PrimitiveType in xla_data.proto).
DTYPE_CODES = {
    "pred": 1, "s8": 2, "s16": 3, "s32": 4, "s64": 5, "u8": 6, "u16": 7, "u32": 8, "u64": 9,
    "f16": 10, "f32": 11, "f64": 12, "c64": 15, "bf16": 16, "c128": 18, "f8e5m2": 19,
    "f8e4m3fn": 20, "s4": 21, "u4": 22, "f8e4m3b11fnuz": 23, "f8e5m2fnuz": 24, "f8e4m3fnuz": 25,
    "s2": 26, "u2": 27, "f8e4m3": 28, "f8e3m4": 29, "f4e2m1fn": 32, "f8e8m0fnu": 33,
}  # fmt: skip

# code = position
ERRORS = (
    "OK",
    "NULL",
    "COUNT",
    "DTYPE",
    "RANK",
    "SIZE",
    "BYTES",
    "ALIGNMENT",
    "OVERLAP",
    "WEIGHTS",
    "MACHINE",
)
KINDS = ("USER", "STATE", "SEED")  # of an input or output

# LLVM types of the structures; `ptr` is as wide as the target's.
TENSOR = "%torch_hlo_tensor"  # data, nbytes, sizes, dtype, rank
ARRAY = "%torch_hlo_array"  # name, sizes, initial, dtype, rank, kind, pair
MODEL = "%torch_hlo_model"
TYPES = f"""{TENSOR} = type {{ ptr, i64, ptr, i32, i32 }}
{ARRAY} = type {{ ptr, ptr, ptr, i32, i32, i32, i32 }}
{MODEL} = type {{ i32, i32, i32, i32, ptr, ptr, ptr, ptr, ptr, ptr, ptr, i64, i64 }}
"""

_C_TYPES = {
    "pred": "uint8_t",
    "f32": "float",
    "f64": "double",
    "c64": "float",
    "c128": "double",
    "bf16": "uint16_t",
    "f16": "uint16_t",
}

_COMMON = """#ifndef TORCH_HLO_AOT_H
#define TORCH_HLO_AOT_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {{
#endif

#define TORCH_HLO_ABI {version}

/* An array of the caller: row-major, at an address that is a multiple of its element's size. pred
 * is one byte, 0 or 1; complex numbers are (re, im); bf16, f16 and f8 are their bits. */
typedef struct torch_hlo_tensor {{
    void *data;
    uint64_t nbytes;       /* of the memory at data; more than the array needs is fine */
    int64_t *sizes;        /* rank of them; NULL when rank is 0 */
    int32_t dtype;         /* TORCH_HLO_F32, ... */
    int32_t rank;
}} torch_hlo_tensor;

/* What a model takes or gives. */
typedef struct torch_hlo_array {{
    const char *name;
    const int64_t *sizes;  /* -1: differs from call to call */
    const void *initial;   /* the first value of an input of kind STATE; else NULL */
    int32_t dtype;
    int32_t rank;
    int32_t kind;          /* TORCH_HLO_USER; TORCH_HLO_STATE: feed the output with this kind into
                              its input at the next call; TORCH_HLO_SEED: any number, equal numbers
                              give equal random results */
    int32_t pair;          /* the output (of an input) or input (of an output) that is the same
                              state; -1: none */
}} torch_hlo_array;

/* Of a call that failed. Pass NULL if only the code is wanted. */
typedef struct torch_hlo_error {{
    int32_t code;          /* what the call returned */
    char message[{message_bytes}];
}} torch_hlo_error;

enum {{ {errors} }};
enum {{ {kinds} }};
enum {{ {dtypes} }};

/* Checks the sizes and element types of `inputs` (data is not looked at) and says what they give:
 * sets sizes[0 .. rank), dtype, rank and nbytes of every output (sizes must point to room for as
 * many numbers as the model says) and the bytes of workspace a run needs. Returns TORCH_HLO_OK or
 * an error code; then nothing but *error has been written. */
typedef int32_t torch_hlo_plan(const torch_hlo_tensor *inputs, int32_t input_count,
                               torch_hlo_tensor *outputs, int32_t output_count,
                               uint64_t *workspace_bytes, torch_hlo_error *error);

/* Runs the model. Everything is checked first: on an error nothing but *error has been written.
 * Outputs and workspace may overlap nothing. `weights`: the contents of the weights file at a
 * multiple of 64, if the model has one, else NULL and 0. Allocates nothing, keeps nothing; any
 * number of threads may run at the same time with workspaces of their own. */
typedef int32_t torch_hlo_run(const torch_hlo_tensor *inputs, int32_t input_count,
                              const torch_hlo_tensor *outputs, int32_t output_count,
                              void *workspace, uint64_t workspace_bytes,
                              const void *weights, uint64_t weights_bytes,
                              torch_hlo_error *error);

/* Reads all of the weights and compares their checksum; a run only looks at the head of the
 * file. */
typedef int32_t torch_hlo_check_weights(const void *weights, uint64_t weights_bytes,
                                        torch_hlo_error *error);

typedef struct torch_hlo_model {{
    int32_t abi;           /* TORCH_HLO_ABI */
    int32_t input_count;
    int32_t output_count;
    int32_t reserved;
    const char *name;
    const torch_hlo_array *inputs;
    const torch_hlo_array *outputs;
    const char *metadata;  /* JSON: see docs/guide/ahead_of_time.md */
    torch_hlo_plan *plan;
    torch_hlo_run *run;
    torch_hlo_check_weights *check_weights;
    uint64_t weights_bytes; /* of the weights file; 0: they are in the library */
    int64_t workspace_bytes; /* -1: depends on the sizes of the inputs, ask plan */
}} torch_hlo_model;

#ifdef __cplusplus
}}
#endif
#endif
"""


@frozen
class Array:
    """An input or output. `pair`: number of the output or input with the same state, else -1.
    `initial`: bytes of a state's first value."""

    name: str
    shape: Shape
    kind: str = "USER"
    pair: int = -1
    initial: bytes | None = None

    @property
    def text(self) -> str:
        return f"{self.name} {self.shape}"


def identifier(text: str) -> str:
    """A C name like `text`."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    return f"_{name}" if not name or name[0].isdigit() or name in _KEYWORDS else name


_KEYWORDS = frozenset(
    "auto break case char const continue default do double else enum extern float for goto if"
    " inline int long register restrict return short signed sizeof static struct switch typedef"
    " union unsigned void volatile while bool class delete new private public template this"
    " operator namespace using true false try catch and or not xor workspace error weights".split()
)


def _common() -> str:
    """What the headers of all models declare."""
    return _COMMON.format(
        version=VERSION,
        message_bytes=MESSAGE_BYTES,
        errors=", ".join(f"TORCH_HLO_{e} = {i}" for i, e in enumerate(ERRORS)),
        kinds=", ".join(f"TORCH_HLO_{k} = {i}" for i, k in enumerate(KINDS)),
        dtypes=", ".join(f"TORCH_HLO_{d.upper()} = {c}" for d, c in DTYPE_CODES.items()),
    )


def header(
    name: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    symbols: Sequence[tuple[str, int, int]],
    workspace: Size,
    weights_bytes: int,
    target: str,
) -> str:
    """Text of NAME.h. `symbols`: (name, input, dimension) of each size that differs from call to
    call."""
    upper = name.upper()
    lines = [f"/* {name}, compiled by torch_hlo for {target}", " *"]
    lines += [
        f" * input {i}: {a.text}{_kind_text(a)}".replace("*/", "* /") for i, a in enumerate(inputs)
    ]
    lines += [
        f" * output {i}: {a.text}{_kind_text(a)}".replace("*/", "* /")
        for i, a in enumerate(outputs)
    ]
    lines += [f" * size {s}: dimension {d} of input {i}" for s, i, d in symbols]
    lines += [
        " */",
        f"#ifndef TORCH_HLO_MODEL_{upper}_H",
        f"#define TORCH_HLO_MODEL_{upper}_H",
        "",
        _common(),
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        f"extern const torch_hlo_model {name}_model;",
        f"torch_hlo_plan {name}_plan;",
        f"torch_hlo_run {name}_run;",
    ]
    lines += [f"torch_hlo_check_weights {name}_check_weights;"] if weights_bytes else []
    lines += [
        "#ifdef __cplusplus",
        "}",
        "#endif",
        "",
        f"#define {upper}_INPUTS {len(inputs)}",
        f"#define {upper}_OUTPUTS {len(outputs)}",
    ]
    lines += [f"#define {upper}_WORKSPACE_BYTES {workspace}"] if isinstance(workspace, int) else []
    lines += [f"#define {upper}_WEIGHTS_BYTES {weights_bytes}"] if weights_bytes else []
    return "\n".join(
        [
            *lines,
            "",
            *_typed_call(name, inputs, outputs, symbols, bool(weights_bytes)),
            "#endif",
            "",
        ]
    )


def _kind_text(a: Array) -> str:
    return f" ({a.kind.lower()})" if a.kind != "USER" else ""


def _typed_call(
    name: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    symbols: Sequence[tuple[str, int, int]],
    weights: bool,
) -> list[str]:
    """`static inline NAME(sizes…, inputs…, outputs…)`: the call with C types, for when sizes are
    known to be right."""
    taken: dict[str, int] = {}

    def unique(text: str) -> str:
        base = identifier(text)
        taken[base] = taken.get(base, 0) + 1
        return base if taken[base] == 1 else unique(f"{base}_{taken[base]}")

    sizes = {s: unique(s) for s, _, _ in symbols}
    parameters = [f"int64_t {v}" for v in sizes.values()]
    setup: list[str] = []
    for label, arrays, const in (("in", inputs, "const "), ("out", outputs, "")):
        rows = []
        for i, a in enumerate(arrays):
            v = unique(a.name)
            parameters.append(f"{const}{_c_type(a.shape.dtype)} *{v}")
            dims = [c_expression(d, sizes) for d in a.shape.dims]
            if dims:
                setup.append(f"    int64_t th_{label}{i}_sizes[] = {{{', '.join(dims)}}};")
            nbytes = " * ".join([*(f"(uint64_t)({d})" for d in dims), f"{a.shape.itemsize}u"])
            rows.append(
                f"        {{(void *){v}, {nbytes}, {f'th_{label}{i}_sizes' if dims else '0'},"
                f" TORCH_HLO_{a.shape.dtype.upper()}, {len(dims)}}},"
            )
        if rows:
            setup += [
                f"    {'const ' if const else ''}torch_hlo_tensor th_{label}[] = {{",
                *rows,
                "    };",
            ]
    parameters += [
        "void *workspace",
        "uint64_t workspace_bytes",
        *(["const void *weights", "uint64_t weights_bytes"] if weights else []),
        "torch_hlo_error *error",
    ]
    arguments = [
        f"{'th_in' if inputs else '0'}, {len(inputs)}",
        f"{'th_out' if outputs else '0'}, {len(outputs)}",
        "workspace, workspace_bytes",
        "weights, weights_bytes" if weights else "0, 0",
        "error",
    ]
    wrapped = ",\n    ".join(parameters)
    return [
        f"/* {name}_run for arrays of exactly these sizes. */",
        f"static inline int32_t {name}(\n    {wrapped}) {{",
        *setup,
        f"    return {name}_run({', '.join(arguments)});",
        "}",
        "",
    ]


def _c_type(dtype: str) -> str:
    if dtype in _C_TYPES:
        return _C_TYPES[dtype]
    if dtype[0] in "su":
        return f"{'u' if dtype[0] == 'u' else ''}int{max(8, int(dtype[1:]))}_t"
    return "uint8_t"


def c_expression(size: Size, names: dict[str, str]) -> str:
    """`size` in C; symbols by their C names."""
    if not isinstance(size, Dim):
        return str(size)
    operators = {
        "floordiv": "({0} / {1} - ({0} % {1} < 0))",
        "mod": "(({0} % {1} + {1}) % {1})",
        "max": "({0} > {1} ? {0} : {1})",
        "min": "({0} < {1} ? {0} : {1})",
    }
    terms = []
    for monomial, coefficient in size.terms:
        factors = [
            (
                names[a[1]]
                if a[0] == "sym"
                else operators[a[0]].format(
                    f"({c_expression(a[1], names)})",
                    f"({c_expression(a[2], names)})",
                )
            )
            for a in monomial
        ]
        terms.append(
            " * ".join(([] if coefficient == 1 and factors else [str(coefficient)]) + factors)
        )
    return " + ".join(terms)
