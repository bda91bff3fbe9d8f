"""What stands behind a layer and is computed with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...layers.packed import NO_ACTIVATION, Activation, known_activations
from ...passes.rewriting import Held, LayerCall, call_in, is_undisturbed, only_user, reason_against_inlining, shape_of
from ...runtime.values import user_class
from .decompositions import written_out

__all__ = ["Epilogue", "find_epilogue"]


@dataclass(frozen=True)
class Epilogue:
    """What is computed with a layer: nodes `inside`, `other` joined to the result, an activation; dropouts are off."""

    inside: tuple[fx.Node, ...]
    other: fx.Node | None
    activation: Activation
    joins: str = "add"
    modes: tuple[str, ...] = ()

    @property
    def last(self) -> fx.Node:
        """Return the node that gives the result."""
        return self.inside[-1]


def find_epilogue(layer: LayerCall) -> Epilogue:
    """Return the activation behind a layer, or the sum (of linears product) and activation, without dropouts."""
    start, modes = _through_dropouts(layer, (layer.node,))
    found = _activation(layer, start[-1])
    if found is not None:
        inside, more = _through_dropouts(layer, (*start, found[0]))
        return _whole(layer, inside, found[1], modes=(*modes, *more))
    for joins in ("add", "mul") if layer.is_linear else ("add",):
        joined = _joined(layer, start[-1], joins)
        if joined is not None and _is_undisturbed(layer, *start, joined[0]):
            last, other = joined
            found = _activation(layer, last) or _relu_in_place(layer, last)
            if found is None or not _is_undisturbed(layer, *start, last, found[0]):
                return Epilogue((*start, last), other, NO_ACTIVATION, joins, modes)
            return Epilogue((*start, last, found[0]), other, found[1], joins, modes)
    return _whole(layer, start, NO_ACTIVATION, modes=modes)


def _whole(
    layer: LayerCall, inside: tuple[fx.Node, ...], activation: Activation, *, modes: tuple[str, ...]
) -> Epilogue:
    """Return all of it where nothing is written in between, else the layer alone."""
    if _is_undisturbed(layer, *inside):
        return Epilogue(inside, None, activation, "add", modes)
    return Epilogue((layer.node,), None, NO_ACTIVATION)


def _through_dropouts(layer: LayerCall, inside: tuple[fx.Node, ...]) -> tuple[tuple[fx.Node, ...], tuple[str, ...]]:
    """Return nodes with the dropouts that follow, which do nothing in evaluation, and the attributes of their modes."""
    modes: list[str] = []
    while (user := only_user(inside[-1])) is not None:
        call = call_in(layer.program, layer.owner, user, "dropout")
        if call is None or call.orders[0][0] is not inside[-1]:
            break
        mode = call.named.get("training")
        if isinstance(mode, Held) or (isinstance(mode, fx.Node) and mode.op == "get_attr"):
            modes.append(str(mode.name if isinstance(mode, Held) else mode.target))
        elif mode is not False:
            break
        inside = (*inside, user)
    return inside, tuple(modes)


def _joined(layer: LayerCall, node: fx.Node, joins: str) -> tuple[fx.Node, fx.Node] | None:
    """Return the addition or product that is all that reads a node, and the other operand, of the same shape."""
    user = only_user(node)
    call = None if user is None else call_in(layer.program, layer.owner, user, joins)
    if user is None or call is None or call.named.get("alpha", 1) != 1:
        return None
    other = next((order[1] for order in call.orders if len(order) > 1 and order[0] is node), None)
    if not isinstance(other, fx.Node) or other is node or shape_of(node) is None or shape_of(other) != shape_of(node):
        return None
    return user, other


def _activation(layer: LayerCall, node: fx.Node) -> tuple[fx.Node, Activation] | None:
    """Return the activation that is all that reads a node, and what it is; None where there is none."""
    user = only_user(node)
    if user is None:
        return None
    for known in known_activations():
        call = call_in(layer.program, layer.owner, user, known.operator)
        if call is None or call.orders[0][0] is not node:
            continue
        numbers: tuple[Any, ...] = tuple(call.named.get(name) for name in known.free)
        is_known = all(call.named.get(name) == value for name, value in known.fixed)
        if is_known and all(map(_is_number, numbers)) and _is_undisturbed(layer, node, user):
            return user, known.having(tuple(map(float, numbers)))
    spelled = written_out(layer.program, layer.owner, user, node)
    return None if spelled is None else (user, spelled)


def _relu_in_place(layer: LayerCall, total: fx.Node) -> tuple[fx.Node, Activation] | None:
    """Return a ReLU that writes into a sum: into a layer's new result, that is, which nothing else reads."""
    user = only_user(total)
    if user is None or user.op != "call_module":
        return None
    module = layer.program.callee(layer.owner, user)
    is_relu = user_class(type(module)) is nn.ReLU and reason_against_inlining(module) is None
    return (user, next(known_activations())) if is_relu else None


def _is_undisturbed(layer: LayerCall, *nodes: fx.Node) -> bool:
    return is_undisturbed(layer.program, layer.owner, nodes)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
