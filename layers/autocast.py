"""What regions and single layers run under: autocast, whose results are of the type that the caller computes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..runtime.graphs import Context
from ..runtime.values import Remade, in_class, remade_by, subclass

__all__ = ["AutocastLeaf", "KeptCasts", "ReturningAutocast", "in_autocast"]


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


@dataclass(frozen=True)
class KeptCasts:
    """Let the casts of weights serve all autocast regions inside, as within one `torch.autocast`; change no types."""

    changes_results: ClassVar[bool] = False

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function`; casts are forgotten at its end, or at that of the user's own autocast around it."""
        if torch.compiler.is_compiling():
            return function(*args)
        torch.autocast_increment_nesting()
        try:
            return function(*args)
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def __str__(self) -> str:
        return "casts of weights are kept"


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
