"""Layers behind one another in a graph, which can pass on numbers of 8 bits rather than floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx
from torch import fx, nn

from ....compat import has_hooks
from ....layers.quantized import FakeQuantized, Freezable, Range
from ....operators import canonical_name, has_random_effects, operator_of_module
from ....runtime.graphs import Region, required_capture
from ....runtime.values import user_class
from ....tracing.program import CallSites, Program
from ...fold_batchnorm import obstacles, pairs_in
from .layout import Followers, followers
from .pools import pooling_of

__all__ = ["Chain", "Link", "chains"]

_MOVING = frozenset("contiguous dropout flatten identity reshape squeeze unsqueeze view".split())
"""What only moves numbers or chooses among them: numbers of 8 bits go through as floats do."""

_ASKING = frozenset({"dim", "shape", "size"})


@dataclass(eq=False)
class Link:
    """A call of a layer.

    Attributes:
        name: of the layer, qualified.
        node: that calls it.
        norm: that calls a batch norm on the result, which is folded into it, or None.
        relu: on the result of both, or None.
        followers: what counts on how its result lies in memory.
        between: the operations up to the layers behind, where all that comes behind are such, of one range.
        output: that range; None: it gives floats.
    """

    name: str
    node: fx.Node
    norm: fx.Node | None = None
    relu: fx.Node | None = None
    between: list[fx.Node] = field(default_factory=list[fx.Node])
    output: Range | None = None
    followers: Followers = field(default_factory=Followers)

    @property
    def last(self) -> fx.Node:
        """Return the node that gives what the layer is to give."""
        return self.relu or self.norm or self.node


@dataclass(frozen=True)
class Chain:
    """Layers of one graph that pass on numbers to one another."""

    owner: str
    specialization: int
    links: Sequence[Link]


def chains(program: Program, ranges: Mapping[str, Range]) -> Iterator[Chain]:
    """Yield the chains of layers that have ranges; a layer that no chain has is called from several places, or none."""
    norms = _norms(program)
    for owner, capture in program.captures.items():
        module = program.module(owner)
        if isinstance(module, Region):
            continue
        for number, specialization in enumerate(required_capture(module).specializations):
            if capture.specializations and specialization.runs_in_mode(module):
                links = _links(program, owner, specialization.graph, ranges, norms)
                yield from (Chain(owner, number, group) for group in _connected(program, owner, links, ranges))
                break  # the graphs of other kinds of calls pass on floats


def _norms(program: Program) -> dict[fx.Node, fx.Node]:
    """Return layer node -> norm node where the norm can be folded."""
    pairs = [pair for pair in pairs_in(program) if not pair.before and len(pair.modules) == 2]
    wrong = obstacles(pairs, program, also=(FakeQuantized, Freezable))
    return {
        call.layer: call.norm
        for pair in pairs
        if pair not in wrong and _is_sure(pair.layer.module)
        for call in pair.calls
    }


def _is_sure(layer: nn.Module | None) -> bool:
    """Say whether a norm behind a layer norms its channels, whatever the number of dimensions."""
    return not isinstance(layer, FakeQuantized) or isinstance(layer, (nn.Conv2d, nn.Conv3d))


def _links(
    program: Program, owner: str, graph: fx.Graph, ranges: Mapping[str, Range], norms: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, Link]:
    found: dict[fx.Node, Link] = {}
    for node in graph.find_nodes(op="call_module"):
        module = program.callee(owner, node)
        name = program.names.name(module)
        if name not in ranges or len(node.args) != 1 or node.kwargs or program.analyses[CallSites].count(module) != 1:
            continue
        link = found[node] = Link(name, node, norms.get(node))
        user = _only_user(link.last)
        is_relu = user is not None and _operator(program, owner, user) == "relu"
        if is_relu and not isinstance(module, nn.Conv3d):  # its kernel has none
            link.relu = user
    return found


def _connected(
    program: Program, owner: str, links: Mapping[fx.Node, Link], ranges: Mapping[str, Range]
) -> Iterator[list[Link]]:
    graph: nx.Graph[Link] = nx.Graph()
    graph.add_nodes_from(links.values())
    for link in links.values():
        behind = _layers_behind(program, owner, link, links)
        found = {ranges[other.name] for other in behind}
        if len(found) == 1:
            link.output = found.pop()
            graph.add_edges_from((link, other) for other in behind)
        else:
            link.between.clear()
            link.followers = followers(program, owner, link.last)
    order = {link: number for number, link in enumerate(links.values())}
    for group in nx.connected_components(graph):
        yield sorted(group, key=order.__getitem__)


def _layers_behind(program: Program, owner: str, link: Link, links: Mapping[fx.Node, Link]) -> list[Link]:
    """Return the layers that read a layer's result, and nothing else does; none if something does."""
    behind: list[Link] = []
    pending = [link.last]
    while pending:
        node = pending.pop()
        for user in node.users:
            operator = _operator(program, owner, user)
            if user in links:
                behind.append(links[user])
            elif _moves(program, owner, user) and user.args[:1] == (node,):
                link.between.append(user)
                pending.append(user)
            elif operator not in _ASKING:
                return []
    return behind


def _moves(program: Program, owner: str, node: fx.Node) -> bool:
    """Say whether an operation takes numbers as it does floats."""
    if pooling_of(program, owner, node) is not None:
        return True
    return _operator(program, owner, node) in _MOVING and not has_random_effects(node)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _operator(program: Program, owner: str, node: fx.Node) -> str | None:
    """Return the operator that a node computes, calls of modules of torch.nn among them."""
    if node.op != "call_module":
        return canonical_name(node)
    module = program.callee(owner, node)
    return None if has_hooks(module) else operator_of_module(user_class(type(module)))
