"""Pruning while training: how much is gone after each step, and that it goes on where it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.errors import StateError, UsageError
from fxopt.transforms.prune import Prune, PruningSchedule, masks, remove_masks

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 5))


def scheduled(schedule: Any = "cubic", **options: Any) -> nn.Module:
    return fxopt.optimize(network(), Prune(amount=0.8, schedule=schedule, **options), example_inputs=X)


def share(model: nn.Module) -> float:
    kept = masks(model).values()
    return sum(int((~flags).sum()) for flags in kept) / sum(flags.numel() for flags in kept)


def trained(model: nn.Module, schedule: PruningSchedule, steps: int) -> list[float]:
    optimizer, shares = torch.optim.Adam(model.parameters(), 0.05), list[float]()
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
        schedule.step()
        shares.append(share(model))
    return shares


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [0.2, 0.4, 0.6, 0.8, 0.8]), ("cubic", [0.4625, 0.7, 0.7875, 0.8, 0.8])],
)
def test_more_goes_step_by_step(schedule: str, expected: list[float]):
    model = scheduled(schedule)
    assert share(model) == 0
    torch.testing.assert_close(model(X), network()(X))
    shares = trained(model, PruningSchedule(model, steps=4), 5)
    assert shares == pytest.approx(expected, abs=1 / 260)


def test_masks_change_now_and_then():
    model = scheduled("linear")
    shares = trained(model, PruningSchedule(model, steps=5, every=2), 6)
    assert shares == pytest.approx([0, 0.32, 0.32, 0.64, 0.8, 0.8], abs=1 / 260)


@pytest.mark.parametrize("method", ["magnitude", "random"])
def test_what_is_gone_stays_gone(method: str):
    model = scheduled(method=method)
    schedule = PruningSchedule(model, steps=4)
    before = masks(model)
    for _ in range(4):
        trained(model, schedule, 1)
        now = masks(model)
        assert all(bool((flags <= before[name]).all()) for name, flags in now.items())
        before = now
    assert all(torch.equal(model.get_parameter(name) != 0, flags) for name, flags in before.items())


def test_checkpoints_and_archives_follow(tmp_path: Path):
    model = scheduled()
    trained(model, PruningSchedule(model, steps=10), 5)
    fxopt.save(model, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=network())
    assert all(torch.equal(masks(loaded)[name], flags) for name, flags in masks(model).items())
    torch.testing.assert_close(loaded(X), model(X))
    model.load_state_dict(network().state_dict())
    assert all(torch.equal(model.state_dict()[name] != 0, flags) for name, flags in masks(model).items())


def test_a_schedule_goes_on_where_it_was():
    whole, halves = scheduled("linear"), scheduled("linear")
    trained(whole, PruningSchedule(whole, steps=6), 4)
    first = PruningSchedule(halves, steps=6)
    trained(halves, first, 2)
    second = PruningSchedule(halves, steps=6)
    second.load_state_dict(first.state_dict())
    trained(halves, second, 2)
    assert share(whole) == share(halves) == pytest.approx(0.8 * 4 / 6, abs=1 / 260)


def test_a_fresh_model_goes_on_with_the_masks_of_the_schedule(tmp_path: Path):
    model = scheduled()
    first = PruningSchedule(model, steps=4)
    trained(model, first, 4)
    torch.save({"model": model.state_dict(), "schedule": first.state_dict()}, tmp_path / "checkpoint.pt")
    fresh, state = scheduled(), torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    second = PruningSchedule(fresh, steps=4)
    second.load_state_dict(state["schedule"])
    fresh.load_state_dict(state["model"])
    shares = trained(fresh, second, 3)
    assert shares == pytest.approx([0.8] * 3, abs=1 / 260)
    zeros = sum(int((fresh.state_dict()[name] == 0).sum()) for name in masks(fresh))
    assert zeros == round(0.8 * 260)
    assert all(torch.equal(masks(fresh)[name], flags) for name, flags in masks(model).items())


def test_an_earlier_state_brings_weights_back_with_the_checkpoint_after_it():
    model = scheduled()
    schedule = PruningSchedule(model, steps=4)
    trained(model, schedule, 1)
    early = schedule.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    trained(model, schedule, 3)
    schedule.load_state_dict(early[0])
    model.load_state_dict(early[1])
    assert share(model) == pytest.approx(0.4625, abs=1 / 260)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in early[1].items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 8}, "the state is of a schedule with steps=8, and this one has 4"),
        ({"amount": 0.5}, r"a schedule with amount=0\.5, and this one has 0\.8"),
        ({"masks": {}}, "of another model: only one of them has masks of '0.weight'"),
        ({"masks": {"0.weight": "", "2.weight": ""}}, r"a mask of shape \[20, 8\] has 0 bytes"),
        (None, "no state of a PruningSchedule, which has done, steps, amount, schedule, masks"),
    ],
)
def test_a_state_of_another_schedule_is_refused(change: dict[str, Any] | None, message: str):
    model = scheduled()
    schedule = PruningSchedule(model, steps=4)
    state = {"done": 2} if change is None else {**schedule.state_dict(), "done": 2, **change}
    with pytest.raises(StateError, match=message):
        schedule.load_state_dict(state)
    assert schedule.done == 0 and share(model) == 0


def test_a_schedule_says_where_it_is_and_the_report_what_is_planned():
    model = scheduled("linear")
    schedule = PruningSchedule(model, steps=4, every=2)
    trained(model, schedule, 2)
    assert repr(schedule) == "PruningSchedule(linear to 0.8, every 2: 2 of 4 steps done, 0.4 gone)"
    details = [decision.detail for decision in fxopt.plan(scheduled(scope="layer")).decisions]
    assert details[0] == "0 of 160 weights are zero; a PruningSchedule brings that to 0.8 of each layer (cubic)"


def test_without_masks_there_is_nothing_to_schedule():
    model = scheduled()
    schedule = PruningSchedule(model, steps=4)
    remove_masks(model)
    with pytest.raises(UsageError, match="has no masks"):
        schedule.step()
    assert schedule.done == 0
    with pytest.raises(UsageError, match="has no masks"):
        PruningSchedule(model, steps=4)


def test_copies_are_pruned_apart():
    model = scheduled()
    other = copy.deepcopy(model)
    trained(other, PruningSchedule(other, steps=1), 1)
    assert share(model) == 0 and share(other) == pytest.approx(0.8, abs=1 / 260)
    model.load_state_dict(network().state_dict())
    assert bool((model.state_dict()["0.weight"] != 0).all())


def test_what_cannot_be_scheduled_is_refused():
    plain = fxopt.optimize(network(), Prune(amount=0.5), example_inputs=X)
    with pytest.raises(UsageError, match=r"no pruning to schedule; optimize it with prune\{schedule=cubic\}"):
        PruningSchedule(plain, steps=3)
    with pytest.raises(UsageError, match="no pruning to schedule"):
        PruningSchedule(network(), steps=3)
    with pytest.raises(UsageError, match="steps=0; give a whole number from 1"):
        PruningSchedule(scheduled(), steps=0)
    with pytest.raises(UsageError, match="every=5 is more than steps=4"):
        PruningSchedule(scheduled(), steps=4, every=5)
    with pytest.raises(UsageError, match="schedule ranks by magnitude"):
        Prune(schedule="cubic", scores={"0.weight": torch.ones(20, 8)})


def test_of_n_to_m_fewer_and_fewer_stay():
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(4, 16)
    fast = fxopt.optimize(model, "prune{method=nm,pattern=2:8,schedule=linear}", example_inputs=(x,))
    assert all(flags.all() for flags in masks(fast).values())
    schedule, stay = PruningSchedule(fast, steps=6), []
    for _ in range(6):
        schedule.step()
        (number,) = {int(each) for flags in masks(fast).values() for each in flags.reshape(-1, 8).sum(1)}
        stay.append(number)
    assert stay == [7, 6, 5, 4, 3, 2] and schedule.amount == 0.75
    state = schedule.state_dict()
    with pytest.raises(StateError, match=r"a schedule with amount=0\.75, and this one has 0\.5"):
        PruningSchedule(
            fxopt.optimize(model, "prune{method=nm,schedule=linear}", example_inputs=(x,)), steps=6
        ).load_state_dict(state)
