"""What stands behind a layer and is computed with it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import fx

from ...layers.packed import Activation, known_activations
from ...passes.rewriting import Found, Place, call_in

__all__ = ["activation_behind"]


def activation_behind(place: Place, node: fx.Node) -> tuple[fx.Node, Activation] | None:
    """Return the activation that is all that reads a node, and what it is; None where there is none."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    for known in known_activations():
        call = call_in(place, user, known.operator)
        if call is None or call.orders[0][0] is not node:
            continue
        numbers: tuple[Any, ...] = tuple(call.named.get(name) for name in known.free)
        is_known = all(call.named.get(name) == value for name, value in known.fixed)
        if is_known and all(map(_is_number, numbers)) and place.is_undisturbed(Found(computed=(node, user))):
            return user, dataclasses.replace(known, numbers=tuple(map(float, numbers))) if numbers else known
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
