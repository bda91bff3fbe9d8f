"""Packed and folded weights follow their originals, also where torch counts no write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.operators import Derived, Keeping
from fxopt.testing import assert_equivalent

needs_packing = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

pytestmark = pytest.mark.parametrize(
    "made", [pytest.param("pack", marks=needs_packing), "fold_batchnorm"], indirect=True
)

Made = tuple[nn.Module, Tensor]


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Made:
    """Return an optimized model that has derived its tensors, and an input."""
    torch.manual_seed(0)
    if request.param == "pack":
        model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)), torch.randn(8, 16)
    else:
        model, x = nn.Sequential(nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16), nn.ReLU()), torch.randn(4, 16, 5)
    fast = fxopt.optimize(model.eval(), request.param, example_inputs=x, measure=False)
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"applied"}
    with torch.no_grad():
        fast(x)
    assert all(each._kept for each in deriveds(fast))
    return fast, x


def deriveds(model: nn.Module) -> Iterator[Derived]:
    for graph in fxopt.graphs(model).values():
        for node in graph.nodes:
            if isinstance(node.target, Keeping):
                yield node.target if isinstance(node.target, Derived) else node.target.weights  # type: ignore[attr-defined]


def right(model: nn.Module, x: Tensor) -> None:
    plain = fxopt.restore(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_steps_of_fused_optimizers(optimizer: str, made: Made) -> None:
    model, x = made
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        model(x).square().sum().backward()
        steps.step()
        right(model, x)


def test_a_fused_step_that_changes_one_row_only(made: Made) -> None:
    model, x = made
    steps = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    model(x)[:, 3].sum().backward()
    steps.step()
    right(model, x)


def by_vector(model: nn.Module) -> Callable[[], object]:
    vector = parameters_to_vector(model.parameters()).detach().clone()
    vector_to_parameters(vector, model.parameters())
    return lambda: (vector.mul_(3), vector_to_parameters(vector, model.parameters()))


def by_shadow(model: nn.Module) -> Callable[[], object]:
    shadows = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, shadow in zip(model.parameters(), shadows, strict=True):
        parameter.data = shadow
    return lambda: [shadow.mul_(2) for shadow in shadows]


def by_data(model: nn.Module) -> Callable[[], object]:
    return lambda: [parameter.data.copy_(parameter * 2) for parameter in model.parameters()]


def turned(model: nn.Module) -> Callable[[], object]:
    weight = model[0].weight  # type: ignore[index]
    return lambda: setattr(weight, "data", weight.data.transpose(0, 1))


@pytest.mark.parametrize("way", [by_vector, by_shadow, by_data, turned])
def test_writes_and_views_that_torch_does_not_count(way: Callable, made: Made) -> None:
    model, x = made
    write = way(model)
    right(model, x)
    before = model(x).detach()
    write()
    right(model, x)
    assert not torch.allclose(model(x), before)


def test_fewer_outputs_in_the_same_memory(made: Made) -> None:
    model, x = made
    folded = "Conv" in repr(model)
    for tensor in [*(model if folded else model[-1]).parameters(), *model.buffers()]:  # type: ignore[index]
        tensor.data = tensor.data[:8] if tensor.ndim else tensor.data
    right(model, x)
    assert model(x).shape[1] == 8


def test_another_process_writes(made: Made) -> None:
    model, x = made
    right(model.share_memory(), x)
    with torch.no_grad():
        before = model(x)
    process = torch.multiprocessing.get_context("fork").Process(target=double, args=(list(model.parameters()),))
    process.start()
    process.join()
    assert process.exitcode == 0
    right(model, x)
    with torch.no_grad():
        assert not torch.allclose(model(x), before)


def double(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.numpy().__imul__(2)


def test_tensors_are_swapped(made: Made) -> None:
    model, x = made
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.randn_like(model[0].weight)))  # type: ignore[index]
    right(model, x)


def test_tensors_are_swapped_by_a_conversion(made: Made) -> None:
    model, x = made
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    right(model, x.double())


def test_a_conversion_lets_go_of_what_was_made(made: Made) -> None:
    model, x = made
    model.to(torch.bfloat16)
    assert not any(each._kept for each in deriveds(model))
    assert model(x.bfloat16()).dtype is torch.bfloat16
    right(model.float(), x)


def test_copies_have_their_own(made: Made) -> None:
    model, x = made
    other = copy.deepcopy(model)
    other[0].weight.data.mul_(2)  # type: ignore[index]
    assert_equivalent(fxopt.restore(other), other, (x,))
    right(model, x)
    right(other, x)
