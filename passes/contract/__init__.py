"""What a pass is, and how it prints its options."""

from __future__ import annotations

from .base import FunctionPass, Pass, snake_case
from .options import WORD, Text, ValueMismatch, format_value, option_types, read_value, type_text

__all__ = [
    "WORD",
    "FunctionPass",
    "Pass",
    "Text",
    "ValueMismatch",
    "format_value",
    "option_types",
    "read_value",
    "snake_case",
    "type_text",
]
