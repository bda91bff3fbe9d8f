"""What all layers with small numbers have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import modules_by_name, own_buffers
from ...errors import UsageError
from .packing import Packing

__all__ = ["QuantizedLayer", "autocast_type", "check_in_floats", "is_finite"]


class QuantizedLayer(nn.Module):
    """Be one operation for whoever traces a model; keep a packed form that copies and pickles leave out.

    The buffers keep their types: `.half()` and the like change the parameters only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packing = Packing()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        buffers = own_buffers(self)
        before = dict(buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                buffers[name] = old.to(new.device)
        return self


def check_in_floats(pass_name: str, model: nn.Module) -> None:
    """Refuse a model with layers that have no weight in floats any more.

    Raises:
        UsageError: the first of them, by name.
    """
    modules: dict[str, nn.Module] = modules_by_name(model)
    name = next((name for name, module in modules.items() if isinstance(module, QuantizedLayer)), None)
    if name is not None:
        raise UsageError(
            f"pass '{pass_name}': '{name}' is quantized already; run it on the model as it was, "
            "or on fxopt.restore(model)"
        )


def is_finite(x: Tensor) -> bool:
    """Say whether no element of a tensor is infinite or NaN, of which kernels for integers know nothing."""
    return math.isfinite(float(x.detach().sum()))


def autocast_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which layers compute with activations of a type on the CPU, where autocast may be on."""
    if not torch.is_autocast_enabled("cpu") or not dtype.is_floating_point or dtype is torch.float64:
        return dtype
    return torch.get_autocast_dtype("cpu")
