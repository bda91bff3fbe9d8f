"""What a point will be, told from points that differ from the first one in one choice each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import UsageError
from ..passes.sites import Cause
from .demands import QUANTITIES
from .points import Aim, Point
from .space import PRESET, Choice, Space, can_be, key_of

__all__ = ["Predictions"]

_MORE_SPEED, _LESS_LOSS = 0.75, 0.5
"""A prediction may be wrong by so much: the objective may be a quarter better, and half as much may be lost."""
_MEASURED = ("latency", "throughput", "training_step", "memory", "size")
"""Figures of which changes multiply."""
_OPEN = ("whole_model", "budget")
"""Stages of a run whose decisions say little of other pipelines."""
_FAR = 3.0
"""What loses so many times what is allowed loses too much beside anything else."""
_BEYOND = 10.0
"""What loses more times what is allowed is not brought there by smaller numbers, nor by layers that are left alone."""
_MOST = 2000
"""So many combinations are looked at."""


class _Expected(NamedTuple):
    cost: float
    loss: float


class Predictions:
    """Gains multiply and losses add up, as if choices did not know of each other; so combinations of choices whose
    effect alone was measured are predicted without being built.
    """

    def __init__(self, space: Space, aim: Aim) -> None:
        self._space, self._aim = space, aim
        self._known: dict[tuple[str, ...], Point] = {}
        self._lossy: list[Point] = []
        self._alone: list[Point] = []
        self._refused: list[Point] = []
        self._first: Point | None = None

    def learn(self, point: Point) -> None:
        """Take in a point."""
        if point.is_known:
            self._known[key_of(point.choice)] = point
            changed = self._changed(point.choice)
            if not changed:
                self._first = point
            elif len(changed) == 1:
                self._alone.append(point)
                if self._aim.loss(point.figures) > _FAR * self._aim.allowed_loss:
                    self._lossy.append(point)
        elif point.reason.startswith(UsageError.__name__) and len(self._changed(point.choice)) == 1:
            self._refused.append(point)

    def _changed(self, choice: Choice) -> list[str]:
        """Return the groups in which a choice is not where the search starts."""
        return [name for name, text in choice.items() if text != self._space.start[name]]

    def _parts(self, choice: Choice) -> tuple[Point, list[Point]] | None:
        """Return the first point and those of each change to it alone; None where one was not measured."""
        start = self._space.start
        base = self._known.get(key_of(start))
        parts = [self._known.get(key_of({**start, name: choice[name]})) for name in self._changed(choice)]
        known = [part for part in parts if part is not None]
        return None if base is None or len(known) < len(parts) else (base, known)

    def expected(self, choice: Choice) -> _Expected | None:
        """Return what a choice will cost and lose; None where a part of it was not measured by itself."""
        found = self._parts(choice)
        if found is None:
            return None
        (cost, loss), *parts = (
            (self._aim.cost(each.figures), self._aim.loss(each.figures)) for each in (found[0], *found[1])
        )
        gain = math.prod(part / cost for part, _ in parts)
        return _Expected(cost * gain, loss + sum(part - loss for _, part in parts))

    def beaten_by(self, choice: Choice, points: Mapping[int, Point]) -> Point | None:
        """Return a point that beats a choice, even if it turns out better than predicted; None if there is none."""
        found = self.expected(choice)
        if found is None:
            return None
        cost, loss = _MORE_SPEED * found.cost, found.loss - _LESS_LOSS * abs(found.loss)
        for point in points.values():
            is_fit = point.is_known and not self._aim.lacks(point.figures)
            if is_fit and self._aim.cost(point.figures) <= cost and self._aim.loss(point.figures) <= loss:
                return point
        return None

    def misses(self, choice: Choice) -> str:
        """Say which constraint on time or bytes a choice does not meet, even if it is better than predicted; "" if none
        is known.
        """
        points = self._parts(choice)
        if points is None:
            return ""
        base, parts = points
        for bound in self._aim.bounds:
            if bound.name not in _MEASURED:
                continue
            ratio = math.prod(part.figures[bound.name] / base.figures[bound.name] for part in parts)
            better = 1.0 / _MORE_SPEED if QUANTITIES[bound.name].higher else _MORE_SPEED
            figures = {bound.name: base.figures[bound.name] * ratio}
            if bound.lack({bound.name: better * figures[bound.name]}, self._aim.original) > 0:
                return bound.said(figures, self._aim.original)
        return ""

    def same_as(self, choice: Choice) -> Choice | None:
        """Return a choice without its passes that rewrite nothing beside the first preset; None if it has none such."""
        idle = [name for name in self._changed(choice) if name != PRESET and self._is_idle(name, choice[name])]
        without = {**choice, **{name: self._space.start[name] for name in idle}}
        return without if idle and can_be(without) else None

    def _is_idle(self, name: str, text: str) -> bool:
        first = self._first
        return first is not None and any(
            _measured_as(point) == _measured_as(first)
            and self._space.groups[name].is_less(text, point.choice[name])
            and not _is_undone(point, name)
            for point in self._alone
            if point.choice[name] != self._space.start[name]
        )

    def refused(self, choice: Choice) -> Point | None:
        """Return a point of one pass, or preset, that cannot be here at all, where a choice has that too."""
        for point in self._refused:
            (name,) = self._changed(point.choice)
            if self._space.groups[name].is_less(choice[name], point.choice[name]):
                return point
        return None

    def hopeless(self, choice: Choice) -> Point | None:
        """Return a point of one pass that loses far too much, where a choice has that pass, or with larger numbers; or
        with any numbers, where results are off beyond mending: errors grow with numbers, metrics may fall at once.
        """
        for point in self._lossy:
            (name,) = self._changed(point.choice)
            group, lossy, text = self._space.groups[name], point.choice[name], choice[name]
            is_beyond = not self._aim.has_metric and not self.is_mendable(point)
            if group.is_milder(lossy, text) or (is_beyond and group.is_alike(lossy, text)):
                return point
        return None

    def is_mendable(self, point: Point) -> bool:
        """Say whether a point that loses too much may lose little enough with smaller numbers."""
        return not self._aim.loss(point.figures) > _BEYOND * self._aim.allowed_loss > 0

    def promising(self, most: int) -> list[Choice]:
        """Return combinations that no other beats by what is predicted, the best objective first."""
        measured = {
            name: [text for text in group.texts if key_of({**self._space.start, name: text}) in self._known]
            for name, group in self._space.groups.items()
        }
        found: list[tuple[_Expected, Choice]] = []
        for texts in itertools.islice(itertools.product(*measured.values()), _MOST):
            choice = dict(zip(measured, texts, strict=True))
            expected = self.expected(choice)
            if expected is not None and key_of(choice) not in self._known:
                found.append((expected, choice))
        best, chosen = math.inf, list[Choice]()
        for expected, choice in sorted(found, key=lambda each: each[0]):
            if expected.loss < best:
                best = expected.loss
                chosen.append(choice)
        return chosen[:most]


def _measured_as(point: Point) -> int:
    """Return the number of the point whose figures a point has."""
    return point.number if point.repeats is None else point.repeats


def _is_undone(point: Point, name: str) -> bool:
    """Say whether a pass rewrote something that only a race of whole models undid, or for which no time was left:
    beside others it may stand.
    """
    decisions = () if point.plan is None else point.plan.decisions
    return any(each.pass_name == name and each.cause and Cause(each.cause).stage in _OPEN for each in decisions)
