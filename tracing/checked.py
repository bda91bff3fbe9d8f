"""Checks that forwards make of their own data (`torch._check`), and the messages that nobody reads unless one fails."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .locate import user_frame
from .proxy import ValueProxy

if TYPE_CHECKING:
    from .session import Session
    from .tracer import ModuleTracer

__all__ = ["Messages", "patch_checks"]


class _Text(NamedTuple):
    proxy: ValueProxy
    frame: FrameType
    line: int
    source: str


class Messages:
    """Know which texts of values were asked for, and whether only messages of checks were made of them.

    A check that fails makes the module run its own forward, which writes the message anew: so such texts decide
    nothing, and may be anything.
    """

    def __init__(self) -> None:
        self._unread: list[_Text] = []

    def note(self, proxy: ValueProxy, frame: FrameType, source: str) -> None:
        """Note that the text of a value was asked for by `frame`, which stands in the line `source`."""
        self._unread.append(_Text(proxy, frame, frame.f_lineno, source))

    def close(self, frame: FrameType | None) -> None:
        """Note that `frame` calls a check: the texts that the arguments in this call are made of are nobody else's."""
        if frame is not None:
            self._unread = [text for text in self._unread if text.frame is not frame or not _is_in_call(text, frame)]

    def take_read(self) -> list[tuple[ValueProxy, str]]:
        """Return, once, the values whose texts were asked for by something else than a check, with the lines."""
        read, self._unread = self._unread, []
        return [(text.proxy, text.source) for text in read]


def _is_in_call(text: _Text, frame: FrameType) -> bool:
    """Tell whether a text was asked for in the lines of the call that `frame` is making."""
    line, end_line, *_ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return line is not None and end_line is not None and line <= text.line <= end_line


def patch_checks(session: Session[Any]) -> None:
    """Send the checks that traced code makes to its tracer."""
    session.wrap(torch, "_check", _check)
    library = sys.modules.get("transformers.utils.import_utils")
    if library is not None:
        session.wrap(library, "torch_compilable_check", _check)


def _check(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    """Decide by the condition, and by nothing else."""
    condition = kwargs["cond"] if "cond" in kwargs else args[0]
    if type(condition) is not ValueProxy and callable(condition):
        condition = condition()
    if type(condition) is ValueProxy:
        holds = condition.all() if isinstance(condition.fxopt_value, Tensor) else condition
        if not holds:
            tracer.fail("a check of its own does not hold")
    elif not _all(condition):
        return original(*args, **kwargs)
    tracer.messages.close(user_frame())
    return None


def _all(condition: Any) -> bool:
    return bool(condition.all() if isinstance(condition, Tensor) else condition)
