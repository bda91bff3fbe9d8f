"""Remove what nothing reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..passes.contract import Pass
from ..passes.rewriting import Edit, has_effects
from ..passes.sites import Goal, Numerics, Phase, Site
from ..tracing.program import Program, found_in_graphs

__all__ = ["EliminateDeadCode"]


@dataclass(frozen=True)
class EliminateDeadCode(Pass):
    """Remove computations whose results nobody reads.

    Before: y = self.unused(x); return self.used(x)        After: return self.used(x)
    Refuses: nothing; whatever writes, draws random numbers, runs hooks or is not known to be pure is kept.
    """

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.SIZE
    clean_up: ClassVar[bool] = True
    phase: ClassVar[Phase] = Phase.BOTH

    def find(self, program: Program) -> Iterator[Site]:
        for owner, specialization, _, dead in found_in_graphs(program, dead_nodes):
            if dead:
                nodes = {f"dead_{number}": node.name for number, node in enumerate(dead)}
                yield Site(program, owner, nodes, specialization, detail=f"{len(dead)} nodes nobody reads")

    def rewrite(self, site: Site, edit: Edit) -> None:
        graph = edit.graph
        for node in dead_nodes(graph, site.program, site.owner):
            graph.erase_node(node)


def dead_nodes(graph: fx.Graph, program: Program, owner: str) -> list[fx.Node]:
    """Return the nodes without effects that nothing live reads, users before what they use."""
    dead: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if all(user in dead for user in node.users) and not has_effects(node, program, owner):
            dead[node] = None
    return list(dead)
