"""Build the graph of an `nn.Sequential` without tracing it; equal ones share one capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import fx, nn

from ...compat import own_children
from ...runtime.graphs import Capture, Specialization
from ...runtime.guards import Argument, Equals, Guard, IsNot, key_of, length_of
from ...runtime.values import signature_of
from ..analyses import tree_uses_host_random
from ..examples import Meta, meta_key, meta_of
from ..reads import listing_of
from ..recording import Call

__all__ = ["SequentialCaptures"]

_SOURCE = "torch/nn/modules/container.py"
_INPUT = Argument("input")


class SequentialCaptures:
    """Capture Sequentials, each distinct one once."""

    def __init__(self) -> None:
        self._known: dict[Any, Capture] = {}
        self._signature = signature_of(cast("Callable[..., Any]", nn.Sequential.forward))

    def capture(self, module: nn.Module, call: Call | None) -> Capture:
        """Return the capture of `module`, for one call of it (None where there are no example inputs)."""
        metas = None if call is None else _metas(call, len(own_children(module)))
        children = tuple(
            (key, type(child), child is not None and tree_uses_host_random(child))
            for key, child in own_children(module).items()
        )
        key = (type(module), children, None if metas is None else meta_key(tuple(metas)))
        known = self._known.get(key)
        if known is None:
            specialization = _specialization(module, {name: from_host for name, _, from_host in children}, metas)
            known = self._known[key] = Capture(type(module), [specialization], _parameters=self._signature)
        return known


def _metas(call: Call, count: int) -> list[Meta] | None:
    """Return what goes in and what each child gives back, or None if the call did not go child by child."""
    args, kwargs = call.forward_arguments
    given = (*args, *kwargs.values())
    if len(given) != 1 or len(call.children) != count:
        return None
    return [meta_of(given[0]), *(meta_of(child.output) for _, child in call.children)]


def _specialization(module: nn.Module, names: Mapping[str, bool], metas: Sequence[Meta] | None) -> Specialization:
    """Return the graph that calls children one by one; what `names` says is which may draw from outside of torch."""
    graph = fx.Graph()
    value = graph.create_node("placeholder", "input")
    nodes = [value]
    for name, from_host in names.items():
        value = graph.create_node("call_module", name, (value,))
        if from_host:
            value.meta["draws"] = "host"
        nodes.append(value)
    graph.output(value)
    for index, node in enumerate(nodes):
        node.meta["source"] = _SOURCE
        if metas is not None:
            node.meta["val"] = metas[index]
    guards = (
        Guard(_INPUT, IsNot(key_of(None)), "input is a tensor"),
        Guard(length_of(listing_of(module)), Equals(key_of(len(names))), f"it has {len(names)} children"),
    )
    return Specialization(guards, graph, {nodes[0].name: _INPUT})
