"""A bar on standard error, where somebody watches, that says how far a long run is."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["progress_bar"]

_BETWEEN_SECONDS = 0.1


@contextmanager
def progress_bar(what: str, total: int | None, wanted: bool = True) -> Generator[Callable[[int], None]]:
    """Show a bar where standard error is a terminal; give the function that moves it on. It changes only when moved."""
    from rich.console import Console
    from rich.progress import Progress

    console, last = Console(stderr=True), time.perf_counter()
    if not wanted or not (console.is_terminal or console.is_jupyter):
        yield lambda _: None
        return
    with Progress(console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(what, total=total)

        def move(steps: int) -> None:
            nonlocal last
            bar.advance(task, steps)
            if time.perf_counter() - last > _BETWEEN_SECONDS:
                last = time.perf_counter()
                bar.refresh()

        yield move
