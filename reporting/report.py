"""What was done to a model and what was not, for people and for programs."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from ..errors import StateError
from ..storage import as_path, write_atomically
from .diff import diff_graphs
from .html import report_html, report_page
from .picture import Profile, picture_of
from .plots import figure_of, has_matplotlib, png_of
from .table import ReportTable
from .wording import headline, summary

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from torch import nn

    from ..runtime.graphs import Miss
    from ..runtime.record import Record

__all__ = ["SCHEMA_VERSION", "Report"]

SCHEMA_VERSION = 2
"""Of the JSON; it grows when a key changes its meaning or goes, not when one is added."""


class Report:
    """The before and after of one optimized model; `print(report)` shows the table.

    Args:
        record: what the model remembers; see `fxopt.report`.
        missed: the guards that turned calls away from its graphs since it was handed over.
        notes: what else its user should know, a line each.
        model: the optimized model, whose graphs the page shows; it is kept as long as the report is.
        profiles: what the nodes of the model's graphs cost before and after.
    """

    def __init__(
        self,
        record: Record,
        missed: Sequence[Miss] = (),
        notes: Sequence[str] = (),
        model: nn.Module | None = None,
        profiles: tuple[Profile, Profile] | None = None,
    ) -> None:
        self.record = record
        self.missed = tuple(missed)
        self.notes = tuple(notes)
        self.model = model
        self.profiles = profiles

    def table(self) -> ReportTable:
        """Return sites, lowerings, errors, speed, then what was refused or undone and why; in pipes it is ASCII."""
        return ReportTable(self.record, self.missed, self.notes)

    def diff(self) -> str:
        """Return the graphs before and after as a unified diff, module by module; empty if nothing changed."""
        before, after = self.record.graphs_before, self.record.graphs_after
        return diff_graphs(*({name: str(graph) for name, graph in graphs.items()} for graphs in (before, after)))

    def to_json(self) -> dict[str, Any]:
        """Return everything but the graphs as plain JSON values (docs/file-formats.md); infinite figures are None."""
        record, plan, spent = self.record, self.record.plan, self.record.spent
        finite = {name: None if each == math.inf else each for name, each in (spent or {}).items()}
        return {
            "schema_version": SCHEMA_VERSION,
            **{key: value for key, value in plan.to_json().items() if key != "schema_version"},
            "checked": record.checked,
            "coverage": record.coverage,
            "opaque": [dict(zip(("module", "location", "reason"), each, strict=True)) for each in record.opaque],
            "parameter_tensors": {"before": record.parameters_before, "after": record.parameters_after},
            "cached": record.cached or None,
            "spent": None if spent is None else finite,
            "timings": None if record.timings is None else dict(record.timings),
            "memory": None if record.memory is None else dict(record.memory),
            "finishing": dict(record.finishing),
            "optimizer": dict(record.optimizer) or None,
            "passes": [dataclasses.asdict(trace) for trace in record.traces],
            "messages": [*self.notes],
            "missed": [dataclasses.asdict(miss) for miss in self.missed],
        }

    def picture(self) -> dict[str, Any]:
        """Return the graphs before, between and after the passes, with all decisions and costs, as plain JSON values.

        Raises `StateError` if the report was made without its model.
        """
        if self.model is None:
            raise StateError("the report has no model, whose graphs a picture shows; use fxopt.report(model)")
        return picture_of(self.record, self.model, self.profiles, self.notes)

    def plot(self) -> Figure:
        """Return a matplotlib figure of what there are figures of; notebooks show it, `savefig` writes it.

        - Speed of the model and of each place that was timed, with intervals of 95%; what was undone is hollow.
        - The error of each rewrite. Of lossy passes, as `quantize`, it says how sensitive each layer is.
        - By how much results move by what `prune`, or `quantize{scheme=int8_static}`, does to each layer alone, and the
          share of its criterion that `prune` takes from it.
        - Memory of a training step before and after, with the budget of `checkpoint`; the share of each layer that
          `prune` removed.
        - Time by layer, if the report was made with example inputs.
        - If there is nothing of these: the operations of the rewritten graphs.

        A panel has 24 rows at most: those that matter most, and the number of the others.

        Raises `UsageError` if matplotlib is not installed (`pip install "fxopt[plots]"`).
        """
        return figure_of(self.record, self.profiles)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write picture, table and diff as a page that needs nothing else; a file there is replaced whole, or stays.

        Raises `UsageError` if `path` is none, `OSError` if it cannot be written.
        """
        write_atomically(as_path(path), report_page(self.table(), self.diff(), self.picture() if self.model else None))

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {headline(self.record)}; whole model {summary(self.record)['whole model']}>"

    def _repr_html_(self) -> str:
        """Show the report in a notebook, with the plot if matplotlib is installed."""
        return report_html(self.table(), png_of(self.plot()) if has_matplotlib() else b"")
