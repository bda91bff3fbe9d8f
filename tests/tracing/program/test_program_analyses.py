"""Analyses: worked out when asked for, kept until the program changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Site
from fxopt.tracing.program import CallSites, Program, TensorOwners


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.once = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.once.weight
        self.alias = self.twice
        self.register_buffer("offset", torch.zeros(4))
        self.register_buffer("same_offset", self.offset)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = self.once(x)
        return self.alias(self.twice(x)) + self.tied(x) + self.offset


def captured() -> Program:
    return fxopt.capture(Shared(), (torch.randn(2, 4),))


def test_calls_are_counted_by_module_whatever_its_name() -> None:
    program = captured()
    sites = program.analyses[CallSites]
    assert len(program.captures[""].specializations) == 2
    assert sites.count(program.model.once) == 1
    assert sites.count(program.model.twice) == sites.count(program.model.alias) == 2
    assert sites.count(program.model.tied) == 1
    assert sites.count(program.model.never) == 0
    assert sites.count(nn.Linear(1, 1)) == 0


def test_calls_inside_of_blocks_count_once_for_each_block() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(layer, nn.ReLU()), nn.Sequential(layer, nn.ReLU()))
    program = fxopt.capture(model, (torch.randn(2, 4),))
    assert program.analyses[CallSites].count(layer) == 0
    assert program.analyses[CallSites].count(program.model[0][0]) == 2


def test_tied_tensors_know_all_their_names() -> None:
    owners = captured().analyses[TensorOwners]
    assert owners.names("once.weight") == owners.names("tied.weight") == ("once.weight", "tied.weight")
    assert owners.names("alias.bias") == ("twice.bias", "alias.bias")
    assert owners.names("offset") == ("offset", "same_offset")
    assert owners.names("never.weight") == ("never.weight",)
    assert owners.names("nowhere") == ("nowhere",)


def test_analyses_are_kept_until_the_program_changes() -> None:
    program = captured()
    before = program.analyses[CallSites]
    assert program.analyses[CallSites] is before
    edit = Edit(program, Site(program, "", {}), "test_pass")
    edit.call("never", next(iter(edit.graph.nodes)))
    edit.finish()
    assert program.analyses[CallSites] is not before
    assert (before.count(program.model.never), program.analyses[CallSites].count(program.model.never)) == (0, 1)
    edit.undo()
    assert program.analyses[CallSites].count(program.model.never) == 0


def test_any_class_that_computes_is_an_analysis() -> None:
    class NodeCount(int):
        @classmethod
        def compute(cls, program: Program) -> NodeCount:
            return cls(sum(len(graph.nodes) for graph in program.graphs.values()))

    program = captured()
    assert program.analyses[NodeCount] == sum(
        len(specialization.graph.nodes) for specialization in program.captures[""].specializations
    )
