"""Write what a node computes as Python over the forward's arguments, where it hangs on nothing else."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx

from ..compat import operator_format

__all__ = ["DESCRIPTIONS", "SWITCHES", "expression_of", "is_question", "literal", "question"]

SWITCHES = {
    torch.is_grad_enabled: "torch.is_grad_enabled",
    torch.is_inference_mode_enabled: "torch.is_inference_mode_enabled",
    torch.is_autocast_enabled: "torch.is_autocast_enabled",
}
"""Questions about a mode of torch, asked again at every call."""

DESCRIPTIONS = frozenset(
    "size dim ndimension numel nelement stride storage_offset element_size get_device is_floating_point is_complex "
    "is_signed is_contiguous is_same_size type_as".split()
)
"""Methods that tell a tensor's shape, type or layout, and nothing of its data."""

_MOST_PARTS = 64
"""What is made of more values is checked where the graph computes it."""


def expression_of(node: fx.Node, arguments: Mapping[str, str]) -> str | None:
    """Return Python for the value of `node`, or None where it needs an intermediate result.

    Args:
        node: a node whose value is no tensor.
        arguments: name of a placeholder -> Python for it.
    """
    return _expression(node, arguments) if _is_short(node) else None


def _is_short(node: fx.Node) -> bool:
    """Say whether the expression of a node stays readable, what occurs in it twice counted twice."""
    pending, seen = [node], 0
    while pending:
        seen += 1
        if seen + len(pending) > _MOST_PARTS:
            return False
        pending.extend(pending.pop().all_input_nodes)
    return True


def _expression(node: fx.Node, arguments: Mapping[str, str]) -> str | None:
    if node.op == "placeholder":
        return arguments.get(node.name)
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.op == "call_method":
        return _method(node, arguments)
    if node.op == "call_function":
        return _function(node, arguments)
    return None


def _method(node: fx.Node, arguments: Mapping[str, str]) -> str | None:
    if node.target not in DESCRIPTIONS or node.kwargs:
        return None
    parts = [_part(argument, arguments) for argument in node.args]
    if None in parts:
        return None
    owner, *rest = parts
    return f"{owner}.{node.target}({', '.join(map(str, rest))})"


def _function(node: fx.Node, arguments: Mapping[str, str]) -> str | None:
    function: Any = node.target
    if function in SWITCHES:
        return question(function, node.args)
    parts = [_part(argument, arguments) for argument in node.args]
    if None in parts or node.kwargs:
        return None
    if function is getattr:
        return f"{parts[0]}.{node.args[1]}"
    if function is hasattr:
        return f"hasattr({parts[0]}, {parts[1]})"
    if function is type:
        return f"type({parts[0]})"
    if function is len:
        return f"len({parts[0]})"
    if function is operator.getitem:
        return f"{parts[0]}[{parts[1]}]"
    form = operator_format(function)
    return None if form is None else f"({form.format(*parts)})"


def question(function: Any, args: tuple[Any, ...]) -> str | None:
    """Return Python that asks for a mode of torch, for that of a device (`args`) where it takes one."""
    texts = [literal(argument) for argument in args]
    return None if None in texts else f"{SWITCHES[function]}({', '.join(map(str, texts))})"


def is_question(expression: str) -> bool:
    """Tell whether `question` wrote an expression."""
    return expression.startswith(tuple(f"{name}(" for name in SWITCHES.values()))


def _part(argument: Any, arguments: Mapping[str, str]) -> str | None:
    if isinstance(argument, fx.Node):
        return _expression(argument, arguments)
    if isinstance(argument, slice):
        limits = cast("tuple[Any, ...]", (argument.start, argument.stop, argument.step))
        bounds = [_part(bound, arguments) for bound in limits]
        return None if None in bounds else f"slice({', '.join(map(str, bounds))})"
    return literal(argument)


def literal(value: Any) -> str | None:
    """Return Python that gives `value` in a guard, or None if it has no such spelling."""
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) is float:
        return repr(value) if value - value == 0 else None
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if type(value) in (tuple, torch.Size):
        parts = [literal(item) for item in value]
        return None if None in parts else f"({', '.join(map(str, parts))}{',' if len(parts) == 1 else ''})"
    return None
