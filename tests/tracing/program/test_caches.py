"""State-space caches: tensors that live in an object that the forward is given, read, replaced and written in place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.runtime.values import copied_object, state_of, tensors_within
from fxopt.tracing.program import capture_program


class States:
    """Keep a window and a recurrent state for each layer; both stay where they are, once there."""

    def __init__(self, layers: int = 2) -> None:
        self.windows: list[torch.Tensor | None] = [None] * layers
        self.recurrent: dict[int, torch.Tensor | None] = dict.fromkeys(range(layers))
        self.started = dict.fromkeys(range(layers), False)

    def window(self, layer: int) -> torch.Tensor | None:
        return self.windows[layer] if self.started[layer] else None

    def update_window(self, x: torch.Tensor, layer: int, size: int = 3) -> torch.Tensor:
        held = self.windows[layer]
        if held is None:
            held = self.windows[layer] = x.new_zeros(x.shape[0], size, x.shape[2])
        full = x if not self.started[layer] else torch.cat([held, x], 1)
        self.started[layer] = True
        padded = full if full.shape[1] >= size else torch.cat([x.new_zeros(x.shape[0], size, x.shape[2]), full], 1)
        held.copy_(padded[:, -size:])
        return full

    def update_recurrent(self, state: torch.Tensor, layer: int) -> None:
        held = self.recurrent[layer]
        if held is None:
            held = self.recurrent[layer] = torch.zeros_like(state)
        held.copy_(state)


class Cell(nn.Module):
    """Mix a window of inputs, then run a recurrence; one step works on the states in place."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decay = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor, states: States | None = None) -> torch.Tensor:
        length = x.shape[1]
        window = recurrent = None
        if states is not None:
            window, recurrent = states.window(self.layer), states.recurrent[self.layer]
        x = self.into(x)
        if window is not None and length == 1:
            full = torch.cat([window, x], 1)
            window.copy_(full[:, 1:])
            x = full.mean(1, keepdim=True)
        elif states is not None:
            x = states.update_window(x, self.layer).cumsum(1)[:, -length:]
        else:
            x = x.cumsum(1)
        if recurrent is not None and length == 1:
            recurrent.mul_(self.decay).add_(x[:, 0])
            y = recurrent.unsqueeze(1)
        else:
            start = x.new_zeros(x.shape[0], 4) if recurrent is None else recurrent * self.decay
            y = x + start.unsqueeze(1)
            if states is not None:
                states.update_recurrent(y[:, -1], self.layer)
        return self.out(y) if not self.training else self.out(y) * 2


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cell(number) for number in range(layers))

    def forward(self, x: torch.Tensor, states: States | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, states)
        return x


def _started() -> States:
    states = States()
    with torch.no_grad():
        Model()(torch.randn(3, 5, 4), states)
    return states


EXAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "none": lambda: (torch.randn(3, 5, 4),),
    "empty": lambda: (torch.randn(3, 5, 4), States()),
    "chunk": lambda: (torch.randn(3, 5, 4), _started()),
    "step": lambda: (torch.randn(3, 1, 4), _started()),
}


def _same(first: nn.Module, second: nn.Module, calls: Any = (5, 1, 1, 3, 1), layers: int = 2, batch: int = 2) -> None:
    """Assert that two models give the same and leave the same states, call after call."""
    mine, theirs = States(layers), States(layers)
    for length in calls:
        x = torch.randn(batch, length, 4)
        with torch.no_grad():
            torch.testing.assert_close(first(x, mine), second(x, theirs))
            torch.testing.assert_close(first(x), second(x))
        torch.testing.assert_close(list(tensors_within(mine)), list(tensors_within(theirs)))
        assert mine.started == theirs.started


@pytest.mark.parametrize("example", EXAMPLES)
def test_steps_with_a_cache_are_those_of_the_forward(example: str):
    model = Model().eval()
    program = capture_program(copy.deepcopy(model), EXAMPLES[example]())
    assert program.opaque == {}
    for training in (False, True):
        model.train(training)
        program.model.train(training)
        _same(program.model, model)
        _same(program.model, model, layers=3, batch=1)
        _same(program.model, model, calls=(1, 1, 2, 1), batch=4)


@pytest.mark.parametrize("example", EXAMPLES)
def test_optimized_copied_pickled_and_restored(example: str):
    model = Model().eval()
    fast = fxopt.optimize(model, "inference", example_inputs=EXAMPLES[example](), measure=False)
    for each in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fxopt.restore(fast)):
        _same(each, model)


