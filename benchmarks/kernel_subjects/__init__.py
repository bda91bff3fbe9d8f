"""What `kernels.py` measures: operators and rivals, the memory of a head, reports of compilers."""

from __future__ import annotations

from .heads import head_row
from .operators import SUBJECTS, Subject
from .reports import compile_reports, interpreter_differences

__all__ = ["SUBJECTS", "Subject", "compile_reports", "head_row", "interpreter_differences"]
