"""The pipeline of a capture, and what it gives: a model with its graphs, and all that may be asked about it."""

from __future__ import annotations

from ..trace import BY_DATA
from .call_forms import call_forms, calls_of_forms
from .called import is_called
from .capturing import Opaque
from .example_calls import captured_on
from .inactive_modules import (
    deactivate,
    deactivate_type_checkers,
    type_checkers_around_changes,
    type_checkers_without_answer,
)
from .program import Program, capture_program
from .running import GraphRunner, function_of_node
from .shapes import changed_metas
from .unrolling import Unrolled, Unroller, unrolling

__all__ = [
    "BY_DATA",
    "GraphRunner",
    "Opaque",
    "Program",
    "Unrolled",
    "Unroller",
    "call_forms",
    "calls_of_forms",
    "capture_program",
    "captured_on",
    "changed_metas",
    "deactivate",
    "deactivate_type_checkers",
    "function_of_node",
    "is_called",
    "type_checkers_around_changes",
    "type_checkers_without_answer",
    "unrolling",
]
