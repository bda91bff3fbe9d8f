"""The table of lowerings, and what plans say of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import MatchFailure, PlanError
from fxopt.transforms.fuse_ensembles import FuseEnsembles, Lowering
from fxopt.transforms.fuse_ensembles.lowerings import rule_called

N = 3


class Ensemble(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.Linear, *options: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(kind(4, 4, *options), nn.ReLU()) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads])


class Separate(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x[i]) for i, head in enumerate(self.heads)])


class Cast(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize(
    ("model", "shape", "names"),
    [
        (Ensemble(), (2, 4), ("wide", "bmm", "wide_input_first", "grouped_conv", "vmap")),
        (Separate(), (N, 2, 4), ("bmm", "grouped_conv", "vmap")),
        (Ensemble(nn.Conv1d, 1), (2, 4, 5), ("grouped_conv", "vmap")),
        (Cast(), (2, 4), ("wide", "bmm", "wide_input_first", "grouped_conv")),
    ],
)
def test_those_are_tried_that_differ(model: nn.Module, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    program = fxopt.capture(model, (torch.randn(shape),))
    (site,) = FuseEnsembles().find(program)
    assert site.choices == names


def test_each_name_that_can_be_asked_for_has_a_rule() -> None:
    for lowering in set(Lowering) - {Lowering.AUTO, Lowering.LOOP}:
        assert callable(rule_called(lowering.value).write)
    for lowering in (Lowering.AUTO, Lowering.LOOP):
        with pytest.raises(MatchFailure, match=f"there is no lowering '{lowering.value}'; there are wide, bmm"):
            rule_called(lowering.value)


@pytest.mark.parametrize("model", [Ensemble(), nn.Sequential(Ensemble(), nn.Flatten(0, 1), Ensemble())])
def test_a_plan_that_names_a_lowering_that_is_no_more_is_refused(model: nn.Module) -> None:
    inputs = (torch.randn(2, 4),)
    plan = fxopt.plan(fxopt.optimize(model, "fuse_ensembles", example_inputs=inputs, measure=False))
    decisions = tuple(dataclasses.replace(each, choice="wide up to 8 rows, then bmm") for each in plan.decisions)
    old = dataclasses.replace(plan, decisions=decisions)
    with pytest.raises(PlanError, match=r"there is no lowering 'wide up to 8 rows, then bmm'; there are wide, bmm, "):
        fxopt.optimize(model, "fuse_ensembles", example_inputs=inputs, plan=old)
