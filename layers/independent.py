"""A copy of one member of a fused ensemble: a module of the user's class, with parameters of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..compat import REGISTERS, all_modules, own_buffers, own_parameters
from ..runtime.graphs import uninstall
from ..runtime.values import user_class
from .slices import View
from .views import outside_views, sealed_names, views_of

__all__ = ["can_be_independent", "make_independent"]


def can_be_independent(module: nn.Module) -> bool:
    """Say whether others compute for a module, and what it reads of stacked tensors lives outside, all of it."""
    outside = outside_views(module)
    is_part = bool(outside) or "forward" in sealed_names(module)
    return is_part and len(outside) == sum(len(views_of(inner)) for inner in all_modules(module))


def make_independent(copied: nn.Module) -> None:
    """Give a copy of a member its own tensors in the place of slices, and its original forward."""
    tensors: dict[View, Tensor] = {}
    for module in all_modules(copied):
        views = views_of(module)
        uninstall(module)
        for name in [name for name in vars(module) if name.startswith("_fxopt")]:
            del vars(module)[name]
        object.__setattr__(module, "__class__", user_class(type(module)))
        for register in (*REGISTERS, "_modules"):
            vars(module)[register] = dict(vars(module)[register])
        for name, view in views.items():
            tensor = tensors.setdefault(view, _own(view))
            register = own_parameters(module) if isinstance(tensor, nn.Parameter) else own_buffers(module)
            register[name] = tensor  # pyright: ignore[reportArgumentType]
        if isinstance(module, nn.RNNBase):
            names: list[str] = vars(module).get("_flat_weights_names", [])
            vars(module)["_flat_weights"] = [getattr(module, name, None) for name in names]


def _own(view: View) -> Tensor:
    own = view.read().detach().clone(memory_format=torch.contiguous_format)
    return own if view.is_buffer else nn.Parameter(own, view.stacked.requires_grad)
