"""Pooling of graphs over triples of their nodes, and what it stands on."""

from ...cuda_ops.triples import triangles
from .relational import RO3Pooling
from .triad_pooling import RO3TriadPooling, SAGTriadPooling

__all__ = ["RO3Pooling", "RO3TriadPooling", "SAGTriadPooling", "triangles"]
