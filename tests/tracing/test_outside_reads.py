"""Plain values that a forward reads from outside the modules: no graph outlives them."""

from __future__ import annotations

import argparse
import copy
import gc
import pickle
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.tracing import reached_code
from fxopt.tracing.captured import capture_of
from fxopt.tracing.class_questions import asks_for_classes
from fxopt.tracing.outside import cells_of
from fxopt.tracing.outside_names import single_steps
from fxopt.tracing.outside_reads import OutsideReads, guards_on
from fxopt.tracing.sources import SELF, Attribute, type_of
from fxopt.transforms.fuse_ensembles.inlining.mode_guards import child_guard, is_passed_on

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
CALLED: Any = False
OTHER: Any = object()
LAST: Any = OTHER
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
    other: Any = OTHER

    @property
    def hidden(self) -> int:
        return 0

    @hidden.setter
    def hidden(self, value: int) -> None:
        Counter.count += value


SETTINGS, SLOTTED, COUNTER = Settings(), Slotted(), Counter()
SLOTTED.calls = SLOTTED.depth = 0
START: dict[str, Any] = {
    "SCALE": 2.0, "FLAG": False, "NAME": "tanh", "NOTHING": None, "DTYPE": torch.float32, "SIZES": [1, 2],
    "TABLE": {"bias": 3, "on": True}, "COUNT": 0, "CALLED": False, "NESTED": [(2, "a")],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_at_start() -> Iterator[None]:
    yield
    globals().update(copy.deepcopy(START))
    SETTINGS.__init__()
    Settings.shared, Holder.amount, Base.base = 5, 6, 7
    Child.extra = 8
    LOG[:] = [0]
    globals().update(LAST=OTHER)
    vars(COUNTER).clear()
    Counter.count, Counter.other, NAMESPACE.depth, SLOTTED.calls, SLOTTED.depth = 0, OTHER, 2, 0, 0


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

    def __init__(self) -> None:
        super().__init__()
        self.child = Child()

    def shift(self, x: Tensor) -> Tensor:
        return x + SCALE

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
    assert capture_of(fast).variants and not capture_of(fast).resting
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
    for value, graphs in ((2.0, 1), (3.0, 2), (2.0, 2), (3.0, 2)):
        globals()["SCALE"] = value
        assert torch.equal(fast(X), Scaled()(X))
        assert len(capture_of(fast).variants) == graphs


def closed_over(scale: float) -> tuple[nn.Module, Callable[[float], None]]:
    class Closing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return Closing(), change


def test_what_a_forward_closes_over() -> None:
    model, change = closed_over(2.0)
    fast = fxopt.capture(model, (X,)).model
    assert torch.equal(fast(X), X * 2) and capture_of(fast).variants
    change(5.0)
    assert torch.equal(fast(X), X * 5)
    assert torch.equal(fast(X), X * 5) and len(capture_of(fast).variants) == 2


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return x + 1


class Appending(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        LOG[0] += 1
        return x + 1


class Remembering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global NOTHING
        NOTHING = x
        return x + 1


@pytest.mark.parametrize(("kind", "read"), [(Counting, lambda: COUNT), (Appending, lambda: LOG[0])])
def test_a_forward_that_changes_what_is_outside_is_left_alone(kind: type[nn.Module], read: Callable[[], int]) -> None:
    program = fxopt.capture(kind(), (X,))
    assert "not the module's" in program.opaque[""].reason
    before = read()
    program.model(X)
    assert read() == before + 1


def test_no_proxy_stays_in_a_global() -> None:
    program = fxopt.capture(Remembering(), (X,))
    assert "NOTHING" in program.opaque[""].reason
    assert type(NOTHING) is Tensor


@pytest.mark.parametrize(("kind", "read"), [(Counting, lambda: COUNT), (Appending, lambda: LOG[0])])
def test_what_a_trace_changed_is_put_back(kind: type[nn.Module], read: Callable[[], int]) -> None:
    module = kind()
    reads = OutsideReads(module)
    assert not reads.put_back()
    module(X)
    assert read() == 1
    assert "not the module's" in reads.put_back()
    assert read() == 0 and not reads.put_back()


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


def _of_a_slot(self: Any, x: Tensor) -> Tensor:
    SLOTTED.calls += 1
    return x + 1


def _of_a_namespace(self: Any, x: Tensor) -> Tensor:
    NAMESPACE.depth += 1
    return x + 1


def _of_a_named_type(self: Any, x: Tensor) -> Tensor:
    cls = type(self)
    cls.amount += 1
    return x + 1


def _by_helper(self: Any, x: Tensor) -> Tensor:
    return _of_object(self, x)


STORES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[nn.Module], int]]] = {
    "object": (_of_object, lambda model: COUNTER.count),
    "class": (_of_named_class, lambda model: Counter.count),
    "type of self": (_of_own_type, lambda model: type(model).amount),
    "class of self": (_of_own_class, lambda model: type(model).amount),
    "slot": (_of_a_slot, lambda model: SLOTTED.calls),
    "namespace": (_of_a_namespace, lambda model: NAMESPACE.depth),
    "class under another name": (_of_a_named_type, lambda model: type(model).amount),
    "helper": (_by_helper, lambda model: COUNTER.count),
}


