"""Kinds of layers are timed in turn, each in its own lowerings; their seconds are those of one layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fxopt.transforms.pack import timing


class Right:
    def reason_against(self, x: Tensor, laid: Tensor) -> None:
        return None

    def error(self, x: Tensor, laid: Tensor) -> float:
        return 0.0


class Clock:
    """A clock that calls alone move, by what each of them takes, and that notes them."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[str]()

    def read(self) -> float:
        return self.now

    def takes(self, seconds: float, name: str) -> Callable[..., object]:
        def compute(x: Tensor, number: Tensor) -> None:
            self.now += seconds
            self.calls.append(f"{name} {int(number)}")

        return compute

    def layers(self, count: int, before: float, after: float, name: str) -> timing.Calls:
        tensors = [(torch.tensor(number),) for number in range(count)]
        return timing.Calls((1, 4), self.takes(before, name), self.takes(after, f"{name}'"), tensors, Right())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=made.read))
    monkeypatch.setattr(timing, "race_clock", lambda: made.read)
    return made


def test_seconds_are_those_of_one_layer_in_the_lowerings_that_its_kind_has(clock: Clock) -> None:
    wide = {"packed": clock.layers(3, 6.0, 3.0, "wide"), "transposed": clock.layers(3, 6.0, 2.0, "wide")}
    narrow = {"packed": clock.layers(1, 1.0, 4.0, "narrow")}
    found = timing.figures_interleaved({"wide": wide, "narrow": narrow})
    assert {kind: list(figures) for kind, figures in found.items()} == {
        "wide": ["packed", "transposed"],
        "narrow": ["packed"],
    }
    gains = {(kind, name): each["speedup"] for kind, figures in found.items() for name, each in figures.items()}
    assert gains == {("wide", "packed"): 2.0, ("wide", "transposed"): 3.0, ("narrow", "packed"): 0.25}
    microseconds = [(each["packed"]["before_us"], each["packed"]["after_us"]) for each in found.values()]
    assert microseconds == [(6e6, 3e6), (1e6, 4e6)]


def test_kinds_are_called_in_turn_and_no_more_than_some_layers_of_each(clock: Clock) -> None:
    many = clock.layers(timing.MOST + 2, 1.0, 1.0, "many")
    timing.figures_interleaved({"many": {"packed": many}, "two": {"packed": clock.layers(2, 1.0, 1.0, "two")}})
    first = ["many 0", "two 0", "many 1", "two 1", "many 2", "many 3"]
    assert clock.calls[: len(first)] == first
    per_pass, rounds = 2 * len(first), timing._ROUNDS[0]
    assert len(clock.calls) == per_pass * (1 + rounds)  # once to warm up; by this clock time is up after the fewest
