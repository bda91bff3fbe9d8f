"""Measuring finds what is faster, says how sure it is, and changes nothing. No test asserts a time."""

from __future__ import annotations

import gc
import itertools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.passes.timing import Interval, Runner, Timings, conditions, measure, seconds_of, time_candidates, time_pair


@dataclass
class Call:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class Clock:
    """A clock that only candidates advance, so that a test knows how fast they are."""

    def __init__(self) -> None:
        self.now = 0.0
        self.random = random.Random(0)

    def candidate(self, seconds: float, noise: float = 0.0) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds * (1 + noise * self.random.random())

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for name in ("perf_counter", "thread_time", "process_time"):
        monkeypatch.setattr(measure.time, name, lambda: clock.now)
    monkeypatch.setattr(measure.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(measure, "_interruptions", lambda: 0)  # those of the machine that runs the tests
    return clock


# -- statistics --------------------------------------------------------------------------------------------------------


def timings(**samples: list[float]) -> Timings:
    return Timings([dict(zip(samples, row, strict=True)) for row in zip(*samples.values(), strict=True)])


def test_the_ratio_is_taken_within_rounds() -> None:
    """The machine gets ten times slower half-way; the candidates' ratio does not change."""
    drift = [1.0] * 10 + [10.0] * 10
    found = timings(before=[2 * d for d in drift], after=drift).ratio("before", "after")
    assert found == Interval(2.0, 2.0, 2.0)


def test_too_few_rounds_say_nothing() -> None:
    assert timings(a=[1.0, 1.0], b=[3.0, 3.0]).ratio("b", "a") == Interval(0.0, 3.0, math.inf)
    assert timings(a=[1.0], b=[1.0]).ratio("a", "c").high == math.inf


def test_the_interval_is_the_sign_tests() -> None:
    """For 9 values the 2nd and 8th bound the median with 96%, for 20 the 6th and 15th (Conover, table A3)."""
    assert timings(a=[1.0] * 9, b=[float(i) for i in range(1, 10)]).ratio("b", "a") == Interval(2.0, 5.0, 8.0)
    assert timings(a=[1.0] * 20, b=[float(i) for i in range(1, 21)]).ratio("b", "a") == Interval(6.0, 10.5, 15.0)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rolls = random.Random(1)
    hits = 0
    for _ in range(400):
        samples = [math.exp(rolls.gauss(0, 1)) for _ in range(25)]
        found = timings(a=[1.0] * 25, b=samples).ratio("b", "a")
        hits += found.low <= 1.0 <= found.high
    assert 0.93 <= hits / 400 <= 1.0


def test_one_stall_does_not_sway_the_median() -> None:
    found = timings(before=[2.0] * 19 + [500.0], after=[1.0] * 20).ratio("before", "after")
    assert (found.low, found.mid, found.high) == (2.0, 2.0, 2.0)


def test_the_fastest_wins_and_within_the_noise_the_preferred() -> None:
    found = timings(slow=[3.0] * 12, near=[1.01] * 12, best=[1.0] * 12, far=[1.1] * 12)
    assert found.fastest(prefer=("slow", "far", "near", "best")) == "near"
    assert found.fastest(prefer=("slow", "far", "best", "near")) == "best"
    assert found.fastest(prefer=("slow", "far")) == "far"
    assert found.fastest(prefer=("slow",)) == "slow"


def test_times_are_medians_of_one_call() -> None:
    found = timings(a=[1e-6, 3e-6, 2e-6])
    assert found.seconds("a") == 2e-6
    assert found.microseconds("a") == pytest.approx(2.0)


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_a_clear_answer_comes_early(clock: Clock) -> None:
    found = time_candidates({"before": clock.candidate(1e-3), "after": clock.candidate(1e-4)}, seconds=100)
    assert len(found.rounds) == 9
    assert found.ratio("before", "after").mid == pytest.approx(10)
    assert found.fastest(prefer=("before", "after")) == "after"


def test_cold_candidates_are_called_once_after_each_emptying_of_the_caches(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []

    def evictions(_: object) -> Callable[[], None]:
        return lambda: noted.append("emptied")

    def noting(seconds: float) -> Callable[[], object]:
        run = clock.candidate(seconds)
        return lambda: (noted.append("called"), run())

    monkeypatch.setattr(measure, "Eviction", evictions)
    found = time_candidates({"before": noting(1e-5), "after": noting(1e-6)}, seconds=100, cold=True)
    assert found.cold and found.ratio("before", "after").mid == pytest.approx(10)
    sampled = noted[noted.index("emptied") :]
    assert sampled == ["emptied", "called"] * (len(sampled) // 2)
    assert len(sampled) == 2 * 2 * (1 + len(found.rounds))  # each one once more, to learn how long it takes


def test_hot_candidates_leave_the_caches_alone(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(measure, "Eviction")
    assert not time_candidates({"a": clock.candidate(1e-3), "b": clock.candidate(1e-4)}).cold


def test_caches_are_emptied_by_writing_more_than_they_hold(tmp_path: Path) -> None:
    told = tmp_path / "size"
    told.write_text("512K\n")
    assert conditions.last_level_bytes(told) == 512 * 1024
    assert conditions.last_level_bytes(tmp_path / "missing") == 64 * 2**20
    evict = conditions.Eviction()
    evict()
    assert sum(buffer.numel() for buffer in evict._buffers) > conditions.last_level_bytes()
    assert all(bool((buffer == 1).all()) for buffer in evict._buffers)


def test_equal_candidates_are_told_to_be_equal(clock: Clock) -> None:
    found = time_candidates({"a": clock.candidate(1e-3, 0.001), "b": clock.candidate(1e-3, 0.001)}, seconds=100)
    assert len(found.rounds) == 9
    assert found.fastest(prefer=("b", "a")) == "b"


def test_a_close_race_is_run_to_the_end_of_its_time(clock: Clock) -> None:
    found = time_candidates({"a": clock.candidate(1e-3, 0.5), "b": clock.candidate(0.97e-3, 0.5)}, seconds=0.25)
    assert 20 <= len(found.rounds) < 400
    assert clock.now < 0.3


def test_time_is_limited_but_for_the_first_rounds(clock: Clock) -> None:
    found = time_candidates({"a": clock.candidate(5e-3, 0.5), "b": clock.candidate(5e-3, 0.5)}, seconds=0.02)
    assert len(found.rounds) == 9


def test_of_long_calls_no_more_rounds_than_the_fewest_are_taken(clock: Clock) -> None:
    candidates = {"a": clock.candidate(5.0, 0.5), "b": clock.candidate(5.0, 0.5)}
    assert len(time_candidates(candidates, seconds=0.25).rounds) == 6
    assert len(time_pair(*candidates.values(), seconds=0.25, least_rounds=18).rounds) == 3


def test_what_is_clearly_slower_drops_out(clock: Clock) -> None:
    candidates = {
        "before": clock.candidate(5e-3), "a": clock.candidate(1e-3, 0.3), "b": clock.candidate(1e-3, 0.3),
    }  # fmt: skip
    found = time_candidates(candidates, seconds=0.25)
    assert sum("before" in sample for sample in found.rounds) == 9
    assert sum("a" in sample for sample in found.rounds) > 20
    assert found.ratio("before", "a").low > 3


def test_a_hopeless_candidate_is_tried_three_times(clock: Clock) -> None:
    seconds = {"before": 1.02e-2, "good": 1e-2, "bad": 1e-1}
    found = time_candidates({name: clock.candidate(each) for name, each in seconds.items()}, seconds=0.01)
    tried = {name: sum(name in sample for sample in found.rounds) for name in seconds}
    assert (tried["bad"], tried["before"], tried["good"]) == (3, 9, 9)
    assert found.fastest(prefer=("bad", "good")) == "good"


def test_the_last_rival_of_the_first_is_measured_however_slow(clock: Clock) -> None:
    found = time_candidates({"before": clock.candidate(1e-3), "bad": clock.candidate(1e-2)}, seconds=0.25)
    assert found.ratio("before", "bad").high == pytest.approx(0.1)


def test_a_limit_leaves_the_fewest_rounds_that_tell_anything(clock: Clock) -> None:
    candidates = {"before": clock.candidate(1.04), "after": clock.candidate(1.0)}
    found = time_candidates(candidates, limit=0.1)
    assert len(found.rounds) == 6
    assert found.ratio("before", "after").low > 1.0


def test_three_rounds_of_long_calls_are_enough_where_they_leave_no_doubt(clock: Clock) -> None:
    found = time_candidates({"before": clock.candidate(1.0, 0.05), "after": clock.candidate(0.5, 0.05)})
    assert len(found.rounds) == 3
    speed = found.ratio("before", "after")
    assert 1.0 < speed.low < 2.0 < speed.high < math.inf


@pytest.mark.parametrize(("after", "rounds"), [(1.0, 3), (0.995, 3), (0.98, 6)])
def test_three_rounds_of_long_calls_are_enough_where_nothing_is_worth_more(
    clock: Clock, after: float, rounds: int
) -> None:
    candidates = {"before": clock.candidate(1.0), "bad": clock.candidate(1.2), "after": clock.candidate(after)}
    assert len(time_candidates(candidates, limit=0.1, worth=1.01).rounds) == rounds
    assert len(time_candidates(candidates, limit=0.1).rounds) == 6


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_clear_answer(clock: Clock, seed: int) -> None:
    clock.random.seed(seed)
    found = time_candidates({"before": clock.candidate(1.0, 0.4), "after": clock.candidate(1.0, 0.4)}, limit=0.1)
    assert len(found.rounds) == 6


def test_a_call_that_has_just_run_is_not_run_again_to_get_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    long = Runner(nn.Identity(), [Call((torch.zeros(1),))], training=False)
    monkeypatch.setattr(long, "seconds", 1.0)
    monkeypatch.setattr(type(long), "__call__", lambda self: calls.append(self))
    time_candidates({"a": long}, seconds=0.0, least_rounds=4)
    assert len(calls) == 4


@pytest.mark.parametrize("seed", range(20))
def test_the_right_one_is_found_in_noise(clock: Clock, seed: int) -> None:
    clock.random.seed(seed)
    times = {"loop": 1e-3, "wide": 0.80e-3, "bmm": 0.70e-3, "vmap": 1.4e-3}
    found = time_candidates({name: clock.candidate(t, 0.4) for name, t in times.items()}, seconds=0.5)
    assert found.fastest(prefer=("wide", "bmm", "vmap")) == "bmm"
    assert found.ratio("loop", "bmm").low > 1.0


def test_doubt_about_the_first_candidate_buys_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be a gain is timed for longer; what is no gain anyway is not."""
    candidates = {"before": clock.candidate(1e-3, 1.0), "after": clock.candidate(1e-3, 1.0)}
    for seems, least, most in ((Interval(0.9, 1.05, 1.2), 0.4, 0.45), (Interval(0.8, 0.95, 1.2), 0.1, 0.15)):
        monkeypatch.setattr(Timings, "ratio", lambda self, before, after, seems=seems: seems)
        start = clock.now
        found = time_candidates(candidates, seconds=0.1)
        assert least < clock.now - start < most, found


def test_interrupted_samples_are_taken_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    interruptions = 0

    def stalling() -> None:
        nonlocal interruptions
        interrupted = clock.random.random() < 0.4
        interruptions += interrupted
        clock.now += 1.0 if interrupted else 1e-3

    monkeypatch.setattr(measure, "_interruptions", lambda: interruptions)
    monkeypatch.setattr(measure, "_WARM_UP_SECONDS", 10.0)
    found = time_candidates({"a": stalling}, seconds=1e-9, least_rounds=200)
    stalled = sum(sample["a"] > 0.1 for sample in found.rounds)
    assert 0 < stalled < 40  # 0.4 ** 3 of 200 are expected, where 80 would be without a second try


def test_short_calls_are_repeated_until_the_clock_can_tell(clock: Clock) -> None:
    calls = []
    candidate = clock.candidate(1e-6)
    time_candidates({"a": lambda: (calls.append(0), candidate())}, seconds=0.001)
    assert len(calls) > 9 * 200


class BusyMachine:
    """Other programs have the core for most of the time, in pieces of any length: the wall clock tells by chance."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch, threads: int = 1) -> None:
        self.clock, self.threads, self.waited, self.elsewhere = clock, threads, 0.0, 0.0
        monkeypatch.setattr(measure.torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(measure.torch, "set_num_threads", lambda count: setattr(self, "threads", count))
        monkeypatch.setattr(measure.time, "thread_time", lambda: clock.now - self.waited)
        monkeypatch.setattr(measure.time, "process_time", lambda: clock.now - self.waited + self.elsewhere)

    def candidate(self, seconds: float, *, in_other_threads: bool = False) -> Callable[[], None]:
        """Return what takes so long; `in_other_threads`, what is waited for while they work for it."""

        def call() -> None:
            waiting = self.clock.random.uniform(0.5, 10.0) * seconds
            self.clock.now += seconds if in_other_threads else seconds + waiting
            self.waited += seconds * 0.999 if in_other_threads else waiting
            self.elsewhere += seconds if in_other_threads else 0.0

        return call


def test_one_disturbed_round_takes_no_clear_gain_away(clock: Clock) -> None:
    slow, fast = clock.candidate(0.15), clock.candidate(0.1)
    calls = list[int]()

    def disturbed() -> None:
        calls.append(0)
        fast()
        clock.now += 1.0 if len(calls) == 3 else 0.0

    found = time_candidates({"before": slow, "after": disturbed}, limit=0.0)
    assert len(found.rounds) == 9
    assert found.ratio("before", "after").gains()
    never = time_candidates({"before": fast, "after": slow}, limit=0.0)
    assert len(never.rounds) <= 6


@pytest.mark.parametrize("seed", range(10))
def test_other_programs_take_nothing_from_a_race_in_one_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    clock.random.seed(seed)
    machine = BusyMachine(clock, monkeypatch)
    found = time_candidates({"before": machine.candidate(0.1), "after": machine.candidate(0.098)}, limit=0.0)
    assert len(found.rounds) == 6
    assert found.ratio("before", "after").low == pytest.approx(100 / 98)
    assert found.seconds("after") == pytest.approx(0.098)


def test_where_other_programs_have_the_cores_one_thread_tells(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = BusyMachine(clock, monkeypatch, threads=2)
    found = time_candidates({"before": machine.candidate(0.1), "after": machine.candidate(0.098)}, limit=0.0)
    assert found.in_one_thread
    assert found.ratio("before", "after").low == pytest.approx(100 / 98)
    assert machine.threads == 2


def test_one_run_is_timed_without_other_programs_unless_other_threads_work_for_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = BusyMachine(clock, monkeypatch)
    assert seconds_of(machine.candidate(0.1)) == pytest.approx(0.1)
    assert seconds_of(machine.candidate(0.1, in_other_threads=True)) == pytest.approx(0.1)
    machine.threads = 2
    assert seconds_of(machine.candidate(0.1)) > 0.14


def test_what_other_threads_work_for_is_timed_by_the_wall_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = BusyMachine(clock, monkeypatch)
    race = {"before": machine.candidate(0.1), "after": machine.candidate(0.05, in_other_threads=True)}
    found = time_candidates(race, limit=0.0)
    assert found.seconds("after") == pytest.approx(0.05)
    assert found.seconds("before") > 0.15


def test_what_other_threads_work_for_later_is_timed_by_the_wall_clock(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = BusyMachine(clock, monkeypatch)
    here, elsewhere = machine.candidate(0.05), machine.candidate(0.05, in_other_threads=True)
    calls = itertools.count()
    race = {"before": machine.candidate(0.05), "after": lambda: (here if next(calls) < 3 else elsewhere)()}
    found = time_candidates(race, seconds=10.0)
    assert min(each["after"] for each in found.rounds if "after" in each) == pytest.approx(0.05)


class Threads:
    """A machine so busy that calls in two threads stall: three in four take 8 ms or a multiple of it."""

    def __init__(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch, *, spin: bool = True, always: bool = False
    ) -> None:
        self.clock, self.spin, self.always, self.count, self.idle = clock, spin, always, 2, 0.0
        monkeypatch.setattr(measure.torch, "get_num_threads", lambda: self.count)
        monkeypatch.setattr(measure.torch, "set_num_threads", lambda count: setattr(self, "count", count))
        monkeypatch.setattr(measure.time, "thread_time", lambda: clock.now - self.idle)

    def candidate(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            stalled = self.count > 1 and (self.always or self.clock.random.random() < 0.75)
            waiting = self.clock.random.choice((8e-3, 16e-3, 24e-3)) if stalled else 0.0
            self.clock.now += seconds + waiting
            self.idle += 0.0 if self.spin else waiting

        return call


@pytest.mark.parametrize(("spin", "always"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("seed", range(5))
def test_calls_that_stall_are_timed_in_one_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, spin: bool, always: bool, seed: int
) -> None:
    """Waiting threads spin, or not; then processor time tells even where no call runs through."""
    clock.random.seed(seed)
    threads = Threads(clock, monkeypatch, spin=spin, always=always)
    times = {"before": 1.9e-3, "bmm": 0.5e-3, "wide": 0.3e-3}
    found = time_candidates({name: threads.candidate(each) for name, each in times.items()})
    assert found.in_one_thread
    assert found.fastest(prefer=("before", "bmm", "wide")) == "wide"
    assert found.ratio("before", "wide").mid == pytest.approx(1.9 / 0.3)
    assert threads.count == 2


def test_a_loop_of_many_calls_that_stall_is_timed_in_one_thread(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its calls runs through, and threads that spin use the processor: one thread tells."""
    threads = Threads(clock, monkeypatch)
    operation, fused = threads.candidate(20e-6), threads.candidate(3e-3)
    found = time_candidates({"before": lambda: [operation() for _ in range(256)], "after": fused})
    assert found.in_one_thread
    assert found.ratio("before", "after").mid == pytest.approx(256 * 0.02 / 3)


def test_in_one_thread_already_nothing_is_timed_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(clock, monkeypatch)
    threads.count = 1
    assert not time_candidates({"a": threads.candidate(1e-3), "b": threads.candidate(2e-3)}).in_one_thread


def test_noise_and_long_calls_are_no_stalls(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(clock, monkeypatch)
    noisy = {"a": clock.candidate(1e-3, 2.0), "b": clock.candidate(1e-3, 2.0)}
    assert not time_candidates(noisy, seconds=0.1).in_one_thread
    assert not time_candidates({"a": threads.candidate(1e-1), "b": threads.candidate(1e-1)}, seconds=0.1).in_one_thread


def test_the_threads_are_as_before_even_if_a_candidate_raises(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(clock, monkeypatch)
    stalling = threads.candidate(1e-3)

    def fail() -> None:
        stalling()
        if threads.count == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        time_candidates({"a": fail, "b": stalling})
    assert threads.count == 2


def test_short_calls_are_not_given_up_early(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first calls wait for their turn; what they use of the processor says that they are short."""
    times, waits, idle = {"before": 2e-3, "good": 0.5e-3, "best": 0.4e-3}, iter([0.03] * 9), [0.0]
    plain = {name: clock.candidate(each) for name, each in times.items()}
    monkeypatch.setattr(measure.time, "thread_time", lambda: clock.now - idle[0])

    def waiting() -> None:
        wait = next(waits, 0.0)
        idle[0] += wait
        clock.now += wait
        plain["best"]()

    found = time_candidates({**plain, "best": waiting})
    assert found.fastest(prefer=("before", "good", "best")) == "best"


def test_waiting_for_a_busy_machine_takes_no_time_from_a_race(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: dict[bool, int] = {}
    for busy in (False, True):
        idle = [0.0]
        monkeypatch.setattr(measure.time, "thread_time", lambda idle=idle: clock.now - idle[0])

        def call(seconds: float, busy: bool = busy, idle: list[float] = idle) -> None:
            clock.candidate(seconds, 0.5)()
            clock.now += 2 * seconds if busy else 0.0
            idle[0] += 2 * seconds if busy else 0.0

        clock.random.seed(0)
        race = {"a": lambda call=call: call(1e-3), "b": lambda call=call: call(1.03e-3)}
        rounds[busy] = len(time_candidates(race, seconds=0.1).rounds)
    assert rounds[True] >= rounds[False] > 9


@pytest.mark.parametrize("seed", [3, 7, 12, 16, 22])
def test_doubt_about_the_best_of_several_buys_time(clock: Clock, seed: int) -> None:
    """What is shown to be faster than before is not settled with, while something else seems to be faster still."""
    clock.random.seed(seed)
    times = {"before": 4e-3, "bmm": 1.15e-3, "wide": 1e-3}
    found = time_candidates({name: clock.candidate(each, 0.6) for name, each in times.items()}, seconds=0.1)
    assert len(found.rounds) > 9
    assert found.fastest(prefer=("bmm", "wide")) == "wide"


def test_one_candidate_is_its_own_fastest(clock: Clock) -> None:
    assert time_candidates({"a": clock.candidate(1e-3)}).fastest(prefer=("a",)) == "a"


def test_garbage_collection_is_as_before_even_if_a_candidate_raises() -> None:
    assert gc.isenabled()
    calls = iter(range(20))

    def fail() -> None:
        if next(calls, None) is None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        time_candidates({"a": fail})
    assert gc.isenabled()


# -- runners -----------------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Note how it is called, and change everything a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.seen: set[tuple[bool, bool, bool]] = set()
        self.calls = 0

    def forward(self, x: Tensor, unused: Tensor | None = None) -> dict[str, Tensor]:
        self.seen.add((torch.is_grad_enabled(), x.requires_grad, self.training))
        self.calls += 1
        return {"y": self.dropout(self.norm(self.linear(x))), "index": x.argmax(-1)}


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_left_behind(training: bool) -> None:
    module = Watched()
    seen = module.seen
    module(torch.randn(4, 3))["y"].sum().backward()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    x = torch.randn(4, 3)
    kept, generator, calls = x.clone(), torch.get_rng_state(), module.calls
    time_candidates({"a": Runner(module, [Call((x,))], training=training)}, seconds=0.001)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(x, kept)
    assert (module.calls, module.training) == (calls, True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in module.named_parameters())
    assert seen <= {(True, False, True), (training, False, True)}


def counting_backwards(module: nn.Module) -> list[str]:
    arrived: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: arrived.append(name))
    return arrived


def test_training_takes_every_gradient() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    run = Runner(module, [Call((torch.randn(2, 3),))], training=True)
    arrived = counting_backwards(module)
    run()
    assert sorted(arrived) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    run_forward = Runner(module, [Call((torch.randn(2, 3),))], training=False)
    arrived.clear()
    run_forward()
    assert arrived == []


@pytest.mark.parametrize(("required", "asked", "expected"), [(False, None, 1), (True, None, 2), (False, True, 2)])
def test_gradients_of_arguments_are_taken_where_they_count(required: bool, asked: bool | None, expected: int) -> None:
    counts: list[int] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            counts.append(sum(ctx.needs_input_grad))
            return gradients[0] * w, gradients[0] * x

    class Apply(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(x, self.w)

    x = torch.randn(3, requires_grad=required)
    Runner(Apply(), [Call((x,))], training=True, input_gradients=asked)()
    assert counts == [expected]


def test_modules_that_change_their_arguments_get_the_same_ones_each_time() -> None:
    seen: list[float] = []

    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(float(x.detach().sum()))
            return x.mul_(2)

    x = torch.ones(3, requires_grad=True)
    run = Runner(Doubling(), [Call((x,))], training=True)
    for _ in range(5):
        run()
    assert set(seen) == {3.0}
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_a_cold_first_call_does_not_tell_what_a_run_takes(clock: Clock) -> None:
    calls = []

    def cold(*_: Any) -> None:
        calls.append(0)
        clock.now += 0.04 if len(calls) == 1 else 1e-3

    module = nn.Identity()
    module.register_forward_pre_hook(cold)
    run = Runner(module, [Call((torch.zeros(1),))], training=False)
    assert run.seconds == pytest.approx(1e-3)


def test_a_long_call_is_made_once_to_get_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Runner.__module__], "_MAY_BE_COLD", -1.0)
    made: list[Tensor] = []
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda _, args: made.append(args[0]))
    Runner(module, [Call((torch.zeros(1, 2),))], training=True)
    assert len(made) == 1


def test_every_recorded_call_is_made() -> None:
    shapes: list[tuple[int, ...]] = []
    module = nn.Identity()
    module.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    run = Runner(module, [Call((torch.zeros(1),)), Call((torch.zeros(2),))], training=False)
    shapes.clear()
    run()
    assert shapes == [(1,), (2,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_outputs_of_any_type_have_a_backward(dtype: torch.dtype) -> None:
    module = nn.Linear(3, 2, dtype=dtype)
    arrived = counting_backwards(module)
    Runner(module, [Call((torch.randn(4, 3, dtype=torch.float32).to(dtype),))], training=True)()
    assert arrived


def test_modules_without_anything_to_train_are_run_all_the_same() -> None:
    Runner(nn.ReLU(), [Call((torch.randn(3),))], training=True)()


class Seen(nn.Module):
    """Notes whether the tensors that it is given are those of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.last: tuple[Tensor, ...] = ()
        self.same: list[bool] = []

    def forward(self, *given: Tensor) -> Tensor:
        self.same = [new is old for new, old in zip(given, self.last, strict=False)]
        self.last = given
        return given[0] + 1


def test_an_index_that_the_model_computes_is_a_new_one_in_each_call() -> None:
    x, edges, computed = torch.randn(3), torch.tensor([0, 1]), torch.tensor([1, 2])
    seen = Seen()
    run = Runner(seen, [Call((x, edges, computed))], training=False, given=[x, edges])
    for _ in range(2):
        run()
    assert seen.same == [True, True, False]


def test_a_whole_model_is_given_the_same_tensors_in_each_call() -> None:
    seen = Seen()
    run = Runner(seen, [Call((torch.randn(3), torch.tensor([0, 1])))], training=False)
    for _ in range(2):
        run()
    assert seen.same == [True, True]
