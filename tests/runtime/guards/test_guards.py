"""Guards are values: they compare, hash, pickle and are rewritten, and the text that they become says the same."""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxopt
from fxopt.runtime.graphs import capture_of
from fxopt.runtime.guards import (
    NOT_HELD,
    SELF,
    Applied,
    Argument,
    Attribute,
    Check,
    Constant,
    Dictionary,
    Equals,
    Globals,
    Guard,
    Has,
    Is,
    IsNot,
    Item,
    Known,
    Lacks,
    Method,
    Source,
    SourceWriter,
    Truth,
    attribute_at,
    constant,
    equal,
    exactly,
    fits,
    is_tensor,
    item_of,
    key_of,
    length_of,
    module_at,
    of_class,
    reader,
    same_type,
    type_of,
)
from fxopt.runtime.values import Absent

X = Argument("x")
SETTING = 3

NAMES: dict[str, Any] = {
    "self": SimpleNamespace(training=True, scale=2.0, parts=(1, 2), inner=SimpleNamespace(name="a", training=False)),
    "x": (1, (2, 3), "text", {"key": 4, "other": None}),
    "n": 5,
    "t": torch.zeros(3, 4),
}
_PLAIN = st.sampled_from([None, True, False, 0, 1, 2, -1, 5, 1.0, 2.5, "key", "text", (2, 3), [1, 2], {"a": 1}, {3}])


_IDENTITIES = st.sampled_from([X, Known(int), key_of(None), key_of(True), Attribute(SELF, "inner")])
"""What is the same object each time that it is read."""


def _sources() -> st.SearchStrategy[Source]:
    leaves = st.one_of(st.sampled_from(sorted(NAMES)).map(Argument), _PLAIN.map(_constant), st.just(Globals(__name__)))

    def grown(inner: st.SearchStrategy[Source]) -> st.SearchStrategy[Source]:
        names = st.sampled_from(["training", "scale", "parts", "inner", "name", "shape", "0", "lambda"])
        keys = st.sampled_from([0, 1, -1, "key", "other", "SETTING"]).map(key_of)
        return st.one_of(
            st.builds(Attribute, inner, names),
            st.builds(Item, inner, st.one_of(keys, inner)),
            st.builds(Dictionary, inner),
            inner.map(length_of),
            inner.map(type_of),
            st.builds(lambda source: Applied(operator.neg, (source,)), inner),
            st.builds(
                lambda function, one, other: Applied(function, (one, other)),
                st.sampled_from([operator.add, operator.sub, operator.mod, operator.lt, operator.eq]),
                inner,
                inner,
            ),
            st.builds(Method, inner, st.sampled_from(["size", "dim"]), st.sampled_from([(), (key_of(0),)])),
        )

    return st.recursive(leaves, grown, max_leaves=6)


def _constant(value: Any) -> Constant:
    found = constant(value)
    assert found is not None
    return found


def _guards() -> st.SearchStrategy[Guard]:
    keys = st.sampled_from([0, "key"]).map(key_of)
    checks: st.SearchStrategy[Check] = st.one_of(
        _PLAIN.map(_constant).map(Equals),
        _IDENTITIES.map(Is),
        _IDENTITIES.map(IsNot),
        st.booleans().map(Truth),
        keys.map(Has),
        keys.map(Lacks),
    )
    return st.builds(Guard, _sources(), checks)


