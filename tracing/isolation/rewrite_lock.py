"""One thread at a time rewrites, checks and times: what it sets meanwhile belongs to the whole process."""

from __future__ import annotations

import threading

__all__ = ["rewrite_lock"]

_rewriting = threading.RLock()


def rewrite_lock() -> threading.RLock:
    """Return what a thread holds while it patches torch or sets its default dtype; a pass may call fxopt again."""
    return _rewriting
