"""How many modules the containers hold that a forward goes through: it loops over them, and loops are unrolled."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn

from ...compat import own_children
from ...runtime.guards import SELF, Equals, Guard, Source, children_of, key_of, length_of, module_at
from ...runtime.values import CONTAINERS, counts_items

__all__ = ["OWN_CHILDREN", "container_lengths", "listing_of"]

_WHOLE = frozenset("_modules children modules named_children named_modules parameters named_parameters".split())
"""Attributes through which a forward may loop over all of its children."""

OWN_CHILDREN = length_of(children_of(SELF))
"""The number of a module's children."""


def listing_of(module: nn.Module, source: Source = SELF) -> Source:
    """Return what has the items that a loop over a module's children comes across, where `source` is the module."""
    return source if counts_items(type(module)) else children_of(source)


def container_lengths(module: nn.Module, graph: fx.Graph, read: Collection[str]) -> list[Guard]:
    """Return guards on the number of items in each container that a forward went through: loops are unrolled."""
    guards: dict[str, Guard] = {}
    seen: set[str] = set()
    if not _WHOLE.isdisjoint(read):
        count = len(own_children(module))
        guards[""] = Guard(length_of(listing_of(module)), Equals(key_of(count)), f"it has {count} items")
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        parts = str(node.target).split(".")
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            if path in seen:
                continue
            seen.add(path)
            container = module.get_submodule(path)
            if isinstance(container, (*CONTAINERS, nn.Sequential)):
                items = module_at(parts[:depth])
                if not isinstance(container, (nn.ParameterList, nn.ParameterDict)):
                    items = listing_of(container, items)
                count = key_of(len(container))
                guards[path] = Guard(length_of(items), Equals(count), f"{path} has {count} items")
    return list(guards.values())
