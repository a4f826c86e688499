"""The C interface misused: every call must return an error code with a message and touch
nothing."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from torch import nn

from torch_hlo import aot
from torch_hlo.compiler.aot import abi
from torch_hlo.device.library import _Error, _Model, _open, _Tensor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
CODE = {name: i for i, name in enumerate(abi.ERRORS)}
F32, F64 = abi.DTYPE_CODES["f32"], abi.DTYPE_CODES["f64"]
GUARD = 64  # bytes before and after every output that must keep their value


class Both(nn.Module):
    def forward(self, x, y):
        return (x @ y).softmax(-1) @ y.T, x.sum(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    n = torch.export.Dim("n", max=100)
    files = aot.compile(
        Both(),
        (torch.randn(4, 3), torch.randn(3, 5)),
        dynamic_shapes=({0: n}, None),
        output=tmp_path_factory.mktemp("aot") / "both.so",
    )
    return _Model.in_dll(_open(str(files.library)), "torch_hlo_library")


class Call:
    """A call that is right, to be spoiled. `run()` gives (code, message) after checking that a
    failed call has written nothing."""

    def __init__(self, model, n=4):
        self.model, self.n = model, n
        self.x, self.y = torch.randn(n, 3), torch.randn(3, 5)
        self.inputs = (_Tensor * 2)()
        self.outputs = (_Tensor * 2)()
        self.memory = [bytearray(b"\xa5" * (GUARD * 2 + nbytes)) for nbytes in (n * 3 * 4, n * 4)]
        self.kept = []
        for t, (address, nbytes, sizes) in zip(
            self.inputs,
            ((self.x.data_ptr(), n * 12, (n, 3)), (self.y.data_ptr(), 60, (3, 5))),
        ):
            self.fill(t, address, nbytes, F32, sizes)
        for t, memory, sizes in zip(self.outputs, self.memory, ((n, 3), (n,))):
            self.fill(t, self.address(memory) + GUARD, len(memory) - 2 * GUARD, F32, sizes)
        self.need = ctypes.c_uint64()
        assert model.plan(self.inputs, 2, self.planned(), 2, ctypes.byref(self.need), None) == 0
        self.scratch = bytearray(b"\x5a" * (self.need.value + 2 * GUARD))
        self.arguments = [
            self.inputs,
            2,
            self.outputs,
            2,
            self.address(self.scratch) + GUARD,
            self.need.value,
            None,
            0,
        ]

    def fill(self, t, address, nbytes, dtype, sizes):
        array = (ctypes.c_int64 * max(1, len(sizes)))(*sizes)
        self.kept.append(array)
        t.data, t.nbytes, t.dtype, t.rank = address, nbytes, dtype, len(sizes)
        t.sizes = array

    def planned(self):
        found = (_Tensor * 2)()
        for t in found:
            self.fill(t, 0, 0, 0, (0, 0))
        return found

    def address(self, memory):
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.kept.append(view)
        return ctypes.addressof(view)

    def run(self):
        error = _Error()
        error.message = b"untouched"
        before = [bytes(m) for m in (*self.memory, self.scratch)]
        code = self.model.run(*self.arguments, ctypes.byref(error))
        for memory in (*self.memory, self.scratch):
            assert (
                memory[:GUARD]
                == memory[-GUARD:]
                == (b"\xa5" if memory is not self.scratch else b"\x5a") * GUARD
            )
        if code:
            assert [bytes(m) for m in (*self.memory, self.scratch)] == before
            assert error.code == code and error.message
            # nobody has to ask for the message
            assert self.model.run(*self.arguments, None) == code
        return code, error.message.decode()


def null_sizes(tensors):
    ctypes.cast(
        ctypes.addressof(tensors[1]) + _Tensor.sizes.offset,
        ctypes.POINTER(ctypes.c_void_p),
    )[0] = None


CASES = [
    ("NULL", "inputs is a null pointer", lambda c: c.arguments.__setitem__(0, None)),
    ("NULL", "outputs is a null pointer", lambda c: c.arguments.__setitem__(2, None)),
    (
        "NULL",
        "input 0 (x): data is a null pointer",
        lambda c: setattr(c.inputs[0], "data", None),
    ),
    (
        "NULL",
        "output 1 (out1): data is a null pointer",
        lambda c: setattr(c.outputs[1], "data", None),
    ),
    ("NULL", "input 1 (y): sizes is a null pointer", lambda c: null_sizes(c.inputs)),
    (
        "NULL",
        "output 1 (out1): sizes is a null pointer",
        lambda c: null_sizes(c.outputs),
    ),
    ("NULL", "workspace is a null pointer", lambda c: c.arguments.__setitem__(4, None)),
    (
        "COUNT",
        "input_count is 1, it must be 2",
        lambda c: c.arguments.__setitem__(1, 1),
    ),
    (
        "COUNT",
        "input_count is -2147483648, it must be 2",
        lambda c: c.arguments.__setitem__(1, -(2**31)),
    ),
    (
        "COUNT",
        "output_count is 3, it must be 2",
        lambda c: c.arguments.__setitem__(3, 3),
    ),
    (
        "DTYPE",
        "input 0 (x): dtype is 12, it must be 11 (f32)",
        lambda c: setattr(c.inputs[0], "dtype", F64),
    ),
    (
        "DTYPE",
        "output 0 (out0): dtype is 0, it must be 11 (f32)",
        lambda c: setattr(c.outputs[0], "dtype", 0),
    ),
    (
        "RANK",
        "input 1 (y): rank is 3, it must be 2",
        lambda c: setattr(c.inputs[1], "rank", 3),
    ),
    (
        "RANK",
        "output 1 (out1): rank is -1, it must be 1",
        lambda c: setattr(c.outputs[1], "rank", -1),
    ),
    (
        "SIZE",
        "input 1 (y): dimension 1 is 6, it must be 5",
        lambda c: c.inputs[1].sizes.__setitem__(1, 6),
    ),
    (
        "SIZE",
        "input 0 (x): dimension 0 is -1, it must not be negative",
        lambda c: c.inputs[0].sizes.__setitem__(0, -1),
    ),
    (
        "SIZE",
        "input 0 (x): dimension 0 is 4611686018427387904, which is too large",
        lambda c: c.inputs[0].sizes.__setitem__(0, 2**62),
    ),
    (
        "SIZE",
        "must fulfil x_size0 <= 100; the left side is 101",
        lambda c: c.inputs[0].sizes.__setitem__(0, 101),
    ),
    (
        "SIZE",
        "output 0 (out0): dimension 0 is 5, these inputs give 4",
        lambda c: c.outputs[0].sizes.__setitem__(0, 5),
    ),
    (
        "BYTES",
        "input 0 (x): nbytes is 47, the array takes 48",
        lambda c: setattr(c.inputs[0], "nbytes", 47),
    ),
    (
        "BYTES",
        "output 0 (out0): nbytes is 47, the array takes 48",
        lambda c: setattr(c.outputs[0], "nbytes", 47),
    ),
    (
        "BYTES",
        "workspace_bytes is 1, these inputs take",
        lambda c: c.arguments.__setitem__(5, 1),
    ),
    (
        "ALIGNMENT",
        "input 0 (x): data must be a multiple of 4",
        lambda c: setattr(c.inputs[0], "data", c.inputs[0].data + 2),
    ),
    (
        "OVERLAP",
        "arrays 1 and 3 share memory",
        lambda c: setattr(c.inputs[0], "data", c.outputs[0].data),
    ),
    (
        "OVERLAP",
        "arrays 1 and 2 share memory",
        lambda c: setattr(c.outputs[1], "data", c.outputs[0].data + 44),
    ),
    (
        "OVERLAP",
        "arrays 0 and 4 share memory",
        lambda c: setattr(c.inputs[1], "data", (c.arguments[4] + 3) // 4 * 4),
    ),
]


@pytest.mark.parametrize(
    "code,message,change", CASES, ids=[f"{i}-{c}" for i, (c, _, _) in enumerate(CASES)]
)
def test_a_wrong_call_returns_an_error_and_touches_nothing(model, code, message, change):
    call = Call(model)
    change(call)
    got, text = call.run()
    assert got == CODE[code] and message in text, (abi.ERRORS[got], text)


def test_a_right_call_and_no_elements(model):
    for n in (4, 100, 1, 0):
        call = Call(model, n)
        assert call.run() == (0, "untouched")
        got = (
            torch.frombuffer(call.memory[0], dtype=torch.float32, offset=GUARD, count=3 * n)
            if n
            else torch.empty(0)
        )
        torch.testing.assert_close(got.reshape(n, 3), (call.x @ call.y).softmax(-1) @ call.y.T)


def test_plan_checks_too(model):
    call, error = Call(model), _Error()
    outputs = call.planned()
    assert (
        model.plan(call.inputs, 2, outputs, 2, None, ctypes.byref(error)) == CODE["NULL"]
        and b"workspace_bytes is a null" in error.message
    )
    assert model.plan(call.inputs, 2, None, 2, ctypes.byref(call.need), None) == CODE["NULL"]
    null_sizes(outputs)
    assert (
        model.plan(call.inputs, 2, outputs, 2, ctypes.byref(call.need), ctypes.byref(error))
        == CODE["NULL"]
    )
    assert outputs[0].nbytes == 0 and outputs[0].sizes[0] == 0  # nothing was written
    call.inputs[0].sizes[1] = 7
    assert (
        model.plan(
            call.inputs,
            2,
            call.planned(),
            2,
            ctypes.byref(call.need),
            ctypes.byref(error),
        )
        == CODE["SIZE"]
    )
    assert b"dimension 1 is 7, it must be 3" in error.message


def test_what_a_model_says_about_itself(model):
    assert (
        model.abi,
        model.input_count,
        model.output_count,
        model.weights_bytes,
        model.workspace_bytes,
    ) == (abi.VERSION, 2, 2, 0, -1)
    assert model.name == b"both"
    x, y = model.inputs[0], model.inputs[1]
    assert (x.name, x.dtype, x.rank, list(x.sizes[:2]), y.sizes[0]) == (
        b"x",
        F32,
        2,
        [-1, 3],
        3,
    )
    assert model.outputs[0].rank == 2 and model.outputs[1].name == b"out1"


@pytest.mark.parametrize("seed", range(8))
def test_random_structures(model, seed):
    """Any numbers in the structures: an error, or a right call; never a crash and nothing beside
    the outputs is touched."""
    rng = random.Random(seed)
    numbers = (
        0,
        1,
        -1,
        3,
        4,
        5,
        11,
        12,
        100,
        101,
        2**31,
        2**32,
        2**62,
        2**63 - 1,
        -(2**63),
    )
    for _ in range(200):
        call = Call(model, rng.choice((0, 1, 4)))
        for _ in range(rng.randrange(1, 4)):
            t = rng.choice((*call.inputs, *call.outputs))
            what = rng.choice(("nbytes", "dtype", "rank", "sizes", "data"))
            value = rng.choice(numbers)
            if what == "sizes":
                t.sizes[rng.randrange(t.rank) if 0 < t.rank <= 2 else 0] = value
            elif what == "data":
                t.data = rng.choice((None, t.data))
            elif what == "nbytes":
                # a promise of more memory than there is cannot be checked
                t.nbytes = min(value % 2**64, t.nbytes)
            else:
                setattr(t, what, (value + 2**31) % 2**32 - 2**31)
        code, message = call.run()
        assert code == 0 or message != "untouched"


def test_sizes_whose_product_wraps_around(tmp_path):
    class Outer(nn.Module):
        def forward(self, x, y):
            return (x[:, None] * y).sum((0, 1)) + (x[:, None] @ y[None]).cumsum(0).sum()

    n, m = torch.export.Dim("n"), torch.export.Dim("m")
    files = aot.compile(
        Outer(),
        (torch.randn(4), torch.randn(3)),
        dynamic_shapes=({0: n}, {0: m}),
        output=tmp_path / "outer.so",
    )
    library = aot.load(files.library).library
    for sizes in ((2**40, 2**40), (2**32, 2**32), (2**47, 2**17)):
        with pytest.raises(aot.LibraryError, match="too large") as error:
            library.plan([sizes[:1], sizes[1:]])
        assert error.value.code == CODE["SIZE"]


def test_a_library_of_another_kind(tmp_path):
    with pytest.raises(FileNotFoundError):
        aot.load(tmp_path / "none.so")
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(OSError):
        aot.load(tmp_path / "text.so")
    with pytest.raises(OSError, match="no library made by"):
        aot.load(
            next(p for p in __import__("pathlib").Path(torch.__file__).parent.glob("lib/libgomp*"))
        )
