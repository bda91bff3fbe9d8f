"""One line on standard error that says how far a long run is, where somebody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.text import Text

from ..passes.driver import Progress
from .wording import printable

__all__ = ["ProgressLine", "progress_line"]

_FIRST_SECONDS = 1.0
"""What takes less is over before anybody wonders."""

_BETWEEN_SECONDS = 0.1


class ProgressLine:
    """Write progress into one line of a terminal or a notebook, only when there is something to tell."""

    def __init__(self, file: TextIO | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._file, self._clock, self._start = file, clock, clock()
        self._last, self._width = -_BETWEEN_SECONDS, 0

    def __call__(self, progress: Progress) -> None:
        """Show where the run is, unless it has hardly begun or was shown a moment ago."""
        seconds = self._clock() - self._start
        if seconds < _FIRST_SECONDS or seconds - self._last < _BETWEEN_SECONDS:
            return
        self._last = seconds
        sites = f": {progress.done} of {progress.total} sites" if progress.total else ""
        self._write(f"fxopt: {printable(progress.what)}{sites}, {seconds:.0f} s")

    def clear(self) -> None:
        """Leave the line empty, if anything was written."""
        if self._width:
            self._write("")

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # it is closed, or cannot write such letters
            if self._file is None or not _is_watched(self._file):
                return
            text = Text(line)
            text.truncate(max(1, Console(file=self._file).width - 1), overflow="ellipsis")
            self._file.write(f"\r{text.plain}{' ' * (self._width - text.cell_len)}" + ("" if line else "\r"))
            self._file.flush()
            self._width = text.cell_len


@contextmanager
def progress_line() -> Generator[ProgressLine]:
    """Show progress on standard error for a while, and clear the line whatever happens."""
    line = ProgressLine(sys.stderr)
    try:
        yield line
    finally:
        line.clear()


def _is_watched(file: TextIO) -> bool:
    """Say whether a file is a terminal that can write over a line, or the output of a notebook."""
    console = Console(file=file)
    return console.is_jupyter or (file.isatty() and not console.is_dumb_terminal)
