"""The table of operators: one row each, what schemas add, and what other packages register."""

from __future__ import annotations

import itertools
import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxopt
from fxopt.operators import (
    OpInfo,
    canonical_name,
    function_path,
    has_random_effects,
    info_of,
    mutates,
    operator_info,
    operator_of_module,
    register_operator,
    resolve,
)
from fxopt.operators.table import TABLE
from fxopt.passes.verification import Float64Mode


@torch.library.custom_op("fxopt_tests::halve", mutates_args=())
def halve(x: Tensor, factor: float = 0.5) -> Tensor:
    if x.dtype is not torch.float32:
        raise NotImplementedError("float32 only")
    return x * factor


@torch.library.custom_op("fxopt_tests::fill", mutates_args=("x",))
def fill(x: Tensor) -> Tensor:
    x.fill_(1)
    return x.clone()


torch.library.define("fxopt_tests::noise", "(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
torch.library.define("fxopt_tests::window", "(Tensor(a) x) -> Tensor(a)")
torch.library.define("fxopt_tests::tell", "(Tensor x) -> ()")


@halve.register_fake
def _(x: Tensor, factor: float = 0.5) -> Tensor:
    return torch.empty_like(x)


halve.register_autograd(
    lambda ctx, gradient: (halve(gradient, ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


def called(target: object, *args: object, **kwargs: object) -> fx.Node:
    graph = fx.Graph()
    operands = [graph.placeholder("x") if arg is Tensor else arg for arg in args]
    return graph.create_node("call_function", target, tuple(operands), dict(kwargs))


def test_each_operator_has_one_row() -> None:
    assert [name for name, count in Counter(info.name for info in TABLE).items() if count > 1] == []
    assert all(None not in (info.pure, info.random, info.fresh) for info in TABLE)


def test_what_torch_calls_random_is_random() -> None:
    aten = [name for name in dir(torch._C._VariableFunctions) if not name.startswith("_")]
    schemas = {name: operator_info(f"aten::{name}") for name in {name.rstrip("_") for name in aten}}
    random = {name for name, info in schemas.items() if info.random} - {"miopen_rnn", "rrelu_with_noise_functional"}
    assert {"dropout", "randn", "bernoulli", "lstm"} < random
    assert {name for name in random if not operator_info(name).random} - {"normal_functional"} == set()


def test_rows_agree_with_schemas() -> None:
    """What a row calls fresh, no schema calls a view."""
    known = [(info, operator_info(f"aten::{info.name}")) for info in TABLE]
    compared = [(info, schema) for info, schema in known if schema.name]
    assert len(compared) > 150
    assert [info.name for info, schema in compared if info.fresh and not schema.fresh] == []


@pytest.mark.parametrize(
    ("name", "pure", "random", "fresh"),
    [
        ("halve", True, False, True),
        ("fill", False, False, True),
        ("noise", True, True, True),
        ("window", True, False, False),
        ("tell", False, False, True),
    ],
)
def test_schemas_say_what_custom_operators_do(name: str, pure: bool, random: bool, fresh: bool) -> None:
    info = operator_info(f"fxopt_tests::{name}")
    assert (info.pure, info.random, info.fresh) == (pure, random, fresh)
    packet = getattr(torch.ops.fxopt_tests, name)
    for target in (packet, packet.default):
        node = called(target, Tensor)
        assert canonical_name(node) == f"fxopt_tests::{name}"
        assert (mutates(node), has_random_effects(node)) == (name == "fill", random)
        assert resolve(function_path(node)) == target


def test_nothing_is_known_of_what_nobody_described() -> None:
    info = operator_info("no_such_operator")
    assert (info.pure, info.random, info.elementwise) == (None, None, False)
    assert operator_info("fxopt_tests::no_such_operator") is info is operator_info(None)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.ops.aten.add.Tensor, "add"),
        (torch.ops.aten.relu_, "relu"),
        (torch.ops.aten.where.self, "where"),
        (torch.ops.aten.native_layer_norm, "aten::native_layer_norm"),
        (operator.imul, "mul"),
        (F.softmax, "softmax"),
        (print, None),
    ],
)
def test_names_of_functions(target: object, name: str | None) -> None:
    assert canonical_name(called(target, Tensor)) == name


@pytest.mark.parametrize(
    ("node", "written"),
    [
        (lambda: called(torch.ops.aten.add_.Tensor, Tensor, 1), True),
        (lambda: called(torch.ops.aten.add.Tensor, Tensor, 1), False),
        (lambda: called(torch.ops.aten.add, Tensor, 1), False),
        *((lambda of=of: called(of, Tensor, Tensor), False) for of in (operator.and_, operator.or_, operator.add)),
        (lambda: called(operator.iand, Tensor, Tensor), True),
        (lambda: called(torch.relu_, Tensor), True),
        (lambda: called(torch.ops.aten.sin.out, Tensor, out=Tensor), True),
        (lambda: called(torch.ops.aten.sin, Tensor, out=Tensor), True),
    ],
)
def test_what_operators_of_torch_ops_write(node: object, written: bool) -> None:
    assert mutates(node()) is written


def test_where_of_one_operand_gives_places() -> None:
    alone, chosen = called(torch.where, Tensor), called(torch.where, Tensor, Tensor, 0.0)
    assert [canonical_name(each) for each in (alone, chosen)] == ["where"] * 2
    assert [(info_of(each).shape, info_of(each).elementwise) for each in (alone, chosen)] == [
        ("data", False), ("operands", True),
    ]  # fmt: skip
    assert info_of(called(torch.where, condition=Tensor)).name == "nonzero"


def test_attention_without_dropout_draws_nothing() -> None:
    arguments = (Tensor, Tensor, Tensor)
    assert not has_random_effects(called(F.scaled_dot_product_attention, *arguments))
    assert has_random_effects(called(F.scaled_dot_product_attention, *arguments, dropout_p=0.1))
    assert has_random_effects(called(F.dropout, Tensor)) and not has_random_effects(called(F.dropout, Tensor, 0.0))
    assert not has_random_effects(called(F.dropout, Tensor, 0.5, False))
    assert not has_random_effects(called(torch.ops.aten.dropout.default, Tensor, 0.5, False))


def test_recurrent_layers_draw_where_they_drop_out_in_training() -> None:
    def lstm(dropout: float, train: bool) -> fx.Node:
        return called(torch.ops.aten.lstm.input, Tensor, [], [], True, 2, dropout, train, False, True)

    assert has_random_effects(lstm(0.5, True))
    assert not has_random_effects(lstm(0.5, False)) and not has_random_effects(lstm(0.0, True))


# -- registration --------------------------------------------------------------------------------------------------


class Halve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return halve(x)


class Uses(nn.Module):
    """Calls the operator in vain, and reads it twice."""

    def forward(self, x: Tensor) -> Tensor:
        halve(x)
        return halve(x) + torch.ops.fxopt_tests.halve(x).relu() + halve(x).relu()


def test_a_custom_operator_without_side_effects_is_removed_and_merged() -> None:
    fast = fxopt.optimize(
        Uses(), "eliminate_dead_code,eliminate_common_subexpressions", example_inputs=(torch.randn(3),), verify=False
    )
    assert str(fxopt.graphs(fast)[""]).count("call_function[target=torch.ops.fxopt_tests.halve") == 2


class Tells(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        fill(x.clone())
        return x * 1


def test_a_custom_operator_that_writes_stays() -> None:
    fast = fxopt.optimize(Tells(), "eliminate_dead_code", example_inputs=(torch.randn(3),))
    assert "fxopt_tests.fill" in str(fxopt.graphs(fast)[""])


def test_registered_operators_are_known_until_they_are_removed() -> None:
    registration = register_operator(
        OpInfo("fxopt_tests::halve", modules=(Halve,), elementwise=True, notes=(Uses, "a note"))
    )
    info = operator_info("fxopt_tests::halve")
    assert info.elementwise and info.pure and not info.random and info.fresh
    assert info.note(str) == "a note" and info.note(int) is None
    assert operator_of_module(Halve) == "fxopt_tests::halve"
    registration.remove()
    registration.remove()
    assert not operator_info("fxopt_tests::halve").elementwise
    assert operator_of_module(Halve) is None


def test_an_operator_is_described_once() -> None:
    registration = register_operator(OpInfo("fxopt_tests::halve", modules=(Halve,)))
    try:
        with pytest.raises(fxopt.UsageError, match=r"'fxopt_tests::halve' is already in the table"):
            register_operator(OpInfo("fxopt_tests::halve", elementwise=True))
        with pytest.raises(fxopt.UsageError, match=r"'fxopt_tests::fill' cannot have .*Halve.* 'fxopt_tests::halve'"):
            register_operator(OpInfo("fxopt_tests::fill", modules=(Halve,)))
        assert not operator_info("fxopt_tests::halve").elementwise
    finally:
        registration.remove()


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (OpInfo("relu"), "'relu' is already in the table"),
        (OpInfo("rectify", aliases=("relu",)), "'rectify' cannot have .*'relu'"),
        (OpInfo("fxopt_tests::missing"), "torch.ops has no operator 'fxopt_tests::missing'"),
        (OpInfo(""), "needs a name"),
    ],
)
def test_what_cannot_be_registered(info: OpInfo, reason: str) -> None:
    with pytest.raises(fxopt.UsageError, match=reason):
        register_operator(info)


