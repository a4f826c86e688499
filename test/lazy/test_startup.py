"""What the first step must not wait for."""
from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, torch, torch_hlo
from torch.nn import functional as F
x = torch.randn(4, 8).to("hlo").requires_grad_()
F.cross_entropy(F.layer_norm(F.gelu(x) + 1, (8,)), torch.arange(4).to("hlo")).backward()
torch_hlo.sync()
assert x.grad.shape == x.shape
print("torch._dynamo" in sys.modules)
torch.compile(lambda y: y * 2, backend="eager")(torch.ones(2))
"""


def test_recording_does_not_import_dynamo() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr[-2000:]
