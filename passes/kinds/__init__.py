"""Judge one kind of layer by itself, computed in two ways: is the new one right, and does it gain?"""

from __future__ import annotations

from .judging import LEAST_GAIN, Judgement, allowed_error, beyond_rounding, error_of, figures_of, over_budget

__all__ = ["LEAST_GAIN", "Judgement", "allowed_error", "beyond_rounding", "error_of", "figures_of", "over_budget"]
