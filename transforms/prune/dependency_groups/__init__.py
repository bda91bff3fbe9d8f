"""Which slices of which tensors belong together."""

from __future__ import annotations

from ....layers.resized import ResizedAttention
from .analysis import coupling
from .experts import choices_of
from .groups import Attribute, Coupling, Cut, Group, Kind, Norm, Number, Refused, Router

__all__ = [
    "Attribute", "Coupling", "Cut", "Group", "Kind", "Norm", "Number", "Refused", "ResizedAttention", "Router",
    "choices_of", "coupling",
]  # fmt: skip
