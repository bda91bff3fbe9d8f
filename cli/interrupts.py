"""Ctrl-C on the command line: heard also where other code makes an error of its own of it, or nothing at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "noting_interrupts", "stop_if_interrupted"]


class Interrupts:
    """Handle Ctrl-C as before, and note it: an import that it hits may fail otherwise, and be done without."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self._before = before
        self.heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        self._before(number, frame)


@contextmanager
def noting_interrupts() -> Generator[Interrupts]:
    """Note each Ctrl-C, where this is the main thread and it raises KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(signal.default_int_handler)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def stop_if_interrupted() -> None:
    """Raise KeyboardInterrupt where Ctrl-C was heard, and the work went on."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupts) and handler.heard:
        raise KeyboardInterrupt
