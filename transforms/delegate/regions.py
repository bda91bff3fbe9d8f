"""Which nodes of a graph an engine may compute together, and the graph in which they are one call."""

from __future__ import annotations

import enum
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...layers.folded import expect_dimensions, expect_one_of
from ...operators import Keeping, canonical_name, has_random_effects, info_of, is_known_function, mutates
from ...runtime.guards import require
from ...runtime.values import PLAIN_TYPES, Meta, TensorMeta

__all__ = ["Cut", "Region"]

_CHECKS = (require, expect_dimensions, expect_one_of)
_HEAVY = frozenset(
    "linear matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "scaled_dot_product_attention packed packed_lstm lstm gru".split()
)
"""What makes a region worth a call of an engine."""
_LEAST_HEAVY = 2
_STAYS = frozenset("diff nonzero unique unique_consecutive masked_select bincount histc searchsorted".split())
"""What no converter knows, or gives shapes that the numbers decide."""
_DESCRIBES = frozenset("shape size dim len numel ndim dtype device is_floating_point stride condition type".split())
"""What tells of a tensor without reading its numbers."""


class _Kind(enum.Enum):
    SOURCE = enum.auto()  # an input, a tensor of the model
    TENSOR = enum.auto()  # an operation that an engine may compute
    SIZE = enum.auto()  # a number, a shape or a type, known from what tensors are like
    CHECK = enum.auto()
    OTHER = enum.auto()


@dataclass(eq=False)
class Region:
    """Nodes that are computed together. No way leads from one of them out of the region and back."""

    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list[fx.Node])
    tensors: list[fx.Node] = field(default_factory=list[fx.Node])  # those of the model
    outputs: list[fx.Node] = field(default_factory=list[fx.Node])
    computed: set[fx.Node] = field(default_factory=set[fx.Node])  # but for sizes, which others may read, too

    def graph(self) -> fx.Graph:
        """Return the region as a graph of its inputs and tensors."""
        graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*self.inputs, *self.tensors):
            values[node] = graph.placeholder(node.name)
        for node in self.nodes:
            values[node] = graph.node_copy(node, values.__getitem__)
        graph.output(tuple(values[node] for node in self.outputs))
        return graph


