"""A model in which passes have put what their rewrites must be equal to."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ....compat import own_children
from ...contract import Pass
from ...pipeline import switches_kept
from ...sites import Site

__all__ = ["with_references"]


def with_references(model: nn.Module, sites: Iterable[tuple[Pass, Site]]) -> nn.Module | None:
    """Change a copy of the original at sites, in order; None where a pass cannot say what it must be."""
    for pass_, site in sites:
        try:
            original = model.get_submodule(site.owner)
            with switches_kept():
                reference = pass_.reference(site, original)
        except Exception:  # the original may lack what an earlier rewrite made, and the site names
            return None
        if reference is None:
            return None
        if reference is not original:
            model = _put(model, site.owner, reference)
    return model


def _put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    path, _, last = name.rpartition(".")
    if not name:
        return module
    own_children(model.get_submodule(path)).update({last: module})  # fused members refuse items
    return model
