"""Many rewrites of one pass, verified at once on the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support.runs import manager_of
from torch import Tensor, nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Manager
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Numerics, Phase, Site
from fxopt.passes.timing import TimeBudget
from fxopt.tracing.program import Program, capture_program

WIDTHS = (4, 5, 6, 7, 8, 9)


class Scaled(nn.Module):
    """Twice what a linear gives, in one size of its own."""

    def __init__(self, width: int, following: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, following)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * 2.0


class Net(nn.Sequential):
    """Blocks of which no two are alike."""

    def __init__(self) -> None:
        super().__init__(*(Scaled(width, width + 1) for width in WIDTHS))


@dataclass(frozen=True)
class WriteSum(Pass):
    """Write the doubling as a sum.

    Before: x * 2        After: x + x; at some widths, which are wrong, x + x + 1e-6, or an error
    Refuses: nothing.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    phase: ClassVar[Phase] = Phase.EVAL
    wrong: tuple[int, ...] = ()

    def find(self, program: Program) -> Iterator[Site]:
        for owner, capture in program.captures.items():
            for node in capture.specializations[0].graph.nodes:
                if node.op == "call_function" and node.args[1:] == (2.0,):
                    yield Site(program, owner, {"doubled": node.name})

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("doubled")
        (source,) = node.all_input_nodes
        total = edit.call(torch.add, source, source, before=node)
        if site.program.module(site.owner).get_parameter("linear.weight").shape[1] in self.wrong:
            total = edit.call(torch.add, total, 1e-6, before=node)
        edit.replace(node, total)


def manager(pass_: Pass, budget: float = 100.0) -> Manager:
    torch.manual_seed(0)
    program = capture_program(Net().eval(), (torch.randn(3, WIDTHS[0]),))
    runs = manager_of(program, time=False, budget=TimeBudget(budget, 1e-3))
    runs.run([pass_])
    return runs


def together(runs: Manager) -> list[int | None]:
    return [decision.figures.get("checked_together") for decision in runs.decisions]


def test_unequal_blocks_are_checked_in_one_run_of_the_model() -> None:
    runs = manager(WriteSum())
    assert together(runs) == [len(WIDTHS)] * len(WIDTHS)
    assert all(decision.figures["checked"] == "float64" for decision in runs.decisions)


@pytest.mark.parametrize("wrong", [WIDTHS[:1], WIDTHS[-1:], WIDTHS[1:3]])
def test_those_that_are_wrong_are_found_and_undone(wrong: tuple[int, ...]) -> None:
    runs = manager(WriteSum(wrong))
    found = {decision.key.partition(":")[0]: decision.status for decision in runs.decisions}
    expected = {str(n): "undone" if width in wrong else "applied" for n, width in enumerate(WIDTHS)}
    assert found == expected


def test_calls_of_parts_are_no_runs_of_the_model() -> None:
    x, pass_ = torch.randn(3, WIDTHS[0]), WriteSum()
    calls = [fxopt.Inputs.of_part("1", torch.randn(3, WIDTHS[1])), fxopt.Inputs(x)]
    fast = fxopt.optimize(Net().eval(), passes=[pass_], example_inputs=calls, measure=False)
    assert [d.figures.get("checked_together") for d in fxopt.plan(fast).decisions] == [len(WIDTHS)] * len(WIDTHS)


def test_a_module_that_is_never_called_is_not_checked_with_the_others() -> None:
    class Partial(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in list(self)[:-1]:
                x = block(x)
            return x

    x, pass_ = torch.randn(3, WIDTHS[0]), WriteSum((WIDTHS[-1],))
    fast = fxopt.optimize(Partial().eval(), passes=[pass_], example_inputs=(x,), measure=False)
    by_key = {d.key.partition(":")[0]: d for d in fxopt.plan(fast).decisions}
    assert "checked_together" in by_key["0"].figures
    assert "5" not in by_key or "checked_together" not in by_key["5"].figures


def test_where_there_is_no_time_for_the_whole_model_it_is_not_begun() -> None:
    runs = manager(WriteSum(), budget=1e-9)
    assert {decision.figures["checked"] for decision in runs.decisions} == {"with the whole model"}
    assert together(runs) == [None] * len(WIDTHS)


def test_a_plan_of_sites_checked_together_replays() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(3, WIDTHS[0])
    fast = fxopt.optimize(model, passes=[WriteSum()], example_inputs=(x,), measure=False)
    again = fxopt.optimize(model, passes=[WriteSum()], plan=fxopt.plan(fast))
    assert [d.status for d in fxopt.plan(again).decisions] == ["applied"] * len(WIDTHS)
    assert torch.equal(again(x), fast(x))