class _Names:
    """Hand out names as generated code does."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

        self._count = itertools.count()

    def fresh(self, hint: str) -> str:
        return f"_{hint}_{next(self._count)}"

    def name(self, value: object) -> str:
        name = self.fresh("object")
        self.objects[name] = value
        return name


def _as_text(guards: list[Guard]) -> str:
    """Return what the text of guards answers: "True", "False", or the error that it raises."""
    names = _Names()
    lines, answer = fits(guards, SourceWriter(guards, names.fresh, names.name))
    space = {**names.objects, **NAMES}
    try:
        exec("\n".join([*lines, f"answer = bool({answer})"]), space)
    except Exception as error:
        return type(error).__name__
    return str(space["answer"])


def _as_values(guards: list[Guard]) -> str:
    try:
        return str(all(guard.holds(NAMES) for guard in guards))
    except Exception as error:
        return type(error).__name__


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # None[0]
@settings(max_examples=400, deadline=None)
@given(st.lists(_guards(), min_size=1, max_size=4))
def test_the_text_of_guards_says_what_they_say(guards: list[Guard]) -> None:
    assert _as_text(guards) == _as_values(guards)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@settings(max_examples=200, deadline=None)
@given(st.lists(_guards(), min_size=1, max_size=3), st.lists(_guards(), min_size=1, max_size=3))
def test_what_is_read_twice_means_the_same(one: list[Guard], other: list[Guard]) -> None:
    guards = [guard for guard in (*one, *other, *one) if guard.holds(NAMES)]
    assert not guards or _as_text(guards) == "True"


@settings(max_examples=200, deadline=None)
@given(_guards())
def test_copies_are_equal(guard: Guard) -> None:
    for copied in (pickle.loads(pickle.dumps(guard)), copy.deepcopy(guard), guard.over({}), guard.over({X: X})):
        assert copied == guard and hash(copied) == hash(guard) and str(copied) == str(guard)
        assert _as_values([copied]) == _as_values([guard])


@settings(max_examples=200, deadline=None)
@given(_guards())
def test_another_argument_takes_the_place_of_one(guard: Guard) -> None:
    moved = guard.over({SELF: Attribute(Argument("holder"), "held")})
    assert SELF not in moved.sources()
    names = {**NAMES, "holder": SimpleNamespace(held=NAMES["self"])}
    del names["self"]
    assert moved.holds(names) is guard.holds(NAMES)


def test_equal_conditions_are_one_whatever_their_reasons() -> None:
    one, other = Guard(X, Equals(key_of(1)), "here"), Guard(X, Equals(key_of(1)), "there")
    assert one == other and {one: 1} == {other: 1}


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ([1], [True]), ((1,), [1]), ("1", 1)])
def test_constants_that_python_takes_for_equal_are_not(one: Any, other: Any) -> None:
    assert constant(one) != constant(other)
    assert constant(one) == constant(copy.deepcopy(one))


def test_constants_do_not_change_with_what_they_were_made_of() -> None:
    value = [1, 2]
    guard = equal(X, value, "")
    value.append(3)
    assert guard is not None and guard.holds({"x": [1, 2]}) and not guard.holds({"x": [1, 2, 3]})


@pytest.mark.parametrize("value", [object(), float("nan"), [float("nan")], torch.zeros(2), list(range(100)), nn.Module])
def test_what_has_no_spelling_is_no_constant(value: Any) -> None:
    assert constant(value) is None and equal(X, value, "") is None


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1, 2.5, float("inf"), -0.0, "a'b", b"\0", torch.float16, torch.strided, torch.channels_last,
        torch.device("cpu"), torch.device("cuda", 1), torch.Size((2, 3)), (1,), (), [], {}, set(), {"a": [1, {2}]},
    ],
)  # fmt: skip
def test_constants_are_written_as_what_they_are(value: Any) -> None:
    guard = equal(Argument("n"), value, "")
    assert guard is not None
    names = _Names()
    spelled = guard.check.parts[0].text(_Writer(names))
    back = eval(spelled, dict(names.objects))
    assert back == value and str(back) == str(tuple(value) if isinstance(value, torch.Size) else value)


class _Writer:
    def __init__(self, names: _Names) -> None:
        self.name = names.name

    def __call__(self, source: Source) -> str:
        return source.text(self)


@pytest.mark.parametrize(
    ("guard", "text"),
    [
        (Guard(Item(Attribute(X, "shape"), key_of(1)), Equals(key_of(3))), "x.shape[1] == 3"),
        (Guard(X, Is(Known(Absent))), "x is Absent"),
        (Guard(X, IsNot(key_of(None))), "x is not None"),
        (Guard(attribute_at("layers.0.training"), Truth(False)), "not self.layers[0].training"),
        (Guard(attribute_at("lambda"), Truth(True)), "getattr(self, 'lambda')"),
        (Guard(item_of(Dictionary(Attribute(SELF, "config")), "width"), Equals(key_of(2))), "self.config.width == 2"),
        (Guard(Dictionary(SELF), Lacks(key_of("extra"))), "'extra' not in self.__dict__"),
        (Guard(X, Has(key_of("mask"))), "'mask' in x"),
        (Guard(item_of(Globals(__name__), "SETTING"), Equals(key_of(3))), "SETTING == 3"),
        (Guard(Applied(torch.is_grad_enabled, ()), Truth(True)), "torch.is_grad_enabled()"),
        (Guard(Applied(operator.pow, (key_of(-1), X)), Equals(key_of(1))), "((-1) ** x) == 1"),
        (Guard(Attribute(X, "dtype"), Equals(_constant(torch.float16))), "x.dtype == torch.float16"),
        (Guard(Attribute(X, "device"), Equals(_constant(torch.device("cpu")))), "x.device == torch.device('cpu')"),
        (same_type(X, {}, ""), "type(x) is dict"),
        (of_class(X, SimpleNamespace, ""), "type(x).__qualname__ == 'SimpleNamespace'"),
        (is_tensor(X, False, ""), "not isinstance(x, torch.Tensor)"),
    ],
)
def test_guards_are_printed_as_people_read_them(guard: Guard, text: str) -> None:
    assert str(guard) == text


@pytest.mark.parametrize("error", NOT_HELD)
def test_guards_that_cannot_be_asked_do_not_hold(error: type[Exception]) -> None:
    class Refuses:
        @property
        def shape(self) -> Any:
            raise error

    assert not Guard(Attribute(X, "shape"), IsNot(key_of(3))).holds({"x": Refuses()})


def test_modules_are_found_at_their_paths() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.ReLU()]))
    assert reader({"self": model})(module_at(["1", "0"])) is model[1][0]


class Counting:
    """Counts how often its attribute is read."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def shape(self) -> tuple[int, int]:
        self.count += 1
        return 2, 3


