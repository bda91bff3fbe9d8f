"""Pooling of graphs over triples of their nodes, and what it stands on."""

from .triangles import triangles

__all__ = ["triangles"]
