"""Compute once and for all what depends on nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from ..passes.base import Goal, Numerics, Pass, Phase, Refusal, Site
from ..passes.effects import has_effects, is_written_to, reaches_output

if TYPE_CHECKING:
    from ..passes.edit import Edit
    from ..tracing.program import Program

__all__ = ["FoldConstants"]


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Replace tensors computed from literals alone by their values.

    Before: mask = torch.arange(8) < 4        After: mask = self.constant
    Refuses: a value that is written to or handed to the caller, or that is larger than `limit` elements.

    What reads parameters or buffers is never folded: a checkpoint loaded later would not reach it.

    Options:
        limit: largest constant, in elements.
    """

    limit: int = 1 << 20

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.SIZE
    phase: ClassVar[Phase] = Phase.BOTH

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for home, capture in program.captures.items():
            for variant, captured in enumerate(capture.variants):
                for node in constant_roots(captured.graph, program, home):
                    yield self._examine(node, program, home, variant)

    def _examine(self, node: fx.Node, program: Program, home: str, variant: int) -> Site | Refusal:
        at = f"{home}.{node.name}" if home else node.name
        if reaches_output(node):
            return Refusal("the constant is handed to the caller, who may write into it", at)
        if is_written_to(node, program, home):
            return Refusal("the constant, or a view of it, is written to", at)
        size = evaluate(node).numel()
        if size > self.limit:
            return Refusal(f"the constant has {size:,} elements, more than limit={self.limit:,}", at)
        return Site(program, home, {"constant": node.name}, variant, detail=f"{size:,} elements", label=at)

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("constant")
        name = edit.add_constant(evaluate(node), name=f"constant_{node.name}")
        edit.replace(node, edit.get_attr(name, before=node))


def constant_roots(graph: fx.Graph, program: Program, home: str) -> list[fx.Node]:
    """Return the nodes that give a tensor from literals alone and that something else reads."""
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or has_effects(node, program, home):
            continue
        if all(source in constant for source in node.all_input_nodes):
            constant.add(node)
    ends = [node for node in graph.nodes if node in constant and any(user not in constant for user in node.users)]
    return [node for node in ends if isinstance(evaluate(node), torch.Tensor)]


def evaluate(node: fx.Node) -> Any:
    """Return the value of a node that depends on literals alone."""
    values: dict[fx.Node, Any] = {}
    order = list(_ancestry(node))
    with torch.no_grad():
        for step in order:
            args = fx.map_arg(step.args, values.__getitem__)
            kwargs = fx.map_arg(step.kwargs, values.__getitem__)
            if step.op == "call_method":
                values[step] = getattr(args[0], str(step.target))(*args[1:], **kwargs)  # pyright: ignore
            else:
                values[step] = step.target(*args, **kwargs)  # pyright: ignore
    return values[node]


def _ancestry(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what a node is computed from and the node itself, in execution order."""
    wanted = {node}
    for candidate in reversed(node.graph.nodes):
        if candidate in wanted:
            wanted.update(candidate.all_input_nodes)
    return (candidate for candidate in node.graph.nodes if candidate in wanted)
