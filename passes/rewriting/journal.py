"""What an edit has changed, in order, and how that is taken back."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ...tracing.recording import AttributeState

__all__ = ["Journal"]


class Journal:
    """Note changes, each with what takes it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._kept: set[nn.Module] = set()

    def note(self, undo: Callable[[], object]) -> None:
        """Note a change by what takes it back."""
        self._undo.append(undo)

    def keep(self, module: nn.Module) -> None:
        """Note what a module holds, in its order, before the first change of it."""
        if module not in self._kept:
            self._kept.add(module)
            self.note(AttributeState(module).restore)

    def undo(self) -> None:
        """Take all changes back, the last one first."""
        while self._undo:
            self._undo.pop()()
        self._kept.clear()

    def clear(self) -> None:
        """Let go of what was there before: the changes stay."""
        self._undo.clear()
        self._kept.clear()
