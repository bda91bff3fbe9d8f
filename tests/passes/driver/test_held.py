"""Optimizers, averages and lists of parameters that a model holds itself: they move with it, or `optimize` refuses."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small_models import Ensemble as Heads
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import fxopt
from fxopt.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:Seems like .optimizer.step")  # of a scheduler that was copied


class Ensemble(Heads):
    def __init__(self) -> None:
        super().__init__(count=3)


class Learner(Ensemble):
    """The usual class of tutorials: it has its optimizer, and more that goes by its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.optimizer = optim.Adam(self.parameters(), lr=0.05)
        self.training_state = SimpleNamespace(schedulers=[StepLR(self.optimizer, 3, 0.5)])
        self.clipped = list(self.heads.parameters())
        self.groups = ({"params": tuple(self.trunk.parameters())}, {"params": set(self.heads.parameters())})
        self.average = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        self.by_name = dict(self.named_parameters())

    def learn(self, steps: int = 10) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            (self(inputs()) - 1).square().mean().backward()
            nn.utils.clip_grad_norm_(self.clipped, 0.1)
            self.optimizer.step()
            self.training_state.schedulers[0].step()
            for name, parameter in self.named_parameters():
                self.average[name].lerp_(parameter.detach(), 0.1)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def made(kind: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return kind().double()


def fused(model: Any, passes: str = "fuse_ensembles{lowering=bmm}", **options: Any) -> Any:
    return fxopt.optimize(model, passes, example_inputs=(inputs(),), verify=False, measure=False, **options)


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict())


def everything(model: Any) -> list[set[int]]:
    """Return which parameters each thing that holds all of them has."""
    held = [group["params"] for group in model.optimizer.param_groups], [group["params"] for group in model.groups]
    lists = [*({p for each in one for p in each} for one in held), {*model.by_name.values()}]
    return [set(map(id, each)) for each in lists]


@pytest.mark.parametrize("inplace", [False, True])
def test_what_a_model_holds_goes_along_there_and_back(inplace: bool):
    plain, model = made(Learner), made(Learner)
    held = model.optimizer
    plain.learn(2)
    model.learn(2)
    before = copy.deepcopy(model.state_dict())
    fast = fused(model, inplace=inplace)
    assert (fast.optimizer is held) is inplace
    plain.learn()
    for each in (copy.deepcopy(fast), fast):
        assert each.training_state.schedulers[0].optimizer is each.optimizer
        assert everything(each) == [set(map(id, each.parameters()))] * 3
        each.learn()
        assert_same_weights(each, plain)
    if not inplace:
        assert everything(model) == [set(map(id, model.parameters()))] * 3
        torch.testing.assert_close(model.state_dict(), before)
    restored = fxopt.restore(fast)
    assert everything(restored) == [set(map(id, restored.parameters()))] * 3
    torch.testing.assert_close(restored.average, plain.average)
    plain.learn()
    restored.learn()
    assert_same_weights(restored, plain)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_held_optimizer_is_given(inplace: bool):
    plain, model = made(Learner), made(Learner)
    held = model.optimizer
    fast = fused(model, optimizer=held, inplace=inplace)
    assert fast.optimizer is fast.training_state.schedulers[0].optimizer is held
    plain.learn()
    fast.learn()
    assert_same_weights(fast, plain)
    again = fused(fast, "eliminate_dead_code")  # and what was optimized is optimized once more
    assert again.optimizer is not held
    plain.learn()
    again.learn()
    assert_same_weights(again, plain)
    restored = fxopt.restore(again, optimizer=again.optimizer)
    assert restored.optimizer is again.optimizer
    plain.learn()
    restored.learn()
    assert_same_weights(restored, plain)


def test_an_archive_builds_the_optimizer_anew(tmp_path: Any):
    model = made(Learner)
    fxopt.save(fused(model), tmp_path / "model.fxopt")
    loaded: Any = fxopt.load(tmp_path / "model.fxopt", model=made(Learner), example_inputs=(inputs(),))
    assert everything(loaded) == [set(map(id, loaded.parameters()))] * 3
    model.learn()
    loaded.learn()
    assert_same_weights(loaded, model)


