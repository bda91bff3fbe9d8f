"""The graph that a called module runs: one that it was captured with, or the only one of a `torch.nn` leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from ....errors import CaptureError
from ....passes.kinds import PLAIN
from ....passes.opening import unmet_guards
from ....tracing.captured import Capture, Variant
from ....tracing.guards import require
from ....tracing.leaf_graphs import trace_leaf
from ....tracing.observe import INTERNAL
from .batchable_modules import module_operator

__all__ = ["checks_on_the_way", "has_plain_output", "leaf_graph", "variant_of_call"]

_LEAF_GRAPHS: dict[object, fx.Graph | None] = {}
"""What tracing a leaf gave, by everything that its forward depends on; None where it cannot be traced."""
_MOST_LEAF_GRAPHS = 256
"""With more, all are forgotten: a model has a few kinds of leaves."""


def leaf_graph(module: nn.Module) -> fx.Graph | None:
    """Return the graph that a `torch.nn` leaf always runs; None if there is none."""
    if type(module).__module__.split(".")[:2] != ["torch", "nn"] or any(module.children()):
        return None
    if module_operator(module) is not None:
        return None
    key = leaf_key(module)
    if key is None:
        return _leaf_graph(module)
    if key in _LEAF_GRAPHS:
        return _LEAF_GRAPHS[key]
    if len(_LEAF_GRAPHS) >= _MOST_LEAF_GRAPHS:
        _LEAF_GRAPHS.clear()
    graph = _LEAF_GRAPHS[key] = _leaf_graph(module)
    return graph


def variant_of_call(module: nn.Module, capture: Capture, given: Mapping[str, Any], flipped: bool) -> Variant | None:
    """Return the graph that a module runs for a call in its mode or, if `flipped`, in the other one.

    None where it is not settled by what the call passes. Of a single graph the other conditions are left to the caller.
    """
    in_mode = [variant for variant in capture.variants if variant.runs_in_mode(module, flipped=flipped)]
    if len(in_mode) == 1:
        return in_mode[0]
    for variant in in_mode:
        if all(guard.asks_for_training for guard in unmet_guards(module, variant, given)):
            return variant
    return None


def checks_on_the_way(graph: fx.Graph) -> bool:
    """Say whether a graph starts over where a value in its middle is not as it was at capture."""
    return bool(graph.find_nodes(op="call_function", target=require, sort=False))


def has_plain_output(graph: fx.Graph) -> bool:
    """Say whether a graph returns a value or a plain structure of them."""
    return isinstance(graph.output_node().args[0], (fx.Node, tuple, list, dict))


def _leaf_graph(module: nn.Module) -> fx.Graph | None:
    try:
        graph = trace_leaf(module)
    except CaptureError:
        return None
    return graph if isinstance(graph.output_node().args[0], fx.Node) else None


def leaf_key(module: nn.Module) -> object:
    """Return a key, equal for leaves whose forwards are the same but for their tensors, or None if none is known."""
    attributes: dict[str, Any] = vars(module)
    settings = {
        name: value
        for name, value in attributes.items()
        if name not in INTERNAL and not name.startswith("_fxopt") and not isinstance(value, torch.Tensor)
    }
    if not all(_is_plain(value) for value in settings.values()):
        return None
    tensors = tuple((name, p is None) for key in ("_parameters", "_buffers") for name, p in attributes[key].items())
    return type(module), repr(settings), tensors


def _is_plain(value: Any) -> bool:
    """Say whether the text of a value says all about it."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    return type(value) in PLAIN
