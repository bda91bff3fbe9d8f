"""What is predicted of combinations, from points of one choice each."""

from __future__ import annotations

from dataclasses import replace

from fxopt.passes.sites import Goal, Phase
from fxopt.runtime.record import Decision, Plan
from fxopt.searching.demands import parse_bounds
from fxopt.searching.points import Aim, Point
from fxopt.searching.predictions import Predictions
from fxopt.searching.space import Space, key_of, pipeline_of

SPACE = Space(Phase.EVAL, {Goal.SPEED})
START = SPACE.start
PRUNED, STATIC = "prune{method=structured,amount=0.4}", "quantize{scheme=int8_static}"


def aim(limit: str = "-10%") -> Aim:
    bounds = parse_bounds({"metric": limit}, training=False, minimize=False, has_metric=True)
    return Aim("latency", bounds, {"latency": 10.0, "metric": 1.0}, has_metric=True, minimize=False)


def point(latency: float, metric: float, **choice: str) -> Point:
    chosen = {**START, **choice}
    return Point(0, pipeline_of(chosen), {"latency": latency, "metric": metric, "error": 0.0}, choice=chosen)


def learned(*points: Point) -> Predictions:
    predictions = Predictions(SPACE, aim())
    for each in points:
        predictions.learn(each)
    return predictions


def test_gains_multiply_and_losses_add_up():
    predictions = learned(point(8, 1.0), point(4, 0.98, quantize=STATIC), point(6, 0.97, prune=PRUNED))
    found = predictions.expected({**START, "quantize": STATIC, "prune": PRUNED})
    assert found is not None
    assert abs(found.cost - 3.0) < 1e-9
    assert abs(found.loss - 0.05) < 1e-9
    assert predictions.expected({**START, "quantize": "quantize"}) is None
    promising = [key_of(each) for each in predictions.promising(8)]
    assert promising == [key_of({**START, "quantize": STATIC, "prune": PRUNED})]


def test_what_is_beaten_even_if_it_is_better_than_predicted_is_left_out():
    points = [point(8, 1.0), point(7, 0.98, quantize=STATIC), point(9, 0.97, prune=PRUNED)]
    predictions, both = learned(*points), {**START, "quantize": STATIC, "prune": PRUNED}
    fast = point(2, 1.0, preset="inference{dtype=bfloat16}")
    assert predictions.beaten_by(both, dict(enumerate(points))) is None
    assert predictions.beaten_by(both, {0: fast}) is fast


def test_what_meets_no_constraint_beats_nothing():
    points = [point(8, 1.0), point(7, 0.98, quantize=STATIC), point(9, 0.97, prune=PRUNED)]
    both = {**START, "quantize": STATIC, "prune": PRUNED}
    fast = point(2, 1.0, preset="inference{dtype=bfloat16}")
    bounds = parse_bounds({"memory": "1 MB"}, training=False, minimize=False, has_metric=True)
    predictions = Predictions(SPACE, Aim("latency", bounds, {"latency": 10.0, "metric": 1.0}, True, False))
    for each in points:
        predictions.learn(each)
    heavy, light = (replace(fast, figures={**fast.figures, "memory": held}) for held in (2e6, 0.5e6))
    assert predictions.beaten_by(both, {0: heavy}) is None
    assert predictions.beaten_by(both, {0: light}) is light


def test_what_is_predicted_to_hold_far_too_many_bytes_is_left_out():
    bounds = parse_bounds({"size": "5 MB"}, training=False, minimize=False, has_metric=True)
    predictions = Predictions(SPACE, Aim("latency", bounds, {"latency": 10.0, "metric": 1.0, "size": 8e6}, True, False))
    points = [point(8, 1.0), point(7, 0.98, quantize=STATIC), point(9, 0.97, prune=PRUNED)]
    for each, size in zip(points, (8e6, 12e6, 6e6), strict=True):
        predictions.learn(replace(each, figures={**each.figures, "size": size}))
    both = {**START, "quantize": STATIC, "prune": PRUNED}
    assert predictions.misses(both) == "size 8.58 MiB, wanted <= 4.77 MiB"
    assert predictions.misses({**START, "prune": PRUNED}) == ""  # it may be a quarter smaller
    assert predictions.misses({**START, "quantize": "quantize"}) == ""


