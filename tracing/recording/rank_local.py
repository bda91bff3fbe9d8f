"""Runs of one rank by itself: a model that is recorded, checked or timed must not wait for other ranks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["is_rank_local", "rank_local"]

_LOCAL: ContextVar[bool] = ContextVar("fxopt_rank_local", default=False)


@contextmanager
def rank_local() -> Generator[None]:
    """Let layers that compute over all ranks compute over this one for a while: the others may not run them now."""
    token = _LOCAL.set(True)
    try:
        yield
    finally:
        _LOCAL.reset(token)


def is_rank_local() -> bool:
    """Say whether collectives are to be left out, in this thread."""
    return _LOCAL.get()
