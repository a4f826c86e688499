"""Classes of values: what is known of something, compared by what it holds, and never changed."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """The dataclass, frozen and with slots: no attribute can be set or added afterwards."""
    return dataclass(frozen=True, slots=True)(cls)
