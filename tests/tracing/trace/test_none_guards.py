"""What a forward decides by what an object holds, and by whether it holds it at all: asked again at every call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxopt.tracing.program import capture_program


class Memory:
    def __init__(self, seen: int = 0, held: torch.Tensor | None = None) -> None:
        self.seen = seen
        self.held = [held]
        self.named: dict[str, Any] = {}
        self.part: object = Memory() if seen % 2 else object()
        if seen % 2:
            self.extra = 1

    def bump(self) -> None:
        self.seen += 1

    def get(self) -> torch.Tensor | None:
        return self.held[0]

    def both(self) -> tuple[torch.Tensor | None, int]:
        return self.held[0], self.seen

    def swap(self, x: torch.Tensor) -> torch.Tensor | None:
        before, self.held[0] = self.held[0], x
        return before


def set_then_asked(x, m):
    m.seen = m.seen + 1
    return x * 2 if m.seen == 3 else x


def called_then_asked(x, m):
    m.bump()
    return x * 2 if m.seen == 3 else x


def asked_then_called(x, m):
    seen = m.seen
    m.bump()
    return x * 2 if seen == 2 else x


def grown_then_asked(x, m):
    m.held.append(x)
    return x * 2 if len(m.held) == 2 else x


def replaced_then_asked(x, m):
    m.held[0] = x[:2]
    return x * 2 if m.held[0].shape[0] == x.shape[0] else x


def key_then_asked(x, m):
    m.named["x"] = x
    return x * 2 if "x" in m.named else x


def changed_then_computed(x, m):
    m.seen = m.seen + 1
    return x * m.seen


def method_gives_none(x, m):
    return x * 2 if m.get() is not None else x


def method_gives_none_to_add(x, m):
    held = m.get()
    return x if held is None else x + held


def item_is_none(x, m):
    return x * 2 if m.held[0] is not None else x


def part_is_none(x, m):
    held, _ = m.both()
    return x * 2 if held is not None else x


def changing_method_gives_none(x, m):
    return x * 2 if m.swap(x) is not None else x


def none_is_handed_on(x, m):
    return F.linear(x, torch.eye(3), m.held[0])


def attribute_may_be_missing(x, m):
    extra = getattr(m, "extra", None)
    return x if extra is None else x + 1


def attribute_is_asked_for(x, m):
    return x * 2 if hasattr(m, "extra") else x


def part_of_a_class(x, m):
    return x * 2 if isinstance(m.part, Memory) else x


def item_of_a_class(x, m):
    return x * 2 if isinstance(m.held[0], torch.Tensor) else x


def falsy_or_none(x, m):
    value = m.both()[1]
    if value is None:
        return x - 1
    return x * 2 if not value else x


FORWARDS = [
    set_then_asked, called_then_asked, asked_then_called, grown_then_asked, replaced_then_asked, key_then_asked,
    changed_then_computed, method_gives_none, method_gives_none_to_add, item_is_none, part_is_none,
    changing_method_gives_none, none_is_handed_on, attribute_may_be_missing, attribute_is_asked_for, part_of_a_class,
    item_of_a_class, falsy_or_none,
]  # fmt: skip
CALLS = list(itertools.product((2, 3), range(5), (None, torch.ones(3))))


@pytest.mark.parametrize("forward", FORWARDS)
def test_every_call_is_that_of_the_forward(forward: Callable[..., Any]):
    """Captured for any of the calls, the graph serves or refuses each of the others, and some of them it serves."""
    net = type("Net", (nn.Module,), {"forward": lambda self, x, m: forward(x, m)})
    for rows, seen, held in CALLS:
        program = capture_program(net(), (torch.randn(rows, 3), Memory(seen, held)))
        assert program.opaque == {}
        for rows_now, seen_now, held_now in CALLS:
            mine, theirs, x = Memory(seen_now, held_now), Memory(seen_now, held_now), torch.randn(rows_now, 3)
            assert torch.equal(program.model(x, mine), forward(x, theirs))
            assert mine.seen == theirs.seen
            assert len(mine.held) == len(theirs.held)
            assert mine.named.keys() == theirs.named.keys()
        assert program.captures[""].misses.total() < len(CALLS)
