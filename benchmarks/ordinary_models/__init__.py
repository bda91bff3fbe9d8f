"""Ordinary models beside eager PyTorch: networks, rows and columns of a table, and how one cell is measured."""

from __future__ import annotations

from .cases import CASES, SEED, Case
from .columns import COLUMNS, IN_TRAINING, OPTIMIZED, RACES
from .measuring import measured, memory_used, prepared_again
from .racing import raced
from .tables import memory_table, race_table, tables
from .verdicts import MEANS, judged, lost, race_verdict, ratio_of, reached

__all__ = [
    "CASES", "COLUMNS", "IN_TRAINING", "MEANS", "OPTIMIZED", "RACES", "SEED",
    "Case", "judged", "lost", "measured", "memory_table", "memory_used", "prepared_again", "race_table",
    "race_verdict", "raced", "ratio_of", "reached", "tables",
]  # fmt: skip
