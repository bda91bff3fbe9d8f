"""Which nodes of a graph an engine may compute together, and the graph in which they are one call."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
_DESCRIBES = frozenset("shape size dim len numel ndim dtype device is_floating_point condition type".split())
"""What tells of a tensor without reading its numbers."""
_VIEWS = frozenset(
    "view view_as unsqueeze squeeze transpose permute expand expand_as getitem narrow chunk split tensor_split unbind "
    "unflatten diagonal detach t T mT swapaxes swapdims movedim select".split()
)
"""What takes no time, and gives the memory of its first operand."""
_RANGED = frozenset(
    "embedding embedding_bag gather index_select take take_along_dim index_add index_copy index_fill index_put scatter "
    "scatter_add scatter_reduce one_hot cross_entropy nll_loss repeat_interleave remainder fmod".split()
)
"""What raises for integers out of range, where engines may give anything."""
_INDEXED = frozenset(("getitem", "setitem"))
"""The same, for integers in the second operand; a mask there makes shapes of numbers."""


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
        self._kinds = self._sorted()
        self._memory = self._shared()
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

    def _sorted(self) -> dict[fx.Node, _Kind]:
        """Return what each node is."""
        kinds, given = dict[fx.Node, _Kind](), set[fx.Node]()  # whose numbers depend on those that a call is given
        for node in self.graph.nodes:
            kind = _kind_of(node, self.metas)
            if kind is _Kind.TENSOR and _may_refuse(node, self.metas, given):
                kind = _Kind.OTHER
            elif kind is _Kind.TENSOR and _is_view(node, self.metas) and kinds[node.args[0]] is not _Kind.TENSOR:
                kind = _Kind.SIZE  # in the memory that it is read from, wherever it is read
            kinds[node] = kind
            is_read = any(each in given for each in node.all_input_nodes) and not _is_plain(self.metas.get(node))
            if kind is _Kind.OTHER or node.op == "placeholder" or is_read:
                given.add(node)
        return kinds

    def _shared(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """Return in whose memory the result of each node may lie."""
        memory = dict[fx.Node, frozenset[fx.Node]]()
        for node in self.graph.nodes:
            is_new = bool(info_of(node).fresh) and not mutates(node)
            read = () if is_new else [each for each in node.all_input_nodes if not _is_plain(self.metas.get(each))]
            memory[node] = frozenset({node}).union(*(memory[each] for each in read))
        return memory

    def _leveled(self) -> dict[fx.Node, int]:
        """Return behind how many calls that stay each node comes: nodes of one level can be computed together.

        Calls that stay keep their order, for they may have effects; nothing that reads behind a write comes before it.
        """
        levels, last, written, read = dict[fx.Node, int](), 0, 0, set[fx.Node]()
        for node in self.graph.nodes:
            level = max((levels[each] for each in node.all_input_nodes), default=written)
            level = max(level, written)
            if self._kinds[node] is _Kind.TENSOR and mutates(node):
                of = [each for each in self._memory[node] if each is not node]
                own = all(self._kinds[each] is _Kind.TENSOR and levels[each] == level for each in of)
                if not own or self._memory[node] & read:  # it is another region's, or a call before this one reads it
                    self._kinds[node] = _Kind.OTHER
            if self._kinds[node] is _Kind.OTHER:
                level = last = max(level, last) + 1
                written = level if _may_write(node) else written
                read |= {place for each in node.all_input_nodes for place in self._memory[each]}
            levels[node] = level
        return levels

    def _region(self, nodes: Sequence[fx.Node]) -> Region | None:
        """Return a region with the sizes it reads and the checks on what is inside; None where it cannot be cut out."""
        inside, graph = set(nodes), self.graph
        written = [each for node in nodes if mutates(node) for each in node.all_input_nodes[:1]]
        if any(user not in inside for node in written for user in node.users):
            return None  # whoever reads it before it is written into would read it afterwards
        if self._is_written_apart(nodes):
            return None
        checks = {n for n in graph.nodes if self._kinds[n] is _Kind.CHECK and self._leaves([n]) & inside}
        members = inside | checks | self._sizes([*nodes, *checks])
        leaves = self._leaves([*nodes, *checks]) - inside
        others = [node for node in graph.nodes if node not in members and self._kinds[node] is not _Kind.SIZE]
        outputs = self._leaves(others) & inside
        if not outputs or not all(isinstance(self.metas[each], TensorMeta) for each in (*leaves, *outputs)):
            return None
        return Region(
            [node for node in graph.nodes if node in members],
            [node for node in graph.nodes if node in leaves and node.op != "get_attr"],
            [node for node in graph.nodes if node in leaves and node.op == "get_attr"],
            [node for node in nodes if node in outputs], inside | checks,
        )  # fmt: skip

    def _is_written_apart(self, nodes: Sequence[fx.Node]) -> bool:
        """Say whether what stays outside may write into one of several results in the same memory."""
        read = {each: [user for user in each.users if self._kinds[user] is _Kind.OTHER] for each in nodes}
        written = {each for each, users in read.items() if any(map(_may_write, users))}
        results = [node for node, users in read.items() if users or any(user not in read for user in node.users)]
        return any(one is not other and self._memory[one] & self._memory[other] for one in written for other in results)

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
    if not _holds_tensors(meta) or has_random_effects(node) or not _is_of_torch(node):
        return _Kind.OTHER
    return _Kind.TENSOR


def _may_refuse(node: fx.Node, metas: Mapping[fx.Node, Meta], given: Collection[fx.Node]) -> bool:
    """Say whether engines may differ by the numbers that a call is given: they raise, make shapes or are rounded."""
    name, operands = _name_of(node), list[fx.Node]()
    if info_of(node).shape == "data" or name.startswith(_DECOMPOSES) or name in _STAYS:
        return True
    if name == "floor_divide" or "rounding_mode" in node.kwargs:  # engines round quotients below zero otherwise
        return any(each in given for each in node.all_input_nodes)
    if name.rstrip("_") in _RANGED:
        operands = node.all_input_nodes
    elif name in _INDEXED:
        fx.map_arg(node.args[1:2], operands.append)
    return any(each in given and _holds_integers(metas[each]) for each in operands)


_DECOMPOSES = ("linalg", "cholesky", "inverse", "lu_", "qr", "svd", "eig", "logdet", "slogdet", "det")


def _holds_integers(meta: Meta) -> bool:
    return isinstance(meta, TensorMeta) and not (meta.dtype.is_floating_point or meta.dtype.is_complex)


def _is_view(node: fx.Node, metas: Mapping[fx.Node, Meta]) -> bool:
    if _name_of(node) not in _VIEWS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return not any(_holds_tensors(metas[each]) for each in node.all_input_nodes if each is not node.args[0])


def _may_write(node: fx.Node) -> bool:
    """Say whether a call that stays may write into what others read."""
    if node.op == "output":
        return False
    return node.op == "call_module" or mutates(node) or not (isinstance(node.target, type) or _is_of_torch(node))


def _describes(node: fx.Node) -> bool:
    return _name_of(node) in _DESCRIBES or getattr(node.target, "__name__", "") in _DESCRIBES


def _name_of(node: fx.Node) -> str:
    """Return what a call is called, also where the table of operators has no row for it."""
    if node.target is getattr:
        return str(node.args[1])
    return canonical_name(node) or (
        str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))
    )


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