class Cut:
    """A graph, cut into regions for an engine and what stays; `metas` says what each node gives."""

    def __init__(self, graph: fx.Graph, metas: Mapping[fx.Node, Meta]) -> None:
        self.graph, self.metas = graph, metas
        self._kinds = {node: _kind_of(node, metas) for node in graph.nodes}
        self._memory = _memory_of(graph)
        self._written = set[fx.Node]()  # memory that calls that stay write into
        self._levels = self._leveled()
        members: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            if self._kinds[node] is _Kind.TENSOR:
                members.setdefault(self._levels[node], []).append(node)
        found = {level: self._region(nodes) for level, nodes in members.items() if _is_heavy(nodes)}
        self._by_level = {level: region for level, region in found.items() if region is not None}

    @property
    def regions(self) -> list[Region]:
        return list(self._by_level.values())

    def _leveled(self) -> dict[fx.Node, int]:
        """Return behind how many calls that stay each node comes: nodes of one level can be computed together.

        Calls that stay keep their order, for they may have effects; what comes behind one that may write stays behind.
        """
        levels, last, written, read = dict[fx.Node, int](), 0, 0, set[fx.Node]()
        for node in self.graph.nodes:
            level = max((levels[each] for each in node.all_input_nodes), default=0)
            if self._kinds[node] is not _Kind.SOURCE:
                level = max(level, written)
            if self._kinds[node] is _Kind.TENSOR and mutates(node):
                memory = self._memory[node.all_input_nodes[0]]
                own = all(self._kinds[each] is _Kind.TENSOR and levels[each] == level for each in memory)
                if not own or memory & read:  # it is another's, or a call before this one reads it
                    self._kinds[node] = _Kind.OTHER
            if self._kinds[node] is _Kind.OTHER:
                level = last = max(level, last) + 1
                read |= {place for each in node.all_input_nodes for place in self._memory[each]}
                if mutates(node) and node.all_input_nodes:
                    self._written |= self._memory[node.all_input_nodes[0]]
                if mutates(node) or not _is_of_torch(node):
                    written = level
            levels[node] = level
        return levels

    def _region(self, nodes: Sequence[fx.Node]) -> Region | None:
        """Return a region with the sizes it reads and the checks on what is inside; None where it cannot be cut out."""
        inside, graph = set(nodes), self.graph
        written = [each for node in nodes if mutates(node) for each in node.all_input_nodes[:1]]
        if any(user not in inside for node in written for user in node.users):
            return None  # whoever reads it before it is written into would read it afterwards
        checks = {n for n in graph.nodes if self._kinds[n] is _Kind.CHECK and self._leaves([n]) & inside}
        members = inside | checks | self._sizes([*nodes, *checks])
        leaves = self._leaves([*nodes, *checks]) - inside
        others = [node for node in graph.nodes if node not in members and self._kinds[node] is not _Kind.SIZE]
        outputs = self._leaves(others) & inside
        if not outputs or not all(isinstance(self.metas[each], TensorMeta) for each in (*leaves, *outputs)):
            return None
        shared = Counter(place for each in (*leaves, *outputs) for place in self._memory[each] & self._written)
        if any(count > 1 for count in shared.values()):
            return None  # results are copies: what is written into one would not be seen in another
        return Region(
            [node for node in graph.nodes if node in members],
            [node for node in graph.nodes if node in leaves and node.op != "get_attr"],
            [node for node in graph.nodes if node in leaves and node.op == "get_attr"],
            [node for node in nodes if node in outputs], inside | checks,
        )  # fmt: skip

    def _leaves(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return what nodes read, and in the place of sizes what these are computed from."""
        nodes = list(nodes)
        sizes = self._sizes(nodes)
        return {each for node in (*nodes, *sizes) for each in node.all_input_nodes} - sizes

    def _sizes(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the sizes that nodes read, and those that these are computed from."""
        found: set[fx.Node] = set()
        pending = [each for node in nodes for each in node.all_input_nodes]
        while pending:
            node = pending.pop()
            if self._kinds[node] is _Kind.SIZE and node not in found:
                found.add(node)
                pending += node.all_input_nodes
        return found

    def written(self, call: Callable[[Region], Callable[..., Any]]) -> fx.Graph:
        """Return the graph in which each region is one call, of what `call` makes of it, and the rest as it was."""
        new, values, stays = fx.Graph(), dict[fx.Node, fx.Node](), set[fx.Node]()
        computed = {node for region in self.regions for node in region.computed}
        stays_outside = [n for n in self.graph.nodes if n not in computed and self._kinds[n] is not _Kind.SIZE]
        computed |= {n for n in self.graph.nodes if self._kinds[n] is _Kind.SIZE} - self._sizes(stays_outside)
        order = {node: (2 * self._levels[node] - (self._kinds[node] is _Kind.OTHER)) for node in self.graph.nodes}
        waiting = [node for node in self.graph.nodes if node.op != "output"]
        written: set[int] = set()
        for node in sorted(waiting, key=lambda node: (order[node], self._kinds[node] is not _Kind.SOURCE)):
            level = self._levels[node]
            ready = self._kinds[node] not in (_Kind.SOURCE, _Kind.OTHER) and level not in written
            if ready and level in self._by_level:
                written.add(level)
                self._write(self._by_level[level], new, values, call, stays)
            if node not in computed:
                values[node] = new.node_copy(node, values.__getitem__)
                if self._kinds[node] in (_Kind.OTHER, _Kind.CHECK) or node.op == "placeholder":
                    stays.add(values[node])
        output = self.graph.output_node()
        stays.add(new.node_copy(output, values.__getitem__))
        new.eliminate_dead_code(is_impure_node=stays.__contains__)
        return new

    def _write(
        self, region: Region, new: fx.Graph, values: dict[fx.Node, fx.Node],
        call: Callable[[Region], Callable[..., Any]], stays: set[fx.Node],
    ) -> None:  # fmt: skip
        called = new.call_function(call(region), tuple(values[each] for each in (*region.inputs, *region.tensors)))
        metas = tuple(self.metas[each] for each in region.outputs)
        called.meta.update(val=metas, checks=any(node.target in _CHECKS for node in region.nodes))
        stays.add(called)
        for place, (node, meta) in enumerate(zip(region.outputs, metas, strict=True)):
            values[node] = new.call_function(operator.getitem, (called, place))
            values[node].meta = {**node.meta, "val": meta}


def _memory_of(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return the nodes in whose memory the result of each node may lie."""
    memory = dict[fx.Node, set[fx.Node]]()
    for node in graph.nodes:
        read = [memory[each] for each in node.all_input_nodes]
        if mutates(node):
            memory[node] = read[0] if read else {node}
        else:
            memory[node] = {node} if info_of(node).fresh else {node}.union(*read)
    return memory


def _is_heavy(nodes: Sequence[fx.Node]) -> bool:
    return sum(canonical_name(node) in _HEAVY for node in nodes) >= _LEAST_HEAVY


def _kind_of(node: fx.Node, metas: Mapping[fx.Node, Meta]) -> _Kind:
    if node.op in ("placeholder", "get_attr"):
        return _Kind.SOURCE
    if node.op not in ("call_function", "call_method"):
        return _Kind.OTHER
    meta = metas[node]
    if node.target in _CHECKS:
        asked = metas[node.args[0]] if isinstance(node.args[0], fx.Node) else None
        return _Kind.OTHER if isinstance(asked, TensorMeta) else _Kind.CHECK
    if _is_plain(meta):
        on_tensors = any(_holds_tensors(metas[each]) for each in node.all_input_nodes)
        return _Kind.SIZE if not on_tensors or _describes(node) else _Kind.OTHER
    if not _holds_tensors(meta) or has_random_effects(node) or not _is_of_torch(node) or _name(node) in _STAYS:
        return _Kind.OTHER
    return _Kind.TENSOR


def _name(node: fx.Node) -> str:
    if node.target is getattr:
        return str(node.args[1])
    return canonical_name(node) or getattr(node.target, "__name__", str(node.target))


def _describes(node: fx.Node) -> bool:
    return _name(node) in _DESCRIBES


def _is_of_torch(node: fx.Node) -> bool:
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    return isinstance(node.target, Keeping) or canonical_name(node) is not None or is_known_function(node.target)


def _is_plain(meta: Meta) -> bool:
    if isinstance(meta, (tuple, list)):
        return all(map(_is_plain, meta))
    return isinstance(meta, (*PLAIN_TYPES, torch.dtype, torch.device, torch.memory_format)) or meta is None


def _holds_tensors(meta: Meta) -> bool:
    if isinstance(meta, (tuple, list)):
        return bool(meta) and all(map(_holds_tensors, meta))
    return isinstance(meta, TensorMeta)