def test_the_order_of_registrations_does_not_matter() -> None:
    infos = [OpInfo("fxopt_tests::halve", elementwise=True), OpInfo("fxopt_tests::noise", vectorizable=True)]
    known = []
    for order in itertools.permutations(infos):
        registrations = list(map(register_operator, order))
        known.append([operator_info(info.name) for info in infos])
        for registration in registrations:
            registration.remove()
    assert known[0] == known[1]


def test_a_reference_stands_in_where_there_is_no_float64_kernel() -> None:
    x = torch.randn(3, dtype=torch.float64)
    with pytest.raises(NotImplementedError), Float64Mode():
        halve(x)
    registration = register_operator(OpInfo("fxopt_tests::halve", reference=lambda x, factor=0.5: x.float() * factor))
    try:
        mode = Float64Mode()
        with mode:
            result = halve(x)
        assert mode.promoted and torch.equal(result, x * 0.5)
        fast = fxopt.optimize(Uses(), "eliminate_common_subexpressions", example_inputs=(torch.randn(3),))
        assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    finally:
        registration.remove()


def test_an_operator_says_how_its_result_lies_in_memory() -> None:
    known = {name: operator_info(name).memory_order for name in ("relu", "conv2d", "linear", "view", "acme::unknown")}
    assert known == {"relu": "kept", "conv2d": "kept", "linear": "anew", "view": None, "acme::unknown": None}
    assert OpInfo("acme::swish", elementwise=True).memory_order == "kept"
    assert OpInfo("acme::gathered", order="anew").memory_order == "anew"
