"""Keep Python's cyclic garbage collector out of what is timed, and of what makes much that lives on, as imports do."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["collection_paused"]


@contextmanager
def collection_paused() -> Generator[None]:
    """Keep Python's cyclic garbage collector from running for a while: it took half of a small model's capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
