"""What a pass is, what it may demand of the process, and how it prints its options."""

from __future__ import annotations

from .base import FunctionPass, Pass, snake_case
from .option_values import check_named, check_option_types, check_options_read, module_words, names_module, word_for
from .options import WORD, Text, ValueMismatch, format_value, option_types, read_value, type_text
from .processes import (
    device_type,
    launch_command,
    mesh_of_same_weights,
    missing_process_group,
    require_process_group,
    require_same_weights,
)

__all__ = [
    "WORD", "FunctionPass", "Pass", "Text", "ValueMismatch", "check_named", "check_option_types",
    "check_options_read", "device_type", "format_value", "launch_command", "mesh_of_same_weights",
    "missing_process_group", "module_words", "names_module", "option_types", "read_value", "require_process_group",
    "require_same_weights", "snake_case", "type_text", "word_for",
]  # fmt: skip
