"""What an edit has changed, in order, and how that is taken back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import nn

from ...tracing.recording import AttributeState
from .changes import Watch

__all__ = ["Journal"]


class Journal:
    """Note changes, each with what takes it back.

    Attributes:
        watch: knows what was there, and finds changes that were not noted; None where nobody asks for them.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._undo: list[Callable[[], object]] = []
        self._kept: set[nn.Module] = set()

    def note(self, undo: Callable[[], object]) -> None:
        """Note a change by what takes it back."""
        self._undo.append(undo)

    @contextmanager
    def changing(self, *modules: nn.Module) -> Generator[None]:
        """Note what modules hold, in its order, before a change of them; the change is made inside.

        Raises:
            UnnotedChange: if one was changed before without being noted here.
        """
        for module in modules:
            if self.watch is not None:
                self.watch.check_module(module)
            if module not in self._kept:
                self._kept.add(module)
                self.note(AttributeState(module).restore)
        yield
        self.accept(*modules)

    def accept(self, *modules: nn.Module) -> None:
        """Take what modules hold now as noted; of all of them, where none is named."""
        if self.watch is not None:
            self.watch.accept(modules)

    def undo(self) -> None:
        """Take all changes back, the last one first."""
        while self._undo:
            self._undo.pop()()
        self._kept.clear()

    def clear(self) -> None:
        """Let go of what was there before: the changes stay."""
        self._undo.clear()
        self._kept.clear()
