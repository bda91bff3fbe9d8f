"""The pipeline of a capture, and what it gives: a model with its graphs, and all that may be asked about it."""

from __future__ import annotations

from .capturing import Opaque
from .program import Program, capture_program
from .resting import askers_without_answer, asking_around_changes, rest, rest_askers

__all__ = [
    "Opaque",
    "Program",
    "askers_without_answer",
    "asking_around_changes",
    "capture_program",
    "rest",
    "rest_askers",
]
