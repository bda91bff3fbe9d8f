"""What no check fits for is left to the whole model, and checked in full with it: a wrong rewrite never stands."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.runs import manager_of
from support.wrong_passes import gradients, modes, numbers, sequences, sizes, states, values
from support.wrong_passes.subject import Replace, Subject
from torch import Tensor, fx, nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.driver.whole_model import full_check
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Numerics, Site
from fxopt.passes.timing import TimeBudget
from fxopt.tracing.program import Program

SHORT = 0.01
SUBJECTS = [each for room in (gradients, modes, numbers, sequences, sizes, states, values) for each in room.SUBJECTS]
WRONG = {
    (family, what): (subject, function) for subject in SUBJECTS for (family, what), function in subject.wrong.items()
}
CHOSEN = [
    ("rows", "chunks of 32 lose the rest"),
    ("zero", "the root of a sum of squares"),
    ("ids", "padding counted from one"),
    ("not finite", "a sum without NaN"),
    ("caches", "packed weights found by their identity"),
    ("gradients", "none where the weight is frozen"),
    ("modes", "given for evaluation: the variance, which is one, left out"),
    ("second derivative", "detached operands"),
    ("switches", "a random number drawn for nothing"),
    ("padding", "lengths counted from the end"),
    ("types", "a product in float32"),
    ("counters", "always the first place"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def time_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave time enough for what is left to the whole model, however slow the machine is."""
    monkeypatch.setattr(sys.modules[TimeBudget.__module__], "_LEAST_FOR_LEAVING", 100.0)


class Fast(Replace):
    """The same for speed: it may be left where time is over."""

    goal: ClassVar[Goal] = Goal.SPEED


def decided(subject: Subject, function: Callable[..., Any]) -> list[tuple[str, Any]]:
    model, inputs = subject.example()
    pass_ = Fast(function, subject.tensors, subject.node)
    fast = fxopt.optimize(model, passes=[pass_], example_inputs=inputs, measure=False, time_budget=SHORT)
    return [(each.status, each.figures.get("checked")) for each in fxopt.plan(fast).decisions]


@pytest.mark.parametrize("wrong", CHOSEN, ids=" ".join)
def test_a_wrong_rewrite_does_not_stand_where_time_is_over(wrong: tuple[str, str]) -> None:
    subject, function = WRONG[wrong]
    assert "undone" in {status for status, _ in decided(subject, function)}
    assert set(decided(subject, subject.honest)) == {("applied", "with the whole model")}


SLOW = [
    ("modes", "folded in evaluation without the shift"),
    ("gradients", "a gradient for the weight only"),
    ("second derivative", "detached operands"),
    ("caches", "a result found by the argument's address"),
]


@pytest.mark.parametrize("wrong", SLOW, ids=" ".join)
def test_of_a_slow_model_each_mode_and_its_gradients_are_checked_where_they_fit(
    wrong: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_check, "_IN_FULL", 1e9)  # any model is slow then
    subject, function = WRONG[wrong]
    assert "undone" in {status for status, _ in decided(subject, function)}
    assert set(decided(subject, subject.honest)) == {("applied", "with the whole model")}


@dataclasses.dataclass(frozen=True)
class Halve(Pass):
    """Write `x / 2` as a product, with a lowering that forgets what is below zero, and an owner where it is wrong."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    choices: tuple[str, ...] = ()
    wrong_at: str = ""

    def find(self, program: Program) -> Any:
        for match in program.matches(operation("div", name="div")):
            yield dataclasses.replace(match.site(), choices=self.choices)

    def rewrite(self, site: Site, edit: Edit) -> None:
        node: fx.Node = edit.graph_node("div")
        x = node.args[0]
        if site.owner == self.wrong_at or site.choice == "wrong":
            x = edit.call(torch.abs, x, before=node)
        edit.replace(node, edit.call(torch.mul, x, 0.5, before=node))


class Half(nn.Module):
    def __init__(self, shape: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x / 2 + self.bias.sum(0)


X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))  # nothing is below zero in the example


def net() -> nn.Sequential:
    return nn.Sequential(*(Half(1 + number) for number in range(5))).eval()


def test_of_several_only_the_wrong_one_goes() -> None:
    model = net()
    fast = fxopt.optimize(model, Halve(wrong_at="3"), example_inputs=(X,), measure=False, time_budget=SHORT)
    statuses = {each.label: each.status for each in fxopt.plan(fast).decisions}
    assert statuses == {str(number): "undone" if number == 3 else "applied" for number in range(5)}
    torch.testing.assert_close(fast(-X), model(-X))


def test_a_wrong_lowering_that_nobody_timed_does_not_stand() -> None:
    model = net()
    pass_ = Halve(choices=("wrong", "right"))
    fast = fxopt.optimize(model, pass_, example_inputs=(X,), time_budget=SHORT)
    assert {each.status for each in fxopt.plan(fast).decisions} == {"undone"}
    torch.testing.assert_close(fast(-X), model(-X))


def test_what_was_found_wrong_is_not_left_to_the_whole_model() -> None:
    """Time is over once the first lowering has been compared."""
    program = fxopt.capture(net(), (X,))
    budget = TimeBudget(1e6)
    manager = manager_of(program, budget=budget, time=False)

    class Late(Halve):
        def rewrite(self, site: Site, edit: Edit) -> None:
            super().rewrite(site, edit)
            budget.spent += 3e5 if site.owner == "0" else 0.0

    manager.run([Late(wrong_at="0")])
    assert manager.decisions[0].status == "undone"
    assert "verify.differs" in manager.decisions[0].cause
    torch.testing.assert_close(program.model(-X), net()(-X))


@dataclasses.dataclass(frozen=True)
class Round(Pass):
    """Write a product by 0.5 as one by a number near it: a lossy pass, which is owed, on what `Halve` wrote."""

    goal: ClassVar[Goal] = Goal.MEMORY
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE

    def find(self, program: Program) -> Any:
        for match in program.matches(operation("mul", name="mul")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("mul")
        edit.replace(node, edit.call(torch.mul, node.args[0], 0.501, before=node))


def test_what_was_written_on_what_goes_unchecked_is_noted_as_gone() -> None:
    """Beside a lossy rewrite nothing is checked with the whole model."""
    model, passes = net(), [Halve(), Round()]
    fast = fxopt.optimize(model, passes, example_inputs=(X,), measure=False, time_budget=SHORT)
    plan = fxopt.plan(fast)
    assert Counter((each.pass_name, each.status) for each in plan.decisions) == {
        ("halve", "undone"): 5,
        ("round", "undone"): 5,
    }
    assert torch.equal(fast(X), model(X))
    again = fxopt.optimize(model, passes, example_inputs=(X,), plan=plan)
    assert torch.equal(again(X), model(X))


def test_what_is_recalled_stands_where_no_time_is_left_to_check_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fast() -> nn.Module:
        return fxopt.optimize(model, "flatten_calls", example_inputs=x, measure=False)

    def no_time(*_: Any) -> None:
        asked.append(1)

    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    model, x, asked = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8), list[int]()
    fast()
    (path,) = tmp_path.iterdir()
    given = json.loads(path.read_text())
    for decision in given["plan"]["decisions"]:
        decision["figures"] = {**decision["figures"], "checked": "with the whole model"}
    path.write_text(json.dumps({**given, "is_compared": False}))
    monkeypatch.setattr("fxopt.passes.driver.whole_model.full_check.FullCheck.objection", no_time)
    again = fast()
    assert asked and fxopt.report(again).to_json()["cached"]
    torch.testing.assert_close(again(x), model(x))
