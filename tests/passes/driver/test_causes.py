"""Each place that is left as it was has a cause: a value that tells who decided, and what for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import pytest
import torch
from torch import fx, nn

import fxopt
from fxopt import Cause

X = torch.randn(4, 8)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def negated(graph_module: fx.GraphModule) -> fx.GraphModule:
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    with graph_module.graph.inserting_before(output):
        output.args = (graph_module.graph.call_function(torch.neg, (output.args[0],)),)
    return graph_module


def causes(model: nn.Module) -> set[str]:
    return {decision.cause for decision in fxopt.plan(model).decisions}


def test_what_is_for_evaluation_is_left_in_training() -> None:
    assert causes(fxopt.optimize(network(), "fold_batchnorm", example_inputs=X)) == {Cause.IN_TRAINING}


def test_what_differs_was_found_by_verification() -> None:
    fast = fxopt.optimize(network(), [negated], example_inputs=X)
    (decision,) = fxopt.plan(fast).decisions
    assert (decision.status, decision.cause) == ("undone", Cause.DIFFERS)
    assert Cause(decision.cause).stage == "verify" and not Cause.DIFFERS.is_speed


def test_what_was_applied_has_no_cause_and_all_else_has_one() -> None:
    fast = fxopt.optimize(network().eval(), "inference,pack", example_inputs=X)
    decisions = json.loads(json.dumps(fxopt.report(fast).to_json()))["decisions"]
    assert decisions and all((each["cause"] == "") == (each["status"] == "applied") for each in decisions)
    assert {each["cause"] for each in decisions} <= {"", *Cause}
    assert fxopt.Plan.from_json(fxopt.plan(fast).to_json()) == fxopt.plan(fast)


@dataclass(frozen=True)
class Refuses(fxopt.Pass):
    name: ClassVar[str] = "refuses"
    cause: str = ""

    def find(self, program: fxopt.Program) -> Iterator[fxopt.Refusal]:
        yield fxopt.Refusal("it is odd", "0", cast("Cause", self.cause))


@pytest.mark.parametrize("cause", ["", "later.invented"])
def test_a_cause_of_another_release_is_told_by_its_reason(cause: str) -> None:
    with pytest.warns(fxopt.NothingDoneWarning, match="it is odd"):
        fast = fxopt.optimize(network().eval(), [Refuses(cause)], example_inputs=X)
    assert "it is odd" in str(fxopt.report(fast).table()) and not Cause(cause).is_speed


def test_a_plan_that_does_not_fit_says_so() -> None:
    plan = fxopt.plan(fxopt.optimize(network().eval(), "fold_batchnorm", example_inputs=X, measure=False))
    with pytest.raises(fxopt.PlanError, match=r"call model.eval\(\) first"):
        fxopt.optimize(network(), plan=plan, example_inputs=X)
