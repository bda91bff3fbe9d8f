"""Change programs: edits, regions, patterns, effects."""

from __future__ import annotations

from .changes import UnnotedChange, only_reading
from .edit import Edit
from .effects import handed_out, has_effects, writes, written_values
from .holding import asks_unchanged, hold_written_out, opened_by
from .inlining import (
    Checks,
    Opener,
    bound,
    lasting_guards,
    obstacle_at,
    obstacle_to_inlining,
    received,
    substituted,
    unmet_guards,
)
from .matching import Found, Held, Place, call_in
from .patterns import Match, Pattern, anything, either, module, operation
from .snapshot import Snapshot

__all__ = [
    "Checks",
    "Edit",
    "Found",
    "Held",
    "Match",
    "Opener",
    "Pattern",
    "Place",
    "Snapshot",
    "UnnotedChange",
    "anything",
    "asks_unchanged",
    "bound",
    "call_in",
    "either",
    "handed_out",
    "has_effects",
    "hold_written_out",
    "lasting_guards",
    "module",
    "obstacle_at",
    "obstacle_to_inlining",
    "only_reading",
    "opened_by",
    "operation",
    "received",
    "substituted",
    "unmet_guards",
    "writes",
    "written_values",
]
