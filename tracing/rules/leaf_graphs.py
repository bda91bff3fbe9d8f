"""The functional graph of a `torch.nn` leaf: what `nn.Linear` or `nn.GELU` calls, with its tensors as attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ...errors import CaptureError
from ...runtime.values import INTERNAL, ModelNames, is_plain_structure, signature_of
from ..examples import Untraceable
from ..trace import ModuleTracer
from .interception import tracing_session

__all__ = ["leaf_graph", "trace_leaf"]

_LEAF_GRAPHS: dict[object, fx.Graph | None] = {}
"""What tracing a leaf gave, by everything that its forward depends on; None where it cannot be traced."""
_MOST_LEAF_GRAPHS = 256
"""With more, all are forgotten: a model has a few kinds of leaves."""


def leaf_graph(module: nn.Module) -> fx.Graph | None:
    """Return the graph that a `torch.nn` leaf always runs; None if there is none."""
    if type(module).__module__.split(".")[:2] != ["torch", "nn"] or any(module.children()):
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


def trace_leaf(module: nn.Module) -> fx.Graph:
    """Return what the forward of a leaf calls, traced without values; `self.training` stays a read.

    Raises:
        CaptureError: if the forward cannot be traced.
    """
    names = ModelNames(module)
    try:
        with tracing_session(names.modules.values()) as session:
            tracer = ModuleTracer(session, names, "", None, lambda _: False, {})
            graph = tracer.trace(signature_of(type(module).forward)).graph
    except (Untraceable, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise CaptureError(f"{type(module).__name__} cannot be traced: {error}") from error
    if tracer.decisions.flags:
        raise CaptureError(
            f"{type(module).__name__} cannot be traced: its control flow depends on "
            f"{' and '.join(map(str, tracer.decisions.flags))}"
        )
    return graph


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
    if not all(is_plain_structure(value) for value in settings.values()):
        return None
    tensors = tuple((name, p is None) for key in ("_parameters", "_buffers") for name, p in attributes[key].items())
    return type(module), repr(settings), tensors
