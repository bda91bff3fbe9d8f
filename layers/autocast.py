"""What a region or a single layer runs under: autocast, whose results are of the type that the caller computes in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..runtime.graphs import Context
from ..runtime.values import Remade, in_class, remade_by, subclass

__all__ = ["AutocastLeaf", "ReturningAutocast", "in_autocast"]


class ReturningAutocast(Context):
    """Autocast within float32, which comes in and leaves; it stands aside for the user's own autocast."""

    def __init__(self, dtype: torch.dtype, device: str = "auto") -> None:
        """Compute in `dtype`, on devices of one type only or, by "auto", on any."""
        super().__init__("autocast", {"dtype": dtype, "device_type": device})

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function` under autocast."""
        floats = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
        wide = floats and all(arg.dtype is torch.float32 for arg in floats)
        device = floats[0].device.type if wide else ""
        if not wide or self.settings["device_type"] not in ("auto", device) or not _is_free(device):
            return function(*args)
        low = self.settings["dtype"]
        with torch.autocast(device, dtype=low):
            result = function(*args)
        return _returned(result, low)


def _is_free(device: str) -> bool:
    """Say whether a device can autocast, and does not yet."""
    return torch.amp.is_autocast_available(device) and not torch.is_autocast_enabled(device)


def _returned(value: Any, low: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype is low else value
    if type(value) in (tuple, list):
        return type(value)(_returned(item, low) for item in cast("list[Any]", value))
    return value


class AutocastLeaf(Remade):
    """A layer of its own class that computes under autocast: code without a graph calls it, so no region can."""

    autocast: ReturningAutocast


def in_autocast(module: nn.Module, dtype: torch.dtype, device: str) -> nn.Module:
    """Return a module of the same class and with the same tensors as `module`, which computes under autocast."""
    new = in_class(module, _leaf_class(type(module)))
    vars(new)["autocast"] = ReturningAutocast(dtype, device)
    return new


def _leaf_class(base: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.autocast.run(partial(base.forward, self, **kwargs), args)

    return subclass(base, (AutocastLeaf,), lambda: {**remade_by(_leaf_class, base), "forward": forward}, key="autocast")
