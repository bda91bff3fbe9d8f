"""What `inspect` and `diff` show of graphs: as text, as a page, and in the formats of other tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from torch import nn

from .. import api
from ..errors import UsageError, did_you_mean
from ..reporting.exports import FORMATS, json_text, times_of_nodes
from ..reporting.html import graphs_page
from ..reporting.inspection import inspection, inspection_json
from ..reporting.picture import picture_of_programs, profile_of
from ..reporting.plots import png_of
from ..reporting.report import Report
from ..reporting.wording import printable
from ..runtime.record import needed_record, record_of
from ..runtime.values import user_class
from ..storage import write_atomically
from ..tracing.program import Program
from .app import note
from .arguments import program_of
from .prechecks import ALL, times_beside

__all__ = ["Inspected", "inspected", "note_graphs", "one_graph", "write_comparison", "write_format", "write_plot"]


@dataclass(frozen=True)
class Inspected:
    """What there is to show of a model; each is made when it is called for."""

    text: Callable[[], object]
    to_json: Callable[[], dict[str, Any]]
    picture: Callable[[], dict[str, Any]]
    write_page: Callable[[Path], None]


def inspected(model: nn.Module, example_inputs: object, *, costs: bool) -> Inspected:
    """Capture a model, or read what was done to it; with `costs`, measure its nodes on the example inputs."""
    if record_of(model) is not None:
        report = api.report(model, example_inputs if costs else None)
        return Inspected(report.table, report.to_json, report.picture, report.to_html)
    program = api.capture(model, example_inputs)
    call = next(iter(program.whole_calls), None) if costs else None
    profile = None if call is None else profile_of(program.model, call)
    title = user_class(type(model)).__name__

    def write_page(path: Path) -> None:
        drawn = picture_of_programs(program, profile=profile)
        write_atomically(path, graphs_page(title, drawn, inspection(program)))

    picture = partial(picture_of_programs, program, profile=profile)
    return Inspected(partial(inspection, program), partial(inspection_json, program), picture, write_page)


def one_graph(model: nn.Module, example_inputs: object, name: str) -> str:
    """Return the graph of one module as text; raise `UsageError` if there is none."""
    graphs = {found or "(root)": graph for found, graph in program_of(model, example_inputs).graphs.items()}
    wanted = name or "(root)"
    if wanted not in graphs:
        raise UsageError(f"no graph for module {name!r}{did_you_mean(wanted, graphs)}")
    return str(graphs[wanted])


def note_graphs(model: nn.Module, wanted: str) -> None:
    """Print the graphs that a pass (or each) changed, as they were behind it, on standard error, as compilers do."""
    record = needed_record(model)
    for step, text in enumerate(record.plan.pipeline):
        if wanted not in (ALL, text.partition("{")[0]):
            continue
        changed = {
            name: next((graph for number, graph in versions if number > step), record.graphs_after.get(name))
            for name, versions in record.graph_versions.items()
            if any(number == step for number, _ in versions)
        }
        note(f"after {text}:" if changed else f"{text} changed no graph")
        for name, graph in changed.items():
            typer.echo(f"{printable(name) or '(root)'}: {graph or 'it is gone'}", err=True)


def write_format(picture: Mapping[str, Any], form: str, output: Path | None) -> str:
    """Return a picture in a format, and write it; the times of its nodes stand beside it for Model Explorer."""
    text = FORMATS[form](picture)
    if output is not None:
        write_atomically(output, text)
        times = times_of_nodes(picture) if form == "model-explorer" else {}
        if times:
            write_atomically(times_beside(output), json_text(times))
    return text


def write_comparison(path: Path, title: str, before: Program, after: Program, text: str) -> None:
    """Write the graphs of two models side by side as a page, and their difference below."""
    write_atomically(path, graphs_page(title, picture_of_programs(before, after), text))


def write_plot(report: Report, path: Path) -> None:
    """Write a report as a figure."""
    write_atomically(path, png_of(report.plot()))
