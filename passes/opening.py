"""Which modules may be looked into from outside, and the graph that is seen there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from ..compat import has_hooks
from ..errors import CaptureError
from ..tracing.captured import Capture, Variant
from ..tracing.dynamic import user_class
from ..tracing.expressions import is_switch
from ..tracing.guards import Guard, require
from ..tracing.leaf_graphs import trace_leaf
from ..tracing.observe import INTERNAL
from ..tracing.regions import ContextRegion
from ..tracing.sources import SELF, Attribute, Source
from .batchable_modules import module_operator
from .kinds import PLAIN
from .mode_guards import asks_for_training, runs_in_mode
from .volatile import VOLATILE, is_volatile

__all__ = [
    "checks_on_the_way",
    "has_plain_output",
    "leaf_graph",
    "obstacle_to_opening",
    "unmet_guard",
    "unmet_guards",
    "variant_of_call",
]

_LEAF_GRAPHS: dict[object, fx.Graph | None] = {}
"""What tracing a leaf gave, by everything that its forward depends on; None where it cannot be traced."""


def obstacle_to_opening(module: nn.Module) -> str | None:
    """Return why a module must stay one call (hooks, parametrizations, contexts), or None."""
    for submodule in module.modules():
        if isinstance(submodule, ContextRegion):
            return f"it opens {submodule.context}"
        if user_class(type(submodule)).__call__ is not nn.Module.__call__ and not isinstance(submodule, fx.GraphModule):
            return "it has a __call__ of its own"
        if has_hooks(submodule):
            return "it has hooks"
        if parametrize.is_parametrized(submodule):
            return "it has parametrizations"
        if "forward" in vars(submodule):
            return "its forward was replaced"
        if is_volatile(submodule):
            return VOLATILE
    return None


def leaf_graph(module: nn.Module) -> fx.Graph | None:
    """Return the graph that a `torch.nn` leaf always runs; None if there is none."""
    if type(module).__module__.split(".")[:2] != ["torch", "nn"] or any(module.children()):
        return None
    if module_operator(module) is not None:
        return None
    key = leaf_key(module)
    if key is None:
        return _leaf_graph(module)
    if key not in _LEAF_GRAPHS:
        _LEAF_GRAPHS[key] = _leaf_graph(module)
    return _LEAF_GRAPHS[key]


def variant_of_call(module: nn.Module, capture: Capture, given: Mapping[str, Any], flipped: bool) -> Variant | None:
    """Return the graph that a module runs for a call in its mode or, if `flipped`, in the other one.

    None where it is not settled by what the call passes. Of a single graph the other conditions are left to the caller.
    """
    in_mode = [variant for variant in capture.variants if runs_in_mode(module, variant, flipped)]
    if len(in_mode) == 1:
        return in_mode[0]
    for variant in in_mode:
        if all(asks_for_training(guard) for guard in unmet_guards(module, variant, given)):
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


def unmet_guard(module: nn.Module, capture: Capture, given: Mapping[str, Any]) -> Guard | None:
    """Return a condition of a captured module's graph that one call of it does not always meet, or None.

    Args:
        module: what is called.
        capture: its graph.
        given: what the call passes, by argument; anything but a constant stands for a value that may be any tensor.
    """
    return next(iter(unmet_guards(module, capture.variants[0], given)), None)


def unmet_guards(module: nn.Module, variant: Variant, given: Mapping[str, Any]) -> list[Guard]:
    """Return all such conditions; see `unmet_guard`."""
    names = {"self": module, **given}
    return [g for g in variant.guards if _may_change(g, module) or not g.holds(names)]


def _may_change(guard: Guard, module: nn.Module) -> bool:
    """Say whether a condition may change from call to call although arguments and module stay the same."""
    is_on_mode = asks_for_training(guard) or any(map(is_switch, guard.sources()))
    return is_on_mode or any(_looks_inside(source, module) for source in guard.sources())


def _looks_inside(source: Source, module: nn.Module) -> bool:
    """Say whether a source is what a plain attribute of the module holds: that may change unnoticed."""
    if not isinstance(source, Attribute) or source.owner != SELF or source.name == "_modules":
        return False
    value = vars(module).get(source.name)
    return value is not None and not isinstance(value, torch.Tensor)
