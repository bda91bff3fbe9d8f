"""Who may patch `torch.nn.Module`: one thread at a time; and when captures are to stay as they are."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["alone", "are_fixed", "captures_fixed", "turn"]

turn = threading.RLock()
"""Held by the thread that patches, records or traces; a thread may take it several times."""


@contextmanager
def alone() -> Generator[None]:
    """Wait for the turn, and keep it while inside."""
    with turn:
        yield


class _Local(threading.local):
    depth = 0


_local = _Local()


@contextmanager
def captures_fixed() -> Generator[None]:
    """Capture nothing anew while inside, in this thread: what runs there is no call of the user's."""
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1


def are_fixed() -> bool:
    """Say whether this thread runs inside of `captures_fixed`."""
    return _local.depth > 0
