"""Patterns: one pattern fits every spelling of an operator, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.small_models import HeadsAndOne
from torch import Tensor, nn

import fxopt
from fxopt.compat import native_functions
from fxopt.operators import mutates, operator_of_module
from fxopt.passes.rewriting import Match, anything, either, module, operation
from fxopt.passes.sites import Site
from fxopt.tracing.program import Program


def captured(forward: Callable[..., object], *tensors: Tensor, **children: nn.Module) -> Program:
    """Return the program of a model with these children and this forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, child in children.items():
                self.add_module(name, child)
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.bias = nn.Parameter(torch.randn(3))

    Model.forward = forward
    return fxopt.capture(Model(), tensors or (torch.randn(2, 4),))


def names(program: Program, pattern: object) -> list[str]:
    """Return the matched nodes called "it"."""
    return [match["it"].name for match in program.matches(pattern)]


LINEARS = {
    "module": lambda self, x: self.layer(x),
    "functional": lambda self, x: F.linear(x, self.weight, self.bias),
    "native": lambda self, x: native_functions().linear(x, self.weight, self.bias),
    "keywords": lambda self, x: F.linear(input=x, weight=self.weight),
}


@pytest.mark.parametrize("spelling", LINEARS)
def test_linear_in_every_spelling(spelling: str) -> None:
    program = captured(LINEARS[spelling], layer=nn.Linear(4, 3))
    assert len(names(program, operation("linear", name="it"))) == 1
    assert names(program, operation("relu", name="it")) == []


RELUS = {
    "module": lambda self, x: self.layer(x),
    "F.relu": lambda self, x: F.relu(x),
    "F.relu in place": lambda self, x: F.relu(x * 1, inplace=True),
    "torch.relu": lambda self, x: torch.relu(x),
    "torch.relu_": lambda self, x: torch.relu_(x * 1),
    "F.relu_": lambda self, x: F.relu_(x * 1),
    "method": lambda self, x: x.relu(),
    "method in place": lambda self, x: (x * 1).relu_(),
}


@pytest.mark.parametrize("spelling", RELUS)
def test_relu_in_every_spelling(spelling: str) -> None:
    program = captured(RELUS[spelling], layer=nn.ReLU())
    assert len(names(program, operation("relu", name="it"))) == 1
    assert names(program, operation("gelu", name="it")) == []


ADDITIONS = {
    "operator": lambda self, x: x + x,
    "in place": lambda self, x: operator.iadd(x * 1, x),
    "torch.add": lambda self, x: torch.add(x, x),
    "method": lambda self, x: x.add(x),
    "method in place": lambda self, x: (x * 1).add_(x),
    "number first": lambda self, x: 1 + x,
}


@pytest.mark.parametrize("spelling", ADDITIONS)
def test_addition_in_every_spelling(spelling: str) -> None:
    assert len(names(captured(ADDITIONS[spelling]), operation("add", name="it"))) == 1


def test_where_as_a_method_is_not_the_function() -> None:
    program = captured(lambda self, x: (x.where(x > 0, -x), torch.where(x > 0, x, -x)))
    assert len(names(program, operation("where", name="it"))) == 1


def test_modules_are_matched_by_their_exact_class() -> None:
    class Mine(nn.Linear):
        pass

    program = captured(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), b=Mine(4, 4))
    assert names(program, module(nn.Linear, name="it")) == ["a"]
    assert names(program, module(Mine, name="it")) == ["b"]


def test_modules_keep_their_class_under_fxopt_s_own() -> None:
    fast = fxopt.optimize(
        HeadsAndOne(), "fuse_ensembles{lowering=bmm}", example_inputs=(torch.randn(2, 4),), measure=False
    )
    assert type(fast.heads[0]) is not nn.Linear
    program = Program(fast)
    assert names(program, module(nn.Linear, name="it")) == names(program, operation("linear", name="it")) == ["heads_3"]


