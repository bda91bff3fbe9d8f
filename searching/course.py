"""The course of a search: what is tried, in which order, until when."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..interrupts import interruptible
from ..progress_bar import progress_bar
from ..reporting.wording import counted, duration
from .bench import Bench
from .front import Front
from .points import Aim, Point
from .predictions import Predictions
from .saved import load_state, save_state
from .space import Choice, Space, pipeline_of
from .trials import Trials

if TYPE_CHECKING:
    from optuna.trial import Trial

__all__ = ["Search"]

_LOG = logging.getLogger("fxopt")
_PROMISING = 8
"""So many combinations that are predicted to be good are tried before the sampler chooses."""
_MENDED = 2
"""Of a point that loses too much, so many with more of its layers left alone are tried."""
_CLEARLY = 0.95
"""What takes less than this part of another's time is faster beyond the noise of timing."""
_CHEAP = 1.0
"""A metric that takes less than a second is evaluated in any case: what it says guides the sampler."""
_LITTLE = 0.5
"""A point that loses less than this part of what is allowed is tried with larger numbers."""
_LOSSES = ("metric", "error")


@dataclass
class Search:
    """Try points until the time is up, in the order of predictions, and without what they rule out."""

    bench: Bench
    space: Space
    aim: Aim
    trials: Trials
    folder: Path | None
    deadline: float
    most: int | None

    def run(self) -> Front:
        """Return what was found, also where Ctrl-C ends the search."""
        notes = self._notes_before()
        predictions = Predictions(self.space, self.aim)
        self.bench.recall(self.trials.points().values())
        for point in self.trials.points().values():
            predictions.learn(point)
        self.trials.plan(self.space.singles())
        made, were_planned, took = 0, False, list[float]()
        try:
            with progress_bar("fxopt: searching", self.most) as move:
                while (self.most is None or made < self.most) and self._has_time(took):
                    if not (were_planned or self.trials.are_planned):
                        self.trials.plan(self._combinations(predictions))
                        were_planned = True
                    chosen = self._chosen(predictions)
                    if chosen is None:
                        notes.append("every pipeline of the space was tried, or is predicted not to be better")
                        break
                    point = self._tried(*chosen)
                    predictions.learn(point)
                    took.append(point.seconds)
                    if were_planned:
                        self.trials.plan(self._further([point]))
                    if point.repeats is None:  # what rewrites the same as another point is none of its own
                        made += 1
                        move(1)
        except KeyboardInterrupt:
            notes.append(f"the search was stopped after {counted(made, 'trial')}")
        return self._front(notes)

    def _chosen(self, predictions: Predictions) -> tuple[Trial, Choice] | None:
        """Return what is tried next; None where nothing is left."""
        points = self.trials.points()
        near = [point.choice for point in self.aim.unbeaten(points.values())]
        return self.trials.next(near, lambda choice: self._ruled_out(choice, points, predictions))

    def _combinations(self, predictions: Predictions) -> list[Choice]:
        """Return what is tried once each choice was tried alone."""
        points = list(self.trials.points().values())
        return [*self._further(points), *self._mended(points, predictions), *predictions.promising(_PROMISING)]

    def _notes_before(self) -> list[str]:
        """Say what can be told beforehand: how many trials fit, and bounds that the original does not meet."""
        left, each = self.deadline - time.perf_counter(), self.bench.trial_seconds
        metric = self.bench.evaluate_seconds
        if left < each:
            takes = f", {duration(metric)} of it evaluate" if metric > each / 2 else ""
            rest = f"only {duration(left)} are" if left > 0 else "nothing is"
            raise UsageError(
                f"time_budget: one trial takes about {duration(each)}{takes}, and {rest} left of it once the original "
                "is measured; give more"
            )
        notes: list[str] = []
        if self.bench.earlier:
            before = ", ".join(self.bench.earlier)
            notes.append(
                f"the model was optimized before ({before}): trials add to that; fxopt.restore(model) is without it"
            )
        wanted, fit = len(self.space.singles()), left / each
        if fit < wanted and (self.most is None or self.most > fit):
            why = f"evaluate takes {duration(metric)}" if metric > each / 2 else f"a trial takes about {duration(each)}"
            notes.append(
                f"{why}, so the time budget is enough for about {counted(int(fit), 'trial')}; "
                f"{wanted} try each choice once"
            )
            _LOG.warning("%s", notes[-1])
        original = self.bench.original.figures
        lossy = [bound for bound in self.aim.lacks(original) if bound.name in _LOSSES]
        notes += [f"the original itself does not meet a constraint: {each.said(original, original)}" for each in lossy]
        return notes

    def _has_time(self, took: list[float]) -> bool:
        """Say whether another trial fits; the first one does."""
        typical = median(took) if took else 0.0
        return time.perf_counter() + typical / 2 < self.deadline

    def _tried(self, trial: Trial, choice: Choice) -> Point:
        """Return the point of a trial."""
        others = self.trials.points()
        try:
            with interruptible():
                point = self.bench.point(
                    trial.number, pipeline_of(choice), choice, lambda found: self._unwanted(found, others)
                )
        except KeyboardInterrupt:
            self.trials.forget(trial)
            raise
        became = point.repeated or point.reason or str(dict(point.figures))
        _LOG.info("trial %d, %s: %s", point.number, point.pipeline or "as it was", became)
        if self.folder is not None and point.finetuned:
            save_state(self.folder, point.number, self.bench.states[point.number])
        self.trials.tell(trial, point)
        return point

    def _ruled_out(self, choice: Choice, others: Mapping[int, Point], predictions: Predictions) -> str:
        """Return why a point is not made, if so."""
        same = predictions.same_as(choice)
        if same is not None:
            return f"not made: predicted to rewrite the same as {pipeline_of(same) or 'nothing'!r}"
        refused = predictions.refused(choice)
        if refused is not None:
            return f"not made: {refused.pipeline!r} is refused already"
        beaten = predictions.beaten_by(choice, others)
        if beaten is not None:
            return f"not made: predicted to be beaten by {beaten.pipeline or 'the original'!r}"
        is_met = any(point.is_known and not self.aim.lacks(point.figures) for point in others.values())
        missed = predictions.misses(choice) if is_met else ""  # else what comes near counts
        if missed:
            return f"not made: predicted to have {missed}"
        lossy = predictions.hopeless(choice)
        return "" if lossy is None else f"not made: {lossy.pipeline!r} loses far too much already"

    def _mended(self, points: Iterable[Point], predictions: Predictions) -> list[Choice]:
        """Return, of points that lose too much, what has smaller numbers, or leaves the most sensitive layers alone."""
        wrong = [
            point for point in points
            if point.is_known and any(bound.name in _LOSSES for bound in self.aim.lacks(point.figures))
            and predictions.is_mendable(point)
        ]  # fmt: skip
        return [
            choice
            for point in wrong
            for choice in (*self.space.milder(point.choice), *self.space.keeping_more(point.choice)[:_MENDED])
        ]

    def _further(self, points: Iterable[Point]) -> list[Choice]:
        """Return, of points that lose nothing, or little of what is allowed, what has larger numbers."""
        allowed = self.aim.allowed_loss
        most = _LITTLE * allowed if math.isfinite(allowed) else 0.0
        mild = [each for each in points if each.is_known and self.aim.loss(each.figures) <= most]
        return [choice for point in mild for choice in self.space.further(point.choice)]

    def _unwanted(self, figures: Mapping[str, float], others: Mapping[int, Point]) -> str:
        """Say why the metric of a point need not be known: another one is clearly better and nearer to the original."""
        if self.bench.evaluate_seconds < _CHEAP:
            return ""
        for other in others.values():
            is_good = other.is_known and self.aim.loss(other.figures) <= 0 and not self.aim.lacks(other.figures)
            is_better = is_good and self.aim.cost(other.figures) < _CLEARLY * self.aim.cost(figures)
            if is_better and other.figures["error"] < figures["error"]:
                return f"not evaluated: {other.pipeline or 'the original'!r} is better, errs less and loses nothing"
        return ""

    def _front(self, notes: list[str]) -> Front:
        points = self.trials.points()
        states = dict(self.bench.states)
        for number, point in points.items():
            if point.finetuned and number not in states and self.folder is not None:
                states[number] = load_state(self.folder, number)
        return Front(
            self.aim, self.bench.original, list(points.values()), notes=notes, states=states, model=self.bench.base,
            calls=self.bench.calls,
        )  # fmt: skip
