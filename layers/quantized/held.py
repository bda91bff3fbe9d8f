"""The weight of a layer that holds small numbers, for whoever reads it as that of any layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...compat.quantized import empty_tensor, without_torch_function

__all__ = ["ASKED", "HeldWeight"]

ASKED = frozenset({"device", "dtype", "is_cpu", "is_cuda", "is_meta", "layout", "ndim", "requires_grad", "shape"})
"""The attributes that a weight answers without being made."""

_METHODS = {getattr(Tensor, name) for name in ("dim", "is_floating_point", "numel", "size")}


class HeldWeight(Tensor):
    """Answer for its shape, type and device at no cost; for anything else be made, anew each time, of floats.

    Forwards ask a weight for its type (T5's does). Writing into it changes nothing.
    """

    make: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls: type[HeldWeight], make: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> HeldWeight:
        weight: HeldWeight = empty_tensor(cls, shape, dtype, device)
        weight.make = make
        return weight

    def __init__(self, make: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        """Be what `__new__` made."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS or getattr(getattr(func, "__self__", None), "__name__", None) in ASKED:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_made, (args, kwargs or {}))
        return func(*args, **kwargs)


def _made(value: object) -> object:
    return value.make() if isinstance(value, HeldWeight) else value
