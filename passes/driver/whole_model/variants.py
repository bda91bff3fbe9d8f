"""Variants of the model that lack some of its rewrites: which there are, and writing one after another."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from torch import nn

from ....compat import all_modules
from ....tracing.isolation import shallow_clone
from ....tracing.program import deactivate
from ..history import Rewrite
from ..tuner import Tuner

__all__ = ["Variants", "around", "is_unproven", "kinds_of", "stages_of"]

_MOST_STAGES = 4
"""A model is divided into so many parts at most: each is one more variant to write and to time."""


class Variants:
    """Write the model without some of its rewrites, as often as asked; in the end all of them stand again."""

    def __init__(self, tuner: Tuner) -> None:
        self._tuner, self._history = tuner, tuner.context.history
        self._all: Sequence[Rewrite] = tuple(self._history.rewrites)
        self._missing: Collection[Rewrite] = ()

    def without(self, left_out: Collection[Rewrite]) -> nn.Module:
        """Return a copy of the model without rewrites, and without those that cannot be written then."""
        self._stand_without(left_out)
        copy = shallow_clone(self._tuner.context.program.model)
        deactivate(all_modules(copy))
        return copy

    def put_back(self) -> None:
        """Let all rewrites stand again."""
        self._history.lose(self._stand_without(()))

    def _stand_without(self, left_out: Collection[Rewrite]) -> dict[Rewrite, str]:
        changed = around(self._all, {*left_out, *self._missing})
        self._missing, standing = left_out, set(self._history.rewrites)
        undone = [rewrite for rewrite in changed if rewrite in standing]
        return self._tuner.stand_again(undone, [rewrite for rewrite in changed if rewrite not in left_out])


def around(rewrites: Sequence[Rewrite], unwanted: Collection[Rewrite]) -> list[Rewrite]:
    """Return those unwanted of some rewrites, and those after them that changed some of the same modules, in order."""
    touched: set[nn.Module] = set()
    found: list[Rewrite] = []
    for rewrite in rewrites:
        modules = rewrite.edit.touched
        if rewrite in unwanted or not touched.isdisjoint(modules):
            found.append(rewrite)
            touched.update(modules)
    return found


def is_unproven(rewrite: Rewrite) -> bool:
    """Say whether only the whole model speaks for a rewrite: it was not timed, and leaves no fewer operations."""
    return bool(rewrite.decision.measured.untimed) and not rewrite.edit.leaves_fewer_operations


def kinds_of(rewrites: Sequence[Rewrite]) -> list[list[Rewrite]]:
    """Return rewrites by pass and, of those that were timed, by what was timed: first what nobody timed, the most
    numerous before others, then what is least certain.
    """
    kinds: dict[Hashable, list[Rewrite]] = {}
    for each in rewrites:
        timed = None if each.decision.measured.untimed else id(each.evidence)
        kinds.setdefault((each.decision.step, timed), []).append(each)

    def order(kind: Sequence[Rewrite]) -> tuple[bool, float, int]:
        measured = kind[0].decision.measured
        return not measured.untimed, measured.speedup_low or 0.0, -len(kind)

    return sorted(kinds.values(), key=order)


def stages_of(rewrites: Sequence[Rewrite]) -> list[list[Rewrite]]:
    """Return rewrites by where they are in the model, in a few parts of about the same number."""
    depth = _depth_that_tells(rewrites)
    places: dict[tuple[str, ...], list[Rewrite]] = {}
    for each in rewrites:
        places.setdefault(_path(each)[:depth], []).append(each)
    stages: dict[int, list[Rewrite]] = {}
    before = 0
    for place in places.values():
        middle = before + len(place) / 2
        stages.setdefault(int(_MOST_STAGES * middle / len(rewrites)), []).extend(place)
        before += len(place)
    return list(stages.values())


def _depth_that_tells(rewrites: Sequence[Rewrite]) -> int:
    """Return how many names of a path tell as many places apart as there are stages, or else any at all; 0 for none."""
    paths = [_path(each) for each in rewrites]
    counts = {depth: len({path[:depth] for path in paths}) for depth in range(1, max(map(len, paths), default=0) + 1)}
    enough = [depth for least in (_MOST_STAGES, 2) for depth, count in counts.items() if count >= least]
    return enough[0] if enough else 0


def _path(rewrite: Rewrite) -> tuple[str, ...]:
    return tuple(rewrite.owner.split(".")) if rewrite.owner else ()
