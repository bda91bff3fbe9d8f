"""Which tensors and modules belong to one expert of several: items of a container, slices of a stacked parameter."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...compat import own_children, submodule
from ...operators import canonical_name
from ...runtime.values import same_kind

__all__ = ["Items", "Slices", "Source", "family_of", "find_sources", "operands"]

_FEWEST = 2
_VIEWS = ("view", "reshape", "unflatten")


def operands(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments of a node."""
    return node.args


@dataclass(frozen=True)
class Items:
    """The children of a container, or what is inside each of them under one name."""

    container: str  # its path, as seen from the owner
    names: tuple[str, ...]  # of its children, in their order
    inside: str = ""  # the path inside a child

    def within(self, name: str) -> Items:
        """Return what is called so in each of them."""
        return Items(self.container, self.names, f"{self.inside}.{name}".lstrip("."))

    def path(self, expert: int) -> str:
        return ".".join(part for part in (self.container, self.names[expert], self.inside) if part)

    @property
    def paths(self) -> list[str]:
        return [self.path(expert) for expert in range(self.count)]

    @property
    def family(self) -> str:
        return f"{self.container}."

    @property
    def kind(self) -> str:
        """Return what is equal for the tensors of one name of all experts."""
        return f"{self.family} {self.inside}"

    @property
    def count(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Slices:
    """The slices of a tensor along its first dimension."""

    stack: fx.Node  # the node that gives the tensor
    count: int

    @property
    def family(self) -> str:
        """Return what is equal for nodes that give the same tensor."""
        node, views = self.stack, list[str]()
        while node.op != "get_attr" and isinstance(before := operands(node)[0], fx.Node):
            views.append(f"{node.target}{operands(node)[1:]}{node.kwargs}")
            node = before
        return f"{node.target} {views}"

    @property
    def kind(self) -> str:
        return self.family


Source = Items | Slices


def family_of(owner: nn.Module, path: str) -> tuple[Items, int] | None:
    """Return of which family of alike modules the one at `path` is, or is inside of, and the number of the expert."""
    parts = path.split(".")
    for length in range(len(parts)):
        container = submodule(owner, ".".join(parts[:length])) if length else owner
        children = own_children(container) if isinstance(container, (nn.ModuleList, nn.ModuleDict)) else {}
        if parts[length] in children:
            names = tuple(name for name, child in children.items() if same_kind(children[parts[length]], child))
            if len(names) >= _FEWEST:
                items = Items(".".join(parts[:length]), names, ".".join(parts[length + 1 :]))
                return items, names.index(parts[length])
    return None


def find_sources(owner: nn.Module, graph: fx.Graph, values: Mapping[fx.Node, Any]) -> dict[fx.Node, tuple[Source, int]]:
    """Return the nodes that read a tensor of one expert, or call a module of one: of which family, and which expert."""
    found: dict[fx.Node, tuple[Source, int]] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            family = family_of(owner, str(node.target))
            if family is not None:
                found[node] = family
        elif canonical_name(node) in ("getitem", "select"):
            picked = _slice(node, values)
            if picked is not None:
                found[node] = picked
    return _independent(graph, found)


def _independent(graph: fx.Graph, sources: dict[fx.Node, tuple[Source, int]]) -> dict[fx.Node, tuple[Source, int]]:
    """Leave out families of which one member reads what another made: layers, say, are no experts."""
    reached: dict[fx.Node, frozenset[tuple[str, int]]] = {}
    chained: set[str] = set()
    for node in graph.nodes:
        before = frozenset[tuple[str, int]]().union(*(reached[used] for used in node.all_input_nodes))
        if node in sources:
            source, expert = sources[node]
            chained |= {other for other, number in before if other == source.family and number != expert}
            before |= {(source.family, expert)}
        reached[node] = before
    return {node: (source, expert) for node, (source, expert) in sources.items() if source.family not in chained}


def _slice(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[Slices, int] | None:
    stack = operands(node)[0]
    if isinstance(stack, fx.Node) and canonical_name(stack) == "unbind":
        dim = stack.kwargs.get("dim", 0) if len(operands(stack)) < 2 else operands(stack)[1]
        stack = operands(stack)[0] if dim == 0 else None
    if not isinstance(stack, fx.Node) or not _is_stack(stack, values):
        return None
    of, number = values[stack], _number(node, values)
    if number is None or not isinstance(values.get(node), Tensor) or values[node].shape != of.shape[1:]:
        return None
    return Slices(stack, of.shape[0]), number % of.shape[0]


def _number(node: fx.Node, values: Mapping[fx.Node, Any]) -> int | None:
    """Return which slice along the first dimension a node takes."""
    if node.target is not operator.getitem and operands(node)[1:2] != (0,):
        return None
    key: Any = operands(node)[1] if node.target is operator.getitem else operands(node)[2]
    key = values.get(key) if isinstance(key, fx.Node) else key
    if isinstance(key, Tensor):
        return int(key) if key.ndim == 0 and key.dtype not in (torch.bool, torch.uint8) else None
    return key if type(key) is int else None


def _is_stack(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Say whether a node gives a parameter that holds one matrix or vector for each of several experts."""
    value = values.get(node)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2 or value.shape[0] < _FEWEST:
        return False
    while node.op == "call_method" and node.target in _VIEWS and isinstance(operands(node)[0], fx.Node):
        node = operands(node)[0]
    return node.op == "get_attr" and isinstance(values.get(node), nn.Parameter)