def part(model: Any) -> None:
    model.part = [model.heads[0][0].weight, model.heads[1][0].weight]


def under_keys(model: Any) -> None:
    model.last = {"last": model.heads[-1][0].weight}


def beside_names(model: Any) -> None:
    model.weights, model.rates = list(model.heads.parameters()), [0.1] * 12


def in_order(model: Any) -> None:
    model.shadow = [parameter.detach().clone() for parameter in model.parameters()]


def referred(model: Any) -> None:
    model.reference = SimpleNamespace(parameter=weakref.ref(model.heads[0][0].weight))


def as_keys(model: Any) -> None:
    model.steps = {parameter: optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}


def averaged(model: Any) -> None:
    model.average = AveragedModel(model.heads)


def whole_tensors(model: Any) -> None:
    model.optimizer = optim.Adafactor(model.parameters())


def in_a_set(model: Any) -> None:
    model.optimizers = {optim.SGD(model.parameters(), lr=0.1), optim.SGD(model.heads.parameters(), lr=0.1)}


def groups_apart(model: Any) -> None:
    model.optimizer = optim.Adam([{"params": head.parameters()} for head in model.heads])


REFUSED = {
    part: "'part' holds 'heads.0.0.weight' but not 'heads.2.0.weight'",
    under_keys: "'last' holds 'heads.2.0.weight' as 'last', and it is a part of 'heads_fused",
    beside_names: "'weights' holds parameters .* so that places may count",
    in_order: "'shadow' holds a tensor for each parameter, in their order",
    referred: "'reference' holds 'heads.0.0.weight' as 'parameter'",
    as_keys: "'steps' holds 'heads.0.0.weight' as a key",
    averaged: "'average' averages its 'heads' by the places",
    in_a_set: "several SGD in the set 'optimizers'; the copies there cannot be told apart: hold them in a list",
    whole_tensors: "'optimizer' cannot move: Adafactor is not known to update each element",
    groups_apart: "'optimizer' cannot move: 'heads.0.0.weight' and 'heads.1.0.weight' are in different parameter",
}


@pytest.mark.parametrize("hold", REFUSED, ids=lambda hold: hold.__name__)
def test_what_cannot_go_along_is_refused(hold: Callable[[Any], None]):
    model = made(Ensemble)
    hold(model)
    names = [*dict(model.named_parameters())]
    for inplace in (False, True)[: 1 if hold is in_a_set else 2]:  # a set that is not copied is as it was
        with pytest.raises(StateError, match=REFUSED[hold]):
            fused(model, inplace=inplace)
        assert [*dict(model.named_parameters())] == names and type(model) is Ensemble


def test_what_keeps_its_form_goes_along_wherever_it_is():
    model = made(Ensemble)
    for hold in (part, under_keys, beside_names, in_order, referred, as_keys, averaged, whole_tensors):
        hold(model)
    fast = fused(model, "eliminate_dead_code")
    weights = [head[0].weight for head in fast.heads]
    assert all(mine is its_own for mine, its_own in zip(fast.part, weights[:2], strict=True))
    assert {*fast.steps} == {*fast.trunk.parameters(), *fast.heads.parameters()}
    assert all(each.param_groups[0]["params"][0] is parameter for parameter, each in fast.steps.items())
    assert fast.last["last"] is weights[-1] and fast.reference.parameter() is weights[0]
    before = weights[0].detach().clone()
    (fast(inputs()) - 1).square().mean().backward()
    fast.optimizer.step()
    assert not torch.equal(before, weights[0])


@dataclass(frozen=True, slots=True)
class Slots:
    weight: nn.Parameter
    optimizer: optim.Optimizer


