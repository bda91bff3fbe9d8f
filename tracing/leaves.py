"""Which modules are captured, which are leaves, and which only hold others."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn

from ..compat import own_children
from .guards import Equals, Guard
from .sources import SELF, children_of, key_of, length_of, module_at

__all__ = [
    "CONTAINERS",
    "OWN_CHILDREN",
    "container_lengths",
    "is_container",
    "is_leaf",
    "is_library",
    "runs_as_sequential",
    "walks_children",
]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that hold others and have no forward."""

_WHOLE = frozenset("_modules children modules named_children named_modules parameters named_parameters".split())
"""Attributes through which a forward may loop over all of its children."""

OWN_CHILDREN = length_of(children_of(SELF))
"""The number of a module's children."""

_LEAF_BASES = (
    "torch_geometric.nn.conv.message_passing.MessagePassing",
    "torch_geometric.nn.aggr.base.Aggregation",
)


def is_library(cls: type) -> bool:
    """Tell whether a class is torch.nn's own."""
    return cls.__module__.startswith("torch.nn.")


def is_container(module: nn.Module) -> bool:
    """Tell whether a module only holds others."""
    return type(module).forward is nn.Module.forward


def runs_as_sequential(module: nn.Module) -> bool:
    """Tell whether a module's forward is that of `nn.Sequential`, over its children in order."""
    cls = type(module)
    return cls.forward is nn.Sequential.forward and getattr(cls, "__iter__", None) is nn.Sequential.__iter__


def is_leaf(module: nn.Module) -> bool:
    """Tell whether a module is an operation of its own, never looked into.

    These are torch.nn's modules, subclasses that keep their forward, and PyTorch Geometric's message passing.
    """
    if runs_as_sequential(module):
        return False
    cls = type(module)
    if any(is_library(base) for base in cls.__mro__ if base.__dict__.get("forward") is cls.forward):
        return True
    return any(f"{base.__module__}.{base.__qualname__}" in _LEAF_BASES for base in cls.__mro__)


def walks_children(module: nn.Module, read: Collection[str]) -> bool:
    """Tell whether a forward may loop over all children of its module, so that one more would matter to it.

    Args:
        module: the traced module.
        read: names of the module's attributes that were read; to list its parameters, torch reads some itself.
    """
    if isinstance(module, (*CONTAINERS, nn.Sequential)) or not {"children", "named_children", "modules"}.isdisjoint(
        read
    ):
        return True
    return "named_parameters" not in read and not {"_modules", "named_modules"}.isdisjoint(read)


def container_lengths(module: nn.Module, graph: fx.Graph, read: Collection[str]) -> list[Guard]:
    """Return guards on the number of items in each container that a forward went through: loops are unrolled.

    Args:
        module: the traced module.
        graph: what came out.
        read: names of the module's attributes that were read.
    """
    guards: dict[str, Guard] = {}
    seen: set[str] = set()
    if not _WHOLE.isdisjoint(read):
        count = len(own_children(module))
        guards[""] = Guard(OWN_CHILDREN, Equals(key_of(count)), f"it has {count} items")
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
                    items = children_of(items)
                count = key_of(len(container))
                guards[path] = Guard(length_of(items), Equals(count), f"{path} has {count} items")
    return list(guards.values())
