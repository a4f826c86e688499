"""Tensors as objects: how they are made, printed, pickled and allocated; process groups and boxed
work. The same in 2.11 to 2.13."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

# a tensor of a subclass without memory
make_wrapper = torch.Tensor._make_wrapper_subclass
# a tensor of a subclass over the memory of another one
make_subclass = torch.Tensor._make_subclass
# the descriptor of `tensor.data`
tensor_data = torch._C.TensorBase.data
# functions that pickled tensors name
rebuild_with_state = torch._tensor._rebuild_from_type_v2
rebuild_parameter = torch._utils._rebuild_parameter
rebuild_parameter_with_state = torch._utils._rebuild_parameter_with_state
rebuild_sparse = torch._utils._rebuild_sparse_tensor


def rebuilding(
    storage: torch.UntypedStorage, dtype: torch.dtype
) -> tuple[Callable, torch.TypedStorage, tuple]:
    """How PyTorch makes a tensor of a saved storage again: the function, its first argument, and
    what follows the others. The younger dtypes have no kind of storage: theirs are bytes."""
    if dtype not in torch.storage._new_dtypes():
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        return torch._utils._rebuild_tensor_v2, typed, ()
    raw = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    raw._pickle_storage_type = lambda: "UntypedStorage"
    return torch._utils._rebuild_tensor_v3, raw, (dtype,)


# torch.empty_strided on the CPU as Inductor's code calls it: 0.3 us instead of 1.5
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu


def plain_tensor(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the device without memory that is no subclass."""
    return torch._C._acc.create_empty_tensor(tuple(size), dtype)


def weak_reference(storage: torch.UntypedStorage) -> int:
    """What torch.multiprocessing's StorageWeakRef holds; it frees it."""
    return storage._weak_ref()


def generator_new(cls: type) -> torch.Generator:
    """An instance of a subclass of torch.Generator; C++ takes it for a CPU generator."""
    return torch._C.Generator.__new__(cls, "cpu")


def values_text(values: torch.Tensor) -> str:
    """The numbers of a tensor as `repr` prints them after "tensor("."""
    return torch._tensor_str._tensor_str(values, len("tensor("))


def tensor_text(tensor: torch.Tensor, contents: str | None) -> str:
    """`repr` of a tensor, with `contents` in place of its numbers."""
    return torch._tensor_str._str(tensor, tensor_contents=contents)


def cuda_stream_finder() -> Callable[[int], int]:
    """A function from the index of a GPU to the address of torch.cuda's current stream there."""
    return getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
        lambda index: torch.cuda.current_stream(index).cuda_stream
    )


def process_group(group: object) -> torch.distributed.ProcessGroup:
    """The process group that an argument of a communication op means: its name, the boxed group, or
    itself."""
    # the shapes of functional collectives
    import torch.distributed._functional_collectives  # noqa: F401

    if isinstance(group, str):
        return torch._C._distributed_c10d._resolve_process_group(group)
    if isinstance(group, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(group)
    return group


def wait_work(work: torch.ScriptObject) -> None:
    """Block until a collective (the boxed Work of a c10d op) is done."""
    torch._C._distributed_c10d.Work.unbox(work).wait()


def done_work(tensors: Sequence[torch.Tensor]) -> torch.ScriptObject:
    """A boxed Work that is done, with these tensors as the value of its future."""
    done = torch.futures.Future()
    done.set_result(tensors)
    return torch._C._distributed_c10d._create_work_from_future(done).boxed()


# how many C++ objects hold a tensor
use_count = torch.Tensor._use_count


@functools.cache
def dtensor_spec(mesh: Any, placements: tuple, *what: Any) -> Any:
    """DTensor's description of a tensor: a DeviceMesh, what is done along its axes, and (shape,
    strides, dtype)."""
    from torch.distributed.tensor import _dtensor_spec

    return _dtensor_spec.DTensorSpec(mesh, placements, _dtensor_spec.TensorMeta(*what))
