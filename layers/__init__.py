"""Modules and functions that passes put into models; what users use directly is named here: `fxopt.layers.RBM`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .belief import RBM, DeepBeliefNetwork, DeepBeliefRelaxationNetwork
    from .moe import MixtureOfExperts, RouterOutput, load_balancing_loss, router_z_loss
    from .pooling import RO3Pooling, RO3TriadPooling, triangles

_PLACES = {
    "belief": "DeepBeliefNetwork DeepBeliefRelaxationNetwork RBM",
    "moe": "MixtureOfExperts RouterOutput load_balancing_loss router_z_loss",
    "pooling": "RO3Pooling RO3TriadPooling triangles",
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names.split()}

__all__ = [
    "RBM", "DeepBeliefNetwork", "DeepBeliefRelaxationNetwork", "MixtureOfExperts", "RO3Pooling", "RO3TriadPooling",
    "RouterOutput", "load_balancing_loss", "router_z_loss", "triangles",
]  # fmt: skip


def __getattr__(name: str) -> object:
    place = _PLACE_OF.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{place}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
