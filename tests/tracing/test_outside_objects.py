"""What forwards read from objects of a module's globals, and set on them, under other names and in their methods."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxopt
from fxopt.tracing.captured import capture_of
from fxopt.tracing.outside_reads import OutsideReads

X, KEPT = torch.linspace(-1, 1, 12).reshape(3, 4), torch.zeros(1)


class Settings:
    def __init__(self) -> None:
        self.calls: Any = 0
        self.scale: Any = 2.0
        self.last: Any = None
        self.flag: Any = True
        self.inner = types.SimpleNamespace(scale=2.0, calls=0)
        self.seen: list[Any] = []

    def bump(self) -> None:
        self.calls += 1

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale

    def __enter__(self) -> Settings:
        return self

    def __exit__(self, *error: object) -> None:
        self.last = None

    @property
    def doubled(self) -> float:
        return self.scale * 2


class Slotted:
    __slots__ = ("calls", "scale")

    def __init__(self) -> None:
        self.calls: Any = 0
        self.scale: Any = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0
    calls: int = 0


class Answering(Settings):
    """Has an answer for whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return vars(self)["scale"]


class Guarded(Settings):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class Making(dict[str, Any]):
    """Makes anew what is asked for."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


SETTINGS, SLOTTED, FROZEN, ANSWERING, GUARDED = Settings(), Slotted(), Frozen(), Answering(), Guarded()
EACH, BY_NAME, SPACE = (Settings(), Settings()), {"one": Settings()}, types.SimpleNamespace(scale=2.0, calls=0)
MAKING, ORDERED, FOUND = Making(one=Settings), collections.OrderedDict(one=Settings()), {KEPT}
EVERY = (SETTINGS, *EACH, BY_NAME["one"], ORDERED["one"], ANSWERING, GUARDED)


@pytest.fixture(autouse=True)
def _as_at_start() -> Iterator[None]:
    yield
    for settings in EVERY:
        vars(settings).clear()
        settings.__init__()
    SLOTTED.__init__()
    FROZEN.__init__()
    vars(SPACE).update(scale=2.0, calls=0)


def _scaled(x: Tensor, by: Any) -> Tensor:
    return x * by.scale


def _renamed(self: Any, x: Tensor) -> Tensor:
    settings = SETTINGS
    return x * settings.scale


def _renamed_slots(self: Any, x: Tensor) -> Tensor:
    settings = SLOTTED
    return x * settings.scale


def _renamed_space(self: Any, x: Tensor) -> Tensor:
    settings = SPACE
    return x * settings.scale


def _renamed_inside(self: Any, x: Tensor) -> Tensor:
    inner = SETTINGS.inner
    return x * inner.scale


def _renamed_frozen(self: Any, x: Tensor) -> Tensor:
    settings = FROZEN
    return x * settings.scale


def _looped(self: Any, x: Tensor) -> Tensor:
    for settings in EACH:
        x = x * settings.scale
    return x


def _closing_over(settings: Settings) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, x: settings.scaled(x)


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "another name": _renamed,
    "another name, slots": _renamed_slots,
    "another name, of no class of Python": _renamed_space,
    "another name, of what it holds": _renamed_inside,
    "another name, frozen": _renamed_frozen,
    "walrus": lambda self, x: x * (settings := SETTINGS).scale * settings.scale,
    "loop": _looped,
    "item": lambda self, x: x * EACH[1].scale,
    "key": lambda self, x: x * BY_NAME["one"].scale,
    "key in order": lambda self, x: x * ORDERED["one"].scale,
    "argument": lambda self, x: _scaled(x, SETTINGS),
    "method": lambda self, x: SETTINGS.scaled(x),
    "method that is handed on": lambda self, x: functools.reduce(lambda y, f: f(y), [SETTINGS.scaled], x),
    "property": lambda self, x: x * SETTINGS.doubled,
    "call": lambda self, x: SETTINGS(x),
    "dictionary": lambda self, x: x * vars(SETTINGS)["scale"],
    "getattr": lambda self, x: x * getattr(SETTINGS, "sca" + "le"),
    "default": lambda self, x: x * getattr(SETTINGS, "option", 1.0),
    "any name": lambda self, x: x * ANSWERING.whatever,
}


def change() -> None:
    for settings in EVERY:
        settings.scale, settings.option, settings.inner.scale = 9.0, 9.0, 9.0
    SLOTTED.scale = SPACE.scale = 9.0
    object.__setattr__(FROZEN, "scale", 9.0)


def model_of(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return type("Direct", (nn.Module,), {"forward": forward})()


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "captured": lambda model: fxopt.capture(model, (X,)).model,
    "deepcopied": lambda model: copy.deepcopy(fxopt.capture(model, (X,)).model),
    "optimized": lambda model: fxopt.optimize(model, "eliminate_dead_code", example_inputs=(X,), measure=False),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("forward", READS.values(), ids=READS)
def test_what_is_read_of_an_object_is_guarded(forward: Any, way: Callable[[nn.Module], nn.Module]) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        x.exp()  # for a pass to take out
        return forward(self, x)

    model = model_of(run)
    fast = way(model)
    assert capture_of(fast).variants and not capture_of(fast).resting
    before = model(X)
    assert torch.equal(fast(X), before) and not capture_of(fast).misses
    change()
    for _ in range(3):
        assert torch.equal(fast(X), model(X))
    assert not torch.equal(before, model(X))


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SETTINGS.scaled(x)


def test_pickles_ask_too() -> None:
    fast = pickle.loads(pickle.dumps(fxopt.capture(Scaled(), (X,)).model))
    assert torch.equal(fast(X), X * 2) and not capture_of(fast).misses
    change()
    assert torch.equal(fast(X), X * 9)


def test_only_what_is_read_is_guarded() -> None:
    model = model_of(lambda self, x: SETTINGS.scaled(x))
    (variant,) = capture_of(fxopt.capture(model, (X,)).model).variants
    assert [guard.reason for guard in variant.guards if "SETTINGS" in guard.reason] == ["SETTINGS.scale is 2.0"] * 2


def test_what_an_object_that_is_closed_over_holds() -> None:
    fast = fxopt.capture(model_of(_closing_over(EACH[0])), (X,)).model
    assert torch.equal(fast(X), X * 2) and not capture_of(fast).misses
    change()
    assert torch.equal(fast(X), X * 9)


def test_what_is_taken_from_an_object_is_taken_again() -> None:
    fast = fxopt.capture(model_of(_after(lambda x: vars(SETTINGS).pop("option", None))), (X,)).model
    assert capture_of(fast).variants
    for _ in range(3):
        SETTINGS.option = 1
        assert torch.equal(fast(X), X + 1)
        assert "option" not in vars(SETTINGS)


def _grows(self: Any, x: Tensor) -> Tensor:
    for settings in LONGER:
        x = x * settings.scale
    return x


LONGER = [Settings()]


def test_a_longer_list_of_objects_is_noticed() -> None:
    fast = fxopt.capture(model_of(_grows), (X,)).model
    assert torch.equal(fast(X), X * 2) and not capture_of(fast).misses
    LONGER.append(Settings())
    try:
        assert torch.equal(fast(X), X * 4)
    finally:
        del LONGER[1:]


def test_objects_that_a_container_makes_are_as_they_were() -> None:
    program = fxopt.capture(model_of(lambda self, x: MAKING["one"].scaled(x)), (X,))
    assert not program.opaque and torch.equal(program.model(X), X * 2)


def _counts(counter: Any) -> None:
    counter.calls += 1


def _renamed_set(self: Any, x: Tensor) -> Tensor:
    settings = SETTINGS
    settings.calls += 1
    return x + 1


def _slot_set(self: Any, x: Tensor) -> Tensor:
    settings = SLOTTED
    settings.calls += 1
    return x + 1


def _space_set(self: Any, x: Tensor) -> Tensor:
    space = SPACE
    space.calls += 1
    return x + 1


def _inside_set(self: Any, x: Tensor) -> Tensor:
    inner = SETTINGS.inner
    inner.calls += 1
    return x + 1


def _looped_set(self: Any, x: Tensor) -> Tensor:
    for settings in EACH:
        settings.calls += 1
    return x + 1


def _with_set(self: Any, x: Tensor) -> Tensor:
    with SETTINGS as settings:
        settings.calls += 1
        return x + 1


def _dictionary_set(self: Any, x: Tensor) -> Tensor:
    vars(SETTINGS)["calls"] += 1
    return x + 1


def _tensor_set(self: Any, x: Tensor) -> Tensor:
    settings = SETTINGS
    settings.last = x
    return x + 1


def _after(done: Callable[[Tensor], object]) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        done(x)
        return x + 1

    return forward


STORES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "another name": _renamed_set,
    "slot": _slot_set,
    "of no class of Python": _space_set,
    "object in an object": _inside_set,
    "loop": _looped_set,
    "with": _with_set,
    "dictionary": _dictionary_set,
    "tensor": _tensor_set,
    "method": _after(lambda x: SETTINGS.bump()),
    "argument": _after(lambda x: _counts(SETTINGS)),
    "setattr": _after(lambda x: setattr(SETTINGS, "calls", len(x))),
    "list": _after(lambda x: SETTINGS.seen.append(x)),
    "table": _after(lambda x: BY_NAME.update(one=x)),
    "table in order": _after(lambda x: ORDERED.update(one=x)),
    "set": _after(lambda x: FOUND.add(x)),
    "its own way of setting": _after(lambda x: GUARDED.bump()),
}


def state() -> list[Any]:
    """Return what the objects hold: tensors and objects by their kind."""
    spaces = [vars(settings) for settings in EVERY] + [vars(SPACE), vars(SETTINGS.inner)]
    held = [value for space in spaces for value in space.values()] + [SLOTTED.calls, *SETTINGS.seen, len(FOUND)]
    held += [*BY_NAME.values(), *ORDERED.values()]
    return [str(value) if isinstance(value, (int, list)) else type(value) for value in held]


@pytest.fixture(autouse=True)
def _tables_as_at_start() -> Iterator[None]:
    one, other = BY_NAME["one"], ORDERED["one"]
    yield
    BY_NAME["one"], ORDERED["one"] = one, other
    FOUND.intersection_update({KEPT})


@pytest.mark.parametrize("forward", STORES.values(), ids=STORES)
def test_a_forward_that_changes_an_object_is_left_alone(forward: Any) -> None:
    program = fxopt.capture(model_of(forward), (X,))
    assert "not the module's" in program.opaque[""].reason
    assert fx.Proxy not in {kind for held in state() if isinstance(held, type) for kind in held.__mro__}


@pytest.mark.parametrize("forward", STORES.values(), ids=STORES)
def test_what_a_trace_changed_is_put_back(forward: Any) -> None:
    module = model_of(forward)
    reads = OutsideReads(module)
    assert not reads.put_back()
    before = state()
    with reads.watching():
        module(X)
    assert state() != before
    assert "not the module's" in reads.put_back()
    assert state() == before


def _sets_what_is_there(self: Any, x: Tensor) -> Tensor:
    settings = SETTINGS
    settings.flag = True
    return x + 1


def test_what_is_there_already_is_set_again_where_it_is_not() -> None:
    fast = fxopt.capture(model_of(_sets_what_is_there), (X,)).model
    assert capture_of(fast).variants
    for _ in range(3):
        SETTINGS.flag = False
        assert torch.equal(fast(X), X + 1)
        assert SETTINGS.flag is True


def test_classes_are_as_they_were_after_a_trace() -> None:
    kinds = (Settings, Slotted, Frozen, Answering, Guarded)
    before = [dict(vars(kind)) for kind in kinds]
    for forward in (*READS.values(), *STORES.values()):
        fxopt.capture(model_of(forward), (X,))
    assert [dict(vars(kind)) for kind in kinds] == before


def test_a_trace_that_raises_gives_classes_back() -> None:
    before = dict(vars(Settings))

    def fails(self: Any, x: Tensor) -> Tensor:
        assert SETTINGS.scale == 2.0
        assert "__getattribute__" in vars(Settings)
        raise KeyError("none")

    reads = OutsideReads(module := model_of(fails))
    with pytest.raises(KeyError, match="none"), reads.watching():
        module(X)
    assert dict(vars(Settings)) == before


class OfClass(nn.Module):
    """A module that reads from an object which its class holds, by another name."""

    settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        settings = self.settings
        return x * settings.scale


class CountsOnClass(OfClass):
    def forward(self, x: Tensor) -> Tensor:
        settings = self.settings
        settings.calls += 1
        return x * settings.scale


def test_objects_that_a_class_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (OfClass, CountsOnClass):
        monkeypatch.setattr(kind, "settings", Settings())
        program = fxopt.capture(kind(), (X,))
        assert bool(program.opaque) is (kind is CountsOnClass)
        kind.settings.scale, kind.settings.calls = 3.0, 0
        torch.testing.assert_close(program.model(X), X * 3.0)
        assert kind.settings.calls == (kind is CountsOnClass)
