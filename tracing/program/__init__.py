"""The pipeline of a capture, and what it gives: a model with its graphs, and all that may be asked about it."""

from __future__ import annotations

from .analyses import CallSites, TensorOwners, TensorReads, found_in_graphs, is_on_meta
from .call_forms import call_forms, calls_of_forms
from .capturing import Opaque
from .model_capture import deactivate
from .object_forms import Unmade, packages_of
from .program import Program, capture_program, captured_on, is_called, outermost
from .running import GraphRunner, changed_metas, function_of_node

__all__ = [
    "CallSites", "GraphRunner", "Opaque", "Program", "TensorOwners", "TensorReads", "Unmade", "call_forms",
    "calls_of_forms", "capture_program", "captured_on", "changed_metas", "deactivate", "found_in_graphs",
    "function_of_node", "is_called", "is_on_meta", "outermost", "packages_of",
]  # fmt: skip
