"""The form of an optimizer's steps: chosen where it is faster and computes the same, and taken back without a rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepping import KINDS, Kernels
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import fxopt
from fxopt.passes.driver.results import choosing
from fxopt.passes.driver.results.choosing import choose_form


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    x = torch.linspace(-1, 1, 24).view(3, 8)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()


def flags(optimizer: Optimizer) -> list[tuple[Any, Any]]:
    return [(group.get("fused"), group.get("foreach")) for group in (*optimizer.param_groups, optimizer.defaults)]


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture
def fused_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fused form be the fastest, whatever this machine does just now."""
    monkeypatch.setattr(choosing, "time_candidates", lambda racing, **_: Race("fused"))


class Race:
    """Timings in which one form is three times faster than all others."""

    def __init__(self, winner: str) -> None:
        self.winner = winner

    def ratio(self, _: str, form: str) -> Any:
        class Ratio:
            mid = 3.0 if form == self.winner else 1.0

        return Ratio

    def fastest(self, left: list[str]) -> str:
        return self.winner if self.winner in left else left[0]


@pytest.mark.usefixtures("fused_wins")
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_in_another_form_and_back(kind: str) -> None:
    """Moments made before stay; the steps are those that the optimizer would have made."""
    plain, model = network(), network()
    expected, optimizer = KINDS[kind](plain.parameters()), KINDS[kind](model.parameters())
    train(plain, expected)
    train(model, optimizer)
    assert choose_form(optimizer, model).form == "fused"
    train(plain, expected)
    with Kernels() as kernels:
        train(model, optimizer)
    assert kernels.count == 2
    assert flags(optimizer) == [(None, None)] * 2
    choosing.reset_form(optimizer)
    assert flags(optimizer) == [(None, None)] * 2
    assert vars(optimizer).keys() == vars(expected).keys()
    train(plain, expected)
    train(model, optimizer)
    assert_alike(model, plain)


@pytest.mark.usefixtures("fused_wins")
@pytest.mark.parametrize("kind", KINDS)
def test_saved_states_load_both_ways_and_know_of_no_form(kind: str) -> None:
    plain, model = network(), network()
    expected, optimizer = KINDS[kind](plain.parameters()), KINDS[kind](model.parameters())
    choose_form(optimizer, model)
    train(model, optimizer)
    train(plain, expected)
    assert [group.items() for group in optimizer.state_dict()["param_groups"]] == [
        group.items() for group in expected.state_dict()["param_groups"]
    ]
    new, old = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(expected.state_dict())
    expected.load_state_dict(new)
    optimizer.load_state_dict(old)
    with Kernels() as kernels:
        train(model, optimizer)
    assert kernels.count == 2
    assert flags(expected) == flags(optimizer) == [(None, None)] * 2
    train(plain, expected)
    assert_alike(model, plain)


@pytest.mark.usefixtures("fused_wins")
def test_a_gradient_scaler_skips_steps_that_overflow() -> None:
    model = network()
    optimizer, scaler = optim.AdamW(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    choose_form(optimizer, model)
    before = [parameter.clone() for parameter in model.parameters()]
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 8)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        stayed = [torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)]
        assert all(stayed) == (factor != 1.0)


@pytest.mark.usefixtures("fused_wins")
def test_momentum_begins_with_the_first_step_that_a_scaler_does_not_skip() -> None:
    model = network()
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=4.0)
    choose_form(optimizer, model)
    scaler.scale(model(torch.ones(1, 8)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert not optimizer.state


def of_sparse() -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    return model, optim.SGD(model.parameters(), lr=0.1)


def with_options(kind: type[Optimizer], **options: Any) -> tuple[nn.Module, Optimizer]:
    model = network()
    return model, kind(model.parameters(), **options)


SET = "you set fused or foreach; leave both out to have the form chosen"
UNUSUAL = "it is differentiable or capturable, or an option is a tensor"
REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, Optimizer]], str]] = {
    "fused": (lambda: with_options(optim.Adam, fused=True), SET),
    "not foreach": (lambda: with_options(optim.Adam, foreach=False), SET),
    "differentiable": (lambda: with_options(optim.SGD, differentiable=True), UNUSUAL),
    "rate": (lambda: with_options(optim.Adam, lr=torch.tensor(0.1)), UNUSUAL),
    "sparse": (of_sparse, "gradients of an embedding are sparse"),
    "complex": (
        lambda: (model := nn.Linear(2, 2, dtype=torch.complex64), optim.Adam(model.parameters())),
        "a parameter is sharded or has no floating-point numbers",
    ),
    "meta": (
        lambda: (model := nn.Linear(2, 2, device="meta"), optim.Adam(model.parameters())),
        "its parameters have no numbers yet, or none is trained",
    ),
}


@pytest.mark.usefixtures("fused_wins")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_as_it_is(case: str) -> None:
    make, reason = REFUSED[case]
    model, optimizer = make()
    before, attributes = flags(optimizer), set(vars(optimizer))
    choice = choose_form(optimizer, model)
    assert (choice.form, choice.reason) == ("", reason)
    assert (flags(optimizer), set(vars(optimizer))) == (before, attributes)


