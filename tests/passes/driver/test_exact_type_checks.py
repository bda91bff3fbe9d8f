"""Forwards that ask a module for its exact class never find the one that a rewritten module has."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Site
from fxopt.runtime.graphs import capture_of
from fxopt.tracing.program import capture_program

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
OTHER_CALLS = (X[0], X.double(), torch.randn(2, 3, 4))


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.exp()  # dead code, for a pass to take out
        return x + 1


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.exp()
        return x * 3


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Plus()
        self.deep = nn.Sequential(nn.Sequential(Plus(), Times()))
        self.ask = lambda module: type(module) is Plus

    def is_plus(self, module: nn.Module) -> bool:
        return type(module) is Plus


SHIFTS = {Plus: 0, Times: 100}


def _asked(module: nn.Module) -> object:
    return type(module)


def by_comparison(self: Any, x: Tensor) -> Tensor:
    return self.child(x) if type(self.child) is Plus else self.child(x) - 100


def by_membership(self: Any, x: Tensor) -> Tensor:
    return self.child(x) if type(self.child) in (Plus, Times) else self.child(x) - 100


def by_equal_classes(self: Any, x: Tensor) -> Tensor:
    return self.child(x) if type(self.child) == type(self.deep[0][0]) else self.child(x) - 100  # noqa: E721


def by_attribute(self: Any, x: Tensor) -> Tensor:
    return self.child(x) if self.child.__class__ is Plus else self.child(x) - 100


def by_dispatch(self: Any, x: Tensor) -> Tensor:
    return self.child(x) - SHIFTS.get(type(self.child), 7)


def by_helper(self: Any, x: Tensor) -> Tensor:
    return self.child(x) if _asked(self.child) is Plus else self.child(x) - 100


def by_method(self: Any, x: Tensor) -> Tensor:
    return self.child(x) if self.is_plus(self.child) else self.child(x) - 100


def by_held_function(self: Any, x: Tensor) -> Tensor:
    return self.child(x) if self.ask(self.child) else self.child(x) - 100


def by_inner_function(self: Any, x: Tensor) -> Tensor:
    def kinds() -> list[type]:
        return [type(child) for child in (self.child,)]

    return self.child(x) if kinds() == [Plus] else self.child(x) - 100


def by_map(self: Any, x: Tensor) -> Tensor:
    return self.child(x) if list(map(type, self.deep[0])) == [Plus, Times] else self.child(x) - 100


def of_grandchildren(self: Any, x: Tensor) -> Tensor:
    for layer in self.deep[0]:
        x = layer(x) if type(layer) is Plus else layer(x) - 100
    return x


FORWARDS = [
    by_comparison, by_membership, by_equal_classes, by_attribute, by_dispatch, by_helper, by_method, by_held_function,
    by_inner_function, by_map, of_grandchildren,
]  # fmt: skip


def holder(forward: Callable[..., Tensor], *, opaque: bool = False) -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        return forward(self, x.clone().requires_grad_(False))

    return type("Holding", (Holder,), {"forward": run if opaque else forward})()


def cleaned(model: nn.Module) -> nn.Module:
    return fxopt.optimize(model, "eliminate_dead_code", example_inputs=(X,), measure=False)


def rewritten(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if (c := capture_of(m)) is not None and c.rewritten]


def applied(fast: nn.Module) -> int:
    return sum(decision.status == "applied" for decision in fxopt.plan(fast).decisions)


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("opaque", [False, True])
def test_nothing_is_rewritten_inside(forward: Callable[..., Tensor], opaque: bool) -> None:
    model = holder(forward, opaque=opaque)
    fast = cleaned(model)
    refusals = [decision.reason for decision in fxopt.plan(fast).decisions if decision.status == "refused"]
    assert refusals and all("'(root)'" in reason and "checks an exact type" in reason for reason in refusals)
    assert not applied(fast) and not rewritten(fast)
    assert type(fast) is type(model) and type(fast.child) is Plus
    for x in (X, X[:2], *OTHER_CALLS):
        assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("opaque", [False, True])
def test_a_captured_model_answers_as_it_did(forward: Callable[..., Tensor], opaque: bool) -> None:
    model = holder(forward, opaque=opaque)
    fast = fxopt.capture(model, (X,)).model
    for x in (X, *OTHER_CALLS):
        assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("opaque", [False, True])
def test_deep_in_a_model(forward: Callable[..., Tensor], opaque: bool) -> None:
    model = nn.Sequential(Plus(), nn.Sequential(Times(), holder(forward, opaque=opaque)))
    fast = cleaned(model)
    assert {fast[0], fast[1][0]} <= set(rewritten(fast))
    assert not rewritten(fast[1][1])
    for x in (X, *OTHER_CALLS):
        assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("again", [copy.deepcopy, cleaned, fxopt.restore, lambda fast: fxopt.capture(fast, (X,)).model])
def test_what_is_made_of_it(forward: Callable[..., Tensor], opaque: bool, again: Callable[..., nn.Module]) -> None:
    model = holder(forward, opaque=opaque)
    other = again(cleaned(model))
    for x in (X, *OTHER_CALLS):
        assert torch.equal(other(x), model(x))


class Comparing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Plus()

    def forward(self, x: Tensor) -> Tensor:
        return by_comparison(self, x)


class ComparingWithoutGraph(Comparing):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone().requires_grad_(False))


@pytest.mark.parametrize("kind", [Comparing, ComparingWithoutGraph])
def test_pickles(kind: type[nn.Module]) -> None:
    model = kind()
    other = pickle.loads(pickle.dumps(cleaned(model)))
    for x in (X, *OTHER_CALLS):
        assert torch.equal(other(x), model(x))


class Asking(nn.Module):
    """Asks, but nothing that a class made on the fly answers otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Plus()

    def forward(self, x: Tensor) -> Tensor:
        if type(self.child) is Tensor or type(self.child) in (list, type(None)):
            raise TypeError(f"this {type(self).__name__} has a {type(self.child)}")
        if self.child.__class__.__name__ != "Plus" or not issubclass(type(self.child), Plus):
            raise TypeError(type(self.child))
        return self.child(x)


