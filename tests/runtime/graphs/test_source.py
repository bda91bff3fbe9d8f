"""The code generated from graphs means what the graph says."""

from __future__ import annotations

import inspect
import linecache
import types

import pytest
import torch
from torch import fx, nn

from fxopt.errors import GuardError
from fxopt.runtime.graphs import Capture, Specialization, generate, install
from fxopt.runtime.guards import (
    Argument,
    Attribute,
    Equals,
    Guard,
    GuardMiss,
    Truth,
    item_of,
    key_of,
    length_of,
    require,
)
from fxopt.runtime.values import Signature, signature_of
from fxopt.tracing.program import capture_program

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def run(build, *args, names=("x",)):
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in names]
    graph.output(build(graph, *nodes))
    module = nn.Module()
    install(module, Capture(nn.Module, [Specialization((), graph)], Signature.of_names(names)))
    return module.forward(*args), fx.Interpreter(module, graph=graph).run(*args)


F = torch.nn.functional
CASES = [
    lambda g, x: g.call_function(pow, (-1, x)),
    lambda g, x: g.call_function(__import__("operator").pow, (-2, x)),
    lambda g, x: g.call_function(__import__("operator").neg, (x,)),
    lambda g, x: g.call_function(__import__("operator").getitem, (x, (slice(None), slice(0, None, 2)))),
    lambda g, x: g.call_function(__import__("operator").getitem, (x, (Ellipsis, None, 0))),
    lambda g, x: g.call_method("to", (x,), {"dtype": torch.float64, "device": torch.device("cpu")}),
    lambda g, x: g.call_function(torch.full_like, (x, float("inf"))),
    lambda g, x: g.call_function(torch.full_like, (x, float("-inf"))),
    lambda g, x: g.call_function(torch.clamp, (x,), {"min": -1e-30}),
    lambda g, x: {"a": [x, (x,)], 3: ()},
    lambda g, x: g.call_function(getattr, (x, "shape")),
    lambda g, x: g.call_function(getattr, (x, "not_there", 5)),
    lambda g, x: g.call_function(torch.cat, ([x, x],), {"dim": 1}),
    lambda g, x: g.call_method("contiguous", (x,), {"memory_format": torch.contiguous_format}),
    lambda g, x: g.call_function(F.pad, (x, (1, 1)), {"value": 0.5}),
]


@pytest.mark.parametrize("build", CASES, ids=range(len(CASES)))
def test_code_and_interpreter_agree(build):
    given, expected = run(build, X.round())
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(given, expected, rtol=0, atol=0)
    else:
        assert isinstance(expected, type(given))
        assert repr(given) == repr(expected)


def test_names_never_hide_each_other():
    def build(g, torch_, cat):
        named = g.create_node("call_function", torch.cat, ([torch_, cat],), name="_cat")
        return g.create_node("call_function", torch.cat, ([named, cat],), name="torch_1")

    given, expected = run(build, X, X, names=("_cat_1", "cat"))
    assert torch.equal(given, expected)


def test_intermediate_values_are_freed():
    def build(g, x):
        y = g.call_function(torch.neg, (x,))
        return g.call_function(torch.relu, (g.call_function(torch.abs, (y,)),))

    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    text = generate(Signature.of_names(["x"]), [Specialization((), graph)]).text
    assert "neg = None" in text
    assert "x = None" not in text


def test_tracebacks_show_the_generated_line():
    module = nn.Module()
    graph = fx.Graph()
    graph.output(graph.call_method("no_such_method", (graph.placeholder("x"),)))
    install(module, Capture(nn.Module, [Specialization((), graph)], Signature.of_names(["x"])))
    code = type(module).forward.__code__
    assert "no_such_method" in linecache.getline(code.co_filename, 2)
    assert "no_such_method" in inspect.getsource(type(module).forward)


class Signatures(nn.Module):
    def plain(self, x, y=1, *, z=2): ...
    def positional(self, x, /, y=1, *rest, z, **named): ...


@pytest.mark.parametrize("name", ["plain", "positional"])
def test_signatures_are_the_users(name):
    function = getattr(Signatures, name)
    signature = signature_of(function)
    namespace: dict = {}
    exec(f"def forward({signature.header}): return forward_to({signature.forwarding('')})", namespace)
    namespace["forward_to"] = lambda *a, **k: (a, k)
    made = namespace["forward"]
    made.__defaults__, made.__kwdefaults__ = signature.defaults, signature.keyword_defaults
    assert str(inspect.signature(made)) == str(inspect.signature(function))
    assert made(None, 3, z=4) == ((3, 1), {"z": 4})


