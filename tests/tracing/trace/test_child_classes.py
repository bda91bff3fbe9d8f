"""What a forward asks of its children apart from calling them: no graph outlives another answer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_models import Stack
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import capture_of

X = torch.randn(3, 4)


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def weighted(self, x: Tensor) -> Tensor:
        return x * 5


class Times(nn.Module):
    extra = 5

    def forward(self, x: Tensor) -> Tensor:
        return x * 3

    def weighted(self, x: Tensor) -> Tensor:
        return x * 7


class Holder(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child
        self.inner = nn.Module()
        self.inner.child = child
        self.items = nn.ModuleList([nn.Linear(4, 4), child])


def _ask_elsewhere(module: nn.Module, x: Tensor) -> Tensor:
    return module(x) if type(module) is Plus else module(x) - 100


def by_isinstance(self: Any, x: Tensor) -> Tensor:
    return self.child(x) if isinstance(self.child, Plus) else self.child(x) - 100


def by_type(self: Any, x: Tensor) -> Tensor:
    child = self.child
    return child(x) if type(child) is Plus else child(x) - 100


def by_class_name(self: Any, x: Tensor) -> Tensor:
    return self.child(x) + (1 if self.child.__class__.__name__ == "Plus" else 50)


def by_hasattr(self: Any, x: Tensor) -> Tensor:
    return self.child(x) - 100 if hasattr(self.child, "extra") else self.child(x)


def by_default(self: Any, x: Tensor) -> Tensor:
    return self.child(x) + getattr(self.child, "extra", 0)


def by_method(self: Any, x: Tensor) -> Tensor:
    return self.child.weighted(x)


def by_forward(self: Any, x: Tensor) -> Tensor:
    return self.child.forward(x)


def by_helper(self: Any, x: Tensor) -> Tensor:
    return _ask_elsewhere(self.child, x)


def inside_by_isinstance(self: Any, x: Tensor) -> Tensor:
    return self.inner.child(x) if isinstance(self.inner.child, Plus) else self.inner.child(x) - 100


def inside_by_type(self: Any, x: Tensor) -> Tensor:
    child = self.inner.child
    return child(x) if type(child) is Plus else child(x) - 100


def items_by_isinstance(self: Any, x: Tensor) -> Tensor:
    for item in self.items:
        x = item(x) if isinstance(item, (nn.Linear, Plus)) else item(x) - 100
    return x


def items_by_type(self: Any, x: Tensor) -> Tensor:
    for item in self.items:
        x = item(x) if type(item) in (nn.Linear, Plus) else item(x) - 100
    return x


def items_by_type_uncalled(self: Any, x: Tensor) -> Tensor:
    return x + sum(10 for item in self.items if type(item) is Plus)


def items_by_helper(self: Any, x: Tensor) -> Tensor:
    return _ask_elsewhere(self.items[1], x)


FORWARDS = [
    by_isinstance, by_type, by_class_name, by_hasattr, by_default, by_method, by_forward, by_helper,
    inside_by_isinstance, inside_by_type, items_by_isinstance, items_by_type, items_by_type_uncalled, items_by_helper,
]  # fmt: skip


def holder(forward: Callable[..., Tensor], child: nn.Module) -> nn.Module:
    cls = type("Holder_" + forward.__name__, (Holder,), {"forward": forward})
    return cls(child)


def put(model: Any, child: nn.Module | None) -> None:
    model.child = model.inner.child = model.items[1] = child


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("pair", [(Plus, Times), (Times, Plus), (Plus, nn.Identity)])
@pytest.mark.parametrize("passes", [None, "eliminate_dead_code"])
def test_a_child_of_another_class(forward: Callable[..., Tensor], pair: Any, passes: str | None) -> None:
    if forward is by_method and nn.Identity in pair:
        pytest.skip("it has no such method")
    torch.manual_seed(0)
    first, second = (kind() for kind in pair)
    model = holder(forward, first)
    if passes is None:
        program = fxopt.capture(copy.deepcopy(model), (X,))
        assert "" not in program.opaque
        fast: Any = program.model
    else:
        fast = fxopt.optimize(model, passes, example_inputs=(X,))
    assert torch.equal(fast(X), model(X))
    for child in (second, first, second):
        put(fast, child)
        put(model, child)
        for _ in range(2):
            assert torch.equal(fast(X), model(X))


class Maybe(Holder):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1 if self.child is None else x + 2
        return x * 2 if self.inner.child is None else x * 3


@pytest.mark.parametrize("pair", [(Plus(), None), (None, Plus())])
def test_a_child_that_comes_or_goes(pair: tuple[nn.Module | None, nn.Module | None]) -> None:
    model = Maybe(Plus())
    model.child = model.inner.child = pair[0]
    fast: Any = fxopt.capture(copy.deepcopy(model), (X,)).model
    assert torch.equal(fast(X), model(X))
    for which in ("inner", ""):
        for one in (model, fast):
            one.get_submodule(which).child = pair[1]
        assert torch.equal(fast(X), model(X))
        assert torch.equal(fast(X), model(X))


class BiasOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.bias is None else x + self.layer.bias
        return x * 2 if hasattr(self.layer, "scale") else x


def test_what_a_child_gets_later() -> None:
    model = BiasOf()
    fast: Any = fxopt.capture(copy.deepcopy(model), (X,)).model
    for name, value in (("bias", nn.Parameter(torch.ones(4))), ("scale", 2), ("scale", torch.ones(1))):
        for one in (model, fast):
            setattr(one.layer, name, value)
        assert torch.equal(fast(X), model(X)), name
        for one in (model, fast):
            if name == "scale":
                delattr(one.layer, name)
        assert torch.equal(fast(X), model(X)), name


class Calls(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner.child(self.child(x))


def test_children_that_are_only_called_may_become_anything() -> None:
    model = Calls(Plus())
    fast: Any = fxopt.capture(copy.deepcopy(model), (X,)).model
    put(fast, Times())
    put(model, Times())
    assert torch.equal(fast(X), model(X))
    assert capture_of(fast).specializations and not capture_of(fast).misses
    assert all("type(" not in str(guard) for guard in capture_of(fast).specializations[0].guards)


def test_another_child_of_the_same_class_keeps_the_graph() -> None:
    model = holder(by_type, nn.Linear(4, 4))
    fast: Any = fxopt.capture(copy.deepcopy(model), (X,)).model
    child = nn.Linear(4, 4)
    put(fast, child)
    put(model, child)
    assert torch.equal(fast(X), model(X))
    assert capture_of(fast).specializations and not capture_of(fast).misses


def test_equal_blocks_of_which_one_changes() -> None:
    model = Stack(holder(by_isinstance, Plus()) for _ in range(3))
    fast: Any = fxopt.capture(copy.deepcopy(model), (X,)).model
    for one in (model, fast):
        one.blocks[1].child = Times()
    assert torch.equal(fast(X), model(X))
    assert capture_of(fast.blocks[0]).specializations and not capture_of(fast.blocks[0]).misses


def test_classes_made_on_the_fly_count_as_the_users() -> None:
    model = holder(by_isinstance, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=(X,), measure=False)
    torch.testing.assert_close(fast(X), model(X))
    assert not capture_of(fast).misses
