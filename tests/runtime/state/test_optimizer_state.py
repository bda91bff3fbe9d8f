from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from fxopt.errors import StateError
from fxopt.runtime.state import ELEMENT_WISE, Rename, Stack, StateMap, translate_optimizer

COUNT = 4
PARTS = ("0.weight", "0.bias", "2.weight", "2.bias")


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(COUNT))
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x) * self.scale
        return torch.stack([head(x) for head in self.heads])


class Fused(nn.Module):
    def __init__(self, source: Separate) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(source.trunk)
        self.gain = nn.Parameter(source.scale.detach().clone())
        state = MAP.forward(source.state_dict())
        self.fused = nn.ParameterDict({part.replace(".", "_"): nn.Parameter(state[target(part)]) for part in PARTS})

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x) * self.gain
        x = torch.baddbmm(self.fused["0_bias"].unsqueeze(1), x.expand(COUNT, *x.shape), self.fused["0_weight"].mT)
        return torch.baddbmm(self.fused["2_bias"].unsqueeze(1), x.tanh(), self.fused["2_weight"].mT)


def target(part: str) -> str:
    return f"fused.{part.replace('.', '_')}"


MAP = StateMap(
    (
        *(Stack(tuple(f"heads.{i}.{part}" for i in range(COUNT)), target(part)) for part in PARTS),
        Rename("scale", "gain"),
    )
)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: optim.SGD(ps, 0.05),
    "momentum": lambda ps: optim.SGD(ps, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda ps: optim.Adam(ps, 0.01, amsgrad=True),
    "adam fused": lambda ps: optim.Adam(ps, 0.01, fused=True),
    "adam foreach": lambda ps: optim.Adam(ps, 0.01, foreach=True, maximize=True),
    "adam capturable-like": lambda ps: optim.Adam(ps, torch.tensor(0.01), differentiable=False, foreach=False),
    "adamw": lambda ps: optim.AdamW(ps, 0.01, weight_decay=0.1),
    "rmsprop": lambda ps: optim.RMSprop(ps, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: optim.Adagrad(ps, 0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda ps: optim.Adadelta(ps),
    "nadam": lambda ps: optim.NAdam(ps, 0.01),
    "radam": lambda ps: optim.RAdam(ps, 0.01),
    "adamax": lambda ps: optim.Adamax(ps, 0.01),
    "asgd": lambda ps: optim.ASGD(ps, 0.05, t0=3),
    "rprop": lambda ps: optim.Rprop(ps, 0.01),
}  # fmt: skip
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": lambda optimizer: StepLR(optimizer, step_size=3, gamma=0.7),
    "cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.02, total_steps=40, cycle_momentum=True),
}


@dataclass
class Setting:
    before: Separate
    after: Fused

    @property
    def names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.before.named_parameters()}

    def translate(self, optimizer: Optimizer, **more: Any) -> Optimizer:
        return translate_optimizer(optimizer, self.names, MAP, dict(self.after.named_parameters()), **more)

    def translate_back(self, optimizer: Optimizer) -> Optimizer:
        names = {id(parameter): name for name, parameter in self.after.named_parameters()}
        return translate_optimizer(optimizer, names, MAP, dict(self.before.named_parameters()), direction="backward")

    def fuse(self) -> None:
        self.after = Fused(self.before)

    def split(self) -> None:
        self.before.load_state_dict(MAP.backward(self.after.state_dict()))


@pytest.fixture
def setting() -> Setting:
    before = Separate()
    return Setting(before, Fused(before))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (torch.randn(6, 3, generator=generator).double(), torch.randn(COUNT, 6, 2, generator=generator).double())


def train(
    model: nn.Module, optimizer: Optimizer, data: Iterator[tuple[Tensor, Tensor]], steps: int, *others: LRScheduler
) -> None:
    for _, (x, y) in zip(range(steps), data, strict=False):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        for scheduler in others:
            scheduler.step()


def same_objects(one: Iterable[Any], other: Iterable[Any]) -> bool:
    return [id(item) for item in one] == [id(item) for item in other]


def moments(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def assert_same_parameters(separate: Separate, fused: Fused) -> None:
    expected = MAP.forward(dict(separate.named_parameters()))
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].detach(), rtol=1e-9, atol=1e-9)


