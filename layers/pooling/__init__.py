"""Pooling of graphs over triples of their nodes, and what it stands on."""

from .relational import RO3Pooling
from .sag_triads import SAGTriadPooling
from .triad_pooling import RO3TriadPooling
from .triangles import triangles

__all__ = ["RO3Pooling", "RO3TriadPooling", "SAGTriadPooling", "triangles"]
