"""What passes find: sites and refusals, and the words of the contract."""

from __future__ import annotations

from .operations import operation_at
from .sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from .suggest import did_you_mean
from .volatile import VOLATILE, is_volatile

__all__ = [
    "VOLATILE",
    "Goal",
    "Numerics",
    "OwnForward",
    "Phase",
    "Refusal",
    "Site",
    "did_you_mean",
    "is_volatile",
    "operation_at",
]
