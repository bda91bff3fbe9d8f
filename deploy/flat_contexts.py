"""Which contexts a flat graph can do without: it has none, so what runs under them must be the same there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import fx, nn

from ..tracing.contexts import Context
from ..tracing.meta import TensorMeta

__all__ = ["carries_gradients", "forbids_autocast", "records_nothing"]


def records_nothing(context: Context) -> bool:
    """Say whether a context only switches gradients off."""
    return context.kind in ("no_grad", "set_grad_enabled") and context.gradients is False


def forbids_autocast(context: Context) -> str | None:
    """Return the type of device that a context switches autocast off for, or None where it does something else."""
    settings = context.settings
    device = settings.get("device_type")
    return device if context.kind == "autocast" and settings.get("enabled") is False and type(device) is str else None


def carries_gradients(nodes: Iterable[fx.Node], takes_gradients: Callable[[str], bool]) -> bool:
    """Say whether gradients might flow into what `nodes` compute, if they were recorded.

    Args:
        nodes: what runs under a context, in order; floating point numbers from before them may carry gradients.
        takes_gradients: tells whether a name is that of a tensor that wants gradients, or may come to want them.
    """
    carrying: dict[fx.Node, bool] = {}

    def carries(node: fx.Node) -> bool:
        if node not in carrying:  # it was computed before
            is_held = node.op == "get_attr"
            carrying[node] = takes_gradients(str(node.target)) if is_held else _holds_floats(node.meta.get("val", nn))
        return carrying[node]

    for node in nodes:
        if node.op == "get_attr":
            continue
        may = node.op == "call_module" or any(map(carries, node.all_input_nodes))
        carrying[node] = may and (node.target is operator.setitem or _holds_floats(node.meta.get("val", nn)))
        if carrying[node]:
            return True
    return False


def _holds_floats(meta: Any) -> bool:
    """Say whether a value so described holds, or may hold, tensors that gradients can reach."""
    if isinstance(meta, TensorMeta):
        return meta.dtype.is_floating_point or meta.dtype.is_complex
    if isinstance(meta, (tuple, list, dict)):
        items = cast("dict[Any, Any]", meta).values() if isinstance(meta, dict) else cast("list[Any]", meta)
        return any(map(_holds_floats, items))
    return not isinstance(meta, (int, float, complex, str, bytes, torch.dtype, torch.device, type(None)))
