"""Which slices of which tensors belong together."""

from __future__ import annotations

from ....layers.resized import ResizedAttention
from .analysis import coupling
from .groups import Attribute, Coupling, Cut, Group, Kind, Norm, Number, Refused, Router
from .routing import choices_of

__all__ = [
    "Attribute",
    "Coupling",
    "Cut",
    "Group",
    "Kind",
    "Norm",
    "Number",
    "Refused",
    "ResizedAttention",
    "Router",
    "choices_of",
    "coupling",
]
