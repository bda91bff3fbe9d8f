"""Figures and decisions in words: what the table, and anything else that is read by people, shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..passes.driver import Record
    from ..passes.pipeline import Decision
    from ..tracing.graphs import Miss

__all__ = [
    "Left",
    "Row",
    "applied_rows",
    "duration",
    "headline",
    "left_alone",
    "located",
    "printable",
    "summary",
    "turned_away",
]

LONGEST_NAME = 60


@dataclass(frozen=True)
class Row:
    """One rewrite that stands."""

    pass_name: str
    site: str
    lowering: str
    error: str
    speed: str
    time: str
    timed: str


@dataclass(frozen=True)
class Left:
    """Places left as they were: `refused` by the pass, `undone` after a check, or `not captured`, and why.

    Also calls that no graph fitted: `missed`.
    """

    status: str
    what: str
    reason: str


def headline(record: Record) -> str:
    """Say in one line how many rewrites stand and how they were checked."""
    statuses = [decision.status for decision in record.plan.decisions]
    applied = statuses.count("applied")
    others = [f"{statuses.count(s)} {s}" for s in ("undone", "skipped", "refused") if s in statuses]
    return f"{', '.join([_count(applied, 'rewrite') + ' applied', *others])}; checked: {record.checked}"


def summary(record: Record) -> dict[str, str]:
    """Return the whole model's figures, each under its title."""
    lines = {
        "whole model": _whole_model(record.timings),
        "parameter tensors": f"{record.parameters_before:,} -> {record.parameters_after:,}",
        "captured": printable(record.coverage.partition("\n")[0]),
    }
    if record.spent:
        lines["checks and timing"] = _spent(record.spent)
    if record.traces:
        lines["passes took"] = ", ".join(f"{trace.name} {duration(trace.seconds)}" for trace in record.traces)
    return lines


def _whole_model(timings: Mapping[str, float] | None) -> str:
    if not timings:
        return "not timed"
    before, after = timings["before_ms"] / 1e3, timings["after_ms"] / 1e3
    return f"{duration(before)} -> {duration(after)}, {timings['speedup']:.3g}x"


def _spent(spent: Mapping[str, float]) -> str:
    seconds, forward = spent["seconds"], spent["forward_ms"] / 1e3
    limit = f" of {duration(spent['budget_s'])}" if math.isfinite(spent["budget_s"]) else ""
    return f"{duration(seconds)}{limit}, as long as {seconds / forward:.3g} forwards of the model"


def applied_rows(record: Record) -> list[Row]:
    """Return a row for each rewrite that stands, in the order in which they were made."""
    return [_row(decision) for decision in record.plan.decisions if decision.status == "applied"]


def _row(decision: Decision) -> Row:
    figures: Mapping[str, Any] = decision.figures
    site = clipped(decision.label) + (f": {decision.detail}" if decision.detail else "")
    first = figures.get("as")
    return Row(
        pass_name=decision.pass_name,
        site=printable(site),
        lowering=decision.choice or "",
        error=_error(figures),
        speed=_speed(figures) + _shared(figures) + (f", as {printable(clipped(str(first)))}" if first else ""),
        time=_time(figures),
        timed=_timed(figures.get("lowerings") or {}),
    )


def _error(figures: Mapping[str, Any]) -> str:
    meaning, precision = figures.get("meaning_error"), figures.get("precision_error")
    if meaning is None:
        return str(figures.get("checked", "unverified"))
    return f"{meaning:.1e}" + ("" if precision is None else f" / {precision:.1e}")


def _speed(figures: Mapping[str, Any]) -> str:
    if figures.get("speedup") is None:
        return "not timed" + (f": {printable(str(figures['untimed']))}" if "untimed" in figures else "")
    low, high = figures.get("speedup_low"), figures.get("speedup_high")
    return f"{figures['speedup']:.3g}x" + ("" if low is None or high is None else f" ({low:.3g} to {high:.3g})")


def _shared(figures: Mapping[str, Any]) -> str:
    """Say that the figures are those of a group of several sites of one graph."""
    count = figures.get("group_size", 1)
    return f", group of {count} sites" if isinstance(count, int) and count > 1 else ""


def _time(figures: Mapping[str, Any]) -> str:
    before, after = figures.get("before_us"), figures.get("after_us")
    return "" if before is None or after is None else f"{duration(before / 1e6)} -> {duration(after / 1e6)}"


def _timed(lowerings: Mapping[str, float]) -> str:
    if len(lowerings) < 2:
        return ""
    fastest_first = sorted(lowerings.items(), key=lambda item: item[1])
    return ", ".join(f"{name} {duration(us / 1e6)}" for name, us in fastest_first)


def left_alone(record: Record) -> list[Left]:
    """Return what was not rewritten, equal reasons together, and what was not captured."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for decision in record.plan.decisions:
        if decision.status != "applied":
            places.setdefault((decision.status, decision.pass_name, decision.reason), []).append(decision.label)
    decided = [
        Left(status, f"{pass_name} at {_several(labels)}", printable(reason))
        for (status, pass_name, reason), labels in places.items()
    ]
    opaque = [
        Left("not captured", (clipped(name) or "(root)") + located(location), printable(reason))
        for name, location, reason in record.opaque
    ]
    return decided + opaque


def located(location: str) -> str:
    """Return a source line in parentheses, or nothing where none is known."""
    return f" ({printable(location)})" if location else ""


def turned_away(missed: Sequence[Miss]) -> list[Left]:
    """Return the guards that calls failed since the model was handed over, with what was done instead."""
    return [Left("missed", clipped(miss.module) or "(root)", printable(str(miss))) for miss in missed]


def _several(labels: Sequence[str]) -> str:
    first = clipped(labels[0]) or "(root)"
    return first if len(labels) == 1 else f"{first} and {len(labels) - 1} more"


def duration(seconds: float) -> str:
    """Write a time with three figures and a unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def clipped(name: str) -> str:
    """Return a printable name, without its middle where it is very long."""
    half = (LONGEST_NAME - 3) // 2
    clean = printable(name)
    return clean if len(clean) <= LONGEST_NAME else f"{clean[:half]}...{clean[-half:]}"


def printable(text: str) -> str:
    """Return text in which nothing can move the cursor or change colours: names come from other people's models."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
