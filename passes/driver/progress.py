"""Say how far a run is while it lasts; who listens decides what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..sites import Refusal
from .groups import Group

__all__ = ["Progress", "announced", "unheard"]


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        what: the name of the pass that runs, or what is done with the whole model.
        done, total: how many of the sites that it found are decided; no total where nothing is counted.
    """

    what: str
    done: int = 0
    total: int = 0


def unheard(progress: Progress) -> None:
    """Listen to nothing."""


def announced(
    found: Sequence[Group | Refusal], pass_name: str, tell: Callable[[Progress], None]
) -> Iterator[Group | Refusal]:
    """Yield what a pass found, and tell before each group how many sites are decided."""
    total, done = sum(len(item.sites) for item in found if isinstance(item, Group)), 0
    for item in found:
        if isinstance(item, Group):
            tell(Progress(pass_name, done, total))
            done += len(item.sites)
        yield item