def test_harmless_questions_cost_nothing() -> None:
    model = Asking()
    fast = cleaned(model)
    assert type(fast.child) is not Plus
    assert capture_of(fast).inactive
    for x in (X, *OTHER_CALLS):
        assert torch.equal(fast(x), model(x))


def test_what_no_pass_changed_is_of_the_users_class() -> None:
    model = nn.Sequential(Asking(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    fast = cleaned(model)
    assert type(fast[0]) is Asking and type(fast[1]) is nn.Sequential
    again = cleaned(fast)
    assert type(again[0]) is Asking and type(again[1]) is nn.Sequential
    fast = fxopt.optimize(Asking(), "eliminate_common_subexpressions", example_inputs=(X,))
    assert type(fast) is Asking
    assert {**fxopt.state_dict(fast)} == {} == {**fast.state_dict()}


def test_a_forward_whose_text_is_not_to_be_had() -> None:
    names: dict[str, Any] = {"Plus": Plus}
    exec("def forward(self, x):\n    return self.child(x) if type(self.child) is Plus else x", names)
    model = type("Written", (Comparing,), {"forward": names["forward"]})()
    fast = cleaned(model)
    assert not applied(fast) and type(fast.child) is Plus
    assert torch.equal(fast(X), model(X))


def test_a_hook_that_asks() -> None:
    model = Asking()
    seen: list[bool] = []
    model.child.register_forward_hook(lambda module, *_: seen.append(type(module) is Plus))
    fast = cleaned(model)
    for x in (X, *OTHER_CALLS):
        assert torch.equal(fast(x), model(x))
    fxopt.capture(model, (X,)).model(X)
    assert len(seen) > 8 and all(seen)


def test_a_replayed_plan_is_refused_alike() -> None:
    plan = fxopt.plan(cleaned(Asking()))
    for model in (Comparing(), ComparingWithoutGraph()):
        with pytest.raises(fxopt.PlanError, match="not in this model"):
            fxopt.optimize(model, list(plan.pipeline), plan=plan)


def test_no_module_is_replaced_inside() -> None:
    program = capture_program(nn.Sequential(Comparing()), (X,))
    edit = Edit(program, Site(program, "", {}), "swap")
    with pytest.raises(fxopt.MatchFailure, match="'0': its code checks an exact type"):
        edit.replace_module("0.child", Times())
