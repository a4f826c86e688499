"""Arrays shared with other libraries: DLPack on the CPU, and copies between the hlo device and
torch.cuda on a stub of the driver."""

import gc

import numpy as np
import pytest
import torch

import torch_hlo
from test.device.stub_cuda import StubCuda
from torch_hlo import config
from torch_hlo.device import dlpack, runtime
from torch_hlo.device.cuda import cuda_driver, cuda_memory
from torch_hlo.hlo.ir.shape import Shape
from torch_hlo.lazy.record import Array, exchange, fresh, meta as metas, session


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
def test_both_ways_without_a_copy(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    y = torch_hlo.from_dlpack(x)
    assert y.device.type == "hlo" and y.dtype == dtype and y.shape == x.shape
    assert torch.equal(y.cpu(), x)
    z = torch.from_dlpack(y)
    assert z.data_ptr() == x.data_ptr() and torch.equal(z, x)


def test_capsules():
    """As libraries did it before `__dlpack__`."""
    x = torch.arange(6.0).to("hlo")
    for function in (torch.to_dlpack, torch.utils.dlpack.to_dlpack):
        assert torch.from_dlpack(function(x * 2)).tolist() == [0, 2, 4, 6, 8, 10]
        assert torch.asarray(function(x), copy=True).tolist() == [*range(6)]
        assert torch.from_dlpack(function(torch.ones(2))).tolist() == [1, 1]


def test_numpy():
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.testing.assert_array_equal((torch_hlo.from_dlpack(x) * 2).cpu().numpy(), x * 2)
    np.testing.assert_array_equal(np.from_dlpack(torch.arange(5, device="hlo")), np.arange(5))


def test_shared_memory_is_never_written_by_programs():
    x = torch.ones(100, 10)
    y = torch_hlo.from_dlpack(x)
    y.add_(1)
    torch_hlo.mark_step(wait=True)
    assert (y.cpu() == 2).all() and (x == 1).all()
    p = torch.ones(1000, device="hlo")
    torch_hlo.sync([p])
    shown = torch.from_dlpack(p)
    for _ in range(3):
        p.mul_(2)
        torch_hlo.mark_step(wait=True)
    assert (shown == 1).all() and (p.cpu() == 8).all()


def test_memory_lives_as_long_as_somebody_uses_it():
    y = torch_hlo.from_dlpack(torch.arange(1000.0))
    gc.collect()
    assert y.sum().item() == 499500
    before = len(dlpack.exports().held)
    z = torch.from_dlpack(torch.arange(1000.0, device="hlo") + 1)
    assert z.sum().item() == 500500 and len(dlpack.exports().held) == before + 1
    del z
    gc.collect()
    assert len(dlpack.exports().held) == before
    (torch.zeros(3, device="hlo") + 1).__dlpack__()  # nobody takes it
    gc.collect()
    assert len(dlpack.exports().held) == before


def test_views_and_pending_work_are_evaluated():
    x = torch.arange(12.0, device="hlo").view(3, 4)
    assert torch.equal(
        torch.from_dlpack((x + 1).t()[1:3]),
        (torch.arange(12.0).view(3, 4) + 1).t()[1:3],
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch_hlo.from_dlpack(torch.ones(3, 4).t()),
            r"sizes \[4, 3\] with strides \[1, 4\].*make it contiguous",
        ),
        (
            lambda: torch.from_dlpack(torch.ones(2, device="hlo", requires_grad=True)),
            "require gradient",
        ),
        (
            lambda: torch.ones(2, device="hlo").__dlpack__(dl_device=(2, 0)),
            r"is on DLPack device \(1, 0\), not \(2, 0\)",
        ),
    ],
)
def test_what_cannot_be_shared(make, message):
    with pytest.raises(BufferError, match=message):
        make()


def test_an_array_of_another_device():
    class Elsewhere:
        def __dlpack_device__(self):
            return dlpack.CUDA, 0

    with pytest.raises(
        BufferError,
        match=r"on DLPack device \(2, 0\), the hlo device computes on \(1, 0\)",
    ):
        torch_hlo.from_dlpack(Elsewhere())


# ---- torch.cuda: CPU tensors stand for its tensors, on the stub's device memory


class Stream:
    cuda_stream = 0


@pytest.fixture
def stub(monkeypatch):
    stub = StubCuda()
    pool = cuda_memory.CudaPool(cuda_driver.Cuda(0, stub))
    monkeypatch.setattr(cuda_memory, "pool_of", lambda number: pool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream)
    with config.override(DEVICE="cuda", CACHE=""):
        yield stub
        torch_hlo.sync()
        pool.driver.synchronize()


def theirs(stub: StubCuda, x: torch.Tensor) -> torch.Tensor:
    stub.own(x.data_ptr(), x.nbytes)
    return x


def test_copies_from_and_to_torch_cuda_stay_on_the_device(stub, monkeypatch):
    x = theirs(stub, torch.zeros(64))
    values = torch.arange(64.0)
    # a kernel of PyTorch's stream that has not run yet
    stub.queues[0].append(lambda: x.copy_(values))
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "shares", lambda device: True)
        y = x.to("hlo")
        patch.setattr(
            torch,
            "empty",
            lambda *size, **options: torch.zeros(*size, dtype=options["dtype"]),
        )
        z = exchange.hand_out(y * 2, torch.device("cpu"))
    assert not z.any()  # nothing has happened
    stub._advance(0)
    assert torch.equal(z, 2 * torch.arange(64.0))
    assert "cuMemcpyDtoHAsync_v2" not in stub.calls


def test_dlpack_orders_the_streams(stub):
    stub.queues[77].append(lambda: None)
    y = torch.full((32,), 3.0, device="hlo") + 1
    capsule = y.__dlpack__(stream=77)
    array, owner = dlpack.take(capsule)
    assert array.device == (dlpack.CUDA, 0) and array.shape == Shape("f32", (32,))
    stub._advance(77)  # waits for the program
    values = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 32).from_address(array.address))
    np.testing.assert_array_equal(values, np.full(32, 4))
    before = len(stub.queues[77])
    del owner
    assert len(stub.queues[77]) == before + 1  # programs wait for what the consumer has started


def test_adopted_device_memory(stub):
    x = theirs(stub, torch.arange(16.0))

    class OnDevice:
        def __dlpack_device__(self):
            return dlpack.CUDA, 0

        def __dlpack__(self, stream):
            assert stream == runtime.driver().main.value
            return dlpack.export(
                dlpack.Array(x.data_ptr(), Shape("f32", (16,)), (dlpack.CUDA, 0)),
                lambda: released.append(True),
            )

    released: list[bool] = []
    y = torch_hlo.from_dlpack(OnDevice())
    uploads = stub.calls.count("cuMemcpyHtoDAsync_v2")
    assert torch.equal((y + 1).cpu(), torch.arange(16.0) + 1)
    assert stub.calls.count("cuMemcpyHtoDAsync_v2") <= uploads + 1  # the number 1 at most
    del y
    torch_hlo.sync()
    gc.collect()
    assert released


@pytest.mark.parametrize(
    "given",
    (
        torch.full((), 0.5).expand(3, 4),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.arange(8)[::2],
    ),
    ids=("expanded", "transposed", "conjugated", "negated", "stepped"),
)
def test_few_numbers_that_lie_in_any_order(given):
    meta = metas.contiguous(tuple(given.shape), given.dtype)
    moved = fresh(meta, Array(meta.hlo, session.engine().upload(given)))
    torch.testing.assert_close(moved.cpu(), given.resolve_conj().resolve_neg().contiguous())
