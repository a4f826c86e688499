"""The SPMD partitioner: an annotated program becomes the program of one device, see partitioner.py."""

from torch_hlo.compiler.partition.partitioner import (
    COUNTER,
    PartitionError,
    PartitionWarning,
    is_per_device,
    partition,
)

__all__ = ["COUNTER", "PartitionError", "PartitionWarning", "is_per_device", "partition"]
