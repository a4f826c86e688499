"""Models compiled ahead of time give what they give eagerly: in this process, and in one without
torch."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_hlo import aot
from torch_hlo.aot.loaded import _CODE
from torch_hlo.device import library as loader

from .models import MODELS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """name -> (module, args, path of the library), compiled once."""
    folder = tmp_path_factory.mktemp("aot")
    cache = {}

    def build(name):
        if name not in cache:
            torch.manual_seed(0)
            module, args, dynamic = MODELS[name]()
            files = aot.compile(module, args, dynamic_shapes=dynamic, output=folder / f"{name}.so")
            cache[name] = module, args, files.library
        return cache[name]

    return build


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_equals_eager(built, name):
    module, args, path = built(name)
    model = aot.load(path)
    close(model(*args), module(*args))


def test_all_sizes_of_dynamic_dimensions(built):
    module, _, path = built("transformer")
    model = aot.load(path)
    for batch, length in ((1, 1), (3, 17), (2, 64), (5, 3), (0, 4)):
        tokens = torch.randint(0, 30, (batch, length))
        mask = torch.arange(length)[None] < torch.full((batch, 1), max(1, length - 2))
        with torch.no_grad():
            want = (
                module(tokens, mask)
                if batch
                else (torch.empty(0, 4, 30), torch.empty(0, dtype=torch.int64))
            )
        close(model(tokens, mask), want)
    with pytest.raises(
        aot.LibraryError,
        match=r"input 1 \(mask\): dimension 1 is 5, it must be 4 = tokens_size1",
    ):
        model(torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(
        aot.LibraryError, match="must fulfil tokens_size1 <= 128; the left side is 129"
    ):
        model(torch.zeros(2, 129, dtype=torch.int64), torch.ones(2, 129, dtype=torch.bool))


def test_in_a_process_without_torch(built, tmp_path):
    jobs, wanted = [], []
    for name in MODELS:
        module, args, path = built(name)
        inputs = []
        for i, t in enumerate(args):
            file = tmp_path / f"{name}.in{i}"
            file.write_bytes(bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist()))
            inputs.append([str(file), _CODE[t.dtype], list(t.shape)])
        want = pytree.tree_leaves(module(*args))
        files = [str(tmp_path / f"{name}.out{i}") for i in range(len(want))]
        jobs.append({"library": str(path), "inputs": inputs, "outputs": files})
        wanted += zip(files, want)
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            HERE / "bare.py",
            loader.__file__,
            tmp_path / "jobs.json",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n", done.stderr
    for file, want in wanted:
        data = bytearray(pathlib.Path(file).read_bytes())
        close(torch.frombuffer(data, dtype=want.dtype).reshape(want.shape), want.detach())


class Counter(nn.Module):
    """A buffer that calls change, an argument that is changed, results that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, log, *, scale=2.0, extra=None):
        self.calls += 1
        log.add_(1)
        return {
            "y": self.norm(x) * scale,
            "size": x.shape[0],
            "none": extra,
            "calls": self.calls * 1,
        }


