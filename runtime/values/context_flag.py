"""Switches that code turns on for what it calls, in its own thread and task alone."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["ContextFlag"]


class ContextFlag:
    """A switch that is on, and true, inside of `with flag():`."""

    def __init__(self, name: str) -> None:
        self._is_on = ContextVar(f"fxopt_{name}", default=False)

    def __bool__(self) -> bool:
        return self._is_on.get()

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Turn it on for a while."""
        token = self._is_on.set(True)
        try:
            yield
        finally:
            self._is_on.reset(token)
