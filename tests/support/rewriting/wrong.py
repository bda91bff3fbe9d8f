"""Wrong rewrites: those that passes get wrong."""

from __future__ import annotations

import random
from typing import Any

from torch import fx, nn

from .place import Apply, Place, Rewrite, nodes_of


def swapped_operands(place: Place, _: random.Random) -> Apply | None:
    if not place.is_call("sub", "truediv", "matmul") or len(place.node.args) != 2:
        return None
    first, second = place.node.args
    return lambda: setattr(place.node, "args", (second, first))


def wrong_dimension(place: Place, _: random.Random) -> Apply | None:
    if not place.is_call("softmax", "sum", "mean", "cat", "stack"):
        return None
    position = len(place.node.args) - 1
    if "dim" in place.node.kwargs:
        dim = place.node.kwargs["dim"]
        return lambda: place.node.update_kwarg("dim", another_dimension(dim))
    if position == 1:
        return lambda: place.node.update_arg(1, another_dimension(place.node.args[1]))
    return None


def another_dimension(dim: Any) -> Any:
    if isinstance(dim, int):
        return {0: 1, 1: 0, -1: -2, -2: -1}.get(dim, 0)
    return tuple(another_dimension(d) for d in dim)


def dropped_user(place: Place, chance: random.Random) -> Apply | None:
    if not place.is_call("add", "sub", "mul") or len(nodes_of(place)) < 2:
        return None
    kept = chance.choice(nodes_of(place))
    return lambda: place.node.replace_all_uses_with(kept)


def stale_buffer(place: Place, _: random.Random) -> Apply | None:
    if place.calls(nn.BatchNorm1d, nn.BatchNorm2d) and place.module.training:
        return lambda: place.set("momentum", 0.0)
    if place.is_call("add_"):
        return lambda: setattr(place.node, "target", "add")
    return None


def lost_gradient(place: Place, chance: random.Random) -> Apply | None:
    if place.node.op not in ("call_function", "call_module", "call_method") or not nodes_of(place):
        return None
    if place.is_call("getattr", "size", "getitem", "add_", "mul_", "detach") or place.calls(nn.Embedding):
        return None
    sources = [node for node in nodes_of(place) if receives_gradients(node, place)]
    if not passes_gradients(place.node) or not sources:
        return None
    source = chance.choice(sources)

    def apply() -> None:
        with place.graph.inserting_before(place.node):
            place.node.replace_input_with(source, place.graph.call_method("detach", (source,)))

    return apply


def passes_gradients(node: fx.Node) -> bool:
    """Say whether the output hangs on `node` by a path that is not detached anyway."""
    users = (user for user in node.users if user.target != "detach")
    return any(user.op == "output" or passes_gradients(user) for user in users)


def receives_gradients(node: fx.Node, place: Place) -> bool:
    """Say whether anything behind `node` wants a gradient."""
    if node.op == "get_attr":
        return str(node.target) in dict(place.program.module(place.owner).named_parameters())
    is_source = node.op in ("placeholder", "call_module")
    return node.target != "detach" and (is_source or any(receives_gradients(n, place) for n in node.all_input_nodes))


def wrong_epsilon(place: Place, _: random.Random) -> Apply | None:
    if place.calls(nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.RMSNorm):
        return lambda: place.set("eps", 1.1e-6)
    return None


def wrong_order(place: Place, chance: random.Random) -> Apply | None:
    """Let two members of one list change places."""
    if place.node.op != "call_module" or not str(place.node.target).rpartition(".")[2].isdigit():
        return None
    container = str(place.node.target).rpartition(".")[0]
    members = [
        node
        for node in place.graph.find_nodes(op="call_module")
        if str(node.target).rpartition(".")[0] == container and node is not place.node
    ]
    if not members or isinstance(place.program.module(place.owner), nn.Sequential):
        return None
    other = chance.choice(members)
    targets = place.node.target, other.target

    def apply() -> None:
        other.target, place.node.target = targets

    return apply


WRONG: dict[str, Rewrite] = {
    "swapped operands": swapped_operands,
    "wrong dimension": wrong_dimension,
    "dropped user": dropped_user,
    "stale buffer": stale_buffer,
    "lost gradient": lost_gradient,
    "epsilon 1.1e-6": wrong_epsilon,
    "members in the wrong order": wrong_order,
}
