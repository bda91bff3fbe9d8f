"""Graphs before and after as a unified diff that a person can read, however many members an ensemble has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .line_diff import diff_lines

__all__ = ["diff_graphs"]

CONTEXT = 3
LEAST_REPEATS = 4
LONGEST_PERIOD = 8
LEAST_ITEMS = 6
_NUMBER = re.compile(r"\d+")
_ITEM = re.compile(r"[^\s,()\[\]{}][^,()\[\]{}]*")
_SEQUENCE = re.compile(rf"{_ITEM.pattern}(?:,\s*{_ITEM.pattern}){{{LEAST_ITEMS - 1},}}")


def diff_graphs(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return a unified diff of the graphs of each module, empty where nothing changed.

    Modules with the same change are shown once; runs of lines, and of items within one, that differ in their numbers
    only are shortened to their first and last.

    Args:
        before: the text of each graph by the qualified name of its module ("" is the root).
        after: the same after the rewrite.
    """
    bodies = {name: _body(before.get(name, ""), after.get(name, "")) for name in dict.fromkeys((*before, *after))}
    changes: dict[tuple[str, ...], list[str]] = {}
    for name, body in bodies.items():
        if body:
            changes.setdefault(_shape(body), []).append(name)
    return "\n".join(_section(names, bodies[names[0]], before, after) for names in changes.values())


def _section(names: Sequence[str], lines: Sequence[str], before: Mapping[str, str], after: Mapping[str, str]) -> str:
    first = names[0]
    body = collapse(lines)
    title = _title(names)
    old = f"--- {title}" + ("" if first in before else " (new)")
    new = f"+++ {title}" + ("" if first in after else " (no longer has its own graph)")
    return "\n".join([old, new, *map(_shorten, body)]) + "\n"


def _title(names: Sequence[str]) -> str:
    first = names[0] or "(root)"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more, up to {names[-1]}"


def _body(before: str, after: str) -> list[str]:
    return list(diff_lines(before.splitlines(), after.splitlines(), CONTEXT))


def _shape(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(_NUMBER.sub("#", line) for line in lines)


@dataclass(frozen=True)
class _Run:
    """`repeats` blocks of `period` lines each, equal but for their numbers, from line `start` on."""

    start: int
    period: int
    repeats: int

    @property
    def lines(self) -> int:
        return self.period * self.repeats


def collapse(lines: Sequence[str]) -> list[str]:
    """Shorten each run of repeated blocks of lines to its first and its last block."""
    shapes, shown, position = _shape(lines), list[str](), 0
    while position < len(lines):
        run = _longest_run(shapes, position)
        if run is None:
            shown.append(lines[position])
            position += 1
            continue
        end = position + run.lines
        hidden = run.lines - 2 * run.period
        shown += lines[position : position + run.period]
        shown.append(f"{lines[position][:1]}    ... {hidden} more lines like these ...")
        shown += lines[end - run.period : end]
        position = end
    return shown


def _longest_run(shapes: Sequence[str], start: int) -> _Run | None:
    runs = [_run_of(shapes, start, period) for period in range(1, LONGEST_PERIOD + 1)]
    long = [run for run in runs if run.repeats >= LEAST_REPEATS and not shapes[start].startswith("@@")]
    return max(long, key=lambda run: (run.lines, -run.period), default=None)


def _run_of(shapes: Sequence[str], start: int, period: int) -> _Run:
    block, repeats = shapes[start : start + period], 1
    while shapes[start + repeats * period : start + (repeats + 1) * period] == block:
        repeats += 1
    return _Run(start, period, repeats)


def _shorten(line: str) -> str:
    """Shorten a long sequence of items that differ in their numbers only: `cat([h_0, h_1, ..., h_127])`."""
    return _SEQUENCE.sub(_shorten_items, line)


def _shorten_items(match: re.Match[str]) -> str:
    items = re.split(r",\s*", match.group())
    if len(set(_shape([item.strip() for item in items[1:-1]]))) > 1:
        return match.group()
    return f"{items[0]}, {items[1]}, ..., {items[-1]}"