# -- training goes on as if nothing had happened -------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_equally(setting: Setting, make: Callable[[Any], Optimizer], warmup: int):
    optimizer = make(setting.before.parameters())
    train(setting.before, optimizer, batches(0), warmup)
    setting.fuse()
    twin = copy.deepcopy((setting.before, optimizer))
    assert setting.translate(optimizer) is optimizer
    train(*twin, batches(1), 20)
    train(setting.after, optimizer, batches(1), 20)
    assert_same_parameters(twin[0], setting.after)
    assert not torch.equal(setting.after.fused["0_weight"], Fused(setting.before).fused["0_weight"])


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw", "rmsprop"])
def test_schedulers_stay_attached(setting: Setting, kind: str, schedule: Callable[[Optimizer], LRScheduler]):
    optimizer = OPTIMIZERS[kind](setting.before.parameters())
    scheduler = schedule(optimizer)
    train(setting.before, optimizer, batches(0), 5, scheduler)
    setting.fuse()
    twin = copy.deepcopy((setting.before, optimizer, scheduler))
    setting.translate(optimizer)
    train(twin[0], twin[1], batches(1), 20, twin[2])
    train(setting.after, optimizer, batches(1), 20, scheduler)
    assert scheduler.get_last_lr() == twin[2].get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert optimizer.param_groups[0]["initial_lr"] == twin[1].param_groups[0]["initial_lr"]
    assert_same_parameters(twin[0], setting.after)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adamw", "rmsprop", "nadam"])
def test_there_and_back(setting: Setting, kind: str):
    optimizer = OPTIMIZERS[kind](setting.before.parameters())
    train(setting.before, optimizer, batches(0), 3)
    setting.fuse()
    twin = copy.deepcopy((setting.before, optimizer))
    setting.translate(optimizer)
    train(setting.after, optimizer, batches(1), 3)
    setting.split()
    setting.translate_back(optimizer)
    assert same_objects(optimizer.param_groups[0]["params"], setting.before.parameters())
    train(setting.before, optimizer, batches(2), 3)
    train(*twin, batches(1), 3)
    train(*twin, batches(2), 3)
    for parameter, expected in zip(setting.before.parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-9)


def test_parts_have_state_of_their_own_on_the_way_back(setting: Setting):
    optimizer = optim.Adam(setting.after.parameters())
    train(setting.after, optimizer, batches(0), 1)
    setting.translate_back(optimizer)
    storages = [tensor.untyped_storage().data_ptr() for tensor in moments(optimizer)]
    assert len(set(storages)) == len(storages)


# -- what the optimizer looks like afterwards ----------------------------------------------------------------------


def test_groups_keep_their_options_and_order(setting: Setting):
    model = setting.before
    heads, rest = list(model.heads.parameters()), [*model.trunk.parameters(), model.scale]
    optimizer = optim.SGD([{"params": rest, "lr": 0.5}, {"params": heads, "note": "mine"}], lr=0.1)
    setting.translate(optimizer)
    after = setting.after
    first, second = optimizer.param_groups
    assert same_objects(first["params"], [after.gain, *after.trunk.parameters()])
    assert same_objects(second["params"], after.fused.parameters())
    assert (first["lr"], second["lr"], second["note"]) == (0.5, 0.1, "mine")


def test_names_in_groups_follow(setting: Setting):
    optimizer = optim.Adam(setting.before.named_parameters())
    setting.translate(optimizer)
    (group,) = optimizer.param_groups
    assert group["param_names"] == [name for name, _ in setting.after.named_parameters()]
    parameters = dict(setting.after.named_parameters())
    assert all(parameters[name] is p for name, p in zip(group["param_names"], group["params"], strict=True))


def test_names_in_groups_stand_in_for_unknown_parameters(setting: Setting):
    extra = nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([*setting.before.named_parameters(), ("extra", extra)])
    translate_optimizer(optimizer, {}, MAP, dict(setting.after.named_parameters()))
    assert set(optimizer.param_groups[0]["params"]) == {*setting.after.parameters(), extra}


def test_other_parameters_stay(setting: Setting):
    extra = nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([extra, *setting.before.parameters()])
    extra.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state[extra]
    setting.translate(optimizer)
    assert optimizer.param_groups[0]["params"][0] is extra
    assert optimizer.state[extra] is state
    assert set(optimizer.param_groups[0]["params"]) == {*setting.after.parameters(), extra}


def test_an_optimizer_without_the_members(setting: Setting):
    optimizer = optim.Adam(setting.before.trunk.parameters())
    setting.translate(optimizer)
    assert same_objects(optimizer.param_groups[0]["params"], list(setting.after.trunk.parameters()))


def test_nothing_of_the_old_parameters_is_kept(setting: Setting):
    optimizer = optim.Adam(setting.before.parameters())
    train(setting.before, optimizer, batches(0), 2)
    setting.translate(optimizer)
    assert set(optimizer.state) == set(setting.after.parameters())
    assert all(tensor.dtype in (torch.float64, torch.float32) for tensor in moments(optimizer))


def test_twice_is_once(setting: Setting):
    optimizer = optim.Adam(setting.before.parameters())
    train(setting.before, optimizer, batches(0), 2)
    setting.translate(optimizer)
    first = copy.deepcopy(optimizer.state_dict())
    setting.translate(optimizer)
    assert str(optimizer.state_dict()) == str(first)


