"""What graphs stand on that compute what calls of modules did: that these modules are what they were."""

from __future__ import annotations

from .as_found import AsFound, Opened
from .holding import asks_as_found, hold_written_out, opened_by

__all__ = ["AsFound", "Opened", "asks_as_found", "hold_written_out", "opened_by"]
