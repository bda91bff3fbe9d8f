"""The pipeline of a capture, and what it gives: a model with its graphs, and all that may be asked about it."""

from __future__ import annotations

from .capturing import Opaque
from .inactive_modules import askers_without_answer, asking_around_changes, deactivate, deactivate_type_checkers
from .program import Program, capture_program

__all__ = [
    "Opaque",
    "Program",
    "askers_without_answer",
    "asking_around_changes",
    "capture_program",
    "deactivate",
    "deactivate_type_checkers",
]
