"""A module's dataflow with what it calls written out in the place of the calls."""

from __future__ import annotations

from .batchable_modules import module_signature, state_names
from .dataflow import InlinedGraph, Operation, is_chain, operations_in
from .inliner import inlined_graph
from .mode_guards import Case, cases_of

__all__ = [
    "Case",
    "InlinedGraph",
    "Operation",
    "cases_of",
    "inlined_graph",
    "is_chain",
    "module_signature",
    "operations_in",
    "state_names",
]
