"""Checks that forwards make of their own data (`torch._check`), and the messages that nobody reads unless one fails."""

from __future__ import annotations

import itertools
from types import FrameType
from typing import NamedTuple

from .proxy import ValueProxy

__all__ = ["Messages"]


class _Text(NamedTuple):
    proxy: ValueProxy
    frame: FrameType
    line: int
    source: str


class Messages:
    """Know which texts of values were asked for: those in the message of a check decide nothing."""

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
