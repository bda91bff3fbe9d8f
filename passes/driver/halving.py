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
    """Judge each half of some items that are wrong together; what is left open of a half is halved again.

    Args:
        items: of one alone nothing is judged.
        judge: returns what is settled of some items, and those of which some are wrong.
        together: returns what to say of items of whose halves nothing is said.
    """
    found, half = list[R](), len(items) // 2
    for part in (items[:half], items[half:]) if half else ():
        settled, wrong = judge(part)
        found += [*settled, *in_halves(wrong, judge, together)]
    return found if found or together is None else list(together(items))


def longest_right(
    count: int, reason: str, objection: Callable[[int], str], goes_on: Callable[[], bool]
) -> tuple[int, str]:
    """Return how many first items of `count` are right, and the reason against one more.

    Args:
        count: so many are wrong, for this `reason`; none are right.
        objection: says what is wrong with so many, or "".
        goes_on: says whether there is time to look on.
    """
    right, wrong = 0, count
    while wrong - right > 1 and goes_on():
        middle = (right + wrong) // 2
        found = objection(middle)
        right, wrong, reason = (right, middle, found) if found else (middle, wrong, reason)
    return right, reason
