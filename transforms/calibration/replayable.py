"""Data that can be gone through once, kept for the next time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

__all__ = ["replayable"]


class _Kept:
    """Go through an iterator, and what was taken out of it before, as often as is wanted."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._taken = source, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        yield from self._taken
        for item in self._source:
            self._taken.append(item)
            yield item


def replayable(data: Any) -> Any:
    """Return data that can be gone through several times: an iterator keeps what is taken out of it."""
    return _Kept(cast("Iterator[Any]", data)) if hasattr(data, "__next__") else data
