"""Match a call to the graph that it would run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..guards import reader
from .capture import Capture, Variant, required_capture

__all__ = ["call_names", "explain_miss", "fitting", "select"]


def fitting(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Variant]:
    """Return the variants whose guards hold for a call, in their order; what they check on the way may not."""
    capture = required_capture(module)
    names = call_names(module, capture, args, kwargs)
    return [variant for variant in capture.variants if variant.fits(names)]


def select(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Variant, list[Any]] | None:
    """Return the variant that a call would run, and the values of its placeholders; None if none holds."""
    capture = required_capture(module)
    names = call_names(module, capture, args, kwargs)
    for variant in capture.variants:
        if variant.fits(names):
            read = reader(names)
            return variant, [read(variant.argument(node)) for node in variant.graph.find_nodes(op="placeholder")]
    return None


def explain_miss(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why no variant holds for a call: the first guard of each that fails."""
    capture = required_capture(module)
    if not capture.variants:
        return capture.dropped
    names = call_names(module, capture, args, kwargs)
    failed = (next((g for g in variant.guards if not g.holds(names)), None) for variant in capture.variants)
    return "; ".join(f"{guard} ({guard.reason})" for guard in failed if guard is not None)


def call_names(module: nn.Module, capture: Capture, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what guards are evaluated over: the arguments of a call by name, and the module itself."""
    return {"self": module, **capture.parameters.bind(args, dict(kwargs))}
