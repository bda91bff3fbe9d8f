"""A single layer under autocast, where no region can be around it: it is called by code without a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...layers.autocast import ReturningAutocast
from ...runtime.values import Remade, class_recipe, in_class, subclass, user_class

__all__ = ["AutocastLeaf", "in_autocast"]


class AutocastLeaf(Remade):
    """A layer of its own class that computes under autocast."""

    autocast: ReturningAutocast


def in_autocast(module: nn.Module, dtype: torch.dtype, device: str) -> nn.Module:
    """Return a module of the same class and with the same tensors as `module`, which computes under autocast."""
    new = in_class(module, _leaf_class(type(module)))
    vars(new)["autocast"] = ReturningAutocast(dtype, device)
    return new


def _leaf_class(base: type[nn.Module]) -> type[nn.Module]:
    return subclass(base, (AutocastLeaf,), lambda: _body(base), key="autocast")


def _body(base: type[nn.Module]) -> dict[str, Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.autocast.run(partial(base.forward, self, **kwargs), args)

    return {
        "_fxopt_base": user_class(base),
        "_fxopt_recipe": (_remade, class_recipe(base)),
        "forward": forward,
    }


def _remade(make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...]) -> type[nn.Module]:
    """Return the class again, whose base may be one that was made on the fly, too."""
    return _leaf_class(make(*arguments))