def test_a_hooked_module_is_no_plain_operator() -> None:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda module, args, output: -output)
    program = captured(lambda self, x: self.layer(x), layer=layer)
    assert names(program, operation("relu", name="it")) == []
    assert names(program, module(nn.ReLU, name="it")) == ["layer"]


def test_operands_follow_the_dataflow() -> None:
    program = captured(
        lambda self, x: (F.relu(self.a(x)), self.b(x).relu(), torch.relu(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3)
    )
    pattern = operation("relu", operation("linear", name="linear"), name="it")
    assert [(match["it"].name, match["linear"].name) for match in program.matches(pattern)] == [
        ("relu", "a"),
        ("relu_1", "b"),
    ]


def test_nested_operands_bind_all_names_or_none() -> None:
    program = captured(lambda self, x: torch.tanh(x.sin() + x.cos()) + torch.tanh(x.sin() + x))
    pattern = operation(
        "tanh", operation("add", operation("sin", name="left"), operation("cos", name="right")), name="it"
    )
    matches = list(program.matches(pattern))
    assert [sorted(match.nodes) for match in matches] == [["it", "left", "right"]]
    assert matches[0]["left"].target == "sin"


def test_too_few_operands_do_not_fit() -> None:
    program = captured(lambda self, x: x + 1)
    assert names(program, operation("add", anything(), anything(), name="it")) == []
    assert names(program, operation("add", anything(name="x"), name="it")) == ["add"]


def test_anything_fits_every_node() -> None:
    program = captured(lambda self, x: x.sin())
    assert names(program, anything(name="it")) == ["x", "sin", "output"]


def test_a_match_gives_a_site() -> None:
    program = captured(lambda self, x: self.outer(x), outer=nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    [match] = program.matches(operation("relu", operation("linear", name="linear"), name="it"))
    site = match.site(choices=("a", "b"))
    assert isinstance(match, Match) and isinstance(site, Site)
    assert (site.owner, dict(site.nodes), site.choices) == ("outer", {"linear": "_0", "it": "_1"}, ("a", "b"))
    assert match.module("linear") is program.model.outer[0]
    assert site["it"] is match["it"]


def test_every_specialization_is_searched() -> None:
    class Modes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return torch.relu(x)
            return torch.relu(x) + 1

    program = fxopt.capture(Modes(), (torch.randn(2),))
    assert sorted(match.specialization for match in program.matches(operation("relu", name="it"))) == [0, 1]


@pytest.mark.parametrize(
    ("module_type", "name"),
    [(nn.Linear, "linear"), (nn.LeakyReLU, "leaky_relu"), (nn.GELU, "gelu"), (nn.Conv2d, "conv2d"), (nn.Module, None)],
)
def test_operators_of_modules(module_type: type[nn.Module], name: str | None) -> None:
    assert operator_of_module(module_type) == name


def test_operators_of_user_classes_are_not_guessed() -> None:
    class ReLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return -x

    assert operator_of_module(ReLU) is None


WRITES = {
    "setitem": lambda self, x: operator.setitem(x.clone(), 0, 1.0),
    "iand": lambda self, x: operator.iand(x > 0, x > 1),
    "method": lambda self, x: x.clone().mul_(2),
    "inplace keyword": lambda self, x: F.relu(x.clone(), inplace=True),
    "inplace by position": lambda self, x: F.leaky_relu(x.clone(), 0.1, True),
    "out": lambda self, x: torch.sin(x, out=x.clone()),
}
READS = {
    "method": lambda self, x: x.mul(2),
    "inplace keyword": lambda self, x: F.relu(x, inplace=False),
    "inplace by position": lambda self, x: F.leaky_relu(x, 0.1, False),
    "inplace left out": lambda self, x: F.leaky_relu(x),
    "special method": lambda self, x: x.__add__(1),
}


@pytest.mark.parametrize("spelling", WRITES)
def test_what_writes(spelling: str) -> None:
    graph = captured(WRITES[spelling]).graph("")
    assert [mutates(node) for node in graph.nodes].count(True) == 1


@pytest.mark.parametrize("spelling", READS)
def test_what_does_not_write(spelling: str) -> None:
    graph = captured(READS[spelling]).graph("")
    assert not any(mutates(node) for node in graph.nodes)


# -- operands ------------------------------------------------------------------------------------------------------

X = anything(name="x")
GATED = operation("mul", X, operation("sigmoid", X, name="gate"), name="it")


def test_a_repeated_name_is_one_node() -> None:
    program = captured(lambda self, x: x * torch.sigmoid(x) + x.sin() * torch.sigmoid(x.cos()))
    assert names(program, GATED) == ["mul"]
    assert len(names(program, operation("mul", anything(), operation("sigmoid"), name="it"))) == 2


def test_the_first_operands_of_commutative_operators_may_be_in_either_order() -> None:
    program = captured(lambda self, x: (torch.sigmoid(x) * x, torch.sigmoid(x) - x, x - torch.sigmoid(x)))
    assert names(program, GATED) == ["mul"]
    assert names(program, operation("sub", X, operation("sigmoid", X), name="it")) == ["sub_1"]


def test_an_addition_with_a_factor_does_not_commute() -> None:
    program = captured(lambda self, x: (torch.add(x.sin(), x, alpha=2), x.sin() + x))
    pattern = operation("add", anything(), operation("sin"), name="it")
    assert names(program, pattern) == ["add_1"]
    assert names(program, operation("add", operation("sin"), anything(), alpha=2, name="it")) == ["add"]
    assert names(program, operation("add", operation("sin"), anything(), alpha=1, name="it")) == ["add_1"]


def test_literals_are_equal_in_value_and_type() -> None:
    program = captured(lambda self, x: (x * 1, 1 * x, x * 1.0, x * True, x * 2))
    assert names(program, operation("mul", anything(), 1, name="it")) == ["mul", "mul_1"]
    assert names(program, operation("mul", anything(), either(1, 1.0), name="it")) == ["mul", "mul_1", "mul_2"]


def test_alternatives_are_tried_in_their_order() -> None:
    activation = either(operation("relu", X, name="rectified"), operation("gelu", X), name="it")
    program = captured(lambda self, x: (x.relu(), F.gelu(x), x.tanh()))
    assert [sorted(match.nodes) for match in program.matches(activation)] == [["it", "rectified", "x"], ["it", "x"]]
    nested = operation("sum", either(operation("sin"), operation("cos")), name="it")
    assert names(captured(lambda self, x: (x.sin().sum(), x.cos().sum(), x.sum())), nested) == ["sum_1", "sum_2"]


def test_a_choice_that_leads_nowhere_is_taken_back() -> None:
    """The first order of the product, and the first alternative, fit at first and fail later."""
    either_way = either(operation("sin", X), operation("sin", anything(name="y")))
    pattern = operation("add", operation("mul", either_way, anything()), operation("cos", X), name="it")
    program = captured(lambda self, x: x.sin() * x.tanh() + x.tanh().cos())
    [match] = program.matches(pattern)
    assert {name: node.name for name, node in match.nodes.items()} == {"y": "x", "x": "tanh_1", "it": "add"}


GELUS = {
    "function": lambda self, x: F.gelu(x, approximate="tanh"),
    "keywords": lambda self, x: F.gelu(approximate="tanh", input=x),
    "module": lambda self, x: self.layer(x),
    "module, by keyword": lambda self, x: self.layer(input=x),
    "operator of torch": lambda self, x: torch.ops.aten.gelu.default(x, approximate="tanh"),
}


@pytest.mark.parametrize("spelling", GELUS)
def test_arguments_are_compared_by_name(spelling: str) -> None:
    program = captured(GELUS[spelling], layer=nn.GELU("tanh"))
    assert len(names(program, operation("gelu", X, approximate="tanh", name="it"))) == 1
    assert names(program, operation("gelu", X, approximate="none", name="it")) == []


@pytest.mark.parametrize("call", [lambda self, x: F.gelu(x), lambda self, x: self.layer(x)])
def test_defaults_are_filled_in(call: Callable[..., object]) -> None:
    program = captured(call, layer=nn.GELU())
    assert len(names(program, operation("gelu", X, approximate="none", name="it"))) == 1
    assert names(program, operation("gelu", X, no_such_argument=1, name="it")) == []


SOFTMAXES = {
    "torch": lambda self, x: torch.softmax(x, -1),
    "functional": lambda self, x: F.softmax(x, dim=-1),
    "method": lambda self, x: x.softmax(-1),
    "module": lambda self, x: self.layer(x),
}


@pytest.mark.parametrize("spelling", SOFTMAXES)
def test_modules_are_compared_with_their_settings(spelling: str) -> None:
    program = captured(SOFTMAXES[spelling], layer=nn.Softmax(-1))
    assert len(names(program, operation("softmax", X, dim=-1, name="it"))) == 1
    assert names(program, operation("softmax", X, dim=0, name="it")) == []


def test_tensors_of_modules_are_no_nodes() -> None:
    program = captured(lambda self, x: self.layer(x), layer=nn.Linear(4, 3))
    assert len(names(program, operation("linear", X, name="it"))) == 1
    assert names(program, operation("linear", X, anything(name="weight"), name="it")) == []


def test_lists_fit_item_by_item() -> None:
    program = captured(lambda self, x: (torch.cat([x.sin(), x]), torch.cat((x, x.sin())), torch.cat([x, x, x])))
    pattern = operation("cat", [operation("sin", X), X], name="it")
    assert names(program, pattern) == ["cat"]
    assert names(program, operation("cat", [X, X, X], 0, name="it")) == ["cat_2"]
    assert names(program, operation("cat", [X, X, X], dim=1, name="it")) == []


def test_custom_operators_are_matched_by_their_qualified_names() -> None:
    @torch.library.custom_op("fxopt_patterns::shift", mutates_args=())
    def shift(x: Tensor, by: float = 1.0) -> Tensor:
        return x + by

    shift.register_fake(lambda x, by=1.0: torch.empty_like(x))
    program = captured(lambda self, x: (shift(x), torch.ops.fxopt_patterns.shift(x, by=2.0)))
    assert len(names(program, operation("fxopt_patterns::shift", X, name="it"))) == 2
    assert names(program, operation("fxopt_patterns::shift", X, by=2.0, name="it")) == ["shift"]


# -- writes --------------------------------------------------------------------------------------------------------


def let(value: Tensor, function: Callable[[Tensor], object]) -> object:
    return function(value)


def bump(value: Tensor) -> None:
    value.add_(1)


def after(write: Callable[[Tensor], object], value: Tensor) -> Tensor:
    write(value)
    return value


def test_in_place_calls_fit_where_nobody_notices() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h.mul_(torch.sigmoid(h))

    assert names(captured(forward, layer=nn.Linear(4, 3)), GATED) == ["mul_"]


NOTICED = {
    "the argument is overwritten": lambda self, x: x.mul_(torch.sigmoid(x)),
    "the gate is the value": lambda self, x: let(x + 1, lambda h: h * h.sigmoid_()),
    "read afterwards": lambda self, x: let(x + 1, lambda h: (h.mul_(torch.sigmoid(h)), h)),
    "read afterwards through a view": lambda self, x: let(x + 1, lambda h: (h[0], h.mul_(torch.sigmoid(h)))),
    "written between": lambda self, x: let(x + 1, lambda h: let(h.sigmoid(), lambda g: after(bump, h) * g)),
    "written into another tensor": lambda self, x: torch.mul(x, torch.sigmoid(x), out=torch.empty(2, 4)),
}


@pytest.mark.parametrize("spelling", NOTICED)
def test_writes_that_somebody_notices_fit_nothing(spelling: str) -> None:
    program = captured(NOTICED[spelling])
    assert str(program.graph("")).count("sigmoid") >= 1
    assert names(program, GATED) == []


def test_writes_before_and_after_a_match_do_not_matter() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = after(bump, x * 2)
        return after(bump, h * torch.sigmoid(h))

    assert names(captured(forward), GATED) == ["mul_1"]
