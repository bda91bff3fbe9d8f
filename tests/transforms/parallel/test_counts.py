"""Experts and members that cannot be dealt to processes are refused in the same words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.layers import MixtureOfExperts
from fxopt.transforms.parallel.experts import mixtures_in
from fxopt.transforms.parallel.members import ensembles_in


class Members(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


@pytest.mark.parametrize(
    ("processes", "reason"),
    [(2, ""), (3, "its 4 {} do not divide by 3 processes"), (8, "it has fewer {} (4) than processes (8)")],
)
def test_counts_that_do_not_fit_are_named(processes: int, reason: str) -> None:
    x = torch.randn(3, 8)
    members = fxopt.optimize(Members(), "fuse_ensembles{lowering=bmm}", example_inputs=x, measure=False)
    mixture = fxopt.capture(nn.Sequential(nn.Linear(8, 8), MixtureOfExperts(8, 6, 4, 2)), x)
    found = {"members": ensembles_in(fxopt.Program(members), processes), "experts": mixtures_in(mixture, processes)}
    for what, (able, refusals) in found.items():
        assert bool(able) == (not reason)
        assert [each.reason for each in refusals] == ([reason.format(what)] if reason else [])
