"""What passes find: sites and refusals, and the words of the contract."""

from __future__ import annotations

from .operations import operation_at
from .sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from .volatile import VOLATILE, is_volatile

__all__ = [
    "VOLATILE",
    "Goal",
    "Numerics",
    "OwnForward",
    "Phase",
    "Refusal",
    "Site",
    "is_volatile",
    "operation_at",
]