def test_a_pass_that_rewrites_nothing_alone_is_predicted_to_rewrite_nothing():
    idle = "quantize{scheme=int8_weight}"
    predictions = learned(point(8, 1.0), replace(point(8, 1.0, quantize=idle), number=5, repeats=0))
    assert predictions.same_as({**START, "quantize": idle, "prune": PRUNED}) == {**START, "prune": PRUNED}
    assert predictions.same_as({**START, "quantize": STATIC}) is None
    assert predictions.same_as({**START, "prune": PRUNED}) is None
    for cause, is_idle in (
        ("whole_model.faster_without", False),
        ("budget.not_timed", False),
        ("final_check.differs", True),
    ):
        undone = Decision(0, "quantize", "layer", "undone", cause=cause)
        raced = replace(point(8, 1.0, quantize=idle), number=5, repeats=0, plan=Plan((idle,), "eval", (undone,)))
        found = learned(point(8, 1.0), raced).same_as({**START, "quantize": idle, "prune": PRUNED})
        assert (found is not None) is is_idle
    other = learned(point(8, 1.0), replace(point(4, 1.0, quantize=idle), number=5))
    assert other.same_as({**START, "quantize": idle, "prune": PRUNED}) is None


def test_what_is_refused_alone_is_not_tried_with_others():
    broken = replace(point(8, 1.0, quantize=STATIC), figures={}, reason="UsageError: it does not run here")
    predictions = learned(point(8, 1.0), broken)
    assert predictions.refused({**START, "quantize": STATIC, "prune": PRUNED}) is broken
    assert predictions.refused({**START, "quantize": "quantize", "prune": PRUNED}) is None
    failed = replace(broken, reason="RuntimeError: out of memory")
    assert learned(point(8, 1.0), failed).refused({**START, "quantize": STATIC, "prune": PRUNED}) is None


def test_a_pass_that_loses_far_too_much_is_left_out_with_larger_numbers():
    predictions = learned(point(8, 1.0), point(4, 0.5, prune=PRUNED))
    assert predictions.hopeless({**START, "quantize": STATIC, "prune": PRUNED}) is not None
    assert predictions.hopeless({**START, "prune": "prune{method=structured,amount=0.6}"}) is not None
    assert predictions.hopeless({**START, "prune": "prune{method=structured,amount=0.3}"}) is None
    assert predictions.hopeless({**START, "quantize": STATIC}) is None
    assert learned(point(4, 0.8, prune=PRUNED)).hopeless({**START, "prune": PRUNED}) is None


def test_a_pass_that_errs_beyond_mending_is_left_out_with_any_numbers():
    bounds = parse_bounds({"error": 0.01}, training=False, minimize=False, has_metric=False)
    predictions = Predictions(SPACE, Aim("latency", bounds, {"latency": 10.0, "error": 0.0}, False, False))
    for each, error in (
        (point(8, 1.0), 0.0),
        (point(4, 1.0, prune=PRUNED), 0.5),
        (point(5, 1.0, quantize=STATIC), 0.05),
    ):
        predictions.learn(replace(each, figures={"latency": each.figures["latency"], "error": error}))
    assert predictions.hopeless({**START, "prune": "prune{method=structured,amount=0.1}"}) is not None
    assert predictions.hopeless({**START, "quantize": STATIC}) is not None
    assert predictions.hopeless({**START, "quantize": "quantize"}) is None
    predictions.learn(replace(point(5, 1.0, preset="compress"), figures={"latency": 5.0, "error": 0.5}))
    assert predictions.hopeless({**START, "preset": "inference{dtype=bfloat16}"}) is None