def test_what_several_guards_read_is_read_once() -> None:
    shape = Attribute(X, "shape")
    guards = [
        Guard(item_of(shape, 0), Equals(key_of(2))),
        Guard(length_of(shape), Equals(key_of(2))),
        Guard(Applied(operator.add, (item_of(shape, 0), item_of(shape, 1))), Equals(key_of(5))),
    ]
    names = _Names()
    lines, answer = fits(guards, SourceWriter(guards, names.fresh, names.name))
    space: dict[str, Any] = {**names.objects, "x": Counting()}
    exec("\n".join([*lines, f"answer = {answer}"]), space)
    assert space["answer"] is True and space["x"].count == 1


class Hidden(nn.Module):
    def forward(self, x: Tensor, type: int, len: list[Tensor], torch: str = "a", isinstance: Any = None) -> Tensor:
        return x * type + len[0]


def test_arguments_may_have_the_names_that_guards_use() -> None:
    x = torch.ones(2)
    fast = fxopt.capture(Hidden(), (x, 2, [x])).model
    assert capture_of(fast) is not None
    assert torch.equal(fast(x, 2, [x]), x * 3)
    assert torch.equal(fast(x, 3, [x * 2]), x * 5)


class Sized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_captured_models_keep_their_guards(copied: Callable[[nn.Module], nn.Module]) -> None:
    fast = fxopt.capture(Sized(), (torch.ones(2),)).model
    before, after = capture_of(fast), capture_of(copied(fast))
    assert before is not None and after is not None
    assert after.specializations[0].guards == before.specializations[0].guards
    assert "((x.shape[0] % 2) == 0)" in map(str, before.specializations[0].guards)
    assert [guard.reason for guard in after.specializations[0].guards] == [
        g.reason for g in before.specializations[0].guards
    ]


def test_numbers_in_short_tuples_are_told_apart_by_their_types() -> None:
    guards = exactly(X, (2, 0, "a", None))
    assert [str(guard) for guard in guards] == [
        "x == (2, 0, 'a', None)", "type(x) is tuple", "type(x[0]) is int", "type(x[1]) is int",
    ]  # fmt: skip
    same = [all(guard.holds({"x": value}) for guard in guards) for value in [(2, 0, "a", None), (2.0, 0, "a", None)]]
    assert same == [True, False]
    assert not all(guard.holds({"x": (2, False, "a", None)}) for guard in guards)
    assert not all(guard.holds({"x": torch.Size((2, 0))}) for guard in exactly(X, (2, 0)))
