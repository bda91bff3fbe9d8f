"""Run a plain function on a module's graph, as `torch.fx` transformations are written, and take over what it made.

A function may change the graph and add modules and tensors under new names. It cannot say what it does to checkpoints,
so it may not touch the tensors that are there, nor put others in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...compat import modules_by_name
from ...errors import CaptureError, MatchFailure, UsageError
from ...runtime.values import Absent
from ...tracing.isolation import AttributeState

__all__ = ["Adopt", "run_function"]

Adopt = Callable[[str, Any], None]
"""Puts a value in the place of an attribute of the owner, by its qualified name."""


def run_function(
    function: Callable[[fx.GraphModule], fx.GraphModule], owner: nn.Module, graph: fx.Graph, adopt: Adopt
) -> fx.Graph:
    """Return the graph that a function makes of `graph`, having adopted what it calls.

    Args:
        function: is given a `GraphModule` and returns one.
        owner: the module that the graph is of; nothing of it may be changed by the function itself.
        graph: a copy; the function may edit it in place.
        adopt: puts new modules and tensors into the owner.

    Raises:
        UsageError: if the function returns anything else, or changes the owner in place.
        CaptureError: if the graph it returns refers to something that is not there.
        MatchFailure: if it puts a module with tensors, or a tensor, in the place of another.
    """
    given = fx.GraphModule(owner, graph, type(owner).__name__)
    with _unchanged(owner):
        returned = function(given)
    if not isinstance(returned, fx.GraphModule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"returned {type(returned).__name__}; a pass function returns a torch.fx.GraphModule")
    for target in dict.fromkeys(str(n.target) for n in returned.graph.nodes if n.op in ("call_module", "get_attr")):
        _take_over(target, returned, owner, adopt)
    return returned.graph


@contextmanager
def _unchanged(owner: nn.Module) -> Generator[None]:
    """Put back whatever is changed of a module, and say so."""
    attributes = {name: AttributeState(module) for name, module in modules_by_name(owner).items()}
    tensors = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        yield
    finally:
        changed = [f"{name}.{what}".strip(".") for name, state in attributes.items() if (what := state.changed())]
        for state in attributes.values():
            state.restore()
        changed += [name for name, tensor in tensors.items() if not _same(tensor, values[name])]
        with torch.no_grad():
            for name in changed:
                if name in values:
                    tensors[name].copy_(values[name])
    if changed:
        raise UsageError(f"changed '{changed[0]}' in place; a pass function may change only the graph it is given")


def _same(tensor: Tensor, value: Tensor) -> bool:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return True
    if torch.equal(tensor, value):
        return True
    return torch.equal(tensor.isnan(), value.isnan()) and torch.equal(tensor.nan_to_num(), value.nan_to_num())


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
