"""What a search is asked for, in words: read, or refused with what to give."""

from __future__ import annotations

from typing import Any

import pytest

from fxopt.errors import UsageError
from fxopt.searching.demands import parse_bounds, parse_objective, parse_seconds

ORIGINAL = {"latency": 0.02, "metric": 0.9, "memory": 1e9, "error": 0.0}


def bounds(given: Any, **options: Any) -> Any:
    settings = {"training": False, "minimize": False, "has_metric": True, **options}
    return parse_bounds(given, **settings)


@pytest.mark.parametrize(
    ("name", "given", "limit"),
    [
        ("metric", "-1%", 0.9 - 0.009),
        ("metric", ">= 0.85", 0.85),
        ("metric", 0.85, 0.85),
        ("latency", "20 ms", 0.02),
        ("latency", "<= 500us", 500e-6),
        ("latency", "-50%", 0.01),
        ("memory", "500 MB", 500e6),
        ("memory", "2GiB", 2 * 2**30),
        ("error", 0.02, 0.02),
        ("error", "2%", 0.02),
        ("throughput", "1000/s", 1000.0),
    ],
)
def test_a_constraint_is_a_limit(name: str, given: Any, limit: float):
    (bound,) = bounds({name: given})
    assert bound.limit(ORIGINAL) == pytest.approx(limit)
    better, worse = (1.01, 0.99) if bound.higher else (0.99, 1.01)
    assert bound.lack({name: better * limit}, ORIGINAL) == 0
    assert bound.lack({name: worse * limit}, ORIGINAL) > 0
    assert f"wanted {'>=' if bound.higher else '<='}" in bound.said({name: worse * limit}, ORIGINAL)


def test_a_loss_may_grow():
    (bound,) = bounds({"metric": "+10%"}, minimize=True)
    assert bound.limit(ORIGINAL) == pytest.approx(0.99)
    assert bound.lack({"metric": 0.95}, ORIGINAL) == 0 < bound.lack({"metric": 1.0}, ORIGINAL)


def test_without_a_metric_it_is_the_error():
    (bound,) = bounds({"metric": "-1%"}, has_metric=False)
    assert (bound.name, bound.number) == ("error", 0.01)
    with pytest.raises(UsageError, match="without evaluate the metric is the error of the results"):
        bounds({"metric": 0.98}, has_metric=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("20 ms", "constraints is of type str; give a dictionary"),
        ({"latancy": "20 ms"}, "'latancy' is no figure of inference; did you mean 'latency'?"),
        ({"training_step": "20 ms"}, "'training_step' is no figure of inference"),
        ({3: "20 ms"}, "3 is no figure of inference; there are"),
        ({"latency": "20"}, "give a number with its unit, such as '20 ms'"),
        ({"latency": "20 MB"}, "give a number with its unit"),
        ({"latency": None}, "give a number with its unit"),
        ({"latency": True}, "give a number with its unit"),
        ({"latency": ">= 20 ms"}, "lower is better, so give an upper bound"),
        ({"metric": "<= 0.9"}, "higher is better, so give a lower bound"),
        ({"memory": "50%"}, "say from where: '-10%'"),
        ({"memory": "-500 MB"}, "no model can have that"),
        ({"error": -0.1}, "no model can have that"),
        ({"latency": "0 ms"}, "no model can have that"),
        ({"latency": "-100%"}, "no model can have that; give something like '-10%'"),
    ],
)
def test_a_wrong_constraint_says_what_to_give(given: Any, message: str):
    with pytest.raises(UsageError) as caught:
        bounds(given)
    assert message in str(caught.value)


def test_times_and_objectives():
    assert [parse_seconds(each) for each in (90, "90", "90 s", "1.5 min", "2h")] == [90, 90, 90, 90, 7200]
    for wrong in ("soon", -1, 0, "10 MB", None, True, ">= 3 s"):
        with pytest.raises(UsageError, match="time_budget="):
            parse_seconds(wrong)
    with pytest.raises(UsageError, match="did you mean 'latency'"):
        parse_objective("latancy")
