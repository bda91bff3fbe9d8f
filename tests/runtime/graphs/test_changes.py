"""Whatever changes in a model that runs from one graph is seen by its guards, and nothing of it is held."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_models import Stack
from torch import Tensor, nn

import fxopt

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Config:
    def __init__(self, scale: float) -> None:
        self.scale, self.shifts = scale, [1.0, 2.0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.config = Config(2.0)
        self.factors = [1.0, 0.5]
        self.shift = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x) * self.config.scale + self.shift
        if len(self.config.shifts) == 2 and self.config.shifts[1] == 2:
            x = x + 1
        for factor in self.factors:
            x = x * factor
        return x


def stack() -> Any:
    torch.manual_seed(0)
    model = Stack(Layer() for _ in range(6))
    with torch.no_grad():
        model(torch.randn(16, 8))
    return model.eval()


def flat(model: nn.Module) -> Any:
    return fxopt.optimize(model, "flatten_calls", example_inputs=X, measure=False)


def same(one: nn.Module, other: nn.Module) -> None:
    with torch.no_grad():
        assert torch.equal(one(X), other(X))


def _hooked(model: Any) -> None:
    model.blocks[2].body[0].register_forward_hook(lambda module, args, result: result + 1)


def _hooked_directly(model: Any) -> None:
    model.blocks[2].body[2]._forward_hooks[77] = lambda module, args, result: result + 1


def _other_attributes(model: Any) -> None:
    model.blocks[3].config.__dict__ = {"scale": 3.0, "shifts": [1.0, 3.0]}


def _other_class(model: Any) -> None:
    model.blocks[4].body[2].__class__ = nn.Tanh


CHANGES: dict[str, Callable[[Any], object]] = {
    "hook": _hooked,
    "hook put there directly": _hooked_directly,
    "configuration": lambda model: setattr(model.blocks[1].config, "scale", 3.0),
    "other configuration": lambda model: setattr(model.blocks[1], "config", Config(3.0)),
    "other attributes": _other_attributes,
    "in a list of the configuration": lambda model: model.blocks[1].config.shifts.__setitem__(1, 3.0),
    "longer list of the configuration": lambda model: model.blocks[1].config.shifts.append(3.0),
    "in a list": lambda model: model.blocks[0].factors.__setitem__(1, 3.0),
    "longer list": lambda model: model.blocks[0].factors.append(3.0),
    "number": lambda model: setattr(model.blocks[5], "shift", 2.0),
    "number's type": lambda model: setattr(model.blocks[5], "shift", 1),
    "setting of a layer": lambda model: setattr(model.blocks[5].body[1], "eps", 0.5),
    "class": _other_class,
    "child": lambda model: model.blocks[4].body.__setitem__(2, nn.Tanh()),
    "one more": lambda model: model.blocks[4].body.append(nn.Tanh()),
    "one less": lambda model: model.blocks.__delitem__(5),
    "mode": lambda model: model.blocks[0].body[1].train(),
    "forward": lambda model: setattr(model.blocks[0].body[2], "forward", torch.tanh),
    "numbers": lambda model: model.blocks[0].body[0].weight.data.mul_(2),
    "parameter": lambda model: setattr(model.blocks[0].body[0], "weight", nn.Parameter(torch.ones(8, 8))),
    "no parameter": lambda model: setattr(model.blocks[0].body[0], "bias", None),
    "registry": lambda model: model.blocks[0].body[0]._parameters.__setitem__("weight", nn.Parameter(torch.eye(8))),
    "buffer": lambda model: setattr(model.blocks[5].body[1], "running_mean", torch.ones(8)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str) -> None:
    model = stack()
    fast = flat(model)
    for _ in range(3):
        same(fast, model)
    for each in (fast, model):
        CHANGES[change](each)
    for _ in range(3):
        same(fast, model)


def test_what_changes_again_and_again_and_back() -> None:
    model = stack()
    fast = flat(model)
    for number in range(20):
        for each in (fast, model):
            each.blocks[1].config.scale = float(number % 3)
            each.blocks[0].body[0].weight = nn.Parameter(torch.full((8, 8), number / 20))
        same(fast, model)
        same(fast, model)


def test_calls_with_other_tensors() -> None:
    model = stack()
    fast = flat(model)
    for _ in range(3):
        same(fast, model)
    others = {name: torch.randn_like(each) for name, each in model.named_parameters()}
    with torch.no_grad():
        found, expected = (torch.func.functional_call(each, others, X) for each in (fast, model))
    assert torch.equal(found, expected)
    same(fast, model)


def test_copies_stand_by_themselves() -> None:
    model = stack()
    fast = flat(model)
    same(fast, model)
    other = copy.deepcopy(fast)
    same(other, model)
    with torch.no_grad():
        other.blocks[0].body[0].weight.zero_()
        other.blocks[1].config.scale = 5.0
    assert not torch.equal(other(X), fast(X))
    same(fast, model)


def test_a_model_that_ran_can_be_freed() -> None:
    fast = flat(stack())
    fast(X)
    gone = weakref.ref(fast.blocks[0].body[0].weight)
    del fast
    gc.collect()
    assert gone() is None


def test_a_copy_goes_while_the_first_stays() -> None:
    fast = flat(stack())
    for _ in range(3):
        fast(X)
    other = copy.deepcopy(fast)
    for _ in range(3):
        other(X)
    gone = [weakref.ref(other), weakref.ref(other.blocks[0].body[0].weight)]
    del other
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_of_a_model_that_ran_give_the_same(copied: Callable[[Any], Any]) -> None:
    model = stack()
    fast = flat(model)
    for _ in range(3):
        same(fast, model)
    same(copied(fast), model)


def test_a_copy_that_was_given_all_attributes_asks_for_itself() -> None:
    model = stack()
    fast = flat(model)
    for _ in range(3):
        same(fast, model)
    other = nn.Module.__new__(type(fast))
    vars(other).update(vars(fast), _modules={"blocks": nn.ModuleList([*fast.blocks[:5], nn.Identity()])})
    for _ in range(3):
        with torch.no_grad():
            assert not torch.equal(other(X), fast(X))
        same(fast, model)


def test_what_was_replaced_goes_with_the_next_call() -> None:
    fast = flat(stack())
    fast(X)
    gone = weakref.ref(fast.blocks[0].body[0].weight)
    fast.blocks[0].body[0].weight = nn.Parameter(torch.ones(8, 8))
    fast(X)
    gc.collect()
    assert gone() is None


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.kept.sum() + self.passing.sum()


class Noticing(Counting):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value + 1 if name == "kept" else value)


@pytest.mark.parametrize("kind", [Counting, Noticing])
def test_buffers_are_set_as_torch_does(kind: type[nn.Module]) -> None:
    model: Any = kind().eval()
    fast: Any = fxopt.optimize(model, "fold_batchnorm", example_inputs=X, measure=False)
    program: Any = fxopt.capture(model, X)
    for each in (model, fast, program.model):
        each.kept, each.passing = torch.ones(2), torch.ones(2)
        each.passing = torch.full((2,), 3.0)
        assert set(each.state_dict()) == {"linear.weight", "linear.bias", "kept"}
    same(fast, model)
    same(program.model, model)
