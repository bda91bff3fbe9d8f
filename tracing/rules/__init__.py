"""How torch, containers and known libraries are traced; what is patched meanwhile."""

from __future__ import annotations

from .interception import tracing_session
from .leaf_graphs import leaf_graph, trace_leaf
from .sequential import SequentialCaptures

__all__ = ["SequentialCaptures", "leaf_graph", "trace_leaf", "tracing_session"]
