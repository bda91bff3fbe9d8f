"""The private names of torch that tell what became of a tensor's memory."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["SAME_MEMORY", "SAME_VERSION", "holders_of"]

SAME_VERSION = "x{i}._version == version{i}"
"""In generated code: a tensor was written to as often as before."""

SAME_MEMORY = "x{i}.data_ptr() == place{i} and x{i}.numel() == number{i} and x{i}.stride() == strides{i}"
"""In generated code: its memory is there, and is read the same way."""


def holders_of(tensor: Tensor) -> int:
    """Return how many tensors share a tensor's memory, itself among them."""
    storage = tensor.untyped_storage()
    return cast("Any", torch)._C._storage_Use_Count(storage._cdata) - 1  # pyright: ignore[reportPrivateUsage]
