"""A module's dataflow with its members written out: members of one kind share patterns, each has its own tensors."""

from __future__ import annotations

import torch
from support.small_models import Twins

from fxopt.tracing.program import capture_program
from fxopt.transforms.fuse_ensembles.inlining import inlined_graph


def test_members_of_one_kind_are_inlined_alike_each_with_its_own_tensors() -> None:
    program = capture_program(Twins(), (torch.ones(1, 2),))
    inlined = inlined_graph(program, "")
    linears = [operation for operation in inlined.operations if operation.operator == "linear"]
    slopes = [operation for operation in inlined.operations if operation.operator == "leaky_relu"]
    assert len({linear.pattern for linear in linears}) == 1
    assert [str(linear.inputs[1].target) for linear in linears] == [f"members.{i}.0.weight" for i in range(3)]
    assert slopes[0].pattern is slopes[1].pattern is not slopes[2].pattern
    assert [slope.inputs[0] for slope in slopes] == linears
    assert [path for paths in inlined.modules.values() for path in paths if path.count(".") == 1] == [
        f"members.{i}" for i in range(3)
    ]