def test_the_example_states_stay_as_they_are():
    states = _started()
    before, copies = state_of(states), [tensor.clone() for tensor in tensors_within(states)]
    capture_program(Model(), (torch.randn(3, 1, 4), states))
    assert state_of(states) == before
    assert all(map(torch.equal, tensors_within(states), copies))


def test_states_that_are_written_in_place_stay_where_they_are():
    program = capture_program(Model().eval(), EXAMPLES["step"]())
    states = _started()
    before, copies = state_of(states), [tensor.clone() for tensor in tensors_within(states)]
    program.model(torch.randn(3, 1, 4), states)
    assert state_of(states) == before
    assert not any(map(torch.equal, tensors_within(states), copies))


def test_states_replaced_between_calls_are_read_anew():
    model = Model().eval()
    program = capture_program(copy.deepcopy(model), EXAMPLES["step"]())
    states = _started()
    for _ in range(3):
        x = torch.randn(3, 1, 4)
        theirs = copied_object(states, torch.clone)
        torch.testing.assert_close(program.model(x, states), model(x, theirs))
        torch.testing.assert_close(list(tensors_within(states)), list(tensors_within(theirs)))
        states.windows = [torch.randn(3, 3, 4) for _ in range(2)]
        states.recurrent = {0: torch.randn(3, 4), 1: torch.randn(3, 4)}
    assert not any(capture.misses for capture in program.captures.values())


class Order(nn.Module):
    """Read, replace and change what an object holds, in an order that matters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("shared", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor, states: States) -> Any:
        return getattr(self, self.kind)(x, states)

    def replaced(self, x: torch.Tensor, states: States) -> Any:
        before = states.recurrent[0] + 1
        states.recurrent[0] = x
        return before + (states.recurrent[0] + 1)

    def method(self, x: torch.Tensor, states: States) -> Any:
        before = states.window(0).sum(1)
        states.windows[0] = torch.stack([x, x, x], 1)
        return before + states.window(0).sum(1)

    def in_place(self, x: torch.Tensor, states: States) -> Any:
        held = states.recurrent[0]
        before = held * 2
        held.add_(x)
        return before + states.recurrent[0] * 2

    def unused(self, x: torch.Tensor, states: States) -> Any:
        states.update_recurrent(x * 2, 0)
        states.recurrent[1].zero_()
        return x + 1

    def handed_on(self, x: torch.Tensor, states: States) -> Any:
        states.recurrent[0].add_(x)
        return states.recurrent[0]

    def buffer(self, x: torch.Tensor, states: States) -> Any:
        before = self.shared * 2
        states.recurrent[0].add_(x)
        return before + self.shared * 2

    def view(self, x: torch.Tensor, states: States) -> Any:
        row = states.recurrent[0][1:]
        row.mul_(3)
        return states.recurrent[0] + x

    def view_before(self, x: torch.Tensor, states: States) -> Any:
        row = states.recurrent[0][:2].sum()
        states.recurrent[0].mul_(3)
        return row + states.recurrent[0][:2].sum() + x


ORDERS = ["replaced", "method", "in_place", "unused", "handed_on", "buffer", "view", "view_before"]


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("optimized", [False, True], ids=["captured", "optimized"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_reads_and_writes_keep_their_order(kind: str, optimized: bool, shared: bool):
    """The object may hold a buffer of the model itself."""
    model = Order(kind).eval()
    call = (torch.randn(3, 4), _started())
    if optimized:
        passes = ["eliminate_common_subexpressions", "fold_constants", "eliminate_dead_code"]
        fast = fxopt.optimize(model, passes, example_inputs=call, measure=False)
    else:
        program = capture_program(copy.deepcopy(model), call)
        assert program.opaque == {}
        fast = program.model
    for _ in range(2):
        mine, theirs, x = _started(), _started(), torch.randn(3, 4)
        for states, each in ((mine, fast), (theirs, model)):
            states.__dict__.update(vars(copied_object(call[1], torch.clone)))
            if shared:
                states.recurrent[0] = each.get_buffer("shared")
        for _ in range(2):
            given, expected = fast(x, mine), model(x, theirs)
            torch.testing.assert_close(given, expected)
            torch.testing.assert_close(list(tensors_within(mine)), list(tensors_within(theirs)))
            assert any(given is t for t in tensors_within(mine)) == any(expected is t for t in tensors_within(theirs))
        torch.testing.assert_close(fast.get_buffer("shared"), model.get_buffer("shared"))
