"""Which modules are captured, which are leaves, and which only hold others."""

from __future__ import annotations

import torch
from torch import nn

from ...compat import is_torch_wrapper
from .dynamic import user_class

__all__ = [
    "CONTAINERS",
    "counts_items",
    "is_container",
    "is_leaf",
    "is_library",
    "is_scripted",
    "runs_as_sequential",
]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that hold others and have no forward."""

_GEOMETRIC = (
    "torch_geometric.nn.conv.message_passing.MessagePassing",
    "torch_geometric.nn.aggr.base.Aggregation",
    "torch_geometric.nn.norm.graph_norm.GraphNorm",
    "torch_geometric.nn.norm.instance_norm.InstanceNorm",
    "torch_geometric.nn.norm.layer_norm.LayerNorm",
)
"""Classes of PyTorch Geometric, by name: importing it takes seconds."""

_IS_OPERATION = "_fxopt_is_operation"
"""The attribute by which a class of `fxopt.layers` says so, for itself and what derives from it."""


def is_scripted(module: nn.Module) -> bool:
    """Tell whether TorchScript compiled a module: its class has no forward."""
    return issubclass(type(module), torch.jit.ScriptModule)  # traced code is noticed when it asks isinstance


def is_library(cls: type) -> bool:
    """Tell whether a class is torch.nn's own."""
    return cls.__module__.startswith("torch.nn.")


def is_container(module: nn.Module) -> bool:
    """Tell whether a module only holds others."""
    return not is_scripted(module) and type(module).forward is nn.Module.forward and not is_torch_wrapper(type(module))


def runs_as_sequential(module: nn.Module) -> bool:
    """Tell whether a module's forward is that of `nn.Sequential`, over its children in order."""
    cls = type(module)
    return (
        not is_scripted(module)
        and cls.forward is nn.Sequential.forward
        and getattr(cls, "__iter__", None) is nn.Sequential.__iter__
    )


def counts_items(cls: type) -> bool:
    """Tell whether a class is one of torch's containers of modules, or one whose length is that of such a one."""
    length = getattr(user_class(cls), "__len__", None)
    return any(length is kind.__len__ for kind in (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def is_leaf(module: nn.Module) -> bool:
    """Tell whether a module is an operation of its own, never looked into: torch.nn's, subclasses that keep its
    forward, fxopt's layers, what TorchScript compiled, and PyTorch Geometric's message passing, aggregations and norms
    that count the graphs.
    """
    if is_scripted(module):
        return True
    cls = type(module)
    if runs_as_sequential(module) or is_torch_wrapper(cls):
        return False
    if any(is_library(base) for base in cls.__mro__ if base.__dict__.get("forward") is cls.forward):
        return True
    if getattr(cls, _IS_OPERATION, False):
        return True
    return any(f"{base.__module__}.{base.__qualname__}" in _GEOMETRIC for base in cls.__mro__)
