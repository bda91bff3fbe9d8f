"""Plain values that a forward reads from outside the modules: no graph outlives them."""

from __future__ import annotations

import argparse
import copy
import gc
import pickle
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import capture_of, misses_in
from fxopt.runtime.guards import cells_of
from fxopt.tracing.reads import OutsideReads

X = torch.linspace(-1, 1, 12).reshape(3, 4)

SCALE: Any = 2.0
FLAG: Any = False
NAME: Any = "tanh"
NOTHING: Any = None
DTYPE: Any = torch.float32
SIZES: Any = [1, 2]
TABLE: Any = {"bias": 3, "on": True}
COUNT = 0
LOG: list[int] = [0]
NAMESPACE = argparse.Namespace(depth=2)
NESTED: Any = [(2, "a")]


class Settings:
    shared = 5

    def __init__(self) -> None:
        self.factor = 4.0
        self.inner = types.SimpleNamespace(depth=2)


class Slotted:
    __slots__ = ("calls", "depth")
    calls: int
    depth: int


class Counter:
    count: Any = 0


SETTINGS, SLOTTED, COUNTER = Settings(), Slotted(), Counter()
SLOTTED.calls = SLOTTED.depth = 0
START: dict[str, Any] = {
    "SCALE": 2.0, "FLAG": False, "NAME": "tanh", "NOTHING": None, "DTYPE": torch.float32, "SIZES": [1, 2],
    "TABLE": {"bias": 3, "on": True}, "COUNT": 0, "NESTED": [(2, "a")],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_at_start() -> Iterator[None]:
    yield
    globals().update(copy.deepcopy(START))
    SETTINGS.__init__()
    Settings.shared, Holder.amount, Base.base = 5, 6, 7
    Child.extra = 8
    LOG[:] = [0]
    Holder.calls[:] = [0]
    vars(COUNTER).clear()
    Counter.count, NAMESPACE.depth, SLOTTED.calls, SLOTTED.depth = 0, 2, 0, 0


def _helped(x: Tensor) -> Tensor:
    return _deeper(x) + 1


def _deeper(x: Tensor) -> Tensor:
    return x * SCALE


class Child(nn.Module):
    extra: Any = 8

    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.extra


class Base(nn.Module):
    base: Any = 7


class Holder(Base):
    amount: Any = 6
    calls: ClassVar[list[int]] = [0]

    def __init__(self) -> None:
        super().__init__()
        self.child = Child()

    def shift(self, x: Tensor) -> Tensor:
        return x + SCALE

    def counted(self, x: Tensor) -> Tensor:
        COUNTER.count += 1
        return x

    @property
    def doubled(self) -> float:
        return SCALE * 2


def change(**values: Any) -> Callable[[], None]:
    return lambda: globals().update(values)


def _looped(self: Any, x: Tensor) -> Tensor:
    def step(y: Tensor) -> Tensor:
        return y * SCALE

    return step(step(x))


def _of_type(self: Any, x: Tensor) -> Tensor:
    return x * type(self).amount


def _of_class(self: Any, x: Tensor) -> Tensor:
    return x * self.__class__.amount


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], None]]] = {
    "float": (lambda self, x: x * SCALE, change(SCALE=3.0)),
    "other type": (lambda self, x: (x * 9).int() * SCALE, change(SCALE=2)),
    "not finite": (lambda self, x: x * SCALE, change(SCALE=float("nan"))),
    "flag": (lambda self, x: x if FLAG else -x, change(FLAG=True)),
    "text": (lambda self, x: getattr(x, NAME)(), change(NAME="exp")),
    "none": (lambda self, x: x if NOTHING is None else -x, change(NOTHING=0)),
    "type": (lambda self, x: x.to(DTYPE), change(DTYPE=torch.float64)),
    "list": (lambda self, x: x * SIZES[0], lambda: SIZES.__setitem__(0, 9)),
    "other type in a list": (lambda self, x: (x * 9).int() * SIZES[1], lambda: SIZES.__setitem__(1, 2.0)),
    "other type in a tuple": (lambda self, x: (x * 9).int() * NESTED[0][0], change(NESTED=[(2.0, "a")])),
    "namespace": (lambda self, x: x * NAMESPACE.depth, lambda: setattr(NAMESPACE, "depth", 9)),
    "slot": (lambda self, x: x * SLOTTED.depth, lambda: setattr(SLOTTED, "depth", 9)),
    "longer list": (lambda self, x: x * len(SIZES), lambda: SIZES.append(9)),
    "table": (lambda self, x: x + TABLE["bias"], lambda: TABLE.update(bias=9)),
    "helper": (lambda self, x: _helped(x), change(SCALE=3.0)),
    "method": (lambda self, x: self.shift(x), change(SCALE=3.0)),
    "property": (lambda self, x: x * self.doubled, change(SCALE=3.0)),
    "inner function": (_looped, change(SCALE=3.0)),
    "object": (lambda self, x: x * SETTINGS.factor, lambda: setattr(SETTINGS, "factor", 9.0)),
    "object's class": (lambda self, x: x * SETTINGS.shared, lambda: setattr(Settings, "shared", 9)),
    "object in an object": (lambda self, x: x * SETTINGS.inner.depth, lambda: setattr(SETTINGS.inner, "depth", 9)),
    "named class": (lambda self, x: x * Holder.amount, lambda: setattr(Holder, "amount", 9)),
    "its own class": (lambda self, x: x * self.amount, lambda: setattr(Holder, "amount", 9)),
    "type of self": (_of_type, lambda: setattr(Holder, "amount", 9)),
    "class of self": (_of_class, lambda: setattr(Holder, "amount", 9)),
    "base class": (lambda self, x: x * self.base, lambda: setattr(Base, "base", 9)),
    "class of a child": (lambda self, x: x * self.child.extra, lambda: setattr(Child, "extra", 9)),
    "in a child's method": (lambda self, x: self.child.scaled(x), lambda: setattr(Child, "extra", 9)),
}
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "captured": lambda model: fxopt.capture(model, (X,)).model,
    "deepcopied": lambda model: copy.deepcopy(fxopt.capture(model, (X,)).model),
    "optimized": lambda model: fxopt.optimize(model, "eliminate_dead_code", example_inputs=(X,), measure=False),
    "twice": lambda model: fxopt.optimize(
        fxopt.optimize(model, "eliminate_dead_code", example_inputs=(X,), measure=False),
        "eliminate_dead_code", example_inputs=(X,), measure=False,
    ),
}  # fmt: skip


