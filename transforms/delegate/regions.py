"""Which nodes of a graph an engine may compute together, and the graph in which they are one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.nn import functional

from ...layers.delegated import LookUp
from ...layers.folded import CHECKS
from ...operators import reached
from ...runtime.values import Meta, TensorMeta
from .kinds import Kind, is_worth_a_call, kinds_of
from .memory import Memory

__all__ = ["Cut", "Region"]


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
        self._memory, self._kinds = Memory(graph, metas), kinds_of(graph, metas)
        self._levels = self._memory.levels(self._kinds)
        members: dict[int, list[fx.Node]] = {}
        for node in self._of(Kind.TENSOR):
            members.setdefault(self._levels[node], []).append(node)
        found = {level: self._region(nodes) for level, nodes in members.items() if is_worth_a_call(nodes)}
        self._by_level = {level: region for level, region in found.items() if region is not None}

    @property
    def regions(self) -> list[Region]:
        return list(self._by_level.values())

    @property
    def dividing(self) -> list[fx.Node]:
        """Return the calls that stay between the first region and the last one."""
        levels = list(self._by_level) or [0]
        stays = [node for node in self._of(Kind.OTHER) if node.op != "output"]
        return [node for node in stays if min(levels) < self._levels[node] <= max(levels)]

    def _of(self, kind: Kind) -> list[fx.Node]:
        return [node for node in self.graph.nodes if self._kinds[node] is kind]

    def _region(self, nodes: Sequence[fx.Node]) -> Region | None:
        """Return a region with the sizes it reads and the checks on what is inside; None where it cannot be cut out."""
        if not self._memory.allows(nodes, self._kinds):
            return None
        inside = set(nodes)
        checks = {node for node in self._of(Kind.CHECK) if self._leaves([node]) & inside}
        members = inside | checks | self._sizes([*nodes, *checks])
        leaves = self._leaves([*nodes, *checks]) - inside
        others = [n for n in self.graph.nodes if n not in members and self._kinds[n] is not Kind.SIZE]
        outputs = self._leaves(others) & inside
        if not outputs or not all(isinstance(self.metas[each], TensorMeta) for each in (*leaves, *outputs)):
            return None
        return Region(
            [node for node in self.graph.nodes if node in members],
            [node for node in self.graph.nodes if node in leaves and node.op != "get_attr"],
            [node for node in self.graph.nodes if node in leaves and node.op == "get_attr"],
            [node for node in nodes if node in outputs], inside | checks,
        )  # fmt: skip

    def _leaves(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return what nodes read, and in the place of sizes what these are computed from."""
        nodes = list(nodes)
        sizes = self._sizes(nodes)
        return {each for node in (*nodes, *sizes) for each in node.all_input_nodes} - sizes

    def _sizes(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the sizes that nodes read, and those that these are computed from."""

        def sizes_read(node: fx.Node) -> list[fx.Node]:
            return [each for each in node.all_input_nodes if self._kinds[each] is Kind.SIZE]

        return set(reached((each for node in nodes for each in sizes_read(node)), sizes_read))

    def written(self, call: Callable[[Region], Callable[..., Any]]) -> fx.Graph:
        """Return the graph in which each region is one call, of what `call` makes of it, and the rest as it was."""
        writing, pending = _Writing(self.metas, call), dict(self._by_level)
        computed = {node for region in self.regions for node in region.computed}
        stays = [n for n in self.graph.nodes if n not in computed and self._kinds[n] is not Kind.SIZE]
        computed |= {*self._of(Kind.SIZE)} - self._sizes(stays)
        for node in sorted((n for n in self.graph.nodes if n.op != "output"), key=self._place):
            if self._kinds[node] not in (Kind.SOURCE, Kind.OTHER):
                region = pending.pop(self._levels[node], None)
                if region is not None:
                    writing.call(region)
            if node not in computed:
                kept = node.op == "placeholder" or self._kinds[node] in (Kind.OTHER, Kind.CHECK)
                writing.copy(node, kept=kept)
        writing.copy(self.graph.output_node(), kept=True)
        return writing.finished()

    def _place(self, node: fx.Node) -> tuple[int, bool]:
        """Return what nodes are sorted by: a call that stays comes before what is on its level, and sources do."""
        kind = self._kinds[node]
        return 2 * self._levels[node] - (kind is Kind.OTHER), kind is not Kind.SOURCE


class _Writing:
    """A graph that is written, with the node for each of the graph before."""

    def __init__(self, metas: Mapping[fx.Node, Meta], make: Callable[[Region], Callable[..., Any]]) -> None:
        self._metas, self._make = metas, make
        self._graph, self._values, self._kept = fx.Graph(), dict[fx.Node, fx.Node](), set[fx.Node]()

    def copy(self, node: fx.Node, *, kept: bool) -> None:
        """Write a node as it was; where `kept`, also where nothing reads it."""
        written = self._values[node] = self._graph.node_copy(node, self._values.__getitem__)
        if written.target is functional.embedding:
            written.target = LookUp()
        if kept:
            self._kept.add(written)

    def call(self, region: Region) -> None:
        """Write a region as one call, and its outputs."""
        operands = tuple(self._values[each] for each in (*region.inputs, *region.tensors))
        called = self._graph.call_function(self._make(region), operands)
        metas = tuple(self._metas[each] for each in region.outputs)
        called.meta.update(val=metas, checks=any(node.target in CHECKS for node in region.nodes))
        self._kept.add(called)
        for place, (node, meta) in enumerate(zip(region.outputs, metas, strict=True)):
            value = self._values[node] = self._graph.call_function(operator.getitem, (called, place))
            value.meta = {**node.meta, "val": meta}

    def finished(self) -> fx.Graph:
        self._graph.eliminate_dead_code(is_impure_node=self._kept.__contains__)
        return self._graph
