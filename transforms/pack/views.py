"""Who needs tensors to lie in memory in the order of their dimensions: packed convolutions lay channels last."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ...tracing.program import Program
from .layers import shape_of

__all__ = ["views_in"]


def views_in(program: Program) -> dict[tuple[str, int], dict[str, str]]:
    """Return, by graph, the nodes that view images in another shape, and images that the model returns, by labels."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for owner, capture in program.captures.items():
        for number, specialization in enumerate(capture.specializations):
            if specialization.runs_in_mode(program.module(owner)):
                views = [node.name for node in specialization.graph.nodes if _is_view(node)]
                outputs = [] if owner else [node.name for node in _returned(specialization.graph)]
                labels = {f"view.{count}": name for count, name in enumerate(views)}
                labels |= {f"output.{count}": name for count, name in enumerate(outputs)}
                if labels:
                    found[owner, number] = labels
    return found


def _is_view(node: fx.Node) -> bool:
    return (
        node.op == "call_method"
        and node.target == "view"
        and isinstance(node.args[0], fx.Node)
        and _is_image(node.args[0])
    )


def _is_image(node: fx.Node) -> bool:
    shape = shape_of(node)
    return shape is not None and len(shape) in (4, 5) and node.op != "placeholder"


def _returned(graph: fx.Graph) -> Iterator[fx.Node]:
    yield from (node for node in graph.output_node().all_input_nodes if _is_image(node))
