"""A point of a search: a pipeline, what it costs, what it is worth; and which of several points no other beats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import PlanError
from ..runtime.record import Plan
from .demands import QUANTITIES, Bound

__all__ = ["Aim", "Point", "numbered"]


def numbered(number: int) -> str:
    """Return what a point of this number is called."""
    return "the original" if number < 0 else f"trial {number}"


@dataclass(frozen=True)
class Point:
    """One pipeline that was tried.

    Attributes:
        number: which trial it is, from 0; -1 is the model as it was given.
        pipeline: what was run, as text that `fxopt.optimize` takes; "" where nothing was.
        figures: name -> number: `latency` and `throughput`, or `training_step`, in seconds; `memory` and `size` in
            bytes; `error` of the results on the example inputs, of their scale; `metric`, if it was asked for.
        interval: where the seconds lie with 95% confidence.
        plan: the decisions; None for the model as it was given, and where the trial failed.
        left: what was not rewritten, and why, a line each.
        finetuned: whether its weights were trained; they are kept beside its plan.
        repeats: the number of the point that rewrites the same, whose figures these are; None where it was measured.
        form: what it became, in a few letters; those of points that rewrite the same are equal. "" where not known.
        reason: why it failed, was not tried, or was not evaluated; "" if all is known.
        seconds: how long the trial took.
        choice: what the search chose.
    """

    number: int
    pipeline: str
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    interval: tuple[float, float] | None = None
    plan: Plan | None = field(default=None, repr=False)
    left: tuple[str, ...] = field(default=(), repr=False)
    finetuned: bool = False
    repeats: int | None = None
    form: str = field(default="", repr=False)
    reason: str = ""
    seconds: float = 0.0
    choice: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @property
    def is_known(self) -> bool:
        """Say whether it was measured to the end."""
        return bool(self.figures) and not self.reason

    @property
    def label(self) -> str:
        """Return what it is called in messages."""
        return numbered(self.number) + ("" if self.number < 0 else f", {self.pipeline or 'as it was'!r}")

    @property
    def repeated(self) -> str:
        """Say which point it rewrites the same as; "" where it was measured."""
        return "" if self.repeats is None else f"rewrites the same as {numbered(self.repeats)}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain, "plan": None if self.plan is None else self.plan.to_json()}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Point:
        """Return the point that `to_json` described; PlanError says where it is malformed."""
        try:
            given = {each.name: data[each.name] for each in fields(cls)}
            if not all(isinstance(given[name], str) for name in ("pipeline", "form", "reason")):
                raise TypeError("its pipeline, its form and its reason are texts")
            given["interval"] = None if given["interval"] is None else tuple(map(float, given["interval"]))
            given["figures"] = {str(name): float(number) for name, number in given["figures"].items()}
            given["left"], given["number"] = tuple(map(str, given["left"])), int(given["number"])
            given["repeats"] = None if given["repeats"] is None else int(given["repeats"])
            given["plan"] = None if given["plan"] is None else Plan.from_json(given["plan"], f"{where}: plan")
            return cls(**given)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"{where} is no point of a search: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Aim:
    """What points are compared by: an objective, what is lost for it, and bounds.

    Attributes:
        original: the figures of the model as it was given.
        has_metric: whether the user's metric says what is lost, or the error.
        minimize: whether less of the metric is better.
    """

    objective: str
    bounds: Sequence[Bound]
    original: Mapping[str, float]
    has_metric: bool
    minimize: bool

    def cost(self, figures: Mapping[str, float]) -> float:
        """Return the objective as a number of which less is better."""
        return QUANTITIES[self.objective].cost(figures.get(self.objective, math.inf))

    def loss(self, figures: Mapping[str, float]) -> float:
        """Return what is lost of the metric, or the error; below zero where the metric is better than before."""
        if not self.has_metric:
            return figures.get("error", math.inf)
        worse = figures.get("metric", math.inf if self.minimize else -math.inf) - self.original["metric"]
        return worse if self.minimize else -worse

    def limit(self, name: str) -> float:
        """Return what a figure, of which less is better, may be at most, by the bounds; infinity where none says."""
        return min((bound.limit(self.original) for bound in self.bounds if bound.name == name), default=math.inf)

    @property
    def lost(self) -> str:
        """Return the figure that says what is lost."""
        return "metric" if self.has_metric else "error"

    def beats(self, one: Mapping[str, float], other: Mapping[str, float]) -> bool:
        """Say whether figures are as good as others, or better, in objective and loss."""
        return self.cost(one) <= self.cost(other) and self.loss(one) <= self.loss(other)

    @property
    def allowed_loss(self) -> float:
        """Return how much may be lost at most, by the bounds; infinity where none says."""
        if not self.has_metric:
            return self.limit("error")
        metrics = [bound.limit(self.original) for bound in self.bounds if bound.name == "metric"]
        return min((max(0.0, self.loss({"metric": each})) for each in metrics), default=math.inf)

    def lacks(self, figures: Mapping[str, float]) -> list[Bound]:
        """Return the bounds that are not met."""
        return [bound for bound in self.bounds if bound.lack(figures, self.original) > 0]

    def distance(self, figures: Mapping[str, float]) -> float:
        """Return how far figures are from what is asked for: 0 where all bounds are met."""
        return sum(bound.lack(figures, self.original) for bound in self.bounds)

    def unbeaten(self, points: Iterable[Point]) -> list[Point]:
        """Return the Pareto front: the points that meet the bounds and that no other of these beats (as good in
        objective and loss, better in one), best objective first; of equal ones the first.
        """
        fit = [each for each in points if each.is_known and not self.lacks(each.figures)]
        fit.sort(key=lambda each: (self.cost(each.figures), self.loss(each.figures), each.number))
        best, found = math.inf, list[Point]()
        for each in fit:
            if self.loss(each.figures) < best:
                best = self.loss(each.figures)
                found.append(each)
        return found

    def nearest(self, points: Iterable[Point]) -> list[Point]:
        """Return the points by how little they lack, those that lack least first."""
        known = [each for each in points if each.is_known]
        return sorted(known, key=lambda each: (self.distance(each.figures), self.cost(each.figures)))
