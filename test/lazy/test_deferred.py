"""What torch.compile imports for others is imported when they use it."""
from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch, torch_hlo

compiled = torch.compile(lambda x: x * 2 + 1, backend="hlo")
assert not {"torch._functorch.partitioners", "networkx", "torch.distributed.fsdp", "torch._dynamo.testing"} & set(sys.modules)
x = torch.arange(4.0)
assert compiled(x).tolist() == [1, 3, 5, 7]
assert torch.compile(lambda x: x + 1, backend="eager")(x).tolist() == [1, 2, 3, 4]
assert {"hlo", "inductor", "cudagraphs"} <= set(torch._dynamo.list_backends())

from torch._dynamo import debug_utils
from torch._dynamo.variables import functions
assert debug_utils.rand_strided((2, 3), (1, 2), torch.float32, "cpu").stride() == (1, 2)
if torch.distributed.is_available():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    assert functions._fsdp_param_group.FSDPParamGroup.use_training_state is FSDPParamGroup.use_training_state
"""


OTHERS = """
import sys, types, torch, torch_hlo
from torch_hlo.lazy import deferred

name = "torch._dynamo.testing"
stand_in = sys.modules[name] = deferred._StandIn(name, {"rand_strided": None})
from torch._dynamo.testing import CompileCounter, rand_strided  # what is asked for by others, too
import torch._dynamo.testing as testing
assert testing is sys.modules[name] is not stand_in and CompileCounter is testing.CompileCounter
"""


def test_stand_ins_answer_for_the_whole_module():
    done = subprocess.run([sys.executable, "-c", OTHERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_imports_come_when_they_are_used():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
