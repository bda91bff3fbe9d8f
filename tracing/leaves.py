"""Which modules are captured, which are leaves, and which only hold others."""

from __future__ import annotations

from torch import fx, nn

from .guards import Guard, require
from .source import module_expression

__all__ = ["CONTAINERS", "container_lengths", "is_container", "is_leaf", "is_library", "runs_as_sequential"]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that hold others and have no forward."""

_LEAF_BASES = (
    "torch_geometric.nn.conv.message_passing.MessagePassing",
    "torch_geometric.nn.aggr.base.Aggregation",
)


def is_library(cls: type) -> bool:
    """Tell whether a class is torch.nn's own."""
    return cls.__module__.startswith("torch.nn.")


def is_container(module: nn.Module) -> bool:
    """Tell whether a module only holds others."""
    return isinstance(module, CONTAINERS) or type(module).forward is nn.Module.forward


def runs_as_sequential(module: nn.Module) -> bool:
    """Tell whether a module's forward is that of `nn.Sequential`, over its children in order."""
    cls = type(module)
    return cls.forward is nn.Sequential.forward and cls.__iter__ is nn.Sequential.__iter__


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


def container_lengths(module: nn.Module, graph: fx.Graph) -> list[Guard]:
    """Return guards on the number of items in each container that children are called from: loops are unrolled."""
    guards: dict[str, Guard] = {}
    for node in graph.find_nodes(op="call_module"):
        parts = str(node.target).split(".")
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            container = module.get_submodule(path)
            if path not in guards and isinstance(container, (*CONTAINERS, nn.Sequential)):
                count = len(container._modules)
                expression = f"len({module_expression(parts[:depth])}._modules) == {count}"
                guards[path] = Guard(expression, f"{path} has {count} items")
    return list(guards.values())
