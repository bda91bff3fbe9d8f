"""Run a plain function on a module's graph, as `torch.fx` transformations are written, and take over what it made.

A function may change the graph and add modules and tensors under new names. It cannot say what it does to checkpoints,
so it may not touch the tensors that are there, nor put others in their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from ...errors import CaptureError, MatchFailure, UsageError
from ...runtime.values import Absent
from .changes import UnnotedChange, Watch

__all__ = ["Adopt", "run_function"]

Adopt = Callable[[str, Any], None]
"""Puts a value in the place of an attribute of the owner, by its qualified name."""


def run_function(
    function: Callable[[fx.GraphModule], fx.GraphModule],
    owner: nn.Module,
    graph: fx.Graph,
    adopt: Adopt,
    watch: Watch | None,
) -> fx.Graph:
    """Return the graph that a function makes of `graph`, which it may edit in place, having adopted what it calls.

    Raises:
        UsageError: if the function returns no `GraphModule`, or changes what `watch` watches.
        CaptureError: if the graph it returns refers to something that is not there.
        MatchFailure: if it puts a module with tensors, or a tensor, in the place of another.
    """
    returned = function(fx.GraphModule(owner, graph, type(owner).__name__))
    try:
        if watch is not None:
            watch.check()
    except UnnotedChange as change:
        raise UsageError(f"it {change.what}; a pass function may change only the graph it is given") from change
    if not isinstance(returned, fx.GraphModule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"returned {type(returned).__name__}; a pass function returns a torch.fx.GraphModule")
    for target in dict.fromkeys(str(n.target) for n in returned.graph.nodes if n.op in ("call_module", "get_attr")):
        _take_over(target, returned, owner, adopt)
    return returned.graph


def _take_over(target: str, returned: fx.GraphModule, owner: nn.Module, adopt: Adopt) -> None:
    """Let the owner have what the returned graph calls `target`."""
    value, present = _attribute(returned, target), _attribute(owner, target)
    if value is Absent:
        raise CaptureError(f"its graph refers to '{target}', which does not exist")
    if present is value:
        return
    if present is not Absent and (_has_tensors(value) or _has_tensors(present)):
        raise MatchFailure(f"it replaces '{target}', so checkpoints would not fit; use a new name")
    adopt(target, value)


def _attribute(module: nn.Module, name: str) -> object:
    path, _, last = name.rpartition(".")
    try:
        return getattr(module.get_submodule(path), last)
    except AttributeError:
        return Absent


def _has_tensors(value: object) -> bool:
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is not None or next(value.buffers(), None) is not None
    return isinstance(value, Tensor)