def direct(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return type("Direct", (Holder,), {"forward": forward})()


@pytest.mark.parametrize(("forward", "read"), STORES.values(), ids=STORES)
def test_a_forward_that_sets_attributes_outside_is_left_alone(forward: Any, read: Callable[[Any], int]) -> None:
    program = fxopt.capture(direct(forward), (X,))
    assert "not the module's" in program.opaque[""].reason
    before = read(program.model)
    program.model(X)
    assert read(program.model) == before + 1


SEEN = {name: case for name, case in STORES.items() if name != "class under another name"}


@pytest.mark.parametrize(("forward", "read"), SEEN.values(), ids=SEEN)
def test_attributes_that_a_trace_set_are_put_back(forward: Any, read: Callable[[Any], int]) -> None:
    module = direct(forward)
    own, before = dict(vars(type(module))), read(module)
    reads = OutsideReads(module)
    assert not reads.put_back()
    module(X)
    assert read(module) == before + 1
    assert "not the module's" in reads.put_back()
    assert read(module) == before and dict(vars(type(module))) == own and not reads.put_back()


def _sets_a_constant(self: Any, x: Tensor) -> Tensor:
    global CALLED
    CALLED = True
    return x + 1


def _sets_a_constant_of_an_object(self: Any, x: Tensor) -> Tensor:
    COUNTER.count = 5
    return x + 1


CONSTANTS: dict[str, Any] = {
    "global": (_sets_a_constant, lambda: globals().update(CALLED=False), lambda: CALLED is True),
    "object": (_sets_a_constant_of_an_object, lambda: setattr(COUNTER, "count", 0), lambda: COUNTER.count == 5),
}


@pytest.mark.parametrize(("forward", "unset", "is_set"), CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_is_set_again(forward: Any, unset: Callable[[], None], is_set: Callable[[], bool]) -> None:
    fast = fxopt.capture(direct(forward), (X,)).model
    for _ in range(3):
        unset()
        assert torch.equal(fast(X), X + 1)
        assert is_set()


def _sets_an_object(self: Any, x: Tensor) -> Tensor:
    global LAST
    LAST = OTHER
    return x + 1


def _sets_an_attribute_to_an_object(self: Any, x: Tensor) -> Tensor:
    Counter.other = OTHER
    return x + 1


def _sets_a_property(self: Any, x: Tensor) -> Tensor:
    COUNTER.hidden = 0
    return x + 1


@pytest.mark.parametrize("forward", [_sets_an_object, _sets_an_attribute_to_an_object, _sets_a_property])
def test_what_may_be_set_unnoticed_is_left_alone(forward: Any) -> None:
    assert "not the module's" in fxopt.capture(direct(forward), (X,)).opaque[""].reason


def _makes_once(self: Any, x: Tensor) -> Tensor:
    global LAST
    if LAST is None:
        LAST = object()
    return x + 1


def test_what_is_made_at_the_first_call_is_no_reason() -> None:
    globals().update(LAST=None)
    assert "" not in fxopt.capture(direct(_makes_once), (X,)).opaque


def test_what_did_not_change_is_not_written() -> None:
    class Watched(dict[str, Any]):
        written = 0

        def __setitem__(self, key: str, value: Any) -> None:
            self.written += 1
            super().__setitem__(key, value)

    code = _sets_a_constant.__code__
    space = Watched(CALLED=True)
    reads = OutsideReads(direct(types.FunctionType(code, space)))
    reads.put_back()
    assert not space.written


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 2.0, [2], (1, True), None, "text"])
def test_conditions_on_classes_are_passed_on(value: Any) -> None:
    guards = guards_on(Attribute(type_of(SELF), "amount"), value, "amount")
    assert guards
    for guard in guards:
        assert is_passed_on(guard) and is_passed_on(child_guard(guard, "child.inner"))


def test_too_much_code_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module = direct(_by_helper)
    assert not asks_for_classes([module])
    monkeypatch.setattr(reached_code, "_MOST", 1)
    assert "more than 1 functions" in asks_for_classes([module])
    assert "more than 1 functions" in OutsideReads(module).put_back()


def test_steps_that_do_two_things_are_split() -> None:
    steps = [
        ("LOAD_FAST_LOAD_FAST", ("x", "self")),
        ("CACHE", None),
        ("STORE_FAST_LOAD_FAST", ("y", "self")),
        ("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("x", "y")),
        ("LOAD_FAST_CHECK", "z"),
    ]
    assert list(single_steps(steps)) == [
        ("LOAD_FAST", "x"), ("LOAD_FAST", "self"), ("STORE_FAST", "y"), ("LOAD_FAST", "self"),
        ("LOAD_FAST_BORROW", "x"), ("LOAD_FAST_BORROW", "y"), ("LOAD_FAST_CHECK", "z"),
    ]  # fmt: skip


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
    outside = [guard.reason for guard in capture_of(fast).variants[0].guards if "SCALE" in str(guard)]
    assert outside == ["SCALE is 2.0"] * 2
    assert "globals_of" not in type(fast).forward.__code__.co_names
