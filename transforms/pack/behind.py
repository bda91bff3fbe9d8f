"""What stands behind a layer and is computed with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...layers.packed import NO_ACTIVATION, Activation, known_activations
from ...passes.rewriting import Found, Place, call_in, obstacle_to_inlining
from ...tracing.values import user_class
from .layers import shape_of

__all__ = ["Behind", "behind"]


@dataclass(frozen=True)
class Behind:
    """What is computed together with a layer.

    Attributes:
        inside: the nodes that are computed together, the layer's first.
        other: what is added to the layer's result; None for nothing.
        activation: behind that.
    """

    inside: tuple[fx.Node, ...]
    other: fx.Node | None
    activation: Activation

    @property
    def last(self) -> fx.Node:
        """Return the node that gives the result."""
        return self.inside[-1]


def behind(place: Place, node: fx.Node) -> Behind:
    """Return what stands behind a layer: an activation, or a sum and perhaps an activation."""
    found = _activation(place, node)
    if found is not None:
        return Behind((node, found[0]), None, found[1])
    total = _sum(place, node)
    if total is None:
        return Behind((node,), None, NO_ACTIVATION)
    last, other = total
    found = _activation(place, last) or _relu_in_place(place, last)
    if found is None or not place.is_undisturbed(Found(computed=(node, last, found[0]))):
        return Behind((node, last), other, NO_ACTIVATION)
    return Behind((node, last, found[0]), other, found[1])


def _sum(place: Place, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the addition that is all that reads a node, and the other operand, of the same shape."""
    user = _only_user(node)
    call = None if user is None else call_in(place, user, "add")
    if user is None or call is None or call.named.get("alpha", 1) != 1:
        return None
    other = next((order[1] for order in call.orders if len(order) > 1 and order[0] is node), None)
    if not isinstance(other, fx.Node) or other is node or shape_of(node) is None or shape_of(other) != shape_of(node):
        return None
    return (user, other) if place.is_undisturbed(Found(computed=(node, user))) else None


def _activation(place: Place, node: fx.Node) -> tuple[fx.Node, Activation] | None:
    """Return the activation that is all that reads a node, and what it is; None where there is none."""
    user = _only_user(node)
    if user is None:
        return None
    for known in known_activations():
        call = call_in(place, user, known.operator)
        if call is None or call.orders[0][0] is not node:
            continue
        numbers: tuple[Any, ...] = tuple(call.named.get(name) for name in known.free)
        is_known = all(call.named.get(name) == value for name, value in known.fixed)
        if is_known and all(map(_is_number, numbers)) and place.is_undisturbed(Found(computed=(node, user))):
            return user, known.having(tuple(map(float, numbers)))
    return None


def _relu_in_place(place: Place, total: fx.Node) -> tuple[fx.Node, Activation] | None:
    """Return a ReLU that writes into a sum: into a layer's new result, that is, which nothing else reads."""
    user = _only_user(total)
    if user is None or user.op != "call_module":
        return None
    module = place.program.callee(place.owner, user)
    is_relu = user_class(type(module)) is nn.ReLU and obstacle_to_inlining(module) is None
    return (user, next(known_activations())) if is_relu else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
