"""The cells of a report as tables in Markdown, as the documentation has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .cases import CASES

__all__ = ["tables"]

BUSY = 2.0
"""Load average from which a cell is marked: other programs ran beside it."""

Cell = Mapping[str, Any]
Rows = Mapping[str, Mapping[str, Cell]]


def tables(rows: Rows, columns: Sequence[str]) -> Iterator[str]:
    """Yield the lines of two tables, of ratios with milliseconds and of what preparing costs.

    Aims stand in brackets; an asterisk marks cells beside which other programs ran.
    """
    others = [column for column in columns if column != "eager"]
    yield from _table(
        ["", *others], ([model, *(_ratio(model, row, each) for each in others)] for model, row in rows.items())
    )
    yield ""
    yield from _table(
        ["seconds to prepare, error", *others],
        ([model, *(_seconds(model, row, each) for each in others)] for model, row in rows.items()),
    )


def _table(heads: Sequence[str], lines: Iterator[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(line)} |" for line in lines)


def _ratio(model: str, row: Mapping[str, Cell], column: str) -> str:
    cell, aim = row.get(column), CASES[model].aims.get(column)
    aimed = f" ({aim:g})" if aim else ""
    if cell is None or "failed" in cell:
        return ("" if cell is None or CASES[model].labels else "failed") + aimed
    low, middle, high = cell["ratio"]
    busy = "*" * (cell["load_average"][0] >= BUSY)
    return f"{middle:.2f}x [{low:.2f}, {high:.2f}]{busy}{aimed}, {cell['ms']:.3g} ms"


def _seconds(model: str, row: Mapping[str, Cell], column: str) -> str:
    cell = row.get(column)
    if cell is None or "failed" in cell:
        return ""
    aimed = CASES[model].preparation if column == "exact" else 0
    return f"{cell['preparation_s']:.1f}" + (f" ({aimed:g})" if aimed else "") + f", {cell['error']:.0e}"
