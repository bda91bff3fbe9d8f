"""What a forward reads of its module and arguments, and finds otherwise later: the graph must not be stale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.tracing.fallback import misses_in


class AsksWhatIsThere(nn.Module):
    """Asks for what it has not, or has as None: a parameter, a buffer, a child, an attribute."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(6, 6), 2.0
        self.register_parameter("shift", None)
        self.register_buffer("mask", None)
        self.add_module("last", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.gain
        y = y if self.shift is None else y + self.shift
        y = y if self.mask is None else y * self.mask
        y = y if self.last is None else self.last(y)
        return y * getattr(self, "absent", 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("shift", nn.Parameter(torch.ones(6))), ("mask", torch.zeros(6)), ("last", nn.Tanh()), ("absent", 3.0)],
)
def test_what_was_missing_may_be_set_later(name, value):
    model, x = AsksWhatIsThere(), torch.randn(3, 6)
    fast = fxopt.capture(model, (x,)).model
    setattr(model, name, value)
    setattr(fast, name, value)
    torch.testing.assert_close(fast(x), model(x))


def test_an_attribute_may_be_deleted():
    model, x = AsksWhatIsThere(), torch.randn(3, 6)
    fast = fxopt.capture(model, (x,)).model
    del model.gain, fast.gain
    torch.testing.assert_close(fast(x), model(x))
    assert "attribute 'gain' was deleted after capture" in [miss.guard for miss in misses_in(fast)]


class JoinsItems(nn.Module):
    def forward(self, parts: dict[str, Tensor]) -> Tensor:
        return torch.cat(list(parts.values()), -1)


def test_the_order_of_a_dictionary_is_part_of_a_call():
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    fast = fxopt.capture(JoinsItems(), ({"a": a, "b": b},)).model
    assert torch.equal(fast({"b": b, "a": a}), torch.cat([b, a], -1))
    assert torch.equal(fast({"a": a, "b": b}), torch.cat([a, b], -1))
