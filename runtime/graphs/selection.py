"""Match a call to the graph that it would run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..guards import Equals, Guard, Is, reader
from .capture import Capture, Specialization, required_capture

__all__ = ["call_names", "explain_miss", "fitting", "select"]


def fitting(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Specialization]:
    """Return the specializations whose guards hold for a call, in their order; what they check on the way may not."""
    capture = required_capture(module)
    names = call_names(module, capture, args, kwargs)
    return [specialization for specialization in capture.specializations if specialization.fits(names)]


def select(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Specialization, list[Any]] | None:
    """Return the specialization that a call would run, and the values of its placeholders; None if none holds."""
    capture = required_capture(module)
    names = call_names(module, capture, args, kwargs)
    for specialization in capture.specializations:
        if specialization.fits(names):
            read = reader(names)
            return specialization, [
                read(specialization.argument(node)) for node in specialization.graph.find_nodes(op="placeholder")
            ]
    return None


def explain_miss(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why no specialization holds for a call: the first guard of each that fails."""
    capture = required_capture(module)
    if not capture.specializations:
        return capture.dropped
    names = call_names(module, capture, args, kwargs)
    failed = (
        next((g for g in specialization.guards if not g.holds(names)), None)
        for specialization in capture.specializations
    )
    return ", or ".join(dict.fromkeys(_text_of(guard) for guard in failed if guard is not None))


def _text_of(guard: Guard) -> str:
    """Return the condition, and what was assumed where that says more."""
    if "__qualname__" in str(guard):  # of a class: the reason names it in words
        return guard.reason
    match guard:
        case Guard(source, Equals(expected) | Is(expected), reason) if reason == f"{source} is {expected}":
            return str(guard)
        case _:
            return f"{guard} ({guard.reason})"


def call_names(module: nn.Module, capture: Capture, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what guards are evaluated over: the arguments of a call by name, and the module itself."""
    return {"self": module, **capture.parameters.bind(args, dict(kwargs))}
