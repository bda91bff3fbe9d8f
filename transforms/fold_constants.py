"""Compute once and for all what depends on nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from ..errors import UsageError
from ..operators import upwards
from ..passes.contract import Pass, check_option_types
from ..passes.rewriting import Edit, handed_out, has_effects, written_values
from ..passes.sites import Goal, Numerics, Phase, Refusal, Site
from ..runtime.graphs import ContextRegion
from ..runtime.values import is_meta, qualified
from ..tracing.program import Program, found_in_graphs, function_of_node

__all__ = ["FoldConstants"]


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Replace tensors computed from literals alone by their values.

    Before: mask = torch.arange(8) < 4        After: mask = self.constant
    Refuses: a value that is written to or handed to the caller, itself or as a view, or that is larger than `limit`
    elements.

    What reads parameters or buffers is never folded: a checkpoint loaded later would not reach it.

    Options:
        limit: largest constant, in elements.
    """

    limit: int = 1 << 20

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.SIZE
    clean_up: ClassVar[bool] = True
    phase: ClassVar[Phase] = Phase.BOTH

    def __post_init__(self) -> None:
        check_option_types(self)
        if self.limit < 0:
            raise UsageError(f"pass 'fold_constants': limit={self.limit}; give a number of elements, 0 or more")

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        on_meta = is_meta(program.model)
        for owner, specialization, graph, constants in found_in_graphs(program, Constants):
            for node in constants.written:
                yield Refusal("the constant, or a view of it, is written to", qualified(owner, node.name))
            ends = constants.ends()
            handed = handed_out(graph, program, owner) if ends else ()
            sizes: dict[fx.Node, int] = {}
            for node in ends:
                size = evaluate(node).numel()
                reason = _ON_META if on_meta else self._reason_against(node in handed, size, program.module(owner))
                if reason is None:
                    sizes[node] = size
                else:
                    yield Refusal(reason, qualified(owner, node.name))
            if sizes:
                yield _site(sizes, program, owner, specialization)

    def _reason_against(self, is_handed_out: bool, size: int, owner: nn.Module) -> str | None:
        if isinstance(owner, ContextRegion) and owner.context.kind == "autocast":
            return f"it is computed under {owner.context}"
        if is_handed_out:
            return "the constant, or a view of it, is handed to the caller, who may write into it"
        if size > self.limit:
            return f"the constant has {size:,} elements, more than limit={self.limit:,}"
        return None

    def rewrite(self, site: Site, edit: Edit) -> None:
        values = {label: evaluate(edit.graph_node(label)) for label in site.nodes}
        for label, value in values.items():
            node = edit.graph_node(label)
            name = edit.add_constant(value, name=f"constant_{node.name}")
            edit.replace(node, edit.get_attr(name, before=node))


_ON_META = "the model is on the meta device, where a constant of another device could not be used"


def _site(sizes: Mapping[fx.Node, int], program: Program, owner: str, specialization: int) -> Site:
    """Return one site for all constants of a graph: each by itself would cost a copy of the graph."""
    nodes = {f"constant_{number}": node.name for number, node in enumerate(sizes)}
    elements = f"{sum(sizes.values()):,} elements"
    if len(sizes) > 1:
        return Site(program, owner, nodes, specialization, detail=f"{len(sizes)} constants, {elements}")
    return Site(program, owner, nodes, specialization, detail=elements, label=qualified(owner, next(iter(sizes)).name))


class Constants:
    """The nodes of a graph that depend on literals alone; `written`: those that are written to afterwards."""

    def __init__(self, graph: fx.Graph, program: Program, owner: str) -> None:
        self.nodes: set[fx.Node] = set()
        self.written: list[fx.Node] = []
        written = written_values(graph, program, owner)
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method") or has_effects(node, program, owner):
                continue
            if not all(source in self.nodes for source in node.all_input_nodes):
                continue
            if node not in written:
                self.nodes.add(node)
            elif not node.all_input_nodes:
                self.written.append(node)

    def ends(self) -> list[fx.Node]:
        """Return the constant tensors that something else reads."""
        ends = [node for node in self.nodes if any(user not in self.nodes for user in node.users)]
        return [node for node in sorted(ends) if isinstance(evaluate(node), torch.Tensor)]


def evaluate(node: fx.Node) -> Any:
    """Return the value of a node that depends on literals alone."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for step in sorted(upwards(node)):
            args = fx.map_arg(step.args, values.__getitem__)
            kwargs = fx.map_arg(step.kwargs, values.__getitem__)
            values[step] = function_of_node(step, nn.Module())(*args, **kwargs)  # it reads nothing of a module
    return values[node]