@pytest.mark.usefixtures("fused_wins")
def test_a_parameter_that_is_a_part_of_other_memory_is_left_alone() -> None:
    model = nn.Linear(2, 4, bias=False)
    model.weight = nn.Parameter(torch.ones(4, 8)[:, ::4])
    assert choose_form(optim.Adam(model.parameters()), model).reason == "a parameter is a part of other memory"


@pytest.mark.usefixtures("fused_wins")
def test_steps_of_a_users_own_class_are_not_tried() -> None:
    class Loud(optim.Adam):
        def step(self, closure: Any = None) -> Any:
            raise OSError("a step of a user's class was made on copies")

    model = network()
    choice = choose_form(Loud(model.parameters()), model)
    assert choice.form == "" and choice.reason.startswith("Loud is no class of torch.optim itself")


@pytest.mark.usefixtures("fused_wins")
def test_why_no_form_could_be_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no such kernel\nwith a long trace")

    monkeypatch.setattr(choosing, "stepping", failing)
    model = network()
    choice = choose_form(optim.Adam(model.parameters()), model)
    assert choice.reason == "its steps could not be tried: no such kernel"


@pytest.mark.usefixtures("fused_wins")
def test_what_has_no_such_form_stays() -> None:
    model = network()
    choice = choose_form(optim.RMSprop(model.parameters()), model)
    assert choice.reason == "no form is faster"
    assert [*choice.forms] == ["foreach"]


@pytest.mark.usefixtures("fused_wins")
def test_steps_that_compute_something_else_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused step that decays weights ten times as fast is no form of this one."""

    def wrong(like: Optimizer, groups: Any, form: str) -> Any:
        changed = [({**options, "weight_decay": 10 * options["weight_decay"]}, tensors) for options, tensors in groups]
        return made(like, changed if form else groups, form)

    made = choosing._optimizer
    monkeypatch.setattr(choosing, "_optimizer", wrong)
    model = network()
    choice = choose_form(optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model)
    assert choice.form == ""
    assert choice.reason.startswith("fused: differs")


def test_all_forms_of_all_kinds_compute_the_same() -> None:
    for make in (*KINDS.values(), optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta):
        optimizer = make(network().parameters())
        for form in ("foreach", "fused") if "fused" in optimizer.defaults else ("foreach",):
            error, problem = choosing.deviation(optimizer, form)
            assert problem == ""
            assert error < 1e-5


def test_a_step_on_a_part_leaves_the_optimizer_alone() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    optimizer = optim.AdamW(model.parameters())
    before = [parameter.clone() for parameter in model.parameters()]
    choosing.stepping(optimizer, "fused")()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


@pytest.mark.usefixtures("fused_wins")
def test_a_plan_repeats_the_form_and_the_report_has_a_row() -> None:
    x = torch.ones(3, 8)
    model = network()
    optimizer = optim.AdamW(model.parameters())
    fast = fxopt.optimize(model, "training", example_inputs=(x,), optimizer=optimizer)
    assert fxopt.plan(fast).optimizer_form == "fused"
    assert "AdamW" in str(fxopt.report(fast))
    assert "3x in optimizer.step()" in str(fxopt.report(fast))
    assert fxopt.report(fast).to_json()["optimizer"]["form"] == "fused"
    plan = type(fxopt.plan(fast)).from_json(fxopt.plan(fast).to_json())
    other = network()
    repeated = optim.AdamW(other.parameters())
    fxopt.optimize(other, plan=plan, example_inputs=(x,), optimizer=repeated)
    for each in repeated.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    with Kernels() as kernels:
        repeated.step()
    assert kernels.count == 1
    back = fxopt.restore(fast, optimizer=optimizer)
    assert flags(optimizer) == [(None, None)] * 2
    train(back, optimizer)


def test_nothing_is_chosen_where_nothing_is_measured() -> None:
    model = network()
    optimizer = optim.AdamW(model.parameters())
    fast = fxopt.optimize(
        model, "training", example_inputs=(torch.ones(3, 8),), optimizer=optimizer, measure=False, inplace=True
    )
    assert flags(optimizer)[0] == (None, None)
    assert "optimizer AdamW: nothing was measured" in str(fxopt.report(fast))


def test_the_first_rank_decides_for_all() -> None:
    everyone = [
        {"form": "fused", "forms": ["foreach", "fused"], "reason": ""},
        {"form": "", "forms": ["foreach"], "reason": ""},
    ]
    assert choosing._judged(everyone) == ("", "another rank cannot take fused steps")
    assert choosing._judged(everyone[:1] * 2) == ("fused", "")


def test_parameters_are_read_and_never_written() -> None:
    shared: Tensor = torch.ones(4)
    optimizer = optim.SGD([nn.Parameter(shared)], lr=1.0)
    choosing.deviation(optimizer, "fused")
    assert torch.equal(shared, torch.ones(4))
