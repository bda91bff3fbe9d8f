"""What each operator of torch does with the dimensions of its operands."""

from __future__ import annotations

from .elementwise import results_of
from .table import RULES
from .whole import WHOLE

__all__ = ["RULES", "WHOLE", "results_of"]
