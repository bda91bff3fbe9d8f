"""Compute once what is computed several times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ..passes.contract import Pass
from ..passes.rewriting import Edit, handed_out, has_effects, writes
from ..passes.sites import Goal, Numerics, Phase, Refusal, Site
from ..runtime.values import is_plain_structure, map_leaves
from ..tracing.program import Program, found_in_graphs

__all__ = ["EliminateCommonSubexpressions"]


@dataclass(frozen=True)
class EliminateCommonSubexpressions(Pass):
    """Compute equal expressions once.

    Before: a = torch.relu(x); b = torch.relu(x)        After: a = torch.relu(x), read in both places
    Refuses: a graph that writes in place, since then equal expressions need not be equal values.

    A graph that repeats reads of sizes and other plain values only is left as it is: that takes no time to speak of.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SIZE
    clean_up: ClassVar[bool] = True
    phase: ClassVar[Phase] = Phase.BOTH

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for owner, specialization, graph, repeated in found_in_graphs(program, repetitions):
            # Some may compute tensors, and not only read plain values such as sizes.
            if all("val" in node.meta and is_plain_structure(node.meta["val"]) for node in repeated):
                continue
            writer = next((node for node in graph.nodes if writes(node, program, owner)), None)
            if writer is not None:
                yield Refusal(
                    f"{_as_written(writer)} may write in place, so equal expressions may differ", at=owner or "(root)"
                )
                continue
            nodes = {f"repeated_{number}": node.name for number, node in enumerate(repeated)}
            yield Site(program, owner, nodes, specialization, detail=f"{len(repeated)} computed before")

    def rewrite(self, site: Site, edit: Edit) -> None:
        graph = edit.graph
        for node, first in repetitions(graph, site.program, site.owner).items():
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _as_written(node: fx.Node) -> str:
    """Return a node as its user knows it: `'add_' at model.py:12`."""
    operation = getattr(node.target, "__name__", node.name) if callable(node.target) else node.target
    place = node.meta.get("source")
    return f"'{operation}'" + (f" at {place}" if place else "")


def repetitions(graph: fx.Graph, program: Program, owner: str) -> dict[fx.Node, fx.Node]:
    """Return node -> an earlier node of equal value; two values that the caller gets, and may write into, stay two."""
    first: dict[object, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    handed = handed_out(graph, program, owner)
    for node in graph.nodes:
        if has_effects(node, program, owner):
            continue
        given = map_leaves(lambda leaf: _Leaf(leaf, same), (node.args, dict(sorted(node.kwargs.items()))))
        known = first.setdefault((node.op, node.target, repr(given)), node)
        if known is not node and not (known in handed and node in handed):
            same[node] = known
            handed.update({known} if node in handed else ())
    return same


class _Leaf:
    """A leaf of an argument whose text is equal exactly where leaves are equal: 1, 1.0 and True are not."""

    def __init__(self, leaf: Any, same: dict[fx.Node, fx.Node]) -> None:
        is_node = isinstance(leaf, fx.Node)
        self._text = f"%{same.get(leaf, leaf).name}" if is_node else f"{type(leaf).__name__}:{leaf!r}"

    def __repr__(self) -> str:
        return repr(self._text)
