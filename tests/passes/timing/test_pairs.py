"""Layers of a kind are timed once more, and longer, where it is open whether they gain."""

from __future__ import annotations

from typing import Any

import pytest

from fxopt.passes.timing import Timings, kinds_within, pairs, time_kind


@pytest.mark.parametrize(
    ("speeds", "least", "is_repeated"),
    [((0.9, 1.1), 1.0, True), ((0.9, 1.1), 1.02, True), ((2.0, 2.1), 1.0, False), ((0.5, 0.6), 1.0, False),
     ((0.7, 1.1), 1.06, False)],
)  # fmt: skip
def test_what_is_open_is_timed_once_more(
    speeds: tuple[float, float], least: float, is_repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int]] = []

    def timed(before: Any, after: Any, *, seconds: float, least_rounds: int = 6, cold: bool) -> Timings:
        asked.append((seconds, least_rounds))
        return Timings([{"before": speed, "after": 1.0} for speed in speeds * 6], cold=cold)

    monkeypatch.setattr(pairs, "time_pair", timed)
    assert time_kind(lambda: None, lambda: None, least=least, cold=True).cold
    assert len(asked) == 1 + is_repeated
    assert not is_repeated or (asked[1][0] > asked[0][0] and asked[1][1] > asked[0][1])


@pytest.mark.parametrize(("left", "expected"), [(10.0, [0.05, 0.2]), (0.8, [0.05, 0.08]), (0.3, [0.03]), (-1.0, [0.0])])
def test_a_kind_takes_no_more_than_its_part_of_the_time_that_is_left(
    left: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def timed(before: Any, after: Any, *, seconds: float, least_rounds: int = 6, cold: bool) -> Timings:
        asked.append(seconds)
        return Timings([{"before": speed, "after": 1.0} for speed in (0.9, 1.1) * 6], cold=cold)

    monkeypatch.setattr(pairs, "time_pair", timed)
    with kinds_within(lambda: left):
        time_kind(lambda: None, lambda: None, least=1.0, cold=False)
    assert asked == pytest.approx(expected)
