"""The pass that swaps the pooling of models on graphs, and what it looks for."""

from __future__ import annotations

from .graph_pooling import GraphPooling

__all__ = ["GraphPooling"]
