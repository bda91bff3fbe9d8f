"""What graphs stand on that compute what calls of modules did: that these modules are what they were."""

from __future__ import annotations

from .unchanged_guards import Opened, UnchangedGuard
from .without_gradient import WithoutGradient

__all__ = ["Opened", "UnchangedGuard", "WithoutGradient"]
