"""The pipeline of a capture, and what it gives: a model with its graphs, and all that may be asked about it."""

from __future__ import annotations

from .call_forms import call_forms, calls_of_forms
from .capturing import Opaque
from .inactive_modules import deactivate
from .program import Program, capture_program, captured_on, is_called
from .shapes import changed_metas

__all__ = [
    "Opaque",
    "Program",
    "call_forms",
    "calls_of_forms",
    "capture_program",
    "captured_on",
    "changed_metas",
    "deactivate",
    "is_called",
]
