"""A model that threads change while others call it: each result is that of one of the states, and so is the last."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.small_models import Stack
from torch import Tensor, nn

import fxopt
from fxopt.operators import Unchanged

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
SECONDS = 0.4


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Config:
    def __init__(self) -> None:
        self.scale, self.shifts = 2.0, [1.0, 2.0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config, self.shift = nn.Linear(8, 8), Config(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.config.scale + self.config.shifts[1] + self.shift


WEIGHTS = [torch.eye(8), torch.ones(8, 8)]
NUMBERS = [2.0, 3.0]


def _swapped(layer: Any, one: int) -> None:
    with contextlib.suppress(RuntimeError):  # in the middle of a call torch refuses
        torch.utils.swap_tensors(layer.linear.weight, nn.Parameter(WEIGHTS[one].clone()))


def _set(layer: Any, one: int) -> None:
    with torch.no_grad():
        layer.linear.weight.set_(WEIGHTS[one])


def _other_attributes(layer: Any, one: int) -> None:
    layer.__dict__ = {**vars(layer), "shift": NUMBERS[one]}


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "swapped": _swapped,
    "data": lambda layer, one: setattr(layer.linear.weight, "data", WEIGHTS[one]),
    "set": _set,
    "parameter": lambda layer, one: setattr(layer.linear, "weight", nn.Parameter(WEIGHTS[one].clone())),
    "configuration": lambda layer, one: setattr(layer.config, "scale", NUMBERS[one]),
    "list": lambda layer, one: layer.config.shifts.__setitem__(1, NUMBERS[one]),
    "attributes of the configuration": lambda layer, one: setattr(
        layer.config, "__dict__", {"scale": NUMBERS[one], "shifts": [1.0, 2.0]}
    ),
    "attributes": _other_attributes,
}


def _running(change: Callable[[int], object], is_over: threading.Event) -> None:
    for number in itertools.count():
        change(number % 2)
        if number % 7 == 0:
            time.sleep(0.002)
        if is_over.is_set():
            break


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_results_are_those_of_one_state(change: str) -> None:
    torch.manual_seed(0)
    model = Stack(Layer() for _ in range(8)).eval()
    fast: Any = fxopt.optimize(model, "flatten_calls", example_inputs=X, measure=False)
    make = CHANGES[change]
    states: list[Tensor] = [model(X)]
    for one in (0, 1):
        make(model.blocks[1], one)
        states.append(model(X))
    fast(X)
    fast(X)
    is_over, results, failures = threading.Event(), list[Tensor](), list[Exception]()

    def call() -> None:
        try:
            with torch.no_grad():
                while not is_over.is_set():
                    results.append(fast(X))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    threads.append(threading.Thread(target=_running, args=(lambda one: make(fast.blocks[1], one), is_over)))
    for each in threads:
        each.start()
    time.sleep(SECONDS)
    is_over.set()
    for each in threads:
        each.join()
    assert not failures and results
    assert all(any(torch.equal(result, state) for state in states) for result in results)
    for one in (0, 1):
        make(fast.blocks[1], one)
        for _ in range(3):
            assert torch.equal(fast(X), states[1 + one])


@pytest.mark.parametrize("change", ["swapped", "data", "set", "gone"])
def test_tensors_are_compared_while_they_change(change: str) -> None:
    tensors = [nn.Parameter(torch.full((64,), float(number))) for number in range(40)]
    is_over, noting = threading.Event(), threading.Lock()

    def change_all(_: int) -> None:
        for place, old in enumerate(tensors):
            new = nn.Parameter(old.detach() + 1)
            if change == "swapped":
                with noting:  # torch's own `detach` reads what a swap puts elsewhere, without holding the GIL
                    torch.utils.swap_tensors(old, new)
            elif change == "data":
                old.data = new.data
            elif change == "set":
                with torch.no_grad():
                    old.set_(new.data)
            else:
                tensors[place] = new

    thread = threading.Thread(target=_running, args=(change_all, is_over))
    thread.start()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        now = tuple(tensors)
        with noting:
            noted = Unchanged(now)
        for _ in range(5):
            noted.same(*tensors)
    is_over.set()
    thread.join()
    noted = Unchanged(tensors)
    assert noted.same(*tensors)
    change_all(0)
    assert not noted.same(*tensors)
