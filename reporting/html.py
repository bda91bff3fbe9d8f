"""The report as HTML, for notebooks: everything in it is escaped, and it brings its own few styles."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .table import ReportTable, cells, titles
from .wording import headline, printable, summary

__all__ = ["report_html"]

_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top"
_HEAD = f"{_CELL};border-bottom:1px solid #999"
_FIGURES = f"{_CELL};font-variant-numeric:tabular-nums;overflow-wrap:break-word"
_NOTE = "margin:4px 0;color:#a15c00"


def report_html(table: ReportTable) -> str:
    """Return the report's headline, figures, rows and reasons as one element."""
    parts = [f"<p style='margin:4px 0'><b>{escape(headline(table.record))}</b></p>"]
    parts.append(_table((), summary(table.record).items()))
    if table.rows:
        parts.append(_table(titles(table.record).values(), map(cells, table.rows)))
        timed = [f"{row.site}: {row.timed}" for row in table.rows if row.timed]
        parts += [f"<p style='margin:4px 0;opacity:0.7'>{escape(line)}</p>" for line in timed]
    if table.left:
        parts.append(_table(("left as it was", "where", "why"), ((e.status, e.what, e.reason) for e in table.left)))
    parts += [f"<p style='{_NOTE}'>{escape(printable(note))}</p>" for note in table.notes]
    return f"<div style='overflow-x:auto;font-size:90%'>{''.join(parts)}</div>"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th style='{_HEAD}'>{escape(title)}</th>" for title in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    shown = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table style='border-collapse:collapse;margin:6px 0'>{shown}<tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    return f"<td style='{_FIGURES}'>{escape(text)}</td>"
