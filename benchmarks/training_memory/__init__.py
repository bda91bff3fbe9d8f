"""The models of `benchmarks/memory.py`, from configurations, and what their memory is measured with."""

from __future__ import annotations

from .columns import BUDGETS, Column, columns
from .measuring import Use, step, used
from .models import MODELS, Subject

__all__ = ["BUDGETS", "MODELS", "Column", "Subject", "Use", "columns", "step", "used"]
