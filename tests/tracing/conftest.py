"""What captures are compared by, for the tests below."""

from __future__ import annotations

from support.captures import agree, misses

__all__ = ["agree", "misses"]
