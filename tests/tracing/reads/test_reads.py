"""What a forward reads of its module and arguments, and finds otherwise later: the graph must not be stale."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import misses_in


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


@pytest.mark.parametrize(
    ("register", "name", "value"),
    [
        (nn.Module.register_parameter, "shift", nn.Parameter(torch.ones(6))),
        (nn.Module.register_buffer, "mask", torch.zeros(6)),
        (nn.Module.add_module, "last", nn.Tanh()),
    ],
)
def test_what_was_missing_may_be_registered_later(register, name, value):
    model, x = AsksWhatIsThere(), torch.randn(3, 6)
    fast = fxopt.capture(model, (x,)).model
    register(model, name, value)
    getattr(fast, register.__name__)(name, value)
    torch.testing.assert_close(fast(x), model(x))


def test_an_attribute_may_be_deleted():
    model, x = AsksWhatIsThere(), torch.randn(3, 6)
    fast = fxopt.capture(model, (x,)).model
    del model.gain, fast.gain
    torch.testing.assert_close(fast(x), model(x))
    assert "attribute 'gain' was deleted after capture" in [miss.guard for miss in misses_in(fast.modules())]


class JoinsItems(nn.Module):
    def forward(self, parts: dict[str, Tensor]) -> Tensor:
        return torch.cat(list(parts.values()), -1)


def test_the_order_of_a_dictionary_is_part_of_a_call():
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    fast = fxopt.capture(JoinsItems(), ({"a": a, "b": b},)).model
    assert torch.equal(fast({"b": b, "a": a}), torch.cat([b, a], -1))
    assert torch.equal(fast({"a": a, "b": b}), torch.cat([a, b], -1))


class Settings:
    """What a user keeps settings in; one value has no spelling."""

    def __init__(self) -> None:
        self.scale, self.dtype, self.kinds, self.act = 2.0, torch.float32, {"a"}, torch.relu


class HoldsSettings(nn.Module):
    """Reads plain objects, containers that hold them, and what those lack."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.own, self.listed, self.kinds = Settings(), [Settings(), 1.0], {"b"}
        self.space = types.SimpleNamespace(scale=2.0, act=torch.relu)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.own.scale * self.listed[0].scale * self.listed[1] * self.space.scale
        y = y + 1 if "a" in self.own.kinds else y
        y = y + 2 if "b" in self.kinds else y
        return (y * getattr(self.own, "bonus", 1.0)).to(self.own.dtype)


def set_in_list(model: nn.Module) -> None:
    model.listed[0].scale = 3.0


def set_item(model: nn.Module) -> None:
    model.listed[1] = 3.0


def set_in_namespace(model: nn.Module) -> None:
    model.space.scale = 3.0


def set_dtype(model: nn.Module) -> None:
    model.own.dtype = torch.float64


def set_what_was_missing(model: nn.Module) -> None:
    model.own.bonus = 3.0


def empty_own_set(model: nn.Module) -> None:
    model.kinds.clear()


def empty_inner_set(model: nn.Module) -> None:
    model.own.kinds.clear()


_CHANGES = [
    set_in_list, set_item, set_in_namespace, set_dtype, set_what_was_missing, empty_own_set, empty_inner_set,
]  # fmt: skip


@pytest.mark.parametrize("change", _CHANGES)
def test_what_is_read_inside_of_attributes_may_change(change):
    model, x = HoldsSettings(), torch.randn(3, 6)
    fast = fxopt.optimize(model, [], example_inputs=(x,))
    torch.testing.assert_close(fast(x), model(x))
    assert not misses_in(fast.modules())
    change(model)
    change(fast)
    torch.testing.assert_close(fast(x), model(x))
    assert type(fast.own) is type(fast.listed[0]) is Settings


class Scaled(nn.Linear):
    def __init__(self, scale: float) -> None:
        super().__init__(6, 6)
        self.scale = scale


class ReadsChildren(nn.Module):
    """Reads plain attributes of its children, by name and in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.heads = nn.Dropout(0.25), nn.ModuleList(Scaled(2.0) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) * head.scale for head in self.heads]).sum(0) * (1 - self.drop.p)


@pytest.mark.parametrize("passes", [[], "fuse_ensembles"])
@pytest.mark.parametrize(("child", "name"), [("drop", "p"), ("heads.3", "scale")])
def test_an_attribute_of_a_child_may_be_set(passes, child, name):
    model, x = ReadsChildren(), torch.randn(3, 6)
    fast = fxopt.optimize(model, passes, example_inputs=(x,), measure=False)
    torch.testing.assert_close(fast(x), model(x))
    assert not misses_in(fast.modules())
    for changed in (model, fast):
        setattr(changed.get_submodule(child), name, 0.5)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("number", [1.0, True])
def test_numbers_that_are_equal_but_of_other_types_are_told_apart(number: float):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(scale=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.full(x.shape, self.config.scale)

    model, x = Model(), torch.ones(3)
    captured = fxopt.capture(model, (x,)).model
    model.config.scale = captured.config.scale = number
    assert captured(x).dtype == model(x).dtype
