"""Let other code run in the place of a function, without touching the classes it belongs to; one thread at a time."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

__all__ = ["patching", "redirect", "rewrite_lock"]

patching = threading.RLock()
"""Held by the thread that patches torch, in `capture` and `optimize` alone; a thread may take it several times."""
_rewriting = threading.RLock()


def rewrite_lock() -> threading.RLock:
    """Return what a thread holds while it rewrites, checks or times: what it sets belongs to the whole process."""
    return _rewriting


def _entry(*args: Any, fxopt_handler: Callable[..., Any], **kwargs: Any) -> Any:
    return fxopt_handler(*args, **kwargs)


def redirect(function: types.FunctionType, handler: Callable[..., Any]) -> Callable[[], None]:
    """Let calls of `function`, whoever holds it, run `handler(original, ...)`; return what ends it. The function is
    lent other code: to set `nn.Module.__getattr__` updates hundreds of subclasses, 0.25 ms each time.
    """
    code, named = function.__code__, function.__kwdefaults__
    original = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = named

    def end() -> None:
        function.__code__ = code
        function.__kwdefaults__ = named

    # In this order, and back: what other threads call in between is whole at every moment.
    function.__kwdefaults__ = {**(named or {}), "fxopt_handler": functools.partial(handler, original)}
    function.__code__ = _entry.__code__.replace(co_freevars=code.co_freevars)
    return end
