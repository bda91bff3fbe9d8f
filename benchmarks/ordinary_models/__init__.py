"""Ordinary models beside eager PyTorch: networks, rows and columns of a table, and how one cell is measured."""

from __future__ import annotations

from .cases import CASES, SEED, Case
from .columns import COLUMNS, IN_TRAINING
from .measuring import measured
from .tables import tables

__all__ = ["CASES", "COLUMNS", "IN_TRAINING", "SEED", "Case", "measured", "tables"]