def holder(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        x.exp()  # for a pass to take out
        return forward(self, x)

    return type("Holding", (Holder,), {"forward": run})()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_value_that_changes(case: Any, way: Callable[[nn.Module], nn.Module]) -> None:
    forward, changed = case
    model = holder(forward)
    fast = way(model)
    assert capture_of(fast).specializations and not capture_of(fast).inactive
    before = model(X)
    assert torch.equal(fast(X), before) and not capture_of(fast).misses
    changed()
    for _ in range(3):
        given, expected = fast(X), model(X)
        torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
    assert before.dtype is not expected.dtype or not torch.equal(before, expected)


class Scaled(Holder):
    def forward(self, x: Tensor) -> Tensor:
        x.exp()
        return _helped(x) * self.amount


def test_pickles_ask_too() -> None:
    fast = pickle.loads(pickle.dumps(fxopt.capture(Scaled(), (X,)).model))
    assert torch.equal(fast(X), Scaled()(X)) and not capture_of(fast).misses
    globals()["SCALE"] = 3.0
    assert torch.equal(fast(X), Scaled()(X))


def test_the_graph_comes_back_with_the_value() -> None:
    fast = fxopt.capture(Scaled(), (X,)).model
    for value, missed in ((2.0, 0), (3.0, 1), (2.0, 1), (3.0, 2)):
        globals()["SCALE"] = value
        assert torch.equal(fast(X), Scaled()(X))
        assert sum(miss.calls for miss in misses_in(fast.modules())) == missed


def closed_over(scale: float) -> tuple[nn.Module, Callable[[float], None]]:
    class Closing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return Closing(), change


def test_an_attribute_of_what_a_forward_closes_over() -> None:
    def closing(settings: Any) -> Callable[[Any, Tensor], Tensor]:
        return lambda self, x: x * settings.factor

    fast = fxopt.capture(direct(closing(SETTINGS)), (X,)).model
    assert torch.equal(fast(X), X * 4) and not capture_of(fast).misses
    SETTINGS.factor = 5.0
    assert torch.equal(fast(X), X * 5)


def test_what_a_forward_closes_over() -> None:
    model, change = closed_over(2.0)
    fast = fxopt.capture(model, (X,)).model
    assert torch.equal(fast(X), X * 2) and capture_of(fast).specializations
    change(5.0)
    assert torch.equal(fast(X), X * 5)
    assert torch.equal(fast(X), X * 5) and sum(miss.calls for miss in misses_in(fast.modules())) == 2


def _global(self: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return x + 1


def _item(self: Any, x: Tensor) -> Tensor:
    LOG[0] += 1
    return x + 1


def _method_of_a_list(self: Any, x: Tensor) -> Tensor:
    LOG.append(1)
    return x + 1


def _slice(self: Any, x: Tensor) -> Tensor:
    LOG[:] = [LOG[0] + 1]
    return x + 1


def _tensor(self: Any, x: Tensor) -> Tensor:
    global NOTHING
    NOTHING = x
    return x + 1


def _of_object(self: Any, x: Tensor) -> Tensor:
    COUNTER.count += 1
    return x + 1


def _of_named_class(self: Any, x: Tensor) -> Tensor:
    Counter.count = Counter.count + 1
    return x + 1


def _of_own_type(self: Any, x: Tensor) -> Tensor:
    type(self).amount += 1
    return x + 1


def _of_own_class(self: Any, x: Tensor) -> Tensor:
    self.__class__.amount += 1
    return x + 1


def _held_by_class(self: Any, x: Tensor) -> Tensor:
    self.calls.append(1)
    return x + 1


def _item_held_by_class(self: Any, x: Tensor) -> Tensor:
    self.calls[0] += 1
    return x + 1


def _of_a_slot(self: Any, x: Tensor) -> Tensor:
    SLOTTED.calls += 1
    return x + 1


def _of_a_namespace(self: Any, x: Tensor) -> Tensor:
    NAMESPACE.depth += 1
    return x + 1


def _inside(self: Any, x: Tensor) -> Tensor:
    def count() -> None:
        COUNTER.count += 1

    count()
    return x + 1


def _by_helper(self: Any, x: Tensor) -> Tensor:
    return _of_object(self, x)


def _by_method(self: Any, x: Tensor) -> Tensor:
    return self.counted(x)


def _of_a_named_type(self: Any, x: Tensor) -> Tensor:
    cls = type(self)
    cls.amount += 1
    return x + 1


STORES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Any], str]] = {
    "global": (_global, lambda model: COUNT, "COUNT"),
    "item": (_item, lambda model: LOG[0], "LOG"),
    "method of a list": (_method_of_a_list, lambda model: len(LOG), "LOG"),
    "slice": (_slice, lambda model: LOG[0], "LOG"),
    "object": (_of_object, lambda model: COUNTER.count, "COUNTER.count"),
    "class": (_of_named_class, lambda model: Counter.count, "Counter.count"),
    "type of self": (_of_own_type, lambda model: type(model).amount, "its class.amount"),
    "class of self": (_of_own_class, lambda model: type(model).amount, "its class.amount"),
    "held by its class": (_held_by_class, lambda model: len(model.calls), "self.calls"),
    "item held by its class": (_item_held_by_class, lambda model: model.calls[0], "self.calls"),
    "slot": (_of_a_slot, lambda model: SLOTTED.calls, "SLOTTED.calls"),
    "namespace": (_of_a_namespace, lambda model: NAMESPACE.depth, "NAMESPACE.depth"),
    "inner function": (_inside, lambda model: COUNTER.count, "COUNTER.count"),
    "helper": (_by_helper, lambda model: COUNTER.count, "COUNTER.count"),
    "method": (_by_method, lambda model: COUNTER.count, "COUNTER.count"),
    "class under another name": (_of_a_named_type, lambda model: type(model).amount, "amount of its class"),
}


