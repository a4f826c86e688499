"""Programs as text, HLO or StableHLO, and as MLIR bytecode.

module = parse_text(text)                    # the format is recognised
results = run_text(text, x, y)               # compile and run on tensors or arrays
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torch_hlo.hlo.ir import DTYPES, Module, numpy_dtype
from torch_hlo.hlo.ir.numeric import round_to
from torch_hlo.hlo.ir.verify import VerifyError
from torch_hlo.hlo.read import parse_text
from torch_hlo.hlo.text.printer import module_text
from torch_hlo.hlo.text.scanner import ParseError

from . import UsageError
from .adopt import adopted
from .devices import run_on_devices
from .execute import run_module


def run_text(text: str | bytes, *inputs: Any, devices: int | None = None) -> list[Any]:
    """Compile the program and run it on one input per parameter: tensors, arrays or Python numbers
    (or one list of them).

    With `devices`, on so many virtual devices, or on the processes of torch.distributed: a program
    with shardings is partitioned, inputs and results are whole arrays. Of a per-device program
    without shardings an input may be a list of one array per device, and a result is one. Results
    are tensors when an input is one, on its device, else NumPy arrays (bf16 and f8 as float32).
    Raises ParseError, EvaluateError for inputs that do not fit, CodegenError for instructions
    without code, CollectiveError."""
    if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)):
        inputs = tuple(inputs[0])
    module = adopted(parse_text(text))
    arrays = [to_array(v) for v in inputs]
    results = (
        run_module(module, arrays) if devices is None else run_on_devices(module, arrays, devices)
    )
    tensors = [
        v
        for item in inputs
        for v in (item if isinstance(item, (list, tuple)) else (item,))
        if isinstance(v, torch.Tensor)
    ]
    if not tensors:
        return [value for value, _ in results]
    return [_tensors(value, dtype, tensors[0].device) for value, dtype in results]


def _tensors(value: Any, dtype: str, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_tensors(v, dtype, device) for v in value]
    return to_tensor(value, dtype).to(device)


def partition_text(text: str, update_axes: Sequence[str] = ()) -> str:
    """The program of one device, as HLO text with XLA's collectives, from an annotated program in
    HLO or StableHLO text.

    Annotations: XLA's `sharding={…}`, `mhlo.sharding`, Shardy's `sdy.mesh` and `sdy.sharding`. What
    is not annotated is propagated. The header says how whole inputs and outputs are cut
    (`frontend_attributes`), so that `run_text(partition_text(text), …, devices=n)` takes whole
    arrays.
    `update_axes`: mesh axes over which the updates of weights (parameters that outputs may
      overwrite) and optimizer states are split.
    Raises ParseError, ShardingError, PartitionError, UsageError for a program without annotations.
    """
    from . import per_device

    module = adopted(parse_text(text))
    return module_text(per_device.partitioned(module, update_axes), style="xla")


def to_array(value: Any) -> Any:
    """A tensor as the NumPy array that holds its values; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(to_array(v) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, *_F8):
        value = value.float()
    return value.resolve_conj().resolve_neg().numpy()


_F8 = tuple(
    getattr(torch, d.torch) for d in DTYPES.values() if (d.torch or "").startswith("float8")
)


def to_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """The values of HLO type `dtype` as a CPU tensor of its PyTorch type (4-bit integers as
    8-bit)."""
    tensor = torch.from_numpy(np.array(round_to(array, dtype), numpy_dtype(dtype), order="C"))
    return tensor.to(getattr(torch, DTYPES[dtype].torch)) if DTYPES[dtype].torch else tensor


def load(path: str) -> Module:
    """The program in a file of text or StableHLO bytecode, see adopt.py. Raises
    OSError, ParseError, UsageError."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        return adopted(parse_text(data))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: neither text nor StableHLO bytecode: byte {error.start} is"
            f" {data[error.start]:#04x}"
        ) from None
    except (ParseError, VerifyError) as error:
        error.filename = path  # a command may read two
        raise


def load_inputs(path: str, count: int) -> Sequence[np.ndarray]:
    """`count` arrays from an .npz file (arg0, arg1, … by name, other names by position) or from an
    .npy file. Raises UsageError."""
    found = np.load(path, allow_pickle=False)
    if isinstance(found, np.ndarray):
        arrays = [found]
    else:
        named = [f"arg{i}" for i in range(len(found.files))]
        arrays = [
            found[name] for name in (named if set(named) == set(found.files) else found.files)
        ]
    if len(arrays) != count:
        raise UsageError(f"{path} holds {len(arrays)} arrays, the program takes {count}")
    return arrays
