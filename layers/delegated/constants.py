"""Derived tensors of a region, handed to engines as numbers: engines compute them too, in many times as long."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from ...operators import Derived

__all__ = ["with_derived"]


def with_derived(graph: fx.Graph, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Let a region read what is derived of tensors of the model alone, and return the tensors that it reads then.

    Its last placeholders are for the tensors, before and afterwards.
    """
    places = graph.find_nodes(op="placeholder")
    known: dict[fx.Node, Any] = dict(zip(places[len(places) - len(tensors) :], tensors, strict=True))
    for node in graph.nodes:
        derives = node.target is operator.getitem or isinstance(node.target, Derived)
        if derives and known.keys() >= set(node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node, value in known.items() if node.op != "placeholder" and isinstance(value, Tensor)]:
        with graph.inserting_before(first):
            known[constant := graph.placeholder(f"{node.name}_made")] = known[node]
        node.replace_all_uses_with(constant)
    for node in list(reversed(known)):
        if not node.users:
            graph.erase_node(node)
            del known[node]
    return [known[node] for node in graph.find_nodes(op="placeholder") if node in known]
