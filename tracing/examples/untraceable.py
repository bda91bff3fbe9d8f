"""Why a module has no graph: what is raised where a forward does something that no graph can say."""

from __future__ import annotations

__all__ = ["Untraceable"]


class Untraceable(Exception):
    """A forward does what no graph can say: the reason is a clause, the location the user's "file.py:12", or ""."""

    def __init__(self, reason: str, location: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.location = location
