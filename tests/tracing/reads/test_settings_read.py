"""Guards on what a configuration holds ask its dictionary, and still see whatever a read of the attribute would."""

from __future__ import annotations

import pickle
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import capture_of, misses_in

switch = False


class Inner:
    def __init__(self, shift: float = 1.0) -> None:
        self.shift = shift


class Config:
    """Maps names to others, as configurations of language models do, and may refuse to be read."""

    names = types.MappingProxyType({"width": "n_width"})
    default = 3.0

    def __init__(self) -> None:
        self.n_width, self._kind, self.default, self.a, self.b = 2.0, "plain", 3.0, None, 5.0
        self.text = "self.config.__dict__['a'] == 1 and 'x' not in self.config.__dict__"
        self.inner = Inner()

    def __getattribute__(self, name: str) -> Any:
        held = super().__getattribute__("__dict__")
        if held.get("refused") == name:
            raise RuntimeError(f"{name} is refused")
        return super().__getattribute__(super().__getattribute__("names").get(name, name))

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def first(self) -> float:
        return self.b if self.a is None else self.a

    @property
    def switched(self) -> float:
        return self.b if switch else self.n_width


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        x = x * config.width + config.default + config.first * config.switched + config.inner.shift
        x = x if config.text.startswith("self") else -x
        return x.sin() if config.kind == "plain" else x.cos()


X = torch.randn(3, 4)


def set_mapped(net: Net) -> None:
    net.config.n_width = 7.0


def set_behind_property(net: Net) -> None:
    net.config._kind = "other"


def set_what_is_preferred(net: Net) -> None:
    net.config.a = 1.0


def uncover_default(net: Net) -> None:
    del net.config.default


def set_text(net: Net) -> None:
    net.config.text = "other"


def set_inner(net: Net) -> None:
    net.config.inner.shift = 2.0


def exchange_inner(net: Net) -> None:
    class Mapped(Inner):
        def __getattribute__(self, name: str) -> Any:
            return 9.0 if name == "shift" else super().__getattribute__(name)

    net.config.inner = Mapped()


CHANGES = [
    set_mapped, set_behind_property, set_what_is_preferred, uncover_default, set_text, set_inner, exchange_inner,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen_through_maps_and_properties(change):
    plain, fast = Net(), fxopt.capture(Net(), (X,)).model
    assert torch.equal(fast(X), plain(X))
    assert not misses_in(fast.modules())
    change(plain)
    change(fast)
    assert torch.equal(fast(X), plain(X))
    assert misses_in(fast.modules())


def test_a_property_that_asks_elsewhere_is_asked(monkeypatch):
    plain, fast = Net(), fxopt.capture(Net(), (X,)).model
    monkeypatch.setattr(f"{__name__}.switch", True)
    assert torch.equal(fast(X), plain(X))


def test_a_refusal_that_comes_later_is_raised():
    fast = fxopt.capture(Net(), (X,)).model
    fast.config.refused = "width"
    with pytest.raises(RuntimeError, match="width is refused"):
        fast(X)
    fast.config.refused = "nothing"
    assert torch.equal(fast(X), Net()(X))


def test_reasons_name_attributes():
    specialization = capture_of(fxopt.capture(Net(), (X,)).model).specializations[0]
    reasons = {str(guard): guard.reason for guard in specialization.guards}
    assert reasons["self.config.width == 2.0"] == "self.config.width is 2.0"
    assert reasons["self.config.b == 5.0"] == "self.config.b is 5.0"
    assert reasons["self.config.inner.shift == 1.0"] == "self.config.inner.shift is 1.0"


def test_a_guard_that_cannot_be_asked_is_a_miss():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return x + getattr(self.inner, "shift", 4.0)

    fast = fxopt.capture(Reads(), (X,)).model
    assert torch.equal(fast(X), X + 1)
    del fast.inner.shift
    assert torch.equal(fast(X), X + 4)
    assert [miss.calls for miss in misses_in(fast.modules())] == [1]


read: list[str] = []


class Counted:
    """Notes what is read of it through its class."""

    def __init__(self, attention: str = "sdpa") -> None:
        self._attention, self.scale, self.own = attention, 2.0, Inner()

    def __getattribute__(self, name: str) -> Any:
        if name[:2] != "__":
            read.append(name)
        return super().__getattribute__(name)

    @property
    def attention(self) -> str:
        return self._attention

    @property
    def inner(self) -> Inner:
        return self.own

    @property
    def width(self) -> float:
        return self.scale if self._attention == "sdpa" else 1.0


class Reads(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.config = name, Counted()

    def forward(self, x: Tensor) -> Tensor:
        value = getattr(self.config, self.name)
        return x.sin() if value == "sdpa" else x * (value.shift if isinstance(value, Inner) else value)


@pytest.mark.parametrize(("name", "asked"), [("attention", []), ("inner", []), ("scale", []), ("width", ["width"])])
def test_only_properties_that_compute_are_asked_again(name: str, asked: list[str]):
    fast = fxopt.capture(Reads(name), (X,)).model
    read.clear()
    fast(X)
    assert read[: len(asked)] == asked
    assert bool(read) == bool(asked)
    assert not misses_in(fast.modules())


class Elsewhere:
    """Gives what is kept elsewhere, whatever the object holds."""

    value: float | None = None

    def __get__(self, holder: Any, cls: Any) -> Any:
        return self if holder is None else Elsewhere.value

    def __set__(self, holder: Any, value: Any) -> None: ...


@pytest.mark.parametrize("shadow", [Elsewhere(), property(lambda self: Elsewhere.value)])
def test_an_item_behind_a_descriptor_is_not_what_is_read(shadow: Any, monkeypatch: pytest.MonkeyPatch):
    kind = type("Shadowed", (), {"value": shadow})
    plain, fast = Reads("value"), Reads("value")
    for net in (plain, fast):
        net.config = kind()
        vars(net.config)["value"] = 1.0
    monkeypatch.setattr(Elsewhere, "value", 1.0)
    fast = fxopt.capture(fast, (X,)).model
    vars(fast.config)["value"] = 1.0
    monkeypatch.setattr(Elsewhere, "value", 3.0)
    assert torch.equal(fast(X), plain(X))


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.functions, self.by_name = [torch.relu, F.silu], {"last": F.gelu}

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return self.by_name["last"](x) + x


def test_functions_in_containers_are_compared():
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    fast = fxopt.optimize(nn.Sequential(Activated(), Activated()), "flatten_calls", example_inputs=x, measure=False)
    loaded = pickle.loads(pickle.dumps(fast))
    for model in (fast, loaded):
        expected = nn.Sequential(Activated(), Activated())
        torch.testing.assert_close(model(x), expected(x))
        assert not misses_in(model)
        for each in (model, expected):
            each[0].functions[1] = torch.cos
        torch.testing.assert_close(model(x), expected(x))
        for each in (model, expected):
            each[1].by_name["last"] = torch.sin
        torch.testing.assert_close(model(x), expected(x))
