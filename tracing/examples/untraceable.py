"""Why a module has no graph: what is raised where a forward does something that no graph can say."""

from __future__ import annotations

__all__ = ["Untraceable"]


class Untraceable(Exception):
    """A forward does something that a graph cannot say.

    Attributes:
        reason: one clause about the forward ("it calls itself").
        location: the user's line, as "file.py:12"; empty if unknown.
    """

    def __init__(self, reason: str, location: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.location = location