class Named(dict[str, Any]):
    """A dictionary with attributes."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer=None)
        self.optimizer = optimizer


HOLDERS: dict[str, tuple[Callable[[optim.Optimizer], Any], Callable[[Any], optim.Optimizer]]] = {
    "deque": (lambda optimizer: deque([optimizer]), lambda held: held[0]),
    "method": (lambda optimizer: optimizer.step, lambda held: held.__self__),
    "partial": (lambda optimizer: partial(print, optimizer), lambda held: held.args[0]),
    "set": (lambda optimizer: {"name", optimizer}, lambda held: (held - {"name"}).pop()),
    "frozen": (lambda optimizer: (frozenset([optimizer]),), lambda held: next(iter(held[0]))),
    "attribute": (Named, lambda held: held.optimizer),
    "value": (lambda optimizer: {nn.Parameter(torch.ones(1)): optimizer}, lambda held: next(iter(held.values()))),
}


def test_optimizers_go_along_wherever_they_are():
    model = made(Ensemble)
    for name, (put, _) in HOLDERS.items():
        setattr(model, name, put(optim.SGD(model.parameters(), lr=0.1)))
    model.slots = Slots(model.trunk.weight, optim.SGD(model.parameters(), lr=0.1))
    model.queue, model.all = deque(model.parameters()), frozenset(model.parameters())
    model.mixed = {*model.parameters(), *range(9)}
    model.rates = dict.fromkeys(model.trunk.parameters(), 0.1)
    fast = fused(model)
    now = {*fast.parameters()}
    held = [*(get(getattr(fast, name)) for name, (_, get) in HOLDERS.items()), fast.slots.optimizer]
    assert all({*optimizer.param_groups[0]["params"]} == now for optimizer in held)
    assert {*fast.queue} == fast.all == now and fast.slots.weight is fast.trunk.weight
    assert fast.mixed == {*now, *range(9)}
    assert [*fast.rates] == [*fast.trunk.parameters()] and model.slots.weight is model.trunk.weight


def test_nothing_is_changed_where_the_given_optimizer_has_a_place_that_cannot_change():
    model = made(Ensemble)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model.optimizers = (optimizer,)
    with pytest.raises(StateError, match=r"'optimizers\[0\]', where nothing can be replaced"):
        fused(model, optimizer=optimizer)
    assert optimizer.param_groups[0]["params"] == [*model.parameters()]


class Shared(optim.SGD):
    def __deepcopy__(self, memo: Any) -> Shared:
        return self


def test_an_optimizer_that_is_not_copied_is_refused():
    model = made(Ensemble)
    model.optimizer = Shared(model.parameters(), lr=0.1)
    with pytest.raises(StateError, match="'optimizer' is not copied with it: give it as optimizer="):
        fused(model)


def test_hooks_of_optimizers_go_along_there_and_back():
    class Counting(Ensemble):
        steps = 0

        def count(self, *_: Any) -> None:
            self.steps += 1

    model, calls = made(Counting), list[optim.Optimizer]()
    model.optimizer = optim.SGD(model.parameters(), lr=0.1)
    model.optimizer.register_step_post_hook(model.count)
    model.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(optimizer))
    model.optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "mine": 1})
    fast = fused(model)
    for each in (fast, fxopt.restore(fast)):
        each.optimizer.step()
        assert each.steps > model.steps == 0 and calls.pop() is each.optimizer
        assert each.optimizer.state_dict()["mine"] == 1
    model.optimizer.step()
    assert model.steps == 1 and not calls[1:]


class Average:
    """A hook on steps that averages the parameters of a model, as users write it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, list[nn.Module]()

    def __call__(self, *_: Any) -> None:
        self.seen.append(self.model)

    def run(self, *_: Any) -> None:
        self.seen.append(self.model)


def _saw(seen: list[nn.Module], module: nn.Module, *_: Any) -> None:
    seen.append(module)


@pytest.mark.parametrize("is_given", [False, True])
def test_hooks_on_steps_reach_the_result_whatever_they_are(is_given: bool):
    model, seen = made(Ensemble), list[nn.Module]()
    model.optimizer, model.average = optim.SGD(model.parameters(), 0.1), Average(model)
    hooks = (model.average, model.average.run, partial(_saw, seen, model), lambda *_: seen.append(model))
    for hook in hooks:
        model.optimizer.register_step_post_hook(hook)
    fast = fused(model, **({"optimizer": model.optimizer} if is_given else {}))
    fast.optimizer.step()
    assert fast.average.seen == [fast, fast] and model.average.seen == []
    assert seen == [fast, fast]
