"""What code does to a member of an optimized ensemble has the effect that it has on the original, or is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_models import Ensemble
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import fxopt
from fxopt.errors import FusedMemberError


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture
def models() -> tuple[Ensemble, Ensemble]:
    """Return a model and the same with its heads fused."""
    torch.manual_seed(0)
    model = Ensemble()
    fast = fxopt.optimize(
        model, "fuse_ensembles{lowering=bmm}", example_inputs=(inputs(),), verify=False, measure=False
    )
    assert isinstance(fast.get_submodule("heads_fused"), nn.Module)
    return model, fast


def linear_of(model: Ensemble) -> Any:
    return model.get_submodule("heads.2.0")


def train_on(model: nn.Module) -> None:
    model(inputs()).square().sum().backward()


def gradients(model: Ensemble) -> list[Tensor]:
    return [head.get_submodule("0").weight.grad.clone() for head in model.heads]  # pyright: ignore[reportCallIssue, reportOptionalMemberAccess]


# -- values --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def scale(model: Ensemble) -> None:
    linear_of(model).weight.mul_(3)


@torch.no_grad()
def as_vector(model: Ensemble) -> None:
    numbers = nn.utils.parameters_to_vector(model.heads[1].parameters())
    nn.utils.vector_to_parameters(numbers * 2, model.heads[1].parameters())


def initialise(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        nn.init.constant_(layer.weight, 0.3)


WRITES: dict[str, Callable[[Ensemble], Any]] = {
    "data": lambda m: setattr(linear_of(m).weight, "data", torch.ones(5, 4)),
    "items of data": lambda m: linear_of(m).weight.data.__setitem__(slice(1, 3), 7.0),
    "copy into data": lambda m: linear_of(m).weight.data.copy_(torch.ones(5, 4)),
    "parameter": lambda m: setattr(linear_of(m), "weight", nn.Parameter(torch.ones(5, 4))),
    "in place": scale,
    "init": lambda m: nn.init.ones_(linear_of(m).weight),
    "apply to a member": lambda m: m.heads[1].apply(initialise),
    "apply to the model": lambda m: m.apply(initialise),
    "as a vector": as_vector,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_reach_the_model(models: tuple[Ensemble, Ensemble], write: Callable[[Ensemble], Any]):
    model, fast = models
    before = fast(inputs())
    for each in models:
        write(each)
    torch.testing.assert_close(fast(inputs()), model(inputs()))
    assert not torch.allclose(fast(inputs()), before)


# -- gradients -----------------------------------------------------------------------------------------------------


def set_gradient(model: Ensemble) -> None:
    linear_of(model).weight.grad = torch.full((5, 4), 3.0)


GRADIENTS: dict[str, Callable[[Ensemble], Any]] = {
    "nothing": lambda m: None,
    "set": set_gradient,
    "add in place": lambda m: linear_of(m).weight.grad.add_(2),
    "clip a member": lambda m: nn.utils.clip_grad_norm_(m.heads[2].parameters(), 0.01),
    "zero a member": lambda m: m.heads[2].zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("change", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_a_member_are_the_stacked_ones(
    models: tuple[Ensemble, Ensemble], change: Callable[[Ensemble], Any]
):
    for each in models:
        train_on(each)
        change(each)
    torch.testing.assert_close(*map(gradients, models))
    for each in models:
        torch.optim.SGD(each.parameters(), 0.1).step()
    torch.testing.assert_close(*(each(inputs()) for each in models))


def test_a_member_without_gradient_has_one_of_zeros(models: tuple[Ensemble, Ensemble]):
    _, fast = models
    held = linear_of(fast).weight
    assert held.grad is None
    train_on(fast)
    assert held.grad.any()
    others = gradients(fast)
    held.grad = None
    assert not held.grad.any()
    fast.heads[2].zero_grad()
    assert not any(parameter.grad.any() for parameter in fast.heads[2].parameters())
    assert torch.equal(gradients(fast)[1], others[1])
    fast.zero_grad()
    assert held.grad is None
    set_gradient(fast)
    assert torch.equal(gradients(fast)[2], torch.full((5, 4), 3.0))
    assert not gradients(fast)[1].any()
    with pytest.raises(FusedMemberError, match="shape"):
        held.grad = torch.zeros(1)


def test_hooks_on_a_members_parameter_run(models: tuple[Ensemble, Ensemble]):
    handles: list[Any] = []
    seen: list[list[Tensor]] = []
    for each in models:
        noted: list[Tensor] = []
        weight, bias = linear_of(each).weight, linear_of(each).bias
        handles.append(weight.register_hook(lambda gradient: gradient * 10))
        weight.register_hook(lambda gradient, noted=noted: noted.append(gradient.clone()))
        bias.register_post_accumulate_grad_hook(lambda bias, noted=noted: noted.append(bias.grad.clone()))
        train_on(each)
        seen.append(noted)
    torch.testing.assert_close(*(sorted(noted, key=Tensor.dim) for noted in seen))
    torch.testing.assert_close(*map(gradients, models))
    for each, handle in zip(models, handles, strict=True):
        handle.remove()
        train_on(each)
    torch.testing.assert_close(*map(gradients, models))


def test_a_member_is_kept_by_a_hook(models: tuple[Ensemble, Ensemble]):
    _, fast = models
    for parameter in fast.heads[2].parameters():
        parameter.register_hook(torch.zeros_like)
    before = [linear_of(fast).weight.clone(), fast(inputs())]
    train_on(fast)
    torch.optim.Adam(fast.parameters(), 0.1).step()
    assert torch.equal(linear_of(fast).weight, before[0])
    assert not torch.allclose(fast(inputs()), before[1])


# -- what one member cannot have for itself ------------------------------------------------------------------------


def freeze_by_hand(model: Ensemble) -> None:
    for parameter in model.heads[2].parameters():
        parameter.requires_grad = False


ALONE: dict[str, tuple[Callable[[Ensemble], Any], str]] = {
    "freeze": (lambda m: m.heads[2].requires_grad_(False), "cannot be frozen by itself"),
    "freeze a parameter": (lambda m: linear_of(m).weight.requires_grad_(False), "cannot be frozen by itself"),
    "freeze by hand": (freeze_by_hand, "cannot be frozen by itself"),
    "set a frozen one": (
        lambda m: setattr(linear_of(m), "bias", nn.Parameter(torch.zeros(5), False)),
        "cannot be frozen by itself",
    ),
    "convert": (lambda m: m.heads[2].double(), "cannot be moved or converted by itself"),
    "move": (lambda m: m.heads[2].to("meta"), "cannot be moved or converted by itself"),
    "convert a layer": (lambda m: linear_of(m).to(torch.bfloat16), "cannot be moved or converted by itself"),
    "data of another type": (
        lambda m: setattr(linear_of(m).weight, "data", torch.ones(5, 4).double()),
        "keeps its dtype torch.float32",
    ),
    "optimizer": (lambda m: torch.optim.Adam(m.heads[2].parameters()), "no optimizer can train by itself"),
    "prune": (lambda m: prune.l1_unstructured(linear_of(m), "weight", 0.5), "cannot be added"),
    "weight norm": (lambda m: parametrizations.weight_norm(linear_of(m)), "cannot be deleted"),
    "old weight norm": (lambda m: nn.utils.weight_norm(linear_of(m)), "cannot be taken away"),
    "forward hook": (lambda m: m.heads[2].register_forward_hook(lambda *_: None), "a hook would never run"),
    "hook inside": (lambda m: m.heads[2][1].register_forward_pre_hook(lambda *_: None), "a hook would never run"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("change", "message"), ALONE.values(), ids=ALONE)
def test_what_one_member_cannot_have(
    models: tuple[Ensemble, Ensemble], change: Callable[[Ensemble], Any], message: str
):
    model, fast = models
    with pytest.raises(FusedMemberError, match=message):
        change(fast)
    torch.testing.assert_close(fast(inputs()), model(inputs()))
    assert fast.state_dict().keys() == copy.deepcopy(fast).state_dict().keys()


def test_all_members_together_can_be_frozen_and_converted(models: tuple[Ensemble, Ensemble]):
    _, fast = models
    fast.heads.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in fast.get_submodule("heads_fused").parameters())
    fast.heads.double()
    fast.heads[1].to("cpu", torch.float64)  # as it is
    assert linear_of(fast).weight.dtype is torch.float64
    fast.trunk.double()
    assert fast(inputs().double()).dtype is torch.float64


# -- copies --------------------------------------------------------------------------------------------------------


def test_a_copy_of_a_member_is_a_module_of_its_own(models: tuple[Ensemble, Ensemble]):
    model, fast = models
    before = fast(inputs())
    member = copy.deepcopy(fast.heads[2])
    assert type(member) is nn.Sequential
    assert torch.equal(member(inputs()), model.heads[2](inputs()))
    member.register_forward_hook(lambda *_: None)
    member[1] = nn.ReLU()
    optimizer = torch.optim.SGD(member.parameters(), 1.0)
    member(inputs()).sum().backward()
    optimizer.step()
    assert torch.equal(fast(inputs()), before)
    assert not torch.equal(member[0].weight, linear_of(fast).weight)


def test_copies_of_several_members_stay_a_part_of_the_copied_model(models: tuple[Ensemble, Ensemble]):
    _, fast = models
    before = fast(inputs())
    member, other = copy.deepcopy([fast.heads[2], fast])
    nn.init.zeros_(member[2].weight)
    nn.init.zeros_(member[2].bias)
    assert not other(inputs())[2].any()
    assert torch.equal(fast(inputs()), before)


def test_a_member_is_compiled_by_itself_and_a_copy_of_it_exported(models: tuple[Ensemble, Ensemble]):
    _, fast = models
    expected = fast.heads[2](inputs())
    torch.testing.assert_close(torch.compile(fast.heads[2], backend="eager")(inputs()), expected)
    exported = torch.export.export(copy.deepcopy(fast.heads[2]), (inputs(),))
    torch.testing.assert_close(exported.module()(inputs()), expected)


class Named(nn.Linear):
    """A layer whose copies are made in a way of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo), copied=True)
        return copied


