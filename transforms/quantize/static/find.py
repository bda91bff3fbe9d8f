"""Layers behind one another in a graph, which can pass on numbers of 8 bits, and what comes behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import networkx as nx
from torch import fx, nn

from ....compat import has_hooks
from ....layers.quantized import FakeQuantized, Freezable
from ....operators import canonical_name, has_random_effects, normalized_arguments, operator_info, operator_of_module
from ....runtime.graphs import Region, required_capture
from ....runtime.values import TensorMeta, user_class
from ....tracing.program import CallSites, Program
from ...fold_batchnorm import pairs_in, reasons_against
from ..layers import CONVOLUTIONS
from .scaling import InputForm

__all__ = ["Chain", "Link", "chains", "pooling_of"]

_MOVING = frozenset("contiguous dropout flatten identity reshape squeeze unsqueeze view".split())
"""What only moves numbers or chooses among them: numbers of 8 bits go through as floats do."""

_ASKING = frozenset({"dim", "shape", "size"})

_SETTINGS: Mapping[str, Any] = {
    "kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False,
}  # fmt: skip
"""Of max pooling, with what they are by default."""


@dataclass(frozen=True)
class Followers:
    """Calls of `view` behind a result, which could be `reshape`; `is_open`: others may count on its order in memory."""

    views: tuple[fx.Node, ...] = ()
    is_open: bool = False


@dataclass(eq=False)
class Link:
    """A call of a layer with its norm and ReLU, and what is `between` it and the layers that take one form of numbers,
    `output`; `behind` is one of these.
    """

    name: str
    node: fx.Node
    norm: fx.Node | None = None
    relu: fx.Node | None = None
    between: list[fx.Node] = field(default_factory=list[fx.Node])
    output: InputForm | None = None
    behind: Link | None = None
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


def chains(program: Program, ranges: Mapping[str, InputForm]) -> Iterator[Chain]:
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
    wrong = reasons_against(pairs, program, also=(FakeQuantized, Freezable))
    sound = [pair for pair in pairs if pair not in wrong]
    # A norm behind another trained layer may norm another dimension than the channels.
    sure = [
        pair for pair in sound
        if not isinstance(pair.layer.module, FakeQuantized) or isinstance(pair.layer.module, (nn.Conv2d, nn.Conv3d))
    ]  # fmt: skip
    return {call.layer: call.norm for pair in sure for call in pair.calls}


def _links(
    program: Program, owner: str, graph: fx.Graph, ranges: Mapping[str, InputForm], norms: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, Link]:
    found: dict[fx.Node, Link] = {}
    for node in graph.find_nodes(op="call_module"):
        module = program.callee(owner, node)
        name = program.names.name(module)
        if name not in ranges or len(node.args) != 1 or node.kwargs or program.analyses[CallSites].count(module) != 1:
            continue
        link = found[node] = Link(name, node, norms.get(node))
        users = list(link.last.users)
        is_relu = len(users) == 1 and _operator(program, owner, users[0]) == "relu"
        if is_relu and not isinstance(module, nn.Conv3d):  # its kernel has none
            link.relu = users[0]
    return found


def _connected(
    program: Program, owner: str, links: Mapping[fx.Node, Link], ranges: Mapping[str, InputForm]
) -> Iterator[list[Link]]:
    graph: nx.Graph[Link] = nx.Graph()
    graph.add_nodes_from(links.values())
    for link in links.values():
        behind = _layers_behind(program, owner, link, links)
        found = {ranges[other.name] for other in behind}
        if len(found) == 1 and (not ranges[behind[0].name].exponents or _keeps_outputs(program, owner, link)):
            link.output, link.behind = found.pop(), behind[0]
            graph.add_edges_from((link, other) for other in behind)
        else:
            link.between.clear()
            link.followers = _followers(program, owner, link.last)
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


def _keeps_outputs(program: Program, owner: str, link: Link) -> bool:
    """Say whether the outputs of a layer are the inputs of those behind, one by one, so that it can scale them."""
    if isinstance(program.callee(owner, link.node), CONVOLUTIONS):
        return False
    sizes = {_last_size(node) for node in (link.node, *link.between)}
    return len(sizes) == 1 and None not in sizes and not any(pooling_of(program, owner, each) for each in link.between)


def _last_size(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    return val.shape[-1] if isinstance(val, TensorMeta) and val.shape else None


def _moves(program: Program, owner: str, node: fx.Node) -> bool:
    """Say whether an operation takes numbers as it does floats."""
    if pooling_of(program, owner, node) is not None:
        return True
    return _operator(program, owner, node) in _MOVING and not has_random_effects(node)


def _operator(program: Program, owner: str, node: fx.Node) -> str | None:
    """Return the operator that a node computes, calls of modules of torch.nn among them."""
    if node.op != "call_module":
        return canonical_name(node)
    module = program.callee(owner, node)
    return None if has_hooks(module) else operator_of_module(user_class(type(module)))


# -- max pooling ---------------------------------------------------------------------------------------------------


def pooling_of(program: Program, owner: str, node: fx.Node) -> tuple[list[int], list[int], list[int]] | None:
    """Return the kernel, stride and padding of a node that pools images by the largest; None of any other node."""
    settings = _settings(program, owner, node)
    if settings is None or settings["ceil_mode"] or settings["return_indices"] or _pair(settings["dilation"]) != [1, 1]:
        return None
    kernel = settings["kernel_size"]
    pairs = [_pair(given) for given in (kernel, settings["stride"] or kernel, settings["padding"])]
    known = [pair for pair in pairs if pair is not None]
    return (known[0], known[1], known[2]) if len(known) == 3 else None


def _settings(program: Program, owner: str, node: fx.Node) -> Mapping[str, Any] | None:
    if node.op == "call_module":
        module = program.callee(owner, node)
        is_pool = user_class(type(module)) is nn.MaxPool2d and not has_hooks(module)
        return {name: getattr(module, name) for name in _SETTINGS} if is_pool else None
    if canonical_name(node) != "max_pool2d":
        return None
    named = normalized_arguments("max_pool2d", node.target, node.args, node.kwargs).named
    return {name: named.get(name, default) for name, default in _SETTINGS.items()}


def _pair(value: Any) -> list[int] | None:
    values = list(cast("Sequence[Any]", value)) if isinstance(value, (tuple, list)) else [value, value]
    return values if len(values) == 2 and all(type(each) is int for each in values) else None


# -- who counts on how a result lies in memory ---------------------------------------------------------------------


def _followers(program: Program, owner: str, node: fx.Node) -> Followers:
    """Return what comes behind a node, as far as its layout goes with it."""
    views: dict[fx.Node, None] = {}
    pending, seen = [(owner, node)], {node}
    while pending:
        place, last = pending.pop()
        for user in last.users:
            if user in seen or _has_one_place(user):
                continue
            seen.add(user)
            if user.op == "call_method" and user.target == "view" and place == owner:
                views[user] = None
                continue
            behind = _behind(program, place, user)
            if behind is None:
                return Followers(tuple(views), is_open=True)
            pending += behind
    return Followers(tuple(views))


def _behind(program: Program, owner: str, user: fx.Node) -> list[tuple[str, fx.Node]] | None:
    """Return where a result goes on from a node that reads it; None where that cannot be seen, or is `view`."""
    if user.op == "output":
        return [(call.owner, call.node) for call in program.analyses[CallSites].of(program.module(owner))] or None
    name = canonical_name(user)
    if user.op == "call_module":
        name = operator_of_module(user_class(type(program.callee(owner, user))))
        if name is None:
            return _placeholders(program, owner, user) or None
    order = operator_info(name).memory_order
    return None if order is None else [(owner, user)] if order == "kept" else []


def _placeholders(program: Program, owner: str, node: fx.Node) -> list[tuple[str, fx.Node]]:
    """Return where a called module's graphs take what they are given; nothing where it has none."""
    name = program.name_of(program.callee(owner, node))
    capture = program.captures.get(name)
    graphs = () if capture is None else (specialization.graph for specialization in capture.specializations)
    return [(name, placeholder) for graph in graphs for placeholder in graph.find_nodes(op="placeholder")]


def _has_one_place(node: fx.Node) -> bool:
    """Say whether a result is [rows, channels, 1, ...]: it lies in memory in one way only."""
    val = node.meta.get("val")
    return isinstance(val, TensorMeta) and len(val.shape) > 2 and set(val.shape[2:]) == {1}
