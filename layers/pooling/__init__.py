"""Pooling of graphs over triples of their nodes, and what it stands on."""

from .triad_pooling import RO3TriadPooling
from .triangles import triangles

__all__ = ["RO3TriadPooling", "triangles"]