def test_members_are_copied_in_the_way_of_their_class():
    model = nn.Sequential(Named(4, 4), Ensemble())
    model[1].heads = nn.ModuleList(Named(4, 2) for _ in range(4))
    fast = fxopt.optimize(
        model, "fuse_ensembles{lowering=bmm}", example_inputs=(inputs(),), verify=False, measure=False
    )
    other = copy.deepcopy(fast)
    assert other[1].heads[2].copied
    torch.testing.assert_close(other(inputs()), model(inputs()))
    nn.init.zeros_(other[1].heads[2].weight)
    torch.testing.assert_close(fast(inputs()), model(inputs()))


def test_a_slice_is_copied_as_a_parameter_and_pickled_as_a_tensor(models: tuple[Ensemble, Ensemble]):
    _, fast = models
    weight = linear_of(fast).weight
    copied, pickled = copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))
    assert type(copied) is nn.Parameter
    assert type(pickled) is Tensor
    assert torch.equal(copied, weight)
    assert torch.equal(pickled, weight)
    nn.init.zeros_(copied)
    assert weight.any()


@pytest.mark.parametrize(
    "share",
    [
        lambda one, other: setattr(one, "data", other.data),
        lambda one, other: setattr(one, "data", nn.Parameter(other.data)),
        lambda one, other: setattr(one, "grad", other.grad),
    ],
)
def test_members_do_not_share_memory(models: tuple[Ensemble, Ensemble], share: Callable[[Any, Any], None]) -> None:
    _, fast = models
    train_on(fast)
    one, other = (fast.heads[i].get_submodule("0").weight for i in (0, 1))
    before = [one.clone(), one.grad.clone()]
    with pytest.raises(FusedMemberError, match="cannot share the memory of another member"):
        share(one, other)
    assert torch.equal(one, before[0]) and torch.equal(one.grad, before[1])


def test_a_member_takes_its_own_memory_turned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Turned())
    fast = fxopt.optimize(
        model, "fuse_ensembles{lowering=bmm}", example_inputs=(inputs(),), verify=False, measure=False
    )
    for each in (model, fast):
        weight = each[0].heads[1].weight
        weight.data = weight.data.t()
    assert torch.equal(fast[0].heads[1].weight, model[0].heads[1].weight)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])
