"""Which tensors of a module are slices of stacked ones, where these are, and copies that have their own instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..compat import REGISTERS, all_modules, modules_by_name, own_buffers, own_parameters
from ..runtime.graphs import uninstall
from ..runtime.state import VIEWS
from ..runtime.values import qualified, user_class
from .slices import View

__all__ = [
    "SEALED", "can_be_independent", "make_independent", "outside_views", "parameters_among", "sealed_names",
    "slices_alone", "stacked_or_slices", "stores_among", "views_of",
]  # fmt: skip

SEALED = "_fxopt_sealed"


def views_of(module: nn.Module) -> Mapping[str, View]:
    """Return the parameters of a member that are slices of stacked ones, by name."""
    return module.__dict__.get(VIEWS, {})


def sealed_names(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's children and settings that must stay what they are."""
    return module.__dict__.get(SEALED, frozenset())


def outside_views(module: nn.Module) -> dict[str, View]:
    """Return the slices that `module` and its children read from stores that are not among its children."""
    children = modules_by_name(module)
    inside = {id(child) for child in children.values()}
    return {
        qualified(path, name): view
        for path, child in children.items()
        for name, view in views_of(child).items()
        if id(view.store) not in inside
    }


def parameters_among(views: Mapping[str, View]) -> dict[str, View]:
    """Return those of some slices that are parameters."""
    return {name: view for name, view in views.items() if not view.is_buffer}


def stacked_or_slices(views: Mapping[str, View]) -> Iterator[tuple[str, Tensor]]:
    """Yield a stacked parameter once where all its slices are there, else each slice that is."""
    for names in _families(views):
        if _is_complete(names, views):
            yield f"{names[0]}..{names[-1]}", views[names[0]].stacked
        else:
            yield from ((name, views[name].read()) for name in names)


def stores_among(views: Mapping[str, View]) -> list[nn.Module]:
    """Return the stores all of whose slices are there."""
    whole = [views[names[0]] for names in _families(views) if _is_complete(names, views)]
    held = {(view.store, view.name) for view in whole}
    stores = dict.fromkeys(view.store for view in whole)
    return [s for s in stores if all((s, name) in held for name in (*s._parameters, *s._buffers))]  # pyright: ignore[reportPrivateUsage]


def slices_alone(views: Mapping[str, View]) -> dict[str, View]:
    """Return the slices of stores that have others, too."""
    whole = set(stores_among(views))
    return {name: view for name, view in views.items() if view.store not in whole}


def _families(views: Mapping[str, View]) -> list[list[str]]:
    """Return the names of the slices of each stacked tensor."""
    families: dict[tuple[int, str], list[str]] = {}
    for name, view in views.items():
        families.setdefault((id(view.store), view.name), []).append(name)
    return list(families.values())


def _is_complete(names: list[str], views: Mapping[str, View]) -> bool:
    return len({views[name].position for name in names}) == views[names[0]].members


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
