"""Calls that no graph of a module fits: who is told of them, and what is kept for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ..guards import Tally
from .capture import required_capture

__all__ = ["HANDLER", "Miss", "MissHandler", "handler_of"]

HANDLER = "_fxopt_fallback"
"""In a module's `__dict__`: the `MissHandler` that it was handed over with."""


@dataclass(frozen=True)
class Miss:
    """The calls that one guard turned away from a module's graphs; `refused`: they raised GuardError."""

    module: str
    guard: str
    calls: int
    refused: bool = False
    note: str = ""

    def __str__(self) -> str:
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'}"
        note = f" ({self.note})" if self.note else ""
        return f"{calls} {'raised GuardError' if self.refused else 'used the original forward'}: {self.guard}{note}"


class MissHandler(Protocol):
    """Hear of the calls that none of a module's graphs fits."""

    def note(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str, tally: Tally | None
    ) -> None:
        """Note a call before the module's original forward runs; `tally` is of a check of data that did not hold."""
        ...

    def during_call(self) -> AbstractContextManager[None]:
        """Return what the module's original forward runs in."""
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

    def during_call(self) -> AbstractContextManager[None]:
        return nullcontext()

    def refuse(self, module: nn.Module, reason: str) -> str:
        return f"this {type(module).__name__}"


_working: MissHandler = _Working()


def handler_of(module: nn.Module) -> MissHandler:
    """Return who hears of a module's misses."""
    return module.__dict__.get(HANDLER, _working)
