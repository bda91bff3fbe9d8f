"""Graphs of torch's own modules: what a leaf such as `nn.Linear` calls, and those of an `nn.Sequential`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from ...compat import own_children
from ...errors import CaptureError
from ...runtime.graphs import Capture, Specialization
from ...runtime.guards import Argument, Equals, Guard, IsNot, key_of, length_of
from ...runtime.values import INTERNAL, Meta, ModelNames, is_plain_structure, meta_key, meta_of, signature_of
from ..analyses import tree_uses_host_random
from ..examples import Untraceable
from ..reads import listing_of
from ..recording import Call
from ..trace import ModuleTracer
from .interception import tracing_session

__all__ = ["SequentialCaptures", "leaf_graph", "trace_leaf"]


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
    """Return what the forward of a leaf calls, traced without values; `self.training` stays a read. CaptureError if
    that cannot be traced.
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
