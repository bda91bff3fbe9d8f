"""Calls that no graph of a module fits: who is told of them, and what is kept for the report."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ...compat import is_plainly_eager
from ..guards import Tally
from .capture import required_capture

__all__ = ["HANDLER", "Miss", "MissHandler", "handler_of", "keeping", "this_call"]

HANDLER = "_fxopt_fallback"
"""In a module's `__dict__`: the `MissHandler` that it was handed over with."""


@dataclass(frozen=True)
class Miss:
    """The calls that one guard turned away from a module's graphs; `refused`: they raised GuardError; `passed`: another
    graph was tried.
    """

    module: str
    guard: str
    calls: int
    refused: bool = False
    note: str = ""
    passed: bool = False

    def __str__(self) -> str:
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'}"
        note = f" ({self.note})" if self.note else ""
        became = "went on to another graph" if self.passed else "used the original forward"
        return f"{calls} {'raised GuardError' if self.refused else became}: {self.guard}{note}"


class MissHandler(Protocol):
    """Hear of the calls that none of a module's graphs fits."""

    def note(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str, tally: Tally | None
    ) -> None:
        """Note a call before the module's original forward runs; `tally` is of a check of data that did not hold."""
        ...

    def passed(self, module: nn.Module, reason: str, tally: Tally | None) -> None:
        """Take note of a call for which the next graph is tried, after a check in the middle of one did not hold."""
        ...

    def refuse(self, module: nn.Module, reason: str) -> str:
        """Take note of a call that is about to raise GuardError, and return what to call the module."""
        ...


class _Working:
    """Count the misses of a module that is being worked on."""

    def note(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str, tally: Tally | None
    ) -> None:
        required_capture(module).misses[reason] += 1

    def passed(self, module: nn.Module, reason: str, tally: Tally | None) -> None:
        pass

    def refuse(self, module: nn.Module, reason: str) -> str:
        return f"this {type(module).__name__}"


_working: MissHandler = _Working()


def handler_of(module: nn.Module) -> MissHandler:
    """Return who hears of a module's misses."""
    return module.__dict__.get(HANDLER, _working)


class _Local(threading.local):
    kept: dict[nn.Module, dict[str, Any]] | None = None


this_call = _Local()
"""`kept` is for what modules keep during a call of this thread that runs an original forward; None outside of one."""


@contextmanager
def keeping(module: nn.Module) -> Generator[None]:
    """Let all that run inside a module's original forward keep things until it is done, in the user's hands."""
    if HANDLER not in vars(module) or this_call.kept is not None or not is_plainly_eager():
        yield
        return
    this_call.kept = {}
    try:
        yield
    finally:
        this_call.kept = None
