"""Which aims a row reaches, and which columns are faster than fxopt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .cases import CASES

__all__ = ["FLOOR", "FRONT", "MEANS", "judged", "lost", "race_verdict", "ratio_of", "reached"]

FLOOR = 0.95
FRONT = 0.97
"""Of the speed of the best column: so much fxopt is to reach in each row."""

MEANS = {"exact": 1.3, "bf16": 2.0}
"""What the geometric mean over the models in evaluation is to reach."""

_RESPONSE = 2.0
"""Gradients may be off by twice what those of eager move."""

_SAME = 1e-9
"""In float64, gradients that are off by more are others."""

Cell = Mapping[str, Any]


def clock_of(threads: int) -> str:
    """Return by which clock a race is judged: several threads wait for each other, which is no work."""
    return "processor" if threads == 1 else "wall"


def best_other(race: Cell, clock: str) -> tuple[str, list[float]] | None:
    """Return the fastest of the columns that err no more than fxopt may, and how many times as fast as it fxopt is."""
    over = {name: ratio for name, ratio in race[clock]["over"].items() if race["errors"][name] <= race["budget"]}
    best = min(over, key=lambda name: over[name][1], default=None)
    return None if best is None else (best, over[best])


def race_verdict(race: Cell, threads: int) -> tuple[bool, str]:
    """Say whether fxopt is where it should be beside the fastest other column, and in one line what was seen."""
    if "failed" in race:
        return False, f"no race: {race['failed']}"
    clocks = ("processor", "wall") if clock_of(threads) == "processor" else ("wall", "processor")
    found, beside = (best_other(race, clock) for clock in clocks)
    if found is None or beside is None:
        return True, f"{reached(True)}: all other columns err by more than {race['budget']:g}"
    best, (low, middle, high) = found
    is_front = middle >= FRONT
    doubt = "" if low >= FRONT or high < FRONT else ", within the noise"
    seen = f"{middle:.2f} [{low:.2f}, {high:.2f}] of {best}{doubt}"
    return is_front, f"{reached(is_front)}: {seen}; {beside[1][1]:.2f} of {beside[0]} by the {clocks[1]} clock"


def lost(races: Mapping[str, Mapping[str, Mapping[str, Cell]]]) -> list[str]:
    """Return the rows, with number of threads and precision, in which fxopt is behind another column."""
    return [
        f"{model}, {threads}, {precision}"
        for model, by_threads in races.items()
        for threads, found in by_threads.items()
        for precision, race in found.items()
        if not race_verdict(race, int(threads))[0]
    ]


def ratio_of(cell: Cell | None) -> float | None:
    """Return the ratio of a cell, if there is one."""
    return None if cell is None or "failed" in cell else float(cell["ratio"][1])


def judged(model: str, column: str, cell: Cell) -> Iterator[str]:
    """Say of a cell of fxopt which aims it reaches, with figures, and what it misses."""
    case, ratio = CASES[model], ratio_of(cell)
    aim, budget = case.aims.get(column), case.budget(column)
    if budget is None:
        return
    if ratio is None:
        yield f"{'not reached' if aim else 'no figure'}: {cell['failed']}"
        return
    if aim is not None:
        yield f"{reached(ratio >= aim)}: {ratio:.2f}x of {aim}x"
    if ratio < FLOOR:
        yield f"not reached: {ratio:.2f}x, below {FLOOR}"
    allowed = max(budget, _RESPONSE * cell.get("eager_moves", 0.0))
    if cell["error"] > allowed:
        yield f"not reached: error {cell['error']:.0e} of {allowed:.0e}"
    if cell.get("error_in_float64", 0.0) > _SAME:
        yield f"not reached: error {cell['error_in_float64']:.0e} in float64"
    if column == "exact" and case.preparation:
        taken = cell["preparation_s"]
        yield f"{reached(taken <= case.preparation)}: {taken:.1f} s of {case.preparation:.0f} s to prepare"


def reached(is_so: bool) -> str:
    """Return a verdict in words."""
    return "reached" if is_so else "not reached"
