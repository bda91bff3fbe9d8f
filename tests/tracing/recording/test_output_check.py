"""Graphs that give another result than the forward they stand for are found, and nothing beside them is lost."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.tracing.examples import Inputs
from fxopt.tracing.program import capture_program

X = torch.randn(3, 4)


class Receivers:
    """Objects are not looked into: what their methods change is seen by nobody."""

    def __init__(self) -> None:
        self._open: list[list[Tensor]] = []

    def begin(self) -> None:
        self._open.append([])

    def end(self) -> list[Tensor]:
        return self._open.pop()

    def give(self, value: Tensor) -> None:
        if self._open:
            self._open[-1].append(value)


RECEIVERS = Receivers()


def collecting(forward: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return what modules inside of the layers gave, too: a graph that calls the layers as a whole cannot."""

    @functools.wraps(forward)
    def wrapper(self: Any, x: Tensor) -> Any:
        RECEIVERS.begin()
        try:
            x = forward(self, x)
        finally:
            seen = RECEIVERS.end()
        return (x, *seen)

    return wrapper


def hand_over(module: nn.Module, args: Any, output: Tensor) -> None:
    RECEIVERS.give(output)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_forward_hook(hand_over)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    @collecting
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stacks(nn.Module):
    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(map(Stack, counts))
        self.head = nn.Sequential(Layer(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for stack in self.stacks:
            x, *more = stack(x)
            found += more
        return (self.head(x), *found)


@pytest.mark.parametrize("counts", [(2,), (2, 3), (1, 2, 2)])
def test_only_what_disagrees_is_left_out(counts: tuple[int, ...]):
    model = Stacks(*counts)
    program = capture_program(copy.deepcopy(model), (X,))
    assert {name: opaque.reason for name, opaque in program.opaque.items()} == {
        f"stacks.{number}": "its graph gives another result than its forward" for number in range(len(counts))
    }
    assert {"", "head.0", "stacks.0.layers.0", "stacks.0.layers.0.inner"} <= program.captures.keys()
    given, expected = program.model(X), model(X)
    assert len(given) == len(expected) == 1 + sum(counts)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, 2 * x


class HalvesInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x, 2 * x) if not self.training else (x, x)


class Sum(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.rest = inner, nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.inner(x)
        for layer in self.rest:
            one = layer(one)
        return one + other


def uncaptured(inner: nn.Module) -> nn.Module:
    """Return a module that is not captured: what it gives in the other mode, only a run tells."""
    inner.forward = functools.partial(type(inner).forward, inner)
    return inner


def hooked(inner: nn.Module) -> nn.Module:
    """Return a module with a hook: what that makes of a result in the other mode, only a run tells."""
    inner.register_forward_hook(lambda _, args, output: output)
    return inner


@pytest.mark.parametrize(
    ("inner", "modes"),
    [
        (Halves(), {False}),
        (HalvesInEvaluation(), {False, True}),
        (uncaptured(Halves()), {False, True}),
        (hooked(Halves()), {False, True}),
    ],
    ids=["plain", "two graphs", "not captured", "hooked"],
)
def test_the_other_mode_is_run_where_a_result_may_have_another_form(
    inner: nn.Module, modes: set[bool], monkeypatch: pytest.MonkeyPatch
):
    seen: set[bool] = set()
    run = Inputs.run

    def noted(call: Inputs, model: nn.Module) -> Any:
        seen.add(model.training)
        return run(call, model)

    monkeypatch.setattr(Inputs, "run", noted)
    program = capture_program(Sum(inner).eval(), (X,))
    assert "" in program.captures
    assert seen == modes
