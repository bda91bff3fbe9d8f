"""Who needs tensors to lie in memory in the order of their dimensions: packed convolutions lay channels last."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass

from torch import fx

from ...layers.packed import PackedConvolution
from ...operators import canonical_name, operator_info, operator_of_module
from ...runtime.graphs import specializations_of
from ...runtime.values import user_class
from ...tracing.program import Program
from .edit import Edit
from .inlining import reason_against_inlining
from .layers import call_of_layer, shape_of

__all__ = ["lay_out_readers", "readers_in"]

_LEAST = 3
"""What a module is given with fewer dimensions is no image."""


def readers_in(
    program: Program, packed: Mapping[tuple[str, int], Collection[fx.Node]]
) -> dict[tuple[str, int], dict[str, str]]:
    """Return, by graph, who may need images in order, and what they read, by labels: `reader.N` reads `value.N`, and
    the graph returns `output.N`. `packed` are, by graph, the nodes whose results will lie otherwise.
    """
    found: dict[tuple[str, int], dict[str, str]] = {}
    for owner, capture in program.captures.items():
        for number, specialization in enumerate(capture.specializations):
            if specialization.runs_in_mode(program.module(owner)):
                graph = _Graph(program, owner, specialization.graph, packed.get((owner, number), ()))
                labels = dict(graph.labels())
                if labels:
                    found[owner, number] = labels
    return found


def lay_out_readers(edit: Edit, labels: Iterable[str]) -> None:
    """Lay images out for all who need them in order, by labels of `readers_in` with or without a prefix."""
    for label in labels:
        start, what, number = ("." + label).rsplit(".", 2)
        if what == "reader":
            _lay_out(edit, edit.graph_node(label), edit.graph_node(f"{start}.value.{number}"[1:]))
        elif what == "output":
            _lay_out(edit, edit.graph.output_node(), edit.graph_node(label))


def _lay_out(edit: Edit, reader: fx.Node, x: fx.Node) -> None:
    """Give who reads a tensor, and all after it, one that lies in memory in the order of its dimensions. What reads it
    may write into it, which those that come later are to see.
    """
    if x not in reader.all_input_nodes:
        return
    plain = edit.call(".contiguous", x, before=reader)
    plain.meta["val"] = x.meta.get("val")
    nodes = list(edit.graph.nodes)
    for later in nodes[nodes.index(reader) :]:
        if x in later.all_input_nodes and (later is reader or reader.op == "call_module"):
            later.replace_input_with(x, plain)


@dataclass
class _Graph:
    """A graph, of which some nodes' results will lie otherwise than they did, and all that lies otherwise then."""

    program: Program
    owner: str
    graph: fx.Graph
    packed: Collection[fx.Node]
    _odd: set[fx.Node] = field(default_factory=set[fx.Node])

    def labels(self) -> Iterator[tuple[str, str]]:
        """Yield the names of readers and of what they read, by labels."""
        count = 0
        for node in self.graph.nodes:
            read = [each for each in node.all_input_nodes if each in self._odd]
            if node.op == "output":
                inner = read if self._is_read_in_order() else []
                yield from ((f"output.{i}", each.name) for i, each in enumerate(inner) if shape_of(each) is not None)
            elif self._takes_any(node):
                if self._lies_otherwise(node, read):
                    self._odd.add(node)
            else:
                for each in (each for each in read if shape_of(each) is not None):
                    yield f"reader.{count}", node.name
                    yield f"value.{count}", each.name
                    count += 1

    def _lies_otherwise(self, node: fx.Node, read: list[fx.Node]) -> bool:
        if node.op == "placeholder" or self._is_captured(node):
            shape = shape_of(node)  # of other graphs, that is, which may have packed convolutions
            return (bool(self.owner) or node.op != "placeholder") and (shape is None or len(shape) >= _LEAST)
        is_packed = node in self.packed or isinstance(node.target, PackedConvolution)
        return is_packed or (bool(read) and operator_info(self._name(node)).memory_order != "anew")

    def _takes_any(self, node: fx.Node) -> bool:
        """Say whether a node takes tensors in any order of memory."""
        if node.op in ("placeholder", "get_attr") or self._is_captured(node):
            return True
        if node.op == "call_function" and isinstance(node.target, type) and is_dataclass(node.target):
            # It makes an object that only holds results, such as a `ModelOutput`.
            return not self._is_read_in_order()
        name = self._name(node)
        if name is None:
            return call_of_layer(self.program, self.owner, node) is not None
        return operator_info(name).memory_order is not None

    def _name(self, node: fx.Node) -> str | None:
        """Return the operator that a node computes; None where it may do more."""
        if node.op != "call_module":
            return canonical_name(node)
        module = self.program.callee(self.owner, node)
        return None if reason_against_inlining(module) else operator_of_module(user_class(type(module)))

    def _is_captured(self, node: fx.Node) -> bool:
        return node.op == "call_module" and bool(specializations_of(self.program.callee(self.owner, node)))

    def _is_read_in_order(self) -> bool:
        """Say whether results are the model's, or go to a module that runs its own forward."""
        around = [name for name in self.program.opaque if not name or self.owner.startswith(f"{name}.")]
        return not self.owner or bool(around)
