"""What a fused ensemble gives as a list belongs to the caller, who may write into it; how its parameters are read."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fxopt


class Heads(nn.Module):
    """Members whose results are returned one by one."""

    def __init__(self, ends_in: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        last = [] if ends_in is None else [ends_in()]
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), *last) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


class Together(nn.Module):
    """Members whose results are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
LOWERINGS = ("wide", "bmm", "grouped_conv", "vmap", "mlp", "wide_input_first")


def fused(model: nn.Module, lowering: str = "wide", x: Tensor = X) -> nn.Module:
    fast = fxopt.optimize(model, f"fuse_ensembles{{lowering={lowering}}}", example_inputs=(x,), measure=False)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    return fast


def written(model: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return outputs of which one was written in place, and the gradient of a function of all for the input."""
    leaf = x.clone().requires_grad_()
    outputs = model(leaf)
    outputs[0].mul_(2.0)
    outputs[1] += outputs[2]
    (gradient,) = torch.autograd.grad(sum(output.square().sum() for output in outputs), leaf)
    return outputs, gradient


# -- outputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("batch", [1, 5])
def test_outputs_can_be_written_in_place(lowering: str, batch: int) -> None:
    model = Heads().eval()
    outputs, gradient = written(fused(model, lowering), X[:batch])
    expected, wanted = written(model, X[:batch])
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("ends_in", [nn.Tanh, nn.Sigmoid, nn.ReLU])
def test_writing_into_outputs_does_not_reach_what_the_backward_pass_reads(ends_in: type[nn.Module]) -> None:
    model = Heads(ends_in).eval()
    fast, leaf = fused(model), X.clone().requires_grad_()
    outputs = fast(leaf)
    with torch.no_grad():
        outputs[0].zero_()
    (found,) = torch.autograd.grad(sum(outputs).sum(), leaf)
    (wanted,) = torch.autograd.grad(sum(model(leaf)).sum(), leaf)
    torch.testing.assert_close(found, wanted)


def test_writing_into_one_output_leaves_the_others() -> None:
    model = Heads().eval()
    fast = fused(model)
    with torch.no_grad():
        outputs = fast(X)
    outputs[1].zero_()
    outputs[0] += torch.ones(2, requires_grad=True)  # with gradients on, after a call without
    torch.testing.assert_close(outputs[2], model(X)[2])
    torch.testing.assert_close(outputs[0], model(X)[0] + 1)


# -- parameters ----------------------------------------------------------------------------------------------------


def changed(fast: nn.Module) -> dict[str, Callable[[], nn.Module]]:
    """Return ways to get at the model, or to change its parameters, that a read must not miss."""

    def other_weights() -> nn.Module:
        torch.manual_seed(1)
        fxopt.load_state_dict(fast, Together().state_dict())
        return fast

    def assigned() -> nn.Module:
        fast.load_state_dict({name: value * 2 for name, value in fast.state_dict().items()}, assign=True)
        return fast

    def stepped() -> nn.Module:
        optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
        fast(X).sum().backward()
        optimizer.step()
        return fast

    return {
        "load_state_dict": other_weights,
        "assign": assigned,
        "step": stepped,
        "to": lambda: fast.to(torch.float64).to(torch.float32),
        "deepcopy": lambda: copy.deepcopy(fast),
        "pickle": lambda: pickle.load(io.BytesIO(pickle.dumps(fast))),
    }


@pytest.mark.parametrize("lowering", ["wide", "wide_input_first", "bmm"])
@pytest.mark.parametrize("change", changed(nn.Module()))
@pytest.mark.parametrize("batch", [1, 5])
def test_parameters_are_read_as_they_are_now(lowering: str, change: str, batch: int) -> None:
    fast = changed(fused(Together(), lowering))[change]()
    expected = fxopt.restore(fast)
    torch.testing.assert_close(fast(X[:batch]), expected(X[:batch]))


class Negated(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


def test_a_parametrized_store_and_tensors_of_others_are_read() -> None:
    fast = fused(Together())
    names = [name for name, _ in fast.named_parameters()]
    zeros = {name: torch.zeros_like(value) for name, value in fast.named_parameters()}
    assert torch.equal(torch.func.functional_call(fast, zeros, (X,)), torch.zeros(5, 6))
    before = fast(X)
    for name in ("weight", "bias"):
        parametrize.register_parametrization(fast.heads_fused.get_submodule("2"), name, Negated())
    assert "heads_fused.2.weight" in names
    torch.testing.assert_close(fast(X), -before)


@pytest.mark.parametrize("batch", [1, 5])
def test_reads_compile_and_export(batch: int) -> None:
    model, x = Together().eval(), X[:batch]
    fast = fused(model, "wide_input_first", x)
    torch.testing.assert_close(torch.compile(fast, fullgraph=True, backend="eager")(x), model(x))
    torch.testing.assert_close(torch.export.export(fast, (x,)).module()(x), model(x))