def test_require():
    require(3, 3, "")
    require(True, True, "")
    require(None, None, "")
    with pytest.raises(GuardMiss):
        require(4, 3, "reason")
    with pytest.raises(GuardError, match="reason; the value is now 4"):
        require(4, 3, "reason", False)
    with pytest.raises(GuardMiss):
        require(0, True, "reason")


EXPECTED = [True, False, None, 0, 2, 2.5, -1, "a", (2, 1), torch.Size([2, 1]), [1], torch.float32, torch.device("cpu")]


@pytest.mark.parametrize("expected", EXPECTED, ids=repr)
@pytest.mark.parametrize("value", [*EXPECTED, True, 1, "", torch.tensor(2), torch.tensor(False)], ids=repr)
def test_checks_in_code_hold_where_require_does(value, expected):
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(__import__("operator").getitem, (x, 0))
    graph.call_function(require, (y, expected, "reason", False))
    graph.output(graph.call_function(len, (x,)))
    module = nn.Module()
    install(module, Capture(nn.Module, [Specialization((), graph)], Signature.of_names(["x"])))
    try:
        require(value, expected, "", False)
    except GuardError:
        with pytest.raises(GuardError, match="reason"):
            module.forward([value])
    else:
        assert module.forward([value]) == 1


def test_what_a_check_read_is_freed_where_it_holds():
    def build(g, x):
        y = g.call_function(torch.neg, (x,))
        g.call_function(require, (g.call_method("dim", (y,)), 2, "", True))
        g.call_function(require, (g.call_method("numel", (y,)), 24, "", True))
        return g.call_function(torch.relu, (x,))

    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    lines = generate(Signature.of_names(["x"]), [Specialization((), graph)]).text.split("\n")
    position = next(number for number, line in enumerate(lines) if "== (24)" in line)
    assert lines[position + 1].endswith(" = None")
    assert "None" not in lines[position]


def test_guards_that_cannot_be_evaluated_do_not_hold():
    x = Argument("x")
    two = Guard(length_of(x), Equals(key_of(2)))
    assert two.holds({"x": [1, 2]})
    assert not two.holds({"x": 3})
    assert not Guard(Attribute(item_of(x, 0), "y"), Truth(True)).holds({"x": []})


def test_guards_ask_for_a_shape_once():
    class Even(nn.Module):
        def forward(self, x, y):
            if x.shape[0] % 2 == 0 and x.shape[1] == y.shape[1] and x.size()[0] == x.size()[1] * 2:
                return x + y[:1]
            return x - y[:1]

    model = Even()
    fast = capture_program(Even(), (torch.ones(4, 2), torch.ones(3, 2))).model
    for shape, other in (((4, 2), (3, 2)), ((2, 1), (1, 1)), ((3, 2), (3, 2)), ((4, 3), (2, 3)), ((4, 2), (4, 1))):
        x, y = torch.randn(shape), torch.randn(other)
        assert torch.equal(fast(x, y), model(x, y))
    head = inspect.getsource(type(fast).forward).partition("except")[0]
    assert (head.count("x.shape"), head.count("x.size()"), head.count("y.shape")) == (1, 1, 1)


def test_what_looks_like_a_shape_in_a_text_is_left_alone():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.settings = types.SimpleNamespace(first="x.shape", second="x.shape")

        def forward(self, x):
            return x if (self.settings.first, self.settings.second) == ("x.shape", "x.shape") else -x

    program = capture_program(Named(), (torch.ones(2),))
    assert torch.equal(program.model(torch.ones(2)), torch.ones(2))
    assert not program.captures[""].misses


def test_what_is_said_before_a_call_reads_what_the_call_reads():
    model = nn.Module()
    model.inner = nn.ModuleDict({name: nn.ModuleDict({"leaf": nn.ReLU()}) for name in "ab"})
    graph = fx.Graph()
    value = graph.placeholder("x")
    for name in "ab":
        value = graph.call_module(f"inner.{name}.leaf", (value,))
        value.meta["changes"] = True
    graph.output(value)
    install(model, Capture(nn.Module, [Specialization((), graph)], Signature.of_names(["x"])))
    assert torch.equal(model(X), X.relu())
