"""Which slices of which tensors belong together."""

from __future__ import annotations

from ....layers.resized import ResizedAttention
from .analysis import coupling
from .experts import choices_of, weights_of
from .groups import Attribute, Coupling, Cut, Group, Kind, Norm, Number, Refused, Router
from .running import CACHED, cached_in

__all__ = [
    "CACHED", "Attribute", "Coupling", "Cut", "Group", "Kind", "Norm", "Number", "Refused", "ResizedAttention",
    "Router", "cached_in", "choices_of", "coupling", "weights_of",
]  # fmt: skip
