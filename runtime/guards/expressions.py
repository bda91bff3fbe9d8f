"""Find what a node computes from the forward's arguments alone, as a source."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx

from ...compat import operator_format
from .sources import SELF, Applied, Attribute, Item, Method, Source, attribute_at, constant

__all__ = ["DESCRIPTIONS", "SWITCHES", "is_switch", "question", "source_of_node"]

SWITCHES = (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled)
"""Questions about a mode of torch, asked again at every call."""

DESCRIPTIONS = frozenset(
    "size dim ndimension numel nelement stride storage_offset element_size get_device is_floating_point is_complex "
    "is_signed is_contiguous is_same_size type_as".split()
)
"""Methods that tell a tensor's shape, type or layout, and nothing of its data."""

_MOST_PARTS = 64
"""What is made of more values is checked where the graph computes it."""


def source_of_node(node: fx.Node, arguments: Mapping[str, Source]) -> Source | None:
    """Return the value of `node`, which is no tensor, as a source, or None where it needs an intermediate result."""
    return _source(node, arguments) if _is_short(node) else None


def _is_short(node: fx.Node) -> bool:
    """Say whether what a node computes stays readable, what occurs in it twice counted twice."""
    pending, seen = [node], 0
    while pending:
        seen += 1
        if seen + len(pending) > _MOST_PARTS:
            return False
        pending.extend(pending.pop().all_input_nodes)
    return True


def _source(node: fx.Node, arguments: Mapping[str, Source]) -> Source | None:
    if node.op == "placeholder":
        return arguments.get(node.name)
    if node.op == "get_attr":
        return attribute_at(str(node.target))
    if node.op == "call_method":
        return _method(node, arguments)
    if node.op == "call_function":
        return _function(node, arguments)
    return None


def _method(node: fx.Node, arguments: Mapping[str, Source]) -> Source | None:
    if node.target not in DESCRIPTIONS or node.kwargs:
        return None
    parts = _parts(node.args, arguments)
    return None if parts is None else Method(parts[0], str(node.target), tuple(parts[1:]))


def _function(node: fx.Node, arguments: Mapping[str, Source]) -> Source | None:
    function: Any = node.target
    if function in SWITCHES:
        return question(function, node.args)
    parts = None if node.kwargs else _parts(node.args, arguments)
    if parts is None:
        return None
    if function is getattr:
        return Attribute(parts[0], cast("str", node.args[1]))
    if function is operator.getitem:
        return Item(*parts)
    if function in (hasattr, type, len) or operator_format(function) is not None:
        return Applied(function, tuple(parts))
    return None


def question(function: Any, args: tuple[Any, ...]) -> Source | None:
    """Return the question about a mode of torch, about that of a device (`args`) where it takes one."""
    parts = _parts(args, {})
    return None if parts is None else Applied(function, tuple(parts))


def is_switch(source: Source) -> bool:
    """Tell whether a source is a mode that may differ from call to call: of torch, or of a module."""
    match source:
        case Applied(function):
            return function in SWITCHES
        case Attribute(owner, "training"):
            return SELF in owner.all()
        case _:
            return False


def _parts(arguments: tuple[Any, ...], given: Mapping[str, Source]) -> list[Source] | None:
    parts = [_part(argument, given) for argument in arguments]
    return None if None in parts else cast("list[Source]", parts)


def _part(argument: Any, arguments: Mapping[str, Source]) -> Source | None:
    if isinstance(argument, fx.Node):
        return _source(argument, arguments)
    if isinstance(argument, slice):
        limits = _parts(cast("tuple[Any, ...]", (argument.start, argument.stop, argument.step)), arguments)
        return None if limits is None else Applied(slice, tuple(limits))
    return constant(argument)
