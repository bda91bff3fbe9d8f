"""Where engines round activations to 8 bits: once for all that read them, sums and pooling among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import fx

from ...layers.quantized import Range, StaticComputation, rounded, to_numbers
from ...operators import canonical_name, mutates
from .kinds import is_in_8_bits

__all__ = ["share_rounding"]

_SUMS = frozenset(("add", "iadd"))


def share_rounding(graph: fx.Graph) -> None:
    """Let the sum behind a convolution read what layers read of the same activation, rounded to 8 bits, and round
    before max pooling, where that is the same for all readers: so engines keep 8 bits between layers.

    Before: y = conv2(relu(conv1(x))) + x, with x rounded in conv1    After: x' = rounded(x); y = conv2(...) + x'
    """
    for x in list(graph.nodes):
        layers = list(_layers(x))
        ranges = {cast("StaticComputation", layer.target).range for layer in layers}
        is_scaled = any(layer.kwargs.get("factors") is not None for layer in layers)
        if len(ranges) != 1 or is_scaled or any(mutates(user) and user.args[0] is x for user in x.users):
            continue
        sums = [user for user in x.users if _adds_convolution(user, x)]
        readers = [*layers, *sums]
        is_for_all = all(user in readers or user.target is to_numbers for user in x.users)
        start = _before_pooling(x) if is_for_all else x
        if sums or start is not x:
            _round(start, x, ranges.pop(), readers)


def _layers(x: fx.Node) -> Iterator[fx.Node]:
    """Yield the layers in 8 bits that read an activation in floats, or its numbers."""
    for user in x.users:
        if user.target is to_numbers:
            yield from (layer for layer in user.users if is_in_8_bits(layer) and layer.args[0] is user)
        elif is_in_8_bits(user) and user.args[0] is x:
            yield user


def _adds_convolution(node: fx.Node, x: fx.Node) -> bool:
    """Say whether a node adds an activation to what a convolution in 8 bits gives in floats."""
    if canonical_name(node) not in _SUMS or len(node.args) != 2 or node.kwargs:
        return False
    other = next((each for each in node.args if each is not x), None)
    if not isinstance(other, fx.Node) or not is_in_8_bits(other) or other.kwargs.get("output") is not None:
        return False
    return len(other.users) == 1 and hasattr(other.target, "geometry")


def _before_pooling(x: fx.Node) -> fx.Node:
    """Return the activation of which another one is the largest of windows; itself where others read that, too."""
    while canonical_name(x) == "max_pool2d" and isinstance(x.args[0], fx.Node) and len(x.args[0].users) == 1:
        x = x.args[0]
    return x


def _round(start: fx.Node, x: fx.Node, to: Range, readers: list[fx.Node]) -> None:
    """Round an activation, of which `x` is made, for those who read `x`."""
    with x.graph.inserting_after(start):
        new = x.graph.call_function(rounded, (start, to.scale, to.zero_point))
    new.meta = dict(start.meta)
    direct = [user for user in start.users if user in readers or user.target is to_numbers]
    for user in direct if start is x else [user for user in start.users if user is not new]:
        user.replace_input_with(start, new)
    for layer in readers:
        if is_in_8_bits(layer):
            layer.update_kwarg("is_rounded", True)
