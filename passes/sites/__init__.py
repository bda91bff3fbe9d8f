"""What passes find: sites and refusals, and the words of the contract."""

from __future__ import annotations

from .causes import Cause, Reason
from .plain import as_plain
from .sites import Goal, Numerics, OwnForward, Phase, Refusal, Site, StaleSite
from .volatile import VOLATILE, is_volatile

__all__ = [
    "VOLATILE",
    "Cause",
    "Goal",
    "Numerics",
    "OwnForward",
    "Phase",
    "Reason",
    "Refusal",
    "Site",
    "StaleSite",
    "as_plain",
    "is_volatile",
]
