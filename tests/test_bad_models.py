"""Models that misbehave when they run: a clear error, or an opaque module with the reason; never a changed model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import InputError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Two linears, and a forward that is given."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.body = forward

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.body(self, x, *rest)


def snapshot(model: nn.Module) -> Any:
    tensors = {name: (id(t), t.tolist()) for name, t in model.state_dict(keep_vars=True).items()}
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    modules = {
        name: (id(m), type(m), m.training, sorted(vars(m)), [len(vars(m)[hook]) for hook in hooks])
        for name, m in model.named_modules()
    }
    return tensors, modules


def attempts(model: nn.Module) -> list[Callable[[], nn.Module]]:
    return [
        lambda: fxopt.capture(model, (X,)).model,
        lambda: fxopt.optimize(model, "inference", example_inputs=(X,), measure=False),
    ]


# -- refused -------------------------------------------------------------------------------------------------------


def raises(model: Model, x: Tensor) -> Tensor:
    raise RuntimeError("no such thing")


def raises_inside(model: Model, x: Tensor) -> Tensor:
    return model.a(x[:, :2])


def needs_more(model: Model, x: Tensor, mask: Tensor) -> Tensor:
    return model.a(x) * mask


def exits(model: Model, x: Tensor) -> Tensor:
    sys.exit("enough")


def calls_itself(model: Model, x: Tensor) -> Tensor:
    return model(x)


def changes_a_parameter(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.a.weight.add_(1)
    return model.a(x)


REFUSED = {
    raises: r"the model \(Model\) raised RuntimeError on the example inputs: no such thing",
    raises_inside: r"module 'a' \(Linear\) raised RuntimeError on the example inputs: mat1 and mat2",
    needs_more: r"the model \(Model\) raised TypeError on the example inputs: needs_more\(\) missing 1 required",
    exits: r"the model \(Model\) raised SystemExit on the example inputs: enough",
    calls_itself: r"the model \(Model\) raised RecursionError",
    changes_a_parameter: r"changes its parameter 'a.weight' in place",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_models_that_do_not_run_are_refused_by_name(forward: Callable[..., Any]) -> None:
    model = Model(forward).eval()
    before = snapshot(model)
    for attempt in attempts(model):
        with pytest.raises(fxopt.InputError, match=REFUSED[forward]) as caught:
            attempt()
        assert caught.value.exit_code == 3
        assert snapshot(model) == before


def test_an_interrupt_is_no_fault_of_the_model() -> None:
    def interrupted(model: Model, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = Model(interrupted)
    before = snapshot(model)
    for attempt in attempts(model):
        with pytest.raises(KeyboardInterrupt):
            attempt()
        assert snapshot(model) == before


# -- left as they are ----------------------------------------------------------------------------------------------


def returns_an_object(model: Model, x: Tensor) -> Any:
    model.a(x)
    return model.b


def returns_a_generator(model: Model, x: Tensor) -> Any:
    return (model.a(x) for _ in range(2))


def adds_a_child(model: Model, x: Tensor) -> Tensor:
    model.add_module(f"child_{len(model._modules)}", nn.Identity())
    return model.a(x)


def deletes_a_child(model: Model, x: Tensor) -> Tensor:
    if hasattr(model, "b"):
        del model.b
    return model.a(x)


def swaps_children(model: Model, x: Tensor) -> Tensor:
    model.a, model.b = model.b, model.a
    return model.a(x)


def replaces_a_forward(model: Model, x: Tensor) -> Tensor:
    model.a.forward = lambda y: y * 2
    return model.a(x)


def changes_a_class(model: Model, x: Tensor) -> Tensor:
    model.a.__class__ = nn.Identity
    return model.a(x)


def flips_a_mode(model: Model, x: Tensor) -> Tensor:
    model.train(not model.training)
    return model.a(x)


def leaves_a_hook(model: Model, x: Tensor) -> Tensor:
    model.a.register_forward_hook(lambda module, inputs, output: output + 1)
    return model.a(x)


def optimizes(model: Model, x: Tensor) -> Tensor:
    return fxopt.optimize(model.a, [], example_inputs=(x,))(x)


OPAQUE = {
    returns_an_object: "passes on a Linear",
    returns_a_generator: "passes on a generator",
    adds_a_child: "",
    deletes_a_child: "deletes self.b",
    swaps_children: "assigns self.a",
    replaces_a_forward: "assigns self.a.forward",
    changes_a_class: "assigns self.a.__class__",
    flips_a_mode: "assigns self.training",
    leaves_a_hook: "",
    optimizes: "",
}


@pytest.mark.parametrize("forward", OPAQUE, ids=lambda forward: forward.__name__)
def test_models_that_change_themselves_are_opaque_with_the_reason(forward: Callable[..., Any]) -> None:
    model = Model(forward).eval()
    before = snapshot(model)
    program = fxopt.capture(model, (X,))
    assert snapshot(model) == before
    assert "" not in program.graphs
    assert OPAQUE[forward] in program.opaque[""].reason
    assert program.opaque[""].reason
    for attempt in attempts(model):
        fast, expected = attempt(), copy.deepcopy(model)
        assert snapshot(model) == before
        for _ in range(3):
            result = expected(X)
            if isinstance(result, Tensor):
                torch.testing.assert_close(fast(X), result)
            else:
                assert type(fast(X)) is type(result)


# -- odd, and captured ---------------------------------------------------------------------------------------------


def counts(model: Model, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return model.a(x) * model.calls


def test_models_that_count_go_on_counting() -> None:
    model = Model(counts).eval()
    before = snapshot(model)
    for attempt in (lambda: fxopt.capture(model, (X,)).model, *attempts(model)):
        fast, expected = attempt(), copy.deepcopy(model)
        assert snapshot(model) == before
        for number in range(1, 8):
            torch.testing.assert_close(fast(X), expected(X))
            assert fast.calls == expected.calls == number


@pytest.mark.parametrize("value", [None, 3, "text", (), {}, {"y": None, 1: [True, 0.5]}], ids=repr)
def test_models_that_return_no_tensor(value: object) -> None:
    def forward(model: Model, x: Tensor) -> object:
        model.a(x)
        return value

    for attempt in attempts(Model(forward).eval()):
        assert attempt()(X) == value


class Oddly(nn.Module):
    """It has attributes that Python's dot cannot name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lambda", torch.tensor([2.0]))
        self.children_ = nn.ModuleDict({"class": nn.Linear(3, 3), "0": nn.Linear(3, 3)})

    def forward(self, x: Tensor) -> Tensor:
        return self.children_["0"](self.children_["class"](x)) * getattr(self, "lambda")


def test_names_that_are_keywords_are_captured() -> None:
    model = Oddly().eval()
    program = fxopt.capture(model, (X,))
    assert program.opaque == {}
    assert torch.equal(program.model(X), model(X))


@torch.library.custom_op("fxopt_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class WithoutGradient(nn.Module):
    """A model for inference, by an operator of the user's that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1) + doubled(self.heads[0](x)).sum()


def test_an_operator_without_a_gradient_is_named_with_the_way_out() -> None:
    model, x = WithoutGradient().eval(), torch.randn(2, 4)
    with pytest.raises(InputError) as caught:
        fxopt.optimize(model, "fuse_ensembles{lowering=bmm},eliminate_common_subexpressions", example_inputs=x)
    message = str(caught.value)
    assert message.startswith("WithoutGradient computes no gradients") and "fxopt_tests.doubled has none" in message
    assert "register_autograd" in message and "\n" not in message
    fast = fxopt.optimize(model.requires_grad_(False), example_inputs=x, measure=False)
    torch.testing.assert_close(fast(x), model(x))
