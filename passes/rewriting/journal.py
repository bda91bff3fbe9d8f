"""What an edit has changed, in order, and how that is taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager

from torch import nn

from .changes import Watch
from .snapshot import ModuleState, Snapshot

__all__ = ["Journal"]


class Journal:
    """Note changes, each with what takes it back; the snapshot forgets what is changed, and `watch` finds the rest."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.watch: Watch | None = None
        self._before: list[ModuleState] = []
        self._undo: list[Callable[[], object]] = []
        self._kept: set[nn.Module] = set()
        self._changed: dict[nn.Module, None] = {}

    def note(self, undo: Callable[[], object]) -> None:
        """Note a change by what takes it back."""
        self._undo.append(undo)

    def keep(self, before: Iterable[ModuleState]) -> None:
        """Note what modules were before all changes: of that nothing is left out when these are taken back."""
        self._before += before
        self._forget([state.module for state in self._before])
        self._look_again()

    @contextmanager
    def changing(self, *modules: nn.Module) -> Generator[None]:
        """Note what modules hold before a change that is made inside; raise UnnotedChange if one was not noted."""
        for module in modules:
            if self.watch is not None:
                self.watch.check_module(module)
            if module not in self._kept:
                self._kept.add(module)
                self.note(self.snapshot.of(module).attributes.restore)
            self._changed[module] = None
        yield
        self.accept(*modules)

    def accept(self, *modules: nn.Module) -> None:
        """Take what modules hold now as noted; of all of them, where none is named."""
        if self.watch is not None:
            self.watch.accept(modules)
        self._forget(modules)
        if not modules:
            self.snapshot.forget()

    def _forget(self, modules: Collection[nn.Module]) -> None:
        self._changed.update(dict.fromkeys(modules))
        if modules:
            self.snapshot.forget(*modules)

    def _look_again(self) -> None:
        """Let the snapshot know what changed modules are from now on."""
        for module in self._changed:
            self.snapshot.of(module)

    def undo(self) -> None:
        """Take all changes back, the last one first."""
        while self._undo:
            self._undo.pop()()
        for state in self._before:
            state.restore()
        self._forget(self._changed)
        self._look_again()
        self.clear()

    def clear(self) -> None:
        """Let go of what was there before: the changes stay."""
        self._undo.clear()
        self._before.clear()
        self._kept.clear()
        self._changed.clear()
