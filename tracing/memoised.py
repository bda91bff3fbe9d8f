"""Memoised functions (`functools.lru_cache`) keep what they are given and what they make: no proxy may get there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from .proxy import proxies_in

if TYPE_CHECKING:
    from .session import Session
    from .tracer import ModuleTracer

__all__ = ["check_hash", "is_memoised", "patch_memos", "run_memo"]

_REASON = "it calls a memoised function, which would keep what it is given"
_MEMO = type(functools.lru_cache(lambda: None))


def is_memoised(value: object) -> bool:
    """Tell whether a value is a memoised function, or a function that a decorator made around one."""
    if type(value) is not FunctionType:
        return type(value) is _MEMO
    inner = value.__dict__.get("__wrapped__")
    return inner is not None and any(type(v) is _MEMO and v.__wrapped__ is inner for v in _closed_over(value))


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def patch_memos(session: Session, cls: type) -> None:
    """Send calls of the memoised functions in a class and its bases, made by traced code, to its tracer."""
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] in ("torch", "builtins") or not session.is_new(owner):
            continue
        for name, value in list(vars(owner).items()):
            function: Any = value.__func__ if isinstance(value, staticmethod) else value
            if is_memoised(function):
                made = session.stand_in(function, run_memo)
                session.patch_now(owner, name, staticmethod(made) if isinstance(value, staticmethod) else made)


def run_memo(tracer: ModuleTracer, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a memoised function for real, if it is given plain values only."""
    if next(proxies_in((args, kwargs)), None) is not None:
        tracer.fail(_REASON)
    with tracer.session.suspended():
        return function(*args, **kwargs)


def check_hash(tracer: ModuleTracer, frame: FrameType) -> None:
    """Give up if the code in a frame, which asks a proxy for its hash, names a memoised function."""
    named: list[Any] = [*frame.f_locals.values(), *map(frame.f_globals.get, frame.f_code.co_names)]
    if any(type(value) is _MEMO for value in named):
        tracer.fail(_REASON)
