"""Triples of the nodes of graphs: triangles, types of triples, and sums of products over them."""

from .near_pairs import near_pairs
from .oriented_edges import oriented_edges
from .products import CLOSED, COMMON, NEAR, sums_by_type
from .structures import COLORS, NODE_LIMIT, TYPES, multisets
from .triangles import (
    MEMORY_LIMIT,
    OrientedGraph,
    check_batch,
    check_edge_index,
    check_edges,
    check_graphs,
    lexicographic,
    simple_edges,
    triangles,
)

__all__ = [
    "CLOSED", "COLORS", "COMMON", "MEMORY_LIMIT", "NEAR", "NODE_LIMIT", "TYPES", "OrientedGraph", "check_batch",
    "check_edge_index", "check_edges", "check_graphs", "lexicographic", "multisets", "near_pairs", "oriented_edges",
    "simple_edges", "sums_by_type", "triangles",
]  # fmt: skip
