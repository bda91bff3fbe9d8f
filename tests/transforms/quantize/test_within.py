"""Which layers stay in floats where all of them err by too much: few runs find those that cost most for their size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes.timing import kinds_within
from fxopt.transforms.quantize import within


def added(costs: Sequence[float], runs: list[int]) -> Callable[[Sequence[int]], float]:
    """Return an error that adds up as independent ones do, and note how many layers each run has."""

    def error(layers: Sequence[int]) -> float:
        runs.append(len(layers))
        return math.sqrt(sum(costs[layer] ** 2 for layer in layers))

    return error


def test_few_costly_layers_are_found_in_few_runs() -> None:
    costs, runs = [0.1] * 80, list[int]()
    costs[3], costs[50] = 4.0, 3.0
    found = within.costs_in_groups(dict.fromkeys(range(80), 1), added(costs, runs), 1.2)
    assert sorted(found, key=found.__getitem__)[-2:] == [50, 3]
    assert (found[3], found[50]) == (4.0, 3.0)
    assert set(found) == set(range(80))
    assert len(runs) < 30


def test_what_costs_most_for_its_size_is_found_first() -> None:
    costs = [1.0, 1.0, 2.5, 1.5]
    found = within.costs_in_groups({0: 1, 1: 1, 2: 100, 3: 100}, added(costs, []), 3.7)
    assert (found[0], found[1]) == (1.0, 1.0)
    assert found[2] == found[3]  # without the small ones it is little enough, and nobody looks into these


def test_layers_are_told_apart_as_long_as_there_is_time() -> None:
    costs, runs, left = [0.1] * 64, list[int](), [2.0, 1.5, 1.1, 1.0]
    costs[37] = 4.0
    with kinds_within(lambda: left.pop(0) if left else 0.0):
        found = within.costs_in_groups(dict.fromkeys(range(64), 1), added(costs, runs), 0.0)
    assert len(runs) == 1 + 2 * (6 + 1)  # with no time at all, the one that costs most is found
    assert max(found, key=found.__getitem__) == 37 and found[37] == 4.0
    assert set(found) == set(range(64))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.first(x))


def test_layers_left_in_floats_are_named_and_the_model_is_as_it_was() -> None:
    model, x = Two().eval(), torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    before = dict(vars(model.first))
    with torch.no_grad():
        full = fxopt.optimize(model, "quantize{budget=0.5}", example_inputs=x, measure=False)
        error = float((full(x) - model(x)).abs().max() / model(x).abs().max())
        tight = 0.9 * error
        fast = fxopt.optimize(model, f"quantize{{budget={tight}}}", example_inputs=x, measure=False)
        found = float((fast(x) - model(x)).abs().max() / model(x).abs().max())
    reasons = [decision.reason for decision in fxopt.plan(fast).decisions if decision.status == "refused"]
    assert reasons and all("moves its results by" in reason or "more than the budget" in reason for reason in reasons)
    assert found <= tight
    assert vars(model.first).keys() == before.keys()
