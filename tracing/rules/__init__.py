"""How torch, containers and known libraries are traced; what is patched meanwhile."""

from __future__ import annotations

from .interception import tracing_session
from .torch_modules import SequentialCaptures, leaf_graph, trace_leaf

__all__ = ["SequentialCaptures", "leaf_graph", "trace_leaf", "tracing_session"]
