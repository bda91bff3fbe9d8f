"""Lists of experts in which some are gone."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fxopt.layers.resized import KeptExperts, RemovedExpert


def experts() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(4))


def test_items_are_those_that_are_left() -> None:
    every = experts()
    made = KeptExperts.of(every, [1, 3])
    assert len(made) == 2 and list(made) == [every[1], every[3]]
    assert made[0] is every[1] and made[-1] is every[3] and made[1:][0] is every[3]
    assert made.state_dict().keys() == every.state_dict().keys()


def test_what_is_gone_is_no_layer_and_keeps_its_tensors() -> None:
    every = experts()
    gone = KeptExperts.of(every, [1, 3]).get_submodule("0")
    assert isinstance(gone, RemovedExpert) and not any(isinstance(m, nn.Linear) for m in gone.modules())
    assert gone.get_parameter("0.weight") is every[0][0].weight
    assert gone.get_buffer("1.running_mean") is every[0][1].running_mean


def test_more_go_and_copies_are_alike() -> None:
    every = experts()
    fewer = copy.deepcopy(KeptExperts.of(KeptExperts.of(every, [0, 2, 3]), [0, 2]))
    assert fewer.kept == ("0", "3") and len(fewer) == 2
    assert torch.equal(fewer[1][0].weight, every[3][0].weight)
