"""The time budget: how it is read, what is counted on it, and what it leaves for what."""

from __future__ import annotations

import math

import pytest

from fxopt.errors import UsageError
from fxopt.passes import timing
from fxopt.passes.timing import DEFAULT_BUDGET, BudgetRequest, OutOfTimeError, Stage, TimeBudget, budget_clock


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, 4.0), (3, 3.0), (0, 0.0), ("1.5", 1.5), ("20 forwards", 2.0), ("0 forwards", 0.0), (math.inf, math.inf)],
)
def test_seconds_or_forwards(given: float | str | None, seconds: float) -> None:
    assert TimeBudget.granted(BudgetRequest.of(given), forward=0.1).seconds == seconds


def test_the_default_is_never_less_than_two_seconds() -> None:
    assert BudgetRequest.of(None) == DEFAULT_BUDGET
    assert [BudgetRequest.of(each).seconds for each in ("6 s", "2 min")] == [6.0, 120.0]
    assert TimeBudget.granted(DEFAULT_BUDGET, forward=1e-3).seconds == 2.0


@pytest.mark.parametrize("given", [-1, math.nan, True, "", "soon", "5%", "5 minutes", "-3 forwards"])
def test_anything_else_is_refused_by_name(given: float | str) -> None:
    with pytest.raises(UsageError, match="use seconds"):
        BudgetRequest.of(given)


def test_nested_use_counts_once(clock: Clock) -> None:
    spent = TimeBudget(10.0, clock=clock)
    with spent.spending(Stage.TIMING):
        clock.now += 1.0
        with spent.spending(Stage.TIMING):
            clock.now += 2.0
    clock.now += 50.0
    assert (spent.spent, spent.stages, spent.left) == (3.0, {"timing rewrites": 3.0}, 7.0)


def test_what_runs_inside_of_what_is_counted_is_told_at_once(clock: Clock) -> None:
    spent = TimeBudget(10.0, clock=clock)
    with spent.spending(Stage.CHECKING):
        clock.now += 6.0
        with spent.spending(Stage.TIMING):
            clock.now += 5.0
        assert not spent.left
        clock.now += 1.0
    assert (spent.spent, spent.stages) == (12.0, {"checking rewrites": 7.0, "timing rewrites": 5.0})


def test_what_raises_is_counted(clock: Clock) -> None:
    spent = TimeBudget(10.0, clock=clock)

    def fail() -> None:
        clock.now += 4.0
        raise KeyError

    with pytest.raises(KeyError), spent.spending(Stage.CHECKING):
        fail()
    assert spent.spent == 4.0


def test_time_for_the_whole_model_is_kept_back() -> None:
    budget = TimeBudget(40.0, forward=1.0)
    assert budget.for_sites == 20.0
    assert budget.for_a_race() == pytest.approx(10.5)
    assert budget.for_a_race(whole=True) == pytest.approx(16.8)
    assert budget.allows_check(clean_up=True)
    budget.spent = 15.0
    assert not budget.allows_check(clean_up=True)
    assert budget.allows_check(clean_up=False)
    budget.spent = 20.0
    assert not budget.allows_check(clean_up=False)
    assert (budget.for_a_race(), budget.left) == (0.0, 20.0)


def test_passes_that_share_have_equal_parts_and_take_what_is_left_over() -> None:
    budget = TimeBudget(40.0, forward=1.0)  # 20 for sites
    budget.begin_pass(sharing=2)
    assert budget.for_sites == 10.0
    assert str(budget) == "its part of the time budget of 40 s"
    budget.spent = 4.0
    budget.begin_pass()
    assert (budget.for_sites, budget.left, str(budget)) == (20.0, 36.0, "the time budget of 40 s")


@pytest.mark.parametrize(("sharing", "part", "alone"), [(2, 10.0, 20.0), (4, 5.0, 20.0 / 3)])
def test_a_pass_without_a_contest_takes_the_time_for_it(sharing: int, part: float, alone: float) -> None:
    budget = TimeBudget(40.0, forward=1.0)  # 20 for sites
    budget.begin_pass(sharing=sharing, contested=True)
    assert budget.for_sites == part
    of_whole = budget.end_of_writing(whole=True), budget.end_of_writing(whole=True, alone=True)
    assert of_whole == (part, alone if sharing > 2 else 40.0 - 8.0)
    budget.take_share_of_contest()
    assert budget.for_sites == pytest.approx(alone)
    budget.begin_pass(sharing=sharing)
    budget.take_share_of_contest()
    assert budget.for_sites == part


@pytest.mark.parametrize("spent", [0.0, 4.0, 25.0])
def test_passes_that_run_again_have_as_much_time_again(spent: float) -> None:
    budget = TimeBudget(10.0, spent=spent)
    budget.begin_again()
    assert budget.left == 10.0


