"""Show what was done: before and after, as text and as JSON."""

from __future__ import annotations

from .reasons import in_words

__all__ = ["in_words"]
