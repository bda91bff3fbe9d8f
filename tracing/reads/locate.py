"""Find the line of the user's code that is being run."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["condition_of", "frames_of_trace", "is_users", "raised_at", "source_of", "user_frame"]

_TRACING = Path(__file__).parent.parent
_TRACER = str(_TRACING / "trace" / "tracer.py")
_FOREIGN = (str(Path(torch.__file__).parent), str(_TRACING), contextlib.__file__, "<frozen", "<string>")

_LONGEST_LINE = 80


@lru_cache(maxsize=4096)
def is_users(code: CodeType) -> bool:
    """Tell whether code belongs neither to torch nor to the tracer."""
    return not code.co_filename.startswith(_FOREIGN)


def _starts_trace(code: CodeType) -> bool:
    """Tell whether a frame is where the tracer calls the forward: what called the tracer is not the model's."""
    return code.co_name == "trace" and code.co_filename == _TRACER


def user_frame() -> FrameType | None:
    """Return the innermost running frame of the traced forward that belongs neither to torch nor to the tracer."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  inspect is slower
    while frame is not None and not is_users(frame.f_code):
        if _starts_trace(frame.f_code):
            return None
        frame = frame.f_back
    return frame


def frames_of_trace() -> Iterator[FrameType]:
    """Yield the frames of the traced forward, innermost first; not those of torch and of the tracer."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  inspect is slower
    while frame is not None and not _starts_trace(frame.f_code):
        if is_users(frame.f_code):
            yield frame
        frame = frame.f_back


def source_of() -> str:
    """Return the user's line that is running now, as "file.py:12"."""
    frame = user_frame()
    return "" if frame is None else _written(frame.f_code, frame.f_lineno)


def condition_of() -> str:
    """Return the text of the user's line that is running now, in quotes; "a condition" where it cannot be read."""
    frame = user_frame()
    text = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    short = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 3]}..."
    return f"'{short.removesuffix(':')}'" if short else "a condition"


def raised_at(error: BaseException) -> str:
    """Return the innermost user's line that `error` came through, as "file.py:12"."""
    place, trace = "", error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code):
            place = _written(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return place


@lru_cache(maxsize=4096)
def _written(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line}"
