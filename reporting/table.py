"""The report on a terminal: a table where there is room, indented lines where there is not."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..runtime.record import Plan, Record
from ..runtime.state import StateMap
from .wording import Left, Row, applied_rows, headline, left_alone, phase_of, printable, summary, turned_away

if TYPE_CHECKING:
    from ..runtime.graphs import Miss

__all__ = ["PlanTable", "ReportTable", "cells", "plain_text", "titles"]

NARROW = 100
TITLES = {
    "pass_name": "pass",
    "site": "site",
    "lowering": "lowering",
    "error": "error (float64 / native)",
    "speed": "speed",
    "time": "time",
}
STYLES = {"refused": "dim", "undone": "yellow", "skipped": "dim", "not captured": "magenta", "missed": "magenta"}


class ReportTable:
    """What was done to a model, for `rich` to print; as a string it is plain text of any width."""

    def __init__(self, record: Record, missed: Sequence[Miss] = (), notes: Sequence[str] = ()) -> None:
        self.record = record
        self.notes = list(notes)
        self.rows = applied_rows(record)
        self.left = left_alone(record) + turned_away(missed)

    def __str__(self) -> str:
        return self.plain(width=10_000)

    def plain(self, width: int = 120) -> str:
        """Return the report as ASCII lines without colours, as a table if `width` has room for one."""
        return plain_text(self, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(headline(self.record), style="bold")
        for title, text in summary(self.record).items():
            yield Text(f"{title:<18}{text}")
        yield from self.decided(options)
        yield from (Text(printable(message), style="yellow") for message in self.notes)

    def decided(self, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield what stands, then what was left and why."""
        if self.rows:
            yield from self._lines() if options.max_width < NARROW else self._table(options.is_terminal)
        if self.left:
            yield Text()
            yield from map(_left_line, self.left)

    def _table(self, terminal: bool) -> Iterator[RenderableType]:
        table = Table(box=box.SIMPLE_HEAD if terminal else box.MARKDOWN)
        for title in titles(self.record).values():
            table.add_column(title, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(text) for text in cells(row)))
        yield table
        yield from (Text(f"{row.site}: {row.timed}", style="dim") for row in self.rows if row.timed)

    def _lines(self) -> Iterator[RenderableType]:
        yield Text()
        for row in self.rows:
            yield Text(f"{row.pass_name} at {row.site}", style="bold")
            for field in fields(row)[2:]:
                if text := getattr(row, field.name):
                    yield Text(f"  {field.name:<10}{text}")


class PlanTable(ReportTable):
    """The decisions of a plan, without what only a model tells."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(Record(plan, StateMap(), {}, {}, "", 0, 0))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan = self.record.plan
        yield Text(f"plan for {'training' if plan.phase == 'train' else 'inference'}", style="bold")
        yield Text(f"made by fxopt {printable(plan.fxopt)} on torch {printable(plan.torch)}")
        yield Text(f"passes: {printable(', '.join(plan.pipeline)) or 'none'}")
        yield from self.decided(options)


def plain_text(shown: RenderableType, width: int) -> str:
    """Return what `rich` can print as ASCII lines without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def titles(record: Record) -> dict[str, str]:
    """Return the columns' titles by field of a row; speed is that of one phase."""
    return {**TITLES, "speed": f"speed in {phase_of(record)}"}


def cells(row: Row) -> list[str]:
    """Return a row's cells, in the order of the titles."""
    return [getattr(row, name) for name in TITLES]


def _left_line(left: Left) -> Text:
    return Text.assemble((f"{left.status:<13}", STYLES.get(left.status, "")), f"{left.what}: {left.reason}")
