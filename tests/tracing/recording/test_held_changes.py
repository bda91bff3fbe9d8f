"""Tensors that a module holds unregistered and changes in place: nothing is left in them of calls that fxopt makes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxopt

X = torch.arange(1.0, 9.0).reshape(2, 4)


class Steps(nn.Module):
    """Counts its calls in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.steps = torch.ones(4)

    def forward(self, x):
        self.steps.add_(1)
        return x * self.steps


class Listed(nn.Module):
    """Counts in a tensor in a dictionary in a list."""

    def __init__(self):
        super().__init__()
        self.held = [{"steps": torch.zeros(4)}]

    def forward(self, x):
        steps = self.held[0]["steps"]
        steps += x[0]
        return x - steps


class Returns(nn.Module):
    """Gives the tensor itself."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(4)

    def forward(self, x):
        return self.total.add_(x[0])


class ThroughData(nn.Module):
    """Goes past the count of changes, and reads an expanded tensor, which nobody could write to."""

    def __init__(self):
        super().__init__()
        self.steps = torch.ones(4)
        self.half = torch.full((1,), 0.5).expand(4)

    def forward(self, x):
        self.steps.data.mul_(2)
        return x * self.steps * self.half.data


class Calls(nn.Module):
    """Calls a module of which each call changes what the next one gives, once for nothing."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def forward(self, x):
        self.child(x)
        return self.child(x) + self.child(x)


KINDS = (Steps, Listed, Returns, ThroughData)
MODELS = [*((kind.__name__, kind) for kind in KINDS), *((f"calls {k.__name__}", lambda k=k: Calls(k())) for k in KINDS)]


@pytest.mark.parametrize("make", [make for _, make in MODELS], ids=[name for name, _ in MODELS])
@pytest.mark.parametrize("passes", [[], ["eliminate_common_subexpressions", "fold_constants", "eliminate_dead_code"]])
def test_the_first_call_is_the_first(make, passes):
    model = make().eval()
    fast = fxopt.optimize(copy.deepcopy(model), passes=passes, example_inputs=(X,))
    for _ in range(3):
        assert torch.equal(fast(X), model(X))


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_that_was_given_is_left_as_it_was(kind):
    model, untouched = kind(), kind()
    fxopt.optimize(model, passes=["eliminate_dead_code"], example_inputs=(X,))
    assert torch.equal(model(X), untouched(X))
