"""A module's dataflow with what it calls written out in the place of the calls."""

from __future__ import annotations

from .dataflow import InlinedGraph, Known, Operation, is_chain, module_signature, operations_in, state_names
from .inliner import inlined_graph

__all__ = [
    "InlinedGraph", "Known", "Operation", "inlined_graph", "is_chain", "module_signature", "operations_in",
    "state_names",
]  # fmt: skip
