"""What passes find: sites and refusals, and the words of the contract."""

from __future__ import annotations

from .causes import Cause, Reason
from .sites import VOLATILE, Goal, Numerics, OwnForward, Phase, Refusal, Site, StaleSite, is_volatile

__all__ = [
    "VOLATILE", "Cause", "Goal", "Numerics", "OwnForward", "Phase", "Reason", "Refusal", "Site", "StaleSite",
    "is_volatile",
]  # fmt: skip
