"""Checks of rewritten graphs: they are well formed, and no write in place is carried over a read of the same memory."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence

from torch import fx, nn

from ...errors import CaptureError, MatchFailure
from ...operators import mutates
from ...runtime.values import keep
from ...tracing.program import Program
from .effects import may_share, writes

__all__ = [
    "ReadsOutOfOrder", "check_order_of_writes", "check_runs_as_one", "check_well_formed", "has_write_between",
    "is_same_graph",
]  # fmt: skip


class ReadsOutOfOrder(MatchFailure):
    """The new code would read on the other side of a write, and so would that of any other lowering."""


class _SharedMemory:
    """Which values of a graph may lie in the same memory, and its nodes, in order, that may write into it."""

    def __init__(self, graph: fx.Graph, program: Program, owner: str) -> None:
        self.writers = [node for node in graph.nodes if _writes(node, program, owner)]
        self._parent: dict[fx.Node, fx.Node] = {}
        if self.writers:
            for node in graph.nodes:
                if node.op not in ("placeholder", "get_attr", "output") and _shares(node, program, owner):
                    for source in node.all_input_nodes:
                        self._join(node, source)

    def _join(self, node: fx.Node, source: fx.Node) -> None:
        mine, other = self.of(node), self.of(source)
        if mine is not other:
            self._parent[mine] = other

    def of(self, node: fx.Node) -> fx.Node:
        """Return what stands for the memory of a node's value."""
        while node in self._parent:
            node = self._parent[node]
        return node

    def touched(self, node: fx.Node) -> set[fx.Node]:
        """Return the memory that a node reads or gives."""
        return {self.of(each) for each in (node, *node.all_input_nodes)}

    def written(self, writer: fx.Node) -> set[fx.Node]:
        """Return the memory that a writer may write into."""
        targets = writer.all_input_nodes
        if writer.op != "call_module" and mutates(writer):
            out = writer.kwargs.get("out")
            targets = [out] if isinstance(out, fx.Node) else targets[:1]
        return {self.of(each) for each in targets}


def _writes(node: fx.Node, program: Program, owner: str) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    try:
        return writes(node, program, owner)
    except CaptureError:
        return False  # it calls a module that the rewrite has removed


def _shares(node: fx.Node, program: Program, owner: str) -> bool:
    try:
        return may_share(node, program, owner)
    except CaptureError:
        return True


def has_write_between(first: fx.Node, last: fx.Node, program: Program, owner: str) -> bool:
    """Say whether anything between two nodes of a graph may write in place."""
    between = itertools.takewhile(lambda node: node is not last, _from(first.next))
    return any(_writes(node, program, owner) for node in between)


def _from(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "root":
        yield node
        node = node.next


def check_runs_as_one(chosen: Sequence[fx.Node], program: Program, owner: str) -> None:
    """Raise MatchFailure if nodes that run as one would carry a write in place over what reads the same memory."""
    memory = _SharedMemory(chosen[0].graph, program, owner)
    inside, writers = set(chosen), set(memory.writers)
    if not writers:
        return
    between = [
        node
        for node in itertools.takewhile(lambda n: n is not chosen[-1], _from(chosen[0]))
        if node not in inside and node.op != "get_attr"  # whenever it is read, it is the same tensor
    ]
    for other, mine in itertools.product(between, chosen):
        for writer, reader in ((other, mine), (mine, other)):
            if writer in writers and memory.written(writer) & memory.touched(reader):
                raise MatchFailure(
                    f"'{reader.name}' and '{writer.name}', which writes in place, would change their order"
                )


def check_order_of_writes(graph: fx.Graph, before: fx.Graph, program: Program, owner: str) -> None:
    """Raise ReadsOutOfOrder if a rewritten graph reads before a write what it read after it, or the other way round."""
    memory = _SharedMemory(before, program, owner)
    if not memory.writers:
        return
    old = {node.name: (number, node) for number, node in enumerate(before.nodes)}
    new = {node.name: (number, node) for number, node in enumerate(graph.nodes)}
    instead = {name: node for node in graph.nodes for name in node.meta.get("replaces", ())}
    for writer in memory.writers:
        if writer.name not in new:
            continue
        written, was, now = memory.written(writer), old[writer.name][0], new[writer.name][0]
        for name, (place, node) in new.items():
            readers = [old[name][1]] if name in old else _stood_in_for(node, old, new, instead)
            for reader in readers:
                if reader.name == writer.name or not written & memory.touched(reader):
                    continue
                if (old[reader.name][0] < was) != (place < now):
                    raise ReadsOutOfOrder(_moved(writer, name, "before" if place < now else "after"))


def _moved(writer: fx.Node, reader: str, side: str) -> str:
    """Say that a node reads on another side of a write than it did."""
    if writer.target is keep:
        return (
            "the forward changes an object, such as a cache; it is noted before, so that a call without a graph can "
            f"start over, and the new code would read it {side} it is noted"
        )
    return (
        f"the forward changes a tensor in place ('{writer.name}') that the new code would read {side} the change "
        f"('{reader}'), unlike the forward"
    )


_Places = Mapping[str, tuple[int, fx.Node]]


def _stood_in_for(node: fx.Node, old: _Places, new: _Places, instead: Mapping[str, fx.Node]) -> list[fx.Node]:
    """Return the operations that are gone since a new node gives what they gave, and no other one does."""
    gone = [old[name][1] for name in node.meta.get("replaces", ()) if name in old and name not in new]
    found: dict[fx.Node, None] = {}
    for each in gone:
        if each not in found:
            found[each] = None
            sources = (source for source in each.all_input_nodes if source.name not in new)
            gone += [source for source in sources if instead.get(source.name, node) is node]
    return list(found)


def check_well_formed(graph: fx.Graph, before: fx.Graph, owner: nn.Module) -> None:
    """Raise CaptureError if a rewritten graph of `owner` is malformed, or has other inputs than before."""
    try:
        graph.lint()
        _check_targets(graph, owner)
        _check_inputs(graph, before)
    except (RuntimeError, AttributeError, ValueError) as error:
        raise CaptureError(f"the rewritten graph is malformed: {error}") from error


def _check_inputs(graph: fx.Graph, before: fx.Graph) -> None:
    names, given = ([node.name for node in g.find_nodes(op="placeholder")] for g in (before, graph))
    if names != given:
        raise ValueError(f"its inputs changed from {', '.join(names)} to {', '.join(given)}")


def _check_targets(graph: fx.Graph, owner: nn.Module) -> None:
    for node in graph.nodes:
        if node.op == "call_module":
            owner.get_submodule(str(node.target))
        elif node.op == "get_attr":
            operator.attrgetter(str(node.target))(owner)


def is_same_graph(graph: fx.Graph, other: fx.Graph) -> bool:
    """Say whether two graphs do the same, node by node and name by name."""
    if len(graph.nodes) != len(other.nodes):
        return False
    pairs = zip(graph.nodes, other.nodes, strict=True)
    return all(_is_same_target(a, b) for a, b in pairs) and str(graph) == str(other)


def _is_same_target(node: fx.Node, other: fx.Node) -> bool:
    if node.name != other.name or node.op != other.op:
        return False
    return node.target == other.target if isinstance(node.target, str) else node.target is other.target
