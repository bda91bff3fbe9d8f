"""The report as HTML, for notebooks and as a page: all text is escaped, and it brings its own few styles."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from ..runtime.values import user_class
from .table import ReportTable, cells, titles
from .wording import headline, printable, summary

__all__ = ["PAGE_MARK", "graphs_page", "points_html", "points_page", "report_html", "report_page"]

PAGE_MARK = "<meta name='generator' content='fxopt'/>"
"""What tells a page of fxopt from other files."""

_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top"
_HEAD = f"{_CELL};border-bottom:1px solid #999"
_FIGURES = f"{_CELL};font-variant-numeric:tabular-nums;overflow-wrap:break-word"
_ONE_LINE = 40
"""Cells of up to as many letters are not broken: figures are no longer."""
_NOTE = "margin:4px 0;color:#a15c00"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; worker-src blob:; img-src data: blob:"
)
"""The page asks nobody for anything."""
_KINDS = {"+": "added", "-": "removed", "@": "place"}
_FILES = ("---", "+++")

_STYLES = """
:root {
  color-scheme: light dark;
  --line: #d5d5d5; --soft: #6a6a6a; --added: #e3f4e5; --removed: #fbe6e4; --note: #8a4f00;
}
@media (prefers-color-scheme: dark) {
  :root { --line: #444; --soft: #a0a0a0; --added: #17351b; --removed: #45201d; --note: #e0a458; }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: min(1640px, 96vw);
  padding: 0 1.25rem; box-sizing: border-box; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p.pipeline, pre { font-family: ui-monospace, monospace; font-size: 0.85rem; overflow-wrap: anywhere; }
p.versions { color: var(--soft); font-size: 0.85rem; margin-top: 2.5rem; }
section { overflow-x: auto; }
tr + tr td { border-top: 1px solid var(--line); }
pre { border: 1px solid var(--line); padding: 0.6rem 0; overflow-x: auto; }
pre code { display: block; font: inherit; width: max-content; min-width: 100%; }
pre span { display: block; padding: 0 0.8rem; min-height: 1.4em; }
section:first-of-type td:first-child { white-space: nowrap; }
.note { color: var(--note) !important; }
.added { background: var(--added); } .removed { background: var(--removed); }
.file { font-weight: bold; } .place { color: var(--soft); }
"""


def report_html(table: ReportTable, plot: bytes = b"") -> str:
    """Return the report's headline, figures, rows, reasons and its plot, a PNG, as one element."""
    parts = [f"<p style='margin:4px 0'><b>{escape(headline(table.record))}</b></p>", _figures(table)]
    parts += [_rewrites(table), _left(table), _notes(table)]
    if plot:
        parts.append(f"<img alt='plot' style='max-width:100%' src='data:image/png;base64,{_base64(plot)}'/>")
    return f"<div style='overflow-x:auto;font-size:90%'>{''.join(parts)}</div>"


def report_page(table: ReportTable, diff: str, picture: Mapping[str, Any] | None) -> str:
    """Return the report, its picture, and the diff of the graphs before and after, as a page of its own."""
    plan = table.record.plan
    sections = {
        "": _figures(table),
        "What was done": _rewrites(table),
        "What was left as it was": _left(table),
        "What to know": _notes(table),
        "The graphs before and after": _lines(diff),
    }
    body = "\n".join(
        f"<section>{f'<h2>{escape(title)}</h2>' if title else ''}{content}</section>"
        for title, content in sections.items()
        if content
    )
    pipeline = escape(printable(", ".join(plan.pipeline)))
    title = f"{user_class(type(table.record.skeleton)).__name__}: {headline(table.record)}"
    versions = f"fxopt {plan.fxopt}, PyTorch {plan.torch}"
    return _page(title, f"<p class='pipeline'>{pipeline}</p>\n{_picture(picture)}{body}", versions)


def points_html(headline: str, heads: Iterable[str], rows: Iterable[Iterable[str]], remarks: Iterable[str]) -> str:
    """Return the points of a search as one element: a headline or "", a table, and what else is to know."""
    lines = "".join(f"<p style='{_NOTE}'>{escape(printable(line))}</p>" for line in remarks)
    head = f"<p style='margin:4px 0'><b>{escape(printable(headline))}</b></p>" if headline else ""
    return f"<div style='overflow-x:auto;font-size:90%'>{head}{_table(heads, rows)}{lines}</div>"


def points_page(
    title: str, shown: str, points: Iterable[tuple[str, Iterable[str], str]], others: str, versions: str
) -> str:
    """Return the points of a search as a page: what `points_html` gave, then each point with a summary, lines to read
    when it is opened, and the page of its own report beside this one, or ""; then the `others`, as `points_html` gave.
    """
    parts: list[str] = []
    for summary_line, lines, link in points:
        listed = "".join(f"<li>{escape(printable(line))}</li>" for line in lines)
        leads = f"<p><a href='{escape(link, quote=True)}'>its graphs and decisions</a></p>" if link else ""
        parts.append(f"<details><summary>{escape(printable(summary_line))}</summary><ul>{listed}</ul>{leads}</details>")
    body = f"<section>{shown}</section>\n<section><h2>The points</h2>{''.join(parts)}</section>"
    return _page(title, f"{body}\n<section><h2>Other trials</h2>{others}</section>", versions)


def graphs_page(title: str, picture: Mapping[str, Any], text: str = "") -> str:
    """Return graphs that no pass has rewritten, or those of two models, as a page of its own; `text` stands below."""
    body = f"<section>{_lines(text)}</section>" if text else ""
    versions = ", ".join(f"{name} {version}" for name, version in picture["versions"].items())
    return _page(title, _picture(picture) + body, versions)


def _page(title: str, body: str, versions: str) -> str:
    written = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    shown = escape(printable(title))
    return (
        f"<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'/>\n{PAGE_MARK}\n"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\"/>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'/>\n"
        f"<title>fxopt: {shown}</title>\n<style>{_STYLES}</style>\n</head>\n<body>\n"
        f"<h1>{shown}</h1>\n{body}\n<p class='versions'>{escape(versions)}, written {written}</p>\n</body>\n</html>\n"
    )


def _picture(picture: Mapping[str, Any] | None) -> str:
    """Return the picture as an element that the script fills, and its data, which are no markup whatever they hold."""
    if picture is None:
        return ""
    text = json.dumps(picture, allow_nan=False, separators=(",", ":"))
    data = _base64(gzip.compress(text.encode(), mtime=0))
    return (
        f"<style>{_built('page.css')}</style>\n<div id='picture'></div>\n"
        f"<script type='text/plain' id='picture-data'>{data}</script>\n<script>{_built('page.js')}</script>\n"
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@cache
def _built(name: str) -> str:
    return (files("fxopt.reporting") / "page" / "dist" / name).read_text(encoding="utf-8")


def _figures(table: ReportTable) -> str:
    return _table((), summary(table.record).items())


def _rewrites(table: ReportTable) -> str:
    if not table.rows:
        return ""
    timed = [f"{row.site}: {row.timed}" for row in table.rows if row.timed]
    lines = (f"<p style='margin:4px 0;opacity:0.7'>{escape(line)}</p>" for line in timed)
    return _table(titles(table.record).values(), map(cells, table.rows)) + "".join(lines)


def _left(table: ReportTable) -> str:
    rows = ((each.status, each.what, each.reason) for each in table.left)
    return _table(("left as it was", "where", "why"), rows) if table.left else ""


def _notes(table: ReportTable) -> str:
    return "".join(f"<p class='note' style='{_NOTE}'>{escape(printable(note))}</p>" for note in table.notes)


def _lines(text: str) -> str:
    lines = "".join(map(_diff_line, text.splitlines()))
    return f"<pre><code>{lines}</code></pre>" if lines else ""


def _diff_line(line: str) -> str:
    kind = "file" if line.startswith(_FILES) else _KINDS.get(line[:1], "same")
    return f"<span class='{kind}'>{escape(printable(line))}</span>"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th style='{_HEAD}'>{escape(title)}</th>" for title in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    shown = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table style='border-collapse:collapse;margin:6px 0'>{shown}<tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    style = f"{_FIGURES};white-space:nowrap" if len(text) <= _ONE_LINE else _FIGURES
    return f"<td style='{style}'>{escape(text)}</td>"