def direct(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return type("Direct", (Holder,), {"forward": forward})()


@pytest.mark.parametrize(("forward", "read", "told"), STORES.values(), ids=STORES)
def test_a_forward_that_sets_what_is_outside_is_left_alone(forward: Any, read: Callable[[Any], int], told: str) -> None:
    program = fxopt.capture(direct(forward), (X,))
    assert f"it sets a value outside the module: {told}" == program.opaque[""].reason
    before = read(program.model)
    program.model(X)
    assert read(program.model) == before + 1


def test_the_line_that_sets_is_told() -> None:
    line = _of_object.__code__.co_firstlineno + 1
    assert fxopt.capture(direct(_by_helper), (X,)).opaque[""].location == f"test_outside_reads.py:{line}"


def test_no_proxy_stays_in_a_global() -> None:
    program = fxopt.capture(direct(_tensor), (X,))
    assert "NOTHING" in program.opaque[""].reason
    assert type(NOTHING) is Tensor


def test_what_a_forward_closes_over_and_sets() -> None:
    calls = 0

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return x + 1

    program = fxopt.capture(Counts(), (X,))
    assert "calls" in program.opaque[""].reason
    before = calls
    program.model(X)
    assert calls == before + 1


def _sets_its_own(self: Any, x: Tensor) -> Tensor:
    rows, self.last = [0], x
    rows[0] += 1
    rows.append(2)
    table = {}
    table["x"] = x
    held = self.child
    held.seen = x
    total = 0

    def add(value: int) -> None:
        nonlocal total
        total += value

    add(rows[0])
    return table["x"] + total


def test_what_a_forward_makes_itself_it_may_set() -> None:
    module = direct(_sets_its_own)
    assert "" not in fxopt.capture(module, (X,)).opaque


def _of_constants(self: Any, x: Tensor) -> Tensor:
    return x * SCALE * COUNT


def test_capitals_of_installed_code_are_constants() -> None:
    code = _of_constants.__code__.replace(co_filename="/lib/site-packages/package/model.py")
    installed = types.FunctionType(code, globals(), "forward")
    read = {guard.reason for guard in OutsideReads(direct(_of_constants)).guards(())}
    assert read == {"SCALE is 2.0", "COUNT is 0"}
    assert not list(OutsideReads(direct(installed)).guards(()))


def test_forwards_that_close_over_their_class_are_not_kept() -> None:
    class Local(Base):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    assert not cells_of(Local())
    left = weakref.ref(Local)
    del Local
    gc.collect()
    assert left() is None


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * SCALE


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


def test_what_members_read_is_asked_for_where_they_are_fused() -> None:
    model = Heads()
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(X,), measure=False)
    assert "fused" in str(fxopt.graphs(fast)[""])
    torch.testing.assert_close(fast(X), model(X))
    globals()["SCALE"] = 3.0
    for _ in range(3):
        torch.testing.assert_close(fast(X), model(X))


def test_guards_ask_for_little() -> None:
    fast = fxopt.capture(Scaled(), (X,)).model
    outside = [guard.reason for guard in capture_of(fast).specializations[0].guards if "SCALE" in str(guard)]
    assert outside == ["SCALE is 2.0"] * 2
    assert "globals_of" not in type(fast).forward.__code__.co_names


class OfAnAbstractClass(nn.Module, Callable):
    """Its metaclass, abc.ABCMeta, sets an attribute on every class that is made of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_what_a_metaclass_sets_on_the_observing_class_was_not_set_by_the_forward() -> None:
    program = fxopt.capture(nn.Sequential(OfAnAbstractClass(), OfAnAbstractClass()), (X,))
    assert program.opaque == {}
