"""Follow the contexts that a forward opens while it is traced: what happens under one is marked in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...runtime.graphs import Context
from ..proxies import ValueProxy
from ..reads import source_of
from .protocol import Tracer
from .spans import mark

__all__ = ["OpenContexts"]


class _Open(NamedTuple):
    key: object
    context: Context
    source: str
    undo: Callable[[], None] | None


class OpenContexts:
    """Know which contexts are open at the place in a forward that is being traced, and whether any was `used`."""

    def __init__(self, tracer: Tracer) -> None:
        self.used = False
        self._tracer = tracer
        self._open: list[_Open] = []

    def enter(self, key: object, context: Context, undo: Callable[[], None] | None = None) -> None:
        """Note that `key`, a context manager, opens a context; `undo` closes it where the forward never does."""
        self.used = True
        self._open.append(_Open(key, context, source_of(), undo))
        mark(self._tracer.graph, context)

    def leave(self, key: object, error: object = None) -> None:
        """Note that `key` closes its context, perhaps because of an error; give up if it is not the last one opened."""
        place = next((i for i, entry in reversed(list(enumerate(self._open))) if entry.key is key), None)
        entry = None if place is None else self._open.pop(place)
        if self._tracer.failure is not None:
            return
        if entry is None or place != len(self._open):
            self._tracer.fail("it does not close contexts in the order in which it opened them")
        mark(self._tracer.graph, None)
        if error is not None:
            self._tracer.give_up(f"an exception leaves {entry.context.kind}")

    def close(self) -> None:
        """Close what the forward left open."""
        while self._open:
            undo = self._open.pop().undo
            if undo is not None:
                undo()

    def check(self) -> None:
        """Give up unless everything was closed."""
        if self._open:
            last = self._open[-1]
            self._tracer.fail(f"it leaves {last.context.kind} switched on when it returns", last.source)

    def knows(self, question: str, args: tuple[Any, ...]) -> bool | None:
        """Return what torch's function named `question` answers if the open contexts decide it, or None."""
        for entry in reversed(self._open):
            context, settings = entry.context, entry.context.settings
            if question == "is_grad_enabled" and context.gradients is not None:
                return context.gradients
            if question == "is_inference_mode_enabled" and context.kind == "inference_mode":
                return bool(settings["mode"])
            if question == "is_autocast_enabled" and settings.get("device_type") == (args[0] if args else "cuda"):
                with self._tracer.session.suspended():
                    return torch.is_autocast_enabled(settings["device_type"])
        return None

    def plain(self, value: Any) -> Any:
        """Return what a proxy stands for, as a decision; other values as they are."""
        return self._tracer.decisions.plain(value) if issubclass(type(value), ValueProxy) else value