def test_a_check_that_takes_too_long_takes_nothing_from_the_passes_behind() -> None:
    budget = TimeBudget(40.0, forward=1.0)
    budget.begin_pass(sharing=2)
    budget.spent = 50.0
    assert not budget.allows_check(clean_up=False)
    budget.begin_pass()
    assert (budget.for_sites - budget.spent, budget.left) == (10.0, 30.0)
    budget.spent = 60.0
    assert not budget.allows_check(clean_up=False)
    assert budget.left == 20.0


def test_what_a_pass_for_speed_takes_beyond_its_part_does_not_allow_those_behind_as_much() -> None:
    budget = TimeBudget(40.0, forward=1.0)
    budget.begin_pass(sharing=2, owed=False)
    budget.spent = 50.0
    budget.begin_pass(sharing=2, owed=False)
    budget.spent = 60.0
    budget.begin_pass()
    assert budget.left == 0.0
    budget.spent = 0.0
    assert budget.left == 1.2 * 40.0


def test_a_pass_that_shares_with_nobody_takes_from_those_behind() -> None:
    budget = TimeBudget(40.0, forward=1.0)
    budget.begin_pass()
    budget.spent = 30.0
    budget.begin_pass()
    assert not budget.allows_check(clean_up=False)


def test_a_short_budget_is_not_all_kept_back() -> None:
    assert TimeBudget(1.0, forward=1.0).for_sites == 0.5


def test_without_a_limit_everything_is_allowed() -> None:
    budget = TimeBudget(spent=1e9)
    budget.begin_pass(sharing=3)
    assert budget.allows_check(clean_up=True)
    assert budget.for_a_race() == math.inf


def test_all_that_passes_counts_once_a_run_has_begun(clock: Clock) -> None:
    clock.now = 3.0
    budget = TimeBudget(10.0, clock=clock).counting_from(1.0, captured_in=7.0)
    with budget.spending(Stage.FINDING):
        clock.now += 4.0
    clock.now += 1.0
    assert (budget.spent, budget.left, budget.captured_in) == (7.0, 3.0, 7.0)
    assert budget.stages == {"writing rewrites, and the rest": 3.0, "finding sites": 4.0}


def test_checks_end_where_only_the_whole_model_and_writing_once_more_are_left(clock: Clock) -> None:
    budget = TimeBudget(40.0, forward=1.0, clock=clock).counting_from(0.0)  # 20 for sites
    budget.writing = 3.0
    ask = budget.ending(budget.for_checks)
    clock.now = 12.9
    ask()
    clock.now = 13.0
    with pytest.raises(OutOfTimeError):
        ask()


@pytest.mark.parametrize(("seconds", "until"), [(40.0, 40.0 - (20.0 + 8.0) / 2 - 3.0), (0.2, 0.25 - 0.1), (0.0, -1.0)])
def test_what_no_check_fits_for_is_written_for_a_while(clock: Clock, seconds: float, until: float) -> None:
    budget = TimeBudget(seconds, forward=1.0, clock=clock).counting_from(0.0)
    budget.writing = 3.0 if seconds > 1.0 else 0.1
    for now in (0.0, until - 0.01, until + 0.01):
        clock.now = max(0.0, now)
        assert budget.allows_writing(skippable=True) is (clock.now < until)


def test_an_engine_begins_nothing_that_ends_half_a_budget_late(clock: Clock) -> None:
    budget = TimeBudget(40.0, forward=1.0, clock=clock).counting_from(0.0)
    budget.writing = 3.0
    for now, allows in ((56.0, True), (58.0, False)):
        clock.now = now
        assert budget.allows_writing(skippable=False) is allows


def test_a_check_may_go_on_beyond_the_part_of_its_pass(clock: Clock) -> None:
    budget = TimeBudget(40.0, forward=1.0, clock=clock).counting_from(0.0)  # 20 for sites
    budget.begin_pass(sharing=2)
    ask = budget.ending(budget.for_checks)
    clock.now = 10.0
    assert not budget.allows_check(clean_up=False)
    ask()
    clock.now = 16.0
    with pytest.raises(OutOfTimeError):
        ask()


@pytest.mark.parametrize(
    ("wall", "processor", "expected"),
    [(8.0, 6.0, 6.0), (8.0, 16.0, 8.0), (8.0, 1.0, 2.0)],
    ids=["others have the cores", "several threads", "waiting"],
)
def test_time_is_what_passes_without_what_other_programs_take(
    monkeypatch: pytest.MonkeyPatch, wall: float, processor: float, expected: float
) -> None:
    now = {"perf_counter": 100.0, "process_time": 50.0}
    monkeypatch.setattr(timing.budget.time, "perf_counter", lambda: now["perf_counter"])
    monkeypatch.setattr(timing.budget.time, "process_time", lambda: now["process_time"])
    clock = budget_clock()
    assert clock() == 0.0
    now["perf_counter"] += wall
    now["process_time"] += processor
    assert clock() == expected
