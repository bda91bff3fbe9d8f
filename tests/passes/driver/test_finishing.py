"""Passes that act on the finished model: when they are asked, what is checked, and what plans and archives keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import OrderError, PassError, UsageError
from fxopt.passes.contract import Pass
from fxopt.passes.pipeline import chosen_passes
from fxopt.passes.sites import Goal, Refusal, Site
from fxopt.tracing.program import Program


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.trunk(x)), 0.5, self.training)
        return torch.stack([head(x) for head in self.heads]).mean(0)


@dataclasses.dataclass(frozen=True)
class Tag(Pass):
    """Note on each linear layer that is there at the end that it was seen.

    Attributes:
        does: what else: "scale" the trunk, "raise", "wrap" the model, or "refuse" it.
    """

    does: str = ""

    goal: ClassVar[Goal] = Goal.PARALLEL

    def check(self, model: nn.Module) -> None:
        if self.does == "refuse":
            raise UsageError("pass 'tag' does not like this model; give it another")

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for name, module in program.model.named_modules():
            if isinstance(module, nn.Linear):
                yield Site(program, name, {}, data={"children": [child for child, _ in program.model.named_children()]})
            elif isinstance(module, nn.BatchNorm1d):
                yield Refusal("a norm is no linear layer", at=name)

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        for site in sites:
            model.get_submodule(site.owner).tag = site.data["children"]  # type: ignore[assignment]
        if self.does == "raise":
            raise ValueError("out of order")
        if self.does == "scale":
            with torch.no_grad():
                model.get_submodule("trunk").weight.mul_(1.01)  # type: ignore[operator]
        return nn.Sequential(model) if self.does == "wrap" else model


def made(*, training: bool = True) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model().train(training), torch.randn(4, 8)


def test_units_are_found_at_the_end_and_named_in_the_plan() -> None:
    model, x = made()
    fast = fxopt.optimize(model, ["fuse_ensembles", Tag()], example_inputs=x, measure=False)
    assert "heads_fused" in fast.trunk.tag and not hasattr(model.trunk, "tag")
    assert next(d.key for d in fxopt.plan(fast).decisions if (d.pass_name, d.status) == ("tag", "applied")) == "trunk"
    assert "a norm is no linear layer" in str(fxopt.report(fast))
    assert isinstance(fast, Model) and fast.training


def test_a_plan_says_where() -> None:
    model, x = made()
    first = fxopt.optimize(model, Tag(), example_inputs=x)
    plan = fxopt.plan(first)
    kept = dataclasses.replace(plan, decisions=tuple(d for d in plan.decisions if d.key != "heads.1"))
    again = fxopt.optimize(model, Tag(), example_inputs=x, plan=kept)
    assert hasattr(again.heads[0], "tag") and not hasattr(again.heads[1], "tag")


def test_a_pass_that_changes_the_outputs_is_refused() -> None:
    model, x = made()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        PassError,
        match=r"pass 'tag' changed what the model gives: output 0 differs: .*: give all processes the same .*out",
    ):
        fxopt.optimize(model, Tag("scale"), example_inputs=x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_comparing_leaves_no_trace() -> None:
    model, x = made()
    state = torch.get_rng_state()
    fast = fxopt.optimize(model, Tag(), example_inputs=x)
    assert torch.equal(torch.get_rng_state(), state)
    assert int(fast.norm.num_batches_tracked) == 0


def test_comparing_draws_no_numbers_that_the_user_would_draw() -> None:
    class Noisy(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(())

    torch.manual_seed(0)
    model, x = Noisy().train(), torch.randn(4, 8)
    state = torch.get_rng_state()
    fxopt.optimize(model, Tag(), example_inputs=x)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_finalize_raises_names_the_pass() -> None:
    model, x = made()
    with pytest.raises(PassError, match="pass 'tag': finalize raised ValueError: out of order"):
        fxopt.optimize(model, Tag("raise"), example_inputs=x)


def test_another_object_in_the_place_of_the_model_has_the_record() -> None:
    model, x = made(training=False)
    wrapped = fxopt.optimize(model, Tag("wrap"), example_inputs=x)
    assert type(wrapped) is nn.Sequential and "tag" in str(fxopt.report(wrapped))
    assert torch.equal(wrapped(x), model(x))


def test_a_pass_refuses_before_any_work() -> None:
    calls: list[int] = []

    class Counting(Model):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)

    with pytest.raises(UsageError, match="does not like this model"):
        fxopt.optimize(Counting(), Tag("refuse"), example_inputs=torch.randn(4, 8))
    assert not calls


def test_it_comes_last_and_on_a_copy() -> None:
    model, x = made()
    with pytest.raises(OrderError, match="'tag' acts on the finished model, so it must run after 'fuse_ensembles'"):
        chosen_passes([Tag(), "fuse_ensembles"])
    with pytest.raises(UsageError, match="'tag' works on a copy: leave inplace=True out"):
        fxopt.optimize(model, Tag(), example_inputs=x, inplace=True)


@pytest.mark.parametrize("again", ["eliminate_dead_code", Tag()])
def test_nothing_comes_after_it_in_another_call_either(again: str | Pass) -> None:
    model, x = made()
    first = fxopt.optimize(model, Tag(), example_inputs=x)
    with pytest.raises(UsageError, match=r"has been through 'tag', which comes last, .* list all passes in one call"):
        fxopt.optimize(first, again, example_inputs=x)
    second = fxopt.optimize(fxopt.restore(first), again, example_inputs=x)
    assert torch.equal(second.eval()(x), model.eval()(x))


@dataclasses.dataclass(frozen=True)
class Idle(Tag):
    """Find nothing to act on."""

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        yield Refusal("there is nothing like it", at="(root)")


def test_a_pass_that_found_nothing_keeps_no_later_call_away() -> None:
    model, x = made()
    first = fxopt.optimize(model, Idle(), example_inputs=x)
    second = fxopt.optimize(first, ["fuse_ensembles", Tag()], example_inputs=x, measure=False)
    assert next(d.pass_name for d in fxopt.plan(second).decisions if d.status == "applied") == "fuse_ensembles"
    assert hasattr(second.trunk, "tag")
    with pytest.raises(UsageError, match="has been through 'tag'"):
        fxopt.optimize(second, Idle(), example_inputs=x)


def test_an_optimizer_goes_along() -> None:
    model, x = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fast = fxopt.optimize(model, ["fuse_ensembles", Tag()], example_inputs=x, measure=False, optimizer=optimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in fast.parameters()}
