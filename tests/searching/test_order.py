"""What a search tries, in which order, and what it leaves out: on points that are not made, but told."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fxopt.passes.sites import Goal, Phase
from fxopt.searching.course import Search
from fxopt.searching.demands import parse_bounds
from fxopt.searching.front import Front
from fxopt.searching.points import Aim, Point
from fxopt.searching.space import Space
from fxopt.searching.trials import Trials
from fxopt.transforms.prune import Prune
from fxopt.transforms.quantize import Quantize

pytest.importorskip("optuna")

ORIGINAL = Point(-1, "", {"latency": 10.0, "metric": 1.0, "error": 0.0, "size": 100.0})
Told = Callable[[Mapping[str, str]], tuple[float, float]]
"""What a choice costs, and what of the metric is left."""


@dataclass
class Teller:
    """In the place of a bench: it says what points are like."""

    told: Told
    made: list[str] = field(default_factory=list[str])
    original: Point = ORIGINAL
    evaluate_seconds: float = 0.0
    trial_seconds: float = 1e-3
    earlier: tuple[str, ...] = ()
    base: Any = None
    calls: tuple[Any, ...] = ()
    states: dict[int, Any] = field(default_factory=dict[int, Any])

    def recall(self, points: object) -> None:
        """Know nothing of earlier points."""

    def point(self, number: int, pipeline: str, choice: Mapping[str, str], _: object) -> Point:
        latency, metric = self.told(choice)
        self.made.append(pipeline)
        figures = {"latency": latency, "metric": metric, "error": 0.0, "size": 100.0}
        repeats = -1 if (latency, metric) == (10.0, 1.0) else None
        return Point(number, pipeline, figures, seconds=0.1, choice=dict(choice), repeats=repeats)


@pytest.fixture(autouse=True)
def _few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantizing(cls: type, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]]:
        return {"scheme": ("int8_dynamic", "int8_static")}

    def pruning(cls: type, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]]:
        return {"method": ("structured",), "amount": (0.2, 0.4, 0.6)}

    monkeypatch.setattr(Quantize, "searched", classmethod(quantizing))
    monkeypatch.setattr(Prune, "searched", classmethod(pruning))
    monkeypatch.setattr("fxopt.searching.space.has_engines", lambda: False)


def searched(told: Told, *, trials: int | None = None, **constraints: Any) -> tuple[list[str], Front]:
    """Return the pipelines that a search made, in order, and its front."""
    bench: Any = Teller(told)
    bounds = parse_bounds(constraints, training=False, minimize=False, has_metric=True)
    aim = Aim("latency", bounds, bench.original.figures, has_metric=True, minimize=False)
    space = Space(Phase.EVAL, {Goal.SPEED})
    made = Trials(space, aim, of="", folder=None, seed=0)
    return bench.made, Search(bench, space, aim, made, folder=None, deadline=math.inf, most=trials).run()


def of_prune(amount: str) -> str:
    return f"prune{{method=structured,amount={amount}}}" if amount != "0.5" else "prune{method=structured}"


def test_a_repeated_point_does_not_count_and_the_search_ends_where_nothing_is_left():
    made, front = searched(lambda _: (10.0, 1.0), trials=3)
    assert len(front.trials) >= len(made) > 3
    assert front.notes == ["every pipeline of the space was tried, or is predicted not to be better"]
    assert all(point.repeats == -1 for point in front.trials if point.is_known)
    alone = "quantize,inference{dtype=float32}"
    assert alone in made
    assert "quantize,inference{dtype=bfloat16}" not in made  # it did nothing beside float32
    assert [point.number for point in front] == [-1]


def test_what_loses_nothing_is_tried_with_larger_numbers():
    def told(choice: Mapping[str, str]) -> tuple[float, float]:
        return (6.0 if choice["prune"] else 8.0), 1.0

    made, _ = searched(told, trials=9)
    singles = made.index(f"{of_prune('0.4')},inference{{dtype=float32}}")
    assert f"{of_prune('0.6')},inference{{dtype=float32}}" in made[singles:9]


@pytest.mark.parametrize(("limit", "is_tried"), [("-10%", True), ("-5%", False)])
def test_what_loses_little_of_what_is_allowed_is_too(limit: str, is_tried: bool):
    def told(choice: Mapping[str, str]) -> tuple[float, float]:
        return (6.0, 0.96) if choice["prune"] else (8.0, 1.0)

    made, _ = searched(told, trials=8, metric=limit)
    assert (f"{of_prune('0.6')},inference{{dtype=float32}}" in made[:8]) is is_tried


def test_what_loses_a_little_too_much_is_tried_with_smaller_numbers():
    def told(choice: Mapping[str, str]) -> tuple[float, float]:
        return (6.0, 0.85) if choice["prune"] else (8.0, 1.0)

    made, _ = searched(told, trials=8, metric="-10%")
    assert f"{of_prune('0.2')},inference{{dtype=float32}}" in made[:8]


def test_what_is_predicted_to_be_beaten_is_not_made():
    def told(choice: Mapping[str, str]) -> tuple[float, float]:
        fast = choice["preset"] == "inference{dtype=bfloat16}"
        return (2.0 if fast else 8.0) + 6.0 * bool(choice["quantize"]), 1.0 - 0.1 * bool(choice["quantize"])

    made, front = searched(told)
    assert sum("quantize" in each for each in made) < 8
    slow = {point.pipeline: point.reason for point in front.trials if point.reason}
    assert slow
    assert all(
        reason.startswith(("not made: predicted to be beaten by", "not made: predicted to rewrite the same"))
        for reason in slow.values()
    )
    assert not set(slow) & set(made)
