"""Which tensors of a module are slices of stacked ones, and where these are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ..compat import modules_by_name
from ..runtime.state import VIEWS
from ..runtime.values import qualified
from .slices import View

__all__ = [
    "SEALED",
    "outside_views",
    "parameters_among",
    "sealed_names",
    "slices_alone",
    "stacked_or_slices",
    "stores_among",
    "views_of",
]

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
