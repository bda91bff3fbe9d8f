"""Two blocks of a difference and a product, a pass that writes these as calls, and runs in which each has a cost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.driver import Manager
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Numerics, Site
from fxopt.passes.timing import TimeBudget, Timings
from fxopt.runtime.graphs import capture_of
from fxopt.tracing.program import Program

from .runs import manager_of

__all__ = ["Block", "Write", "X", "blocks", "by_status", "run", "written_in"]

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
_WRITTEN = (torch.sub, torch.subtract, torch.multiply)


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - 1.0) * 2.0


def blocks() -> nn.Module:
    """Return two blocks in evaluation."""
    return nn.Sequential(Block(), Block()).eval()


@dataclasses.dataclass(frozen=True)
class Write(Pass):
    """Write an operation that nobody has written as a call of a function."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.EXACT
    function: Any = torch.subtract
    found: str = "sub"

    def find(self, program: Program) -> Iterator[Site]:
        for match in program.matches(operation(self.found, name="it")):
            if match["it"].target not in _WRITTEN:
                yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("it")
        edit.replace(node, edit.call(self.function, *node.args))


Names = Mapping[Callable[..., Any], str]


def written_in(model: nn.Module, names: Names) -> Counter[str]:
    """Count the operations that passes have written, by the names that a test gives them."""
    captures = [capture for each in model.modules() if (capture := capture_of(each)) is not None]
    nodes = (node for capture in captures for node in capture.specializations[0].graph.nodes)
    return Counter(names[node.target] for node in nodes if node.target in _WRITTEN)


def run(
    monkeypatch: pytest.MonkeyPatch,
    names: Names,
    costs: Mapping[str, float],
    *passes: Pass,
    budget: TimeBudget | None = None,
) -> tuple[Manager, int]:
    """Run passes on two blocks; the whole model costs 100, and each written operation what is said. Count the races."""
    races: list[Mapping[str, Any]] = []

    def raced(candidates: Mapping[str, Any], **_: Any) -> Timings:
        races.append(candidates)

        def cost(model: nn.Module) -> float:
            return 100.0 + sum(costs[name] * count for name, count in written_in(model, names).items())

        return Timings([{name: cost(each.module) for name, each in candidates.items()}] * 9)

    monkeypatch.setattr(timing, "time_candidates", raced)
    budget = budget or TimeBudget(100.0, forward=0.01, timing=80.0)
    model = blocks()
    manager = manager_of(fxopt.capture(model, (X,)), budget=budget)
    manager.run(passes)
    assert torch.equal(manager.program.model(X), model(X))
    return manager, len(races)


def by_status(manager: Manager) -> Counter[tuple[str, str]]:
    """Count the decisions by pass and status."""
    return Counter((decision.pass_name, decision.status) for decision in manager.decisions)
