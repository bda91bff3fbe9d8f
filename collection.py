"""Keep Python's cyclic garbage collector out of what is timed, and of what makes much that lives on, as imports do."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["collection_of_the_new", "collection_paused"]


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


@contextmanager
def collection_of_the_new() -> Generator[None]:
    """Let the collector look only at what is made meanwhile: to go through all of torch once takes a third of a second.

    Where somebody keeps objects out of it already, these stay as they are.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
