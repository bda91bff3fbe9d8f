"""Compute once and for all what depends on nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import fx

from ..passes.base import Goal, Numerics, Pass, Phase, Refusal, Site
from ..passes.effects import has_effects, is_written_to, reaches_output
from ..tracing.regions import ContextRegion

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
                constants = Constants(captured.graph, program, home)
                for node in constants.written:
                    yield Refusal("the constant, or a view of it, is written to", _qualified(home, node))
                for node in constants.ends():
                    yield self._examine(node, program, home, variant)

    def _examine(self, node: fx.Node, program: Program, home: str, variant: int) -> Site | Refusal:
        at = _qualified(home, node)
        region = program.module(home)
        if isinstance(region, ContextRegion) and region.context.kind == "autocast":
            return Refusal(f"it is computed under {region.context}", at)
        if reaches_output(node):
            return Refusal("the constant is handed to the caller, who may write into it", at)
        size = evaluate(node).numel()
        if size > self.limit:
            return Refusal(f"the constant has {size:,} elements, more than limit={self.limit:,}", at)
        return Site(program, home, {"constant": node.name}, variant, detail=f"{size:,} elements", label=at)

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("constant")
        name = edit.add_constant(evaluate(node), name=f"constant_{node.name}")
        edit.replace(node, edit.get_attr(name, before=node))


class Constants:
    """The nodes of a graph that depend on literals alone.

    Attributes:
        nodes: those whose value never changes.
        written: those that start from nothing, but are written to afterwards, themselves or through a view.
    """

    def __init__(self, graph: fx.Graph, program: Program, home: str) -> None:
        self.nodes: set[fx.Node] = set()
        self.written: list[fx.Node] = []
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method") or has_effects(node, program, home):
                continue
            if not all(source in self.nodes for source in node.all_input_nodes):
                continue
            if not is_written_to(node, program, home):
                self.nodes.add(node)
            elif not node.all_input_nodes:
                self.written.append(node)

    def ends(self) -> list[fx.Node]:
        """Return the constant tensors that something else reads."""
        ends = [node for node in self.nodes if any(user not in self.nodes for user in node.users)]
        order = {node: number for number, node in enumerate(ends[0].graph.nodes)} if ends else {}
        return [node for node in sorted(ends, key=order.__getitem__) if isinstance(evaluate(node), torch.Tensor)]


def _qualified(home: str, node: fx.Node) -> str:
    return f"{home}.{node.name}" if home else node.name


def evaluate(node: fx.Node) -> Any:
    """Return the value of a node that depends on literals alone."""
    values: dict[fx.Node, Any] = {}
    order = list(_ancestry(node))
    with torch.no_grad():
        for step in order:
            args = fx.map_arg(step.args, values.__getitem__)
            kwargs = fx.map_arg(step.kwargs, values.__getitem__)
            if step.op == "call_method":
                values[step] = getattr(args[0], str(step.target))(*args[1:], **kwargs)
            else:
                values[step] = cast("Callable[..., Any]", step.target)(*args, **kwargs)
    return values[node]


def _ancestry(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what a node is computed from and the node itself, in execution order."""
    wanted = {node}
    for candidate in reversed(node.graph.nodes):
        if candidate in wanted:
            wanted.update(candidate.all_input_nodes)
    return (candidate for candidate in node.graph.nodes if candidate in wanted)
