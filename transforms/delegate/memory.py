"""Who reads and writes in whose memory, and in which order nodes may be computed so that this stays as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ...operators import info_of, mutates
from ...runtime.values import Meta
from .kinds import Kind, is_of_torch, is_plain

__all__ = ["Memory"]


class Memory:
    """In whose memory the result of each node of a graph may lie."""

    def __init__(self, graph: fx.Graph, metas: Mapping[fx.Node, Meta]) -> None:
        self._graph = graph
        self._places = dict[fx.Node, frozenset[fx.Node]]()
        for node in graph.nodes:
            is_new = bool(info_of(node).fresh) and not mutates(node)
            read = () if is_new else [each for each in node.all_input_nodes if not is_plain(metas.get(each))]
            self._places[node] = frozenset({node}).union(*(self._places[each] for each in read))

    def levels(self, kinds: dict[fx.Node, Kind]) -> dict[fx.Node, int]:
        """Return behind how many calls that stay each node comes: nodes of one level can be computed together.

        Calls that stay keep their order, for they may have effects; nothing that reads behind a write comes before it.
        Writes into what is not computed in the same level are made calls that stay, in `kinds`.
        """
        levels, last, written, read = dict[fx.Node, int](), 0, 0, set[fx.Node]()
        for node in self._graph.nodes:
            level = max((levels[each] for each in node.all_input_nodes), default=written)
            level = max(level, written)
            if kinds[node] is Kind.TENSOR and mutates(node):
                of = self._places[node] - {node}
                own = all(kinds[each] is Kind.TENSOR and levels[each] == level for each in of)
                if not own or self._places[node] & read:  # it is another region's, or a call before this one reads it
                    kinds[node] = Kind.OTHER
            if kinds[node] is Kind.OTHER:
                level = last = max(level, last) + 1
                written = level if _may_write(node) else written
                read = read.union(*(self._places[each] for each in node.all_input_nodes))
            levels[node] = level
        return levels

    def allows(self, nodes: Sequence[fx.Node], kinds: Mapping[fx.Node, Kind]) -> bool:
        """Say whether nodes may be computed together, before and behind all others."""
        inside = set(nodes)
        overwritten = [each for node in nodes if mutates(node) for each in node.all_input_nodes[:1]]
        if any(user not in inside for node in overwritten for user in node.users):
            return False  # whoever reads it before it is written into would read it afterwards
        return not self._is_written_apart(nodes, kinds)

    def _is_written_apart(self, nodes: Sequence[fx.Node], kinds: Mapping[fx.Node, Kind]) -> bool:
        """Say whether what stays outside may write into one of several results in the same memory."""
        read = {each: [user for user in each.users if kinds[user] is Kind.OTHER] for each in nodes}
        written = [each for each, users in read.items() if any(map(_may_write, users))]
        results = [node for node, users in read.items() if users or any(user not in read for user in node.users)]
        return any(one is not other and self._places[one] & self._places[other] for one in written for other in results)


def _may_write(node: fx.Node) -> bool:
    """Say whether a call that stays may write into what others read."""
    if node.op == "output":
        return False
    return node.op == "call_module" or mutates(node) or not (isinstance(node.target, type) or is_of_torch(node))
