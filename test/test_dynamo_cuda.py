"""torch.compile on tensors of torch.cuda, without a GPU: graphs of fake CUDA tensors, called with
CPU tensors on the memory of a stub of the driver, which executes the kernels when PyTorch's stream
is waited for."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from test.device.stub_cuda import StubCuda
from torch_hlo import config
from torch_hlo.device.cuda import cuda_driver, cuda_memory
from torch_hlo.dynamo import backend, call
from torch_hlo.dynamo.place import Gpu
from torch_hlo.lowering.core.registry import LoweringError

STREAM = 77  # PyTorch's current one


@pytest.fixture
def stub(monkeypatch):
    stub = StubCuda()
    pool = cuda_memory.CudaPool(cuda_driver.Cuda(0, stub))
    monkeypatch.setattr(cuda_memory, "pool_of", lambda number: pool)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(
        Gpu,
        "empty",
        lambda self, size, stride, dtype: theirs(
            stub, torch.empty_strided(size, stride, dtype=dtype)
        ),
    )
    monkeypatch.setattr(Gpu, "bring", lambda self, x: theirs(stub, x.clone()))
    monkeypatch.setattr(
        call,
        "_dense",
        lambda x, order, dense=call._dense: theirs(stub, dense(x, order)),
    )
    with config.override(CACHE="", FALLBACK="error"):
        yield stub


def theirs(stub: StubCuda, x: torch.Tensor) -> torch.Tensor:
    """Memory of PyTorch's allocator, which outlives the tensor as a cached block does."""
    if x.nbytes:
        stub.own(x.data_ptr(), x.untyped_storage().nbytes())
    stub.kept = [*getattr(stub, "kept", ()), x]
    return x


def compiled(function, *examples: torch.Tensor, cpu: tuple[int, ...] = ()):
    """What Dynamo's backend makes of the function on CUDA tensors like the examples (those numbered
    in `cpu` stay there). It is traced on the CPU: a PyTorch without CUDA cannot trace everything
    there."""
    graph = make_fx(function, tracing_mode="fake")(*examples)
    with FakeTensorMode():
        for i, n in enumerate(graph.graph.nodes):
            value = n.meta.get("val")
            if isinstance(value, torch.Tensor) and i not in cpu:
                n.meta["val"] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="cuda"
                )
    fakes = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    return backend.compile_graph(graph, fakes, backend.checked(None))


def test_a_program_runs_in_pytorchs_order_and_memory(stub):
    x, w = theirs(stub, torch.zeros(8, 16)), theirs(stub, torch.randn(5, 16))
    run = compiled(lambda x, w: (F.gelu(F.linear(x, w)), x.sum(0)), x, w)
    for _ in range(3):
        data = torch.randn(8, 16)
        # a kernel of PyTorch's that has not run yet
        stub.queues[STREAM].append(lambda data=data: x.copy_(data))
        y, s = run([x, w])
        stub._advance(STREAM)
        assert not stub.problems
        torch.testing.assert_close(y, F.gelu(F.linear(data, w)))
        torch.testing.assert_close(s, data.sum(0))
    assert not any(c.startswith(("cuMemcpyHtoD", "cuMemcpyDtoH")) for c in stub.calls)
    assert stub.calls.count("cuMemAllocAsync") == 0  # PyTorch's allocator gave all


def test_parameters_are_updated_in_place(stub):
    p, g = theirs(stub, torch.ones(300)), theirs(stub, torch.full((300,), 2.0))
    run = compiled(lambda p, g: (p.copy_(p - 0.5 * g),), p, g)
    for _ in range(2):
        run([p, g])
    stub._advance(STREAM)
    assert not stub.problems and (p == -1).all()


def test_views_that_start_anywhere_are_copied_first(stub):
    base = theirs(stub, torch.arange(101.0))
    x = base[1:]  # 4 bytes further than what 16-byte accesses can take
    run = compiled(lambda x: (x * 2,), x)
    (y,) = run([x])
    stub._advance(STREAM)
    assert not stub.problems
    torch.testing.assert_close(y, x * 2)


def test_tensors_of_the_cpu_are_brought_over(stub):
    x, scale = theirs(stub, torch.arange(32.0)), torch.tensor(3.0)
    run = compiled(lambda x, scale: (x * scale,), x, scale, cpu=(1,))
    (y,) = run([x, scale])
    stub._advance(STREAM)
    torch.testing.assert_close(y, x * 3)


@torch.library.custom_op("hlo_test::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x):
    return torch.empty_like(x)


def test_operators_of_python_see_the_streams_values(stub):
    x = theirs(stub, torch.zeros(32))
    run = compiled(lambda x: (torch.ops.hlo_test.cube(x + 1) * 2,), x)
    stub.queues[STREAM].append(lambda: x.fill_(1))  # a kernel of PyTorch's that has not run yet
    (y,) = run([x])
    stub._advance(STREAM)
    assert not stub.problems and (y == 16).all()


def test_random_numbers_differ_between_calls(stub):
    x = theirs(stub, torch.zeros(4096))
    run = compiled(lambda x: (torch.rand_like(x),), x)
    a, b = (run([x])[0] for _ in range(2))
    stub._advance(STREAM)
    assert (a != b).any() and 0.45 < a.mean() < 0.55 and 0 <= a.min() and a.max() < 1


def test_a_kernel_without_memory_names_its_program(stub):
    x = theirs(stub, torch.ones(64))
    run = compiled(lambda x: (x + 1,), x)
    stub.fail["cuLaunchKernel"] = 700
    with pytest.raises(
        RuntimeError, match=r"kernel k0_\w+ of fusion f32\[64\].*start the process anew"
    ):
        run([x])


def test_two_gpus_in_a_graph():
    with FakeTensorMode():
        a, b = torch.empty(3, device="cuda:0"), torch.empty(3, device="cuda:1")
        graph = make_fx(lambda a, b: (a + 1, b + 1), tracing_mode="fake")(a, b)
    with pytest.raises(
        LoweringError, match="tensors of cuda:0 and cuda:1; a program runs on one GPU"
    ):
        backend.compile_graph(graph, [a, b], backend.checked(None))
