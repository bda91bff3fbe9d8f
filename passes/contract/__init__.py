"""What a pass is, what it may demand of the process, and how it prints its options."""

from __future__ import annotations

from .base import FunctionPass, Pass, snake_case
from .options import WORD, Text, ValueMismatch, format_value, option_types, read_value, type_text
from .processes import require_process_group

__all__ = [
    "WORD",
    "FunctionPass",
    "Pass",
    "Text",
    "ValueMismatch",
    "format_value",
    "option_types",
    "read_value",
    "require_process_group",
    "snake_case",
    "type_text",
]
