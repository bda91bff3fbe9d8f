"""Ctrl-C, heard also where other code makes an error of its own of it, or nothing at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "interruptible", "noting_interrupts", "stop_if_interrupted"]


class Interrupts:
    """Handle Ctrl-C as before, and keep what that raised: native code, or an import that it hits, may swallow it."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self._before = before
        self.raised: BaseException | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before(number, frame)
        except BaseException as error:
            self.raised = error
            raise


@contextmanager
def noting_interrupts() -> Generator[Interrupts | None]:
    """Note each Ctrl-C, where this is the main thread and Python handles it; else give None."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield None
        return
    interrupts = Interrupts(before)
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interruptible() -> Generator[None]:
    """Raise what the handler of Ctrl-C raised, though other code has made an error of its own of it, or nothing."""
    with noting_interrupts() as interrupts:
        try:
            yield
        except Exception as error:
            if interrupts is not None and interrupts.raised is not None:
                raise interrupts.raised from error
            raise
    if interrupts is not None and interrupts.raised is not None:
        raise interrupts.raised


def stop_if_interrupted() -> None:
    """Raise what Ctrl-C raised where it was noted, and the work went on."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupts) and handler.raised is not None:
        raise handler.raised
