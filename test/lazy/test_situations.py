"""Odd situations: after each, the exception is PyTorch's and the device works."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import torch_hlo


def works() -> None:
    assert (torch.ones(2, device="hlo") + 1).tolist() == [2, 2]


def test_backward_twice():
    x = torch.ones(2, device="hlo", requires_grad=True)
    y = (x * x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    works()


def test_leaf_in_place():
    x = torch.ones(2, device="hlo", requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)
    works()


def test_saved_tensor_modified():
    x = torch.ones(2, device="hlo", requires_grad=True)
    y = x.exp()
    z = (y * y).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
    works()


def test_exception_in_a_hook():
    x = torch.ones(2, device="hlo", requires_grad=True)

    def hook(grad):
        raise KeyError("mine")

    x.register_hook(hook)
    with pytest.raises(KeyError, match="mine"):
        (x * 2).sum().backward()
    works()


def test_a_terabyte():
    with pytest.raises((RuntimeError, MemoryError)):
        torch.ones(1 << 38, device="hlo").add(1).cpu()
    works()


def test_four_threads():
    errors = []

    def work(i: int) -> None:
        try:
            for _ in range(10):
                x = torch.full((4,), float(i), device="hlo")
                for _ in range(5):
                    x = x * 2
                torch_hlo.mark_step()
                assert x.tolist() == [i * 32.0] * 4
        except BaseException as error:  # shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    works()


SCRIPTS = {
    "exit with pending work": "x = torch.ones(3, device='hlo') + 1",
    "fork after use": (
        """
import os
x = torch.ones(3, device='hlo') + 1
assert x.tolist() == [2, 2, 2]
child = os.fork()
if child == 0:
    assert (torch.ones(3).to('hlo') + 2).tolist() == [3, 3, 3]
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (x + 1).tolist() == [3, 3, 3]
"""
    ),
    "a forked child writes into its own copies": (
        """
import os
x = torch.zeros(1 << 20).to('hlo')
for _ in range(2):
    x.add_(1)
    torch_hlo.mark_step()
assert x[0].item() == 2
child = os.fork()
if child == 0:
    x.add_(5)
    os._exit(0 if x[0].item() == 7 else 1)
assert os.waitpid(child, 0)[1] == 0
assert x[0].item() == 2
"""
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_process(name):
    code = "import torch, torch_hlo\n" + SCRIPTS[name]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