def test_the_state_dict_can_be_saved_and_loaded(setting: Setting):
    optimizer = optim.Adam(setting.before.parameters())
    train(setting.before, optimizer, batches(0), 2)
    setting.translate(optimizer)
    fresh = optim.Adam(setting.after.parameters())
    fresh.load_state_dict(optimizer.state_dict())
    assert same_objects(optimizer.param_groups[0]["params"], fresh.param_groups[0]["params"])
    for parameter, state in optimizer.state.items():
        assert all(torch.equal(value, fresh.state[parameter][key]) for key, value in state.items())


# -- refusals, each leaving everything as it was -------------------------------------------------------------------


def refused(setting: Setting, optimizer: Optimizer, message: str) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    held = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(StateError, match=message):
        setting.translate(optimizer)
    assert str(optimizer.state_dict()) == str(before)
    assert all(
        a is b
        for old, g in zip(held, optimizer.param_groups, strict=True)
        for a, b in zip(old, g["params"], strict=True)
    )


class Mine(optim.Adam):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ps: optim.LBFGS(ps), "LBFGS is not known to update each element"),
        (lambda ps: optim.Adafactor(ps), "Adafactor is not known"),
        (lambda ps: optim.SparseAdam(ps), "SparseAdam is not known"),
        (lambda ps: Mine(ps), "Mine is a subclass"),
    ],
)
def test_optimizers_that_are_not_element_wise(setting: Setting, make: Callable[[Any], Optimizer], message: str):
    refused(setting, make(list(setting.before.parameters())), message)


def test_muon_is_refused(setting: Setting):
    matrices = [p for p in setting.before.parameters() if p.ndim == 2]
    refused(setting, optim.Muon(matrices), "Muon is not known to update each element")


def test_members_in_different_groups(setting: Setting):
    model = setting.before
    first = list(model.heads[0].parameters())
    others = [p for head in list(model.heads)[1:] for p in head.parameters()]
    optimizer = optim.Adam([{"params": first, "lr": 0.1}, {"params": others}])
    refused(setting, optimizer, r"'heads.0.0.weight' and 'heads.1.0.weight' are in different parameter groups")


def test_members_at_unequal_steps(setting: Setting):
    optimizer = optim.Adam(setting.before.parameters())
    train(setting.before, optimizer, batches(0), 2)
    optimizer.state[setting.before.heads[2][0].weight]["step"] += 1
    refused(setting, optimizer, r"'step' of 'heads.0.0.weight' is 2.0 and that of 'heads.2.0.weight' is 3.0")


def test_members_of_which_only_some_have_state(setting: Setting):
    optimizer = optim.SGD(setting.before.parameters(), 0.1, momentum=0.9)
    setting.before.heads[1][0].weight.grad = torch.ones(5, 3).double()
    optimizer.step()
    message = r"has 'momentum_buffer' for 'heads.1.0.weight' but not for 'heads.0.0.weight'"
    refused(setting, optimizer, message)


def test_members_of_which_only_some_are_held(setting: Setting):
    optimizer = optim.Adam(setting.before.heads[0].parameters())
    refused(setting, optimizer, r"has 'heads.0.0.weight' but not 'heads.1.0.weight', .*now one tensor 'fused.0_weight'")


def test_an_optimizer_of_another_model(setting: Setting):
    refused(setting, optim.Adam(Separate().parameters()), "none of the optimizer's parameters are the model's")


def test_a_parameter_that_is_gone(setting: Setting):
    parameters = {name: p for name, p in setting.after.named_parameters() if name != "gain"}
    optimizer = optim.Adam(setting.before.parameters())
    with pytest.raises(StateError, match="'scale' would become 'gain', but the model has no such parameter"):
        translate_optimizer(optimizer, setting.names, MAP, parameters)


def test_state_of_a_shape_of_its_own(setting: Setting):
    optimizer = optim.Adam(setting.before.parameters())
    train(setting.before, optimizer, batches(0), 1)
    for head in setting.before.heads:
        optimizer.state[head[0].weight]["exp_avg"] = torch.zeros(2)
    refused(setting, optimizer, r"'exp_avg' of 'fused.0_weight' would have shape \[4, 2\], the parameter \[4, 5, 3\]")


def test_tied_parameters_are_found_by_either_name(setting: Setting):
    tied = StateMap(MAP.steps, (("copy.weight", "heads.0.0.weight"),))
    names = {**setting.names, id(setting.before.heads[0][0].weight): "copy.weight"}
    optimizer = optim.Adam(setting.before.parameters())
    translate_optimizer(optimizer, names, tied, dict(setting.after.named_parameters()))
    assert set(optimizer.param_groups[0]["params"]) == set(setting.after.parameters())


def test_every_optimizer_said_to_be_element_wise_is_tested(setting: Setting):
    assert {type(make(list(setting.before.parameters()))) for make in OPTIMIZERS.values()} == ELEMENT_WISE
