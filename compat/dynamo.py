"""The private name by which dynamo's graphs tell which of their inputs are parameters and buffers."""

from __future__ import annotations

from typing import Any, cast

from torch import fx

__all__ = ["is_kept_between_calls"]


def is_kept_between_calls(node: fx.Node) -> bool:
    """Say whether an input of a graph is a parameter or buffer of the model that dynamo captures."""
    return "_dynamo_static_input_type" in cast("dict[str, Any]", node.meta.get("tensor_dict", {}))
