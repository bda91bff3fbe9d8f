"""Whether experts, or members of an ensemble, can be dealt to processes, as many to each."""

from __future__ import annotations

__all__ = ["why_not_dealt"]


def why_not_dealt(count: int, what: str, processes: int) -> str:
    """Say why so many of something, by its name in the plural, cannot be dealt to processes; "" where they can."""
    if not count % processes:
        return ""
    if count < processes:
        return f"it has fewer {what} ({count}) than processes ({processes})"
    return f"its {count} {what} do not divide by {processes} processes"
