"""What a node is computed from, and what else is reached from it."""

from __future__ import annotations

import torch
from torch import fx

from fxopt.operators import reached, upwards


def test_each_thing_once_and_the_nearest_first() -> None:
    following = {1: [2, 3, 3], 2: [4], 3: [4, 1], 4: [1]}
    assert list(reached([1], following.__getitem__)) == [1, 2, 3, 4]
    assert list(reached([4, 3, 4], following.__getitem__)) == [4, 3, 1, 2]
    assert list(reached([], following.__getitem__)) == []


def test_what_is_not_asked_for_is_not_looked_at() -> None:
    def following(number: int) -> list[int]:
        if number > 2:
            raise AssertionError("too far")
        return [number + 1]

    assert any(number == 3 for number in reached([1], following))


def test_what_a_node_is_computed_from() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    squared = graph.call_function(torch.square, (x,))
    result = graph.call_function(torch.add, (squared, x))
    graph.call_function(torch.neg, (y,))
    assert list(upwards(result)) == [result, squared, x]
    assert set(upwards(y)) == {y}
