"""The cells of a report as tables in Markdown, as the documentation has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .cases import CASES
from .columns import RACES
from .verdicts import FRONT, best_other, clock_of, race_verdict

__all__ = ["memory_table", "race_table", "tables"]

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


def race_table(rows: Rows, threads: int) -> Iterator[str]:
    """Yield the lines of a table of races: milliseconds of each column, and fxopt beside the fastest other one.

    Columns that err by more than fxopt may are marked, and do not count.
    """
    clock = clock_of(threads)
    for precision, columns in RACES.items():
        found = {model: row[precision] for model, row in rows.items() if precision in row}
        if not found:
            continue
        heads = [f"ms, {precision}", *columns, "fxopt beside the fastest other", f"{FRONT} reached"]
        yield from _table(heads, (_race(model, race, columns, clock, threads) for model, race in found.items()))
        yield ""


def _race(model: str, race: Cell, columns: Sequence[str], clock: str, threads: int) -> Sequence[str]:
    if "failed" in race:
        return [model, *("" for _ in columns), race["failed"], "no"]
    taken, off = race[clock]["ms"], {name for name, error in race["errors"].items() if error > race["budget"]}
    shown = [f"{taken[each]:.3g}{' (off)' * (each in off)}" if each in taken else "" for each in columns]
    front = "yes" if race_verdict(race, threads)[0] else "no"
    found = best_other(race, clock)
    if found is None:
        return [model, *shown, "all others are off", front]
    best, (low, middle, high) = found
    busy = "*" * (race["load_average"][0] >= BUSY)
    return [model, *shown, f"{middle:.2f} [{low:.2f}, {high:.2f}]{busy}, {best}", front]


def memory_table(rows: Mapping[str, Cell]) -> Iterator[str]:
    """Yield the lines of a table of what a process holds."""
    keys = {"tensors": "tensors", "before": "before", "after": "after", "released": "after, with `release`"}
    yield from _table(["MiB", *keys.values()], ([model, *_mebibytes(row, keys)] for model, row in rows.items()))


def _mebibytes(row: Cell, keys: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{row[key] / 2**20:.0f}" if key in row else row.get("failed", "") for key in keys)


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
    again = cell.get("from_cache", {})
    cached = f", {again['preparation_s']:.1f} from the cache" if "preparation_s" in again else ""
    return f"{cell['preparation_s']:.1f}" + (f" ({aimed:g})" if aimed else "") + cached + f", {cell['error']:.0e}"