def test_state_mutation_and_results_that_are_no_tensors(tmp_path):
    torch.manual_seed(0)
    module, x, log = Counter().train(), torch.randn(6, 4), torch.zeros(3)
    files = aot.compile(
        module,
        (x, log),
        {"scale": 3.0},
        dynamic_shapes=({0: torch.export.Dim("rows", min=2)}, None, None),
        output=tmp_path / "counter.so",
    )
    model, mine = aot.load(files.library), torch.zeros(3)
    assert set(model.state) == {
        "calls",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    for rows in (6, 3):
        x = torch.randn(rows, 4)
        got, want = model(x, mine, scale=3.0), module(x, log, scale=3.0)
        assert type(got["size"]) is int and got["size"] == rows and got["none"] is None
        close(got["y"], want["y"])
        assert torch.equal(got["calls"], want["calls"])
        assert torch.equal(mine, log)
    for name, value in module.named_buffers():
        close(model.state[name], value)
    with pytest.raises(TypeError, match="compiled for the value 3.0"):
        model(x, mine, scale=2.0)
    with pytest.raises(TypeError, match="takes arguments nested as"):
        model(x, scale=3.0)


def test_random_numbers_follow_the_seed(tmp_path):
    files = aot.compile(nn.Dropout(0.5).train(), (torch.ones(1000),), output=tmp_path / "drop.so")
    model = aot.load(files.library)
    torch.manual_seed(1)
    first, second = model(torch.ones(1000)), model(torch.ones(1000))
    torch.manual_seed(1)
    assert torch.equal(model(torch.ones(1000)), first) and not torch.equal(first, second)
    assert 0.4 < first.ne(0).float().mean() < 0.6


def test_conditions_that_tracing_met(tmp_path):
    class Halves(nn.Module):
        def forward(self, x):
            return x.reshape(2, -1).sum(0) if x.shape[0] % 2 == 0 else x

    files = aot.compile(
        Halves(),
        (torch.randn(8),),
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
        output=tmp_path / "halves.so",
    )
    model = aot.load(files.library)
    close(model(torch.arange(10.0)), torch.arange(10.0).reshape(2, 5).sum(0))
    with pytest.raises(
        aot.LibraryError,
        match=r"must fulfil mod\(x_size0,\s?2\) == 0; the left side is 1, the right 0",
    ):
        model(torch.randn(7))


@pytest.mark.parametrize("weights", ["embed", "beside"])
def test_weights(tmp_path, weights):
    torch.manual_seed(0)
    module = nn.Linear(300, 200)
    files = aot.compile(
        module, (torch.randn(2, 300),), output=tmp_path / "linear.so", weights=weights
    )
    x = torch.randn(2, 300)
    if weights == "embed":
        assert files.weights is None and files.library.stat().st_size > 240_000
        return close(aot.load(files.library)(x), module(x))
    assert files.library.stat().st_size < 60_000 and files.weights.stat().st_size > 240_000
    close(aot.load(files.library)(x), module(x))
    good = files.weights.read_bytes()
    for bad, message in (
        (good[:1000] + bytes(8) + good[1008:], "damaged"),
        (good[:-64], "weights_bytes is"),
        (b"x" + good[1:], "not the weights"),
        (good[:40] + bytes(8) + good[48:], "not the weights"),
        (b"", "weights_bytes is 0"),
    ):
        files.weights.write_bytes(bad)
        with pytest.raises(aot.LibraryError, match=message):
            aot.load(files.library)
    files.weights.unlink()
    with pytest.raises(FileNotFoundError):
        aot.load(files.library)


def test_threads_run_one_library_at_the_same_time(built):
    module, args, path = built("cnn")
    model = aot.load(path)
    inputs = [torch.randn(3, 3, 32, 32) for _ in range(4)]
    results: list = [None] * 4

    def work(i):
        results[i] = [model(inputs[i]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for x, rs in zip(inputs, results):
        for r in rs:
            close(r, module(x))


def test_a_library_that_is_replaced_is_loaded_anew(tmp_path):
    for factor in (2.0, 3.0):

        class Times(nn.Module):
            def forward(self, x, factor=factor):
                return x * factor

        files = aot.compile(Times(), (torch.ones(3),), output=tmp_path / "times.so")
        assert aot.load(files.library)(torch.ones(3)).tolist() == [factor] * 3


def test_what_needs_a_host_is_named(tmp_path):
    class Eigen(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x)

    with pytest.raises(Exception, match=r"(?s)geev|eig.*compiled library does without"):
        aot.compile(Eigen(), (torch.randn(3, 3),), output=tmp_path / "eigen.so")
    with pytest.raises(ValueError, match="example arguments"):
        aot.compile(Eigen())
    with pytest.raises(ValueError, match="unknown target 'sparc'; there are host"):
        aot.compile(
            nn.Linear(2, 2),
            (torch.ones(1, 2),),
            target="sparc",
            output=tmp_path / "x.so",
        )
    with pytest.raises(ValueError, match=r"must end in \.so or \.o"):
        aot.compile(nn.Linear(2, 2), (torch.ones(1, 2),), output=tmp_path / "x.dll")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["bert", "gpt2", "llama", "vit", "t5", "mistral", "qwen2", "roberta", "convnext"],
)
def test_hugging_face(tmp_path, name):
    pytest.importorskip("transformers")
    from test.sweeps import huggingface

    case = next(c for c in huggingface.architectures() if c[0] == name)
    torch.manual_seed(0)
    module = huggingface.build(*case).eval()
    inputs = huggingface.batch(module)
    with torch.no_grad():
        want = module(**inputs)
        files = aot.compile(module, (), inputs, output=tmp_path / f"{name}.so")
    got = pytree.tree_leaves(aot.load(files.library)(**inputs))
    for g, w in zip(got, pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.inv(x @ x.T + torch.eye(4)),
        lambda x: torch.nn.functional.interpolate(
            x.reshape(1, 1, 4, 6), scale_factor=2, mode="bilinear"
        ),
        lambda x: (x[:0], x, x, torch.arange(3), None, 7),
        lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,)),
        lambda x: torch.complex(x, -x) * 2,
    ],
    ids=["inverse", "interpolate", "several", "cond", "complex"],
)
def test_programs(tmp_path, function):
    class Program(nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    close(
        aot.load(aot.compile(Program(), (x,), output=tmp_path / "p.so").library)(x),
        function(x),
    )


def test_dimensions_that_are_no_symbol(tmp_path):
    class Pairs(nn.Module):
        def forward(self, x):
            return x.reshape(-1, 2).sum(1)

    half = torch.export.Dim("half", max=100)
    with pytest.raises(
        Exception,
        match=r"is no dimension itself, only 2\*\w+ is: export with a Dim of its own",
    ):
        aot.compile(
            Pairs(),
            (torch.randn(6),),
            dynamic_shapes=({0: 2 * half},),
            output=tmp_path / "pairs.so",
        )
