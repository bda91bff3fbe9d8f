"""Find what is wrong among several rewrites that are judged together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

__all__ = ["in_halves", "longest_right"]

T = TypeVar("T")
R = TypeVar("R")


def in_halves(
    items: Sequence[T],
    judge: Callable[[Sequence[T]], tuple[Iterable[R], Sequence[T]]],
    together: Callable[[Sequence[T]], Iterable[R]] | None = None,
) -> list[R]:
    """Judge each half of items that are wrong together; halve what is left open. A lone item is not judged.

    `judge` returns what is settled and what is open; `together`, what to say where the halves say nothing.
    """
    found, half = list[R](), len(items) // 2
    for part in (items[:half], items[half:]) if half else ():
        settled, wrong = judge(part)
        found += [*settled, *in_halves(wrong, judge, together)]
    return found if found or together is None else list(together(items))


def longest_right(
    count: int, reason: str, objection: Callable[[int], str], goes_on: Callable[[], bool]
) -> tuple[int, str]:
    """Return how many first items of `count` are right, and the reason against one more, at first `reason`."""
    right, wrong = 0, count
    while wrong - right > 1 and goes_on():
        middle = (right + wrong) // 2
        found = objection(middle)
        right, wrong, reason = (right, middle, found) if found else (middle, wrong, reason)
    return right, reason
