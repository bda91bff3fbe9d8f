"""Judge what a rewritten module does in each use, and let pass what is not asked of it."""

from __future__ import annotations

from .leniency import NotAskedError, lenient
from .uses_alike import check_no_new_draws, check_uses

__all__ = ["NotAskedError", "check_no_new_draws", "check_uses", "lenient"]
