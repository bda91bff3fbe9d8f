"""Run a pass's own code: within a time limit, and with its name on whatever it raises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import torch

from ...collection import collection_paused
from ...errors import BudgetError, CalibrationError, FxoptError, MatchFailure, PassError
from ...runtime.values import RandomState

__all__ = ["supervised", "switches_kept"]

T = TypeVar("T")


class _Overdue(BaseException):
    """The time is up; not an `Exception`, so that a pass's own `except Exception` does not swallow it."""


def supervised(action: Callable[[], T], *, what: str | Callable[[], str], seconds: float) -> T:
    """Return `action()`; raise PassError, saying `what` failed, if it raises or takes more than `seconds` (0: forever).

    A timer interrupts the main thread only: elsewhere, what hangs is not stopped. MatchFailure, BudgetError and
    CalibrationError go on as they are: the pass is not at fault.
    """
    try:
        with _time_limit(seconds), collection_paused(), switches_kept():
            return action()
    except _Overdue:
        raise PassError(f"{_said(what)} took longer than {seconds:g} s and was stopped") from None
    except (MatchFailure, PassError, BudgetError, CalibrationError):
        raise
    except FxoptError as error:
        raise PassError(f"{_said(what)}: {error}") from error
    except Exception as error:
        raise PassError(f"{_said(what)} raised {type(error).__name__}: {error}") from error


@contextmanager
def switches_kept() -> Generator[None]:
    """Put the random streams, the gradient mode and the default type back, whatever the code inside does to them."""
    generators, grad, dtype = RandomState(), torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        generators.restore()
        torch.set_grad_enabled(grad)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)


def _said(what: str | Callable[[], str]) -> str:
    return what if isinstance(what, str) else what()


@contextmanager
def _time_limit(seconds: float) -> Generator[None]:
    unlimited = seconds <= 0 or not hasattr(signal, "setitimer")
    if unlimited or threading.current_thread() is not threading.main_thread():
        yield
        return

    def overdue(_signal: int, _frame: FrameType | None) -> None:
        raise _Overdue

    previous = signal.signal(signal.SIGALRM, overdue)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, outer)
        signal.signal(signal.SIGALRM, previous)
