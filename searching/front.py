"""What a search found: the points that no other beats, and all that were tried."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from .. import api
from ..errors import UsageError, expect
from ..passes.driver import copied, remember
from ..reporting.html import points_html, points_page
from ..reporting.plots import front_figure
from ..reporting.report import Report
from ..reporting.table import plain_text
from ..reporting.wording import counted, printable
from ..runtime.record import needed_record, record_of
from ..storage import as_folder, as_path, write_atomically
from ..tracing.examples import Inputs, normalize_inputs
from ..version import VERSION
from .demands import QUANTITIES, parse_bounds
from .explain import held_back
from .others import others
from .points import Aim, Point
from .saved import Findings, load_state, save_state

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Front"]

_NEAREST = 3
_SHOWN = ("latency", "throughput", "training_step", "memory", "size", "error", "metric")


class Front:
    """The Pareto front of a search: the points that no other trial beats, best objective first; `print` shows a table.

    It has a length, and `front[0]` is the first point. Attributes:
        trials: every pipeline that was tried, in order, with the reason where it was not measured to the end.
        notes: what else its user should know, a line each.
    """

    def __init__(
        self,
        aim: Aim,
        original: Point,
        trials: Sequence[Point],
        *,
        notes: Sequence[str] = (),
        states: Mapping[int, Mapping[str, Tensor]] | None = None,
        model: nn.Module | None = None,
        calls: Sequence[Inputs] = (),
    ) -> None:
        self.aim, self.original, self.trials, self.notes = aim, original, tuple(trials), list(notes)
        self._states, self._model, self._calls = dict(states or {}), model, tuple(calls)

    @property
    def points(self) -> list[Point]:
        """Return the trials that meet all constraints and that no other one beats."""
        return self.aim.unbeaten(self._all)

    @property
    def nearest(self) -> list[Point]:
        """Return what was measured, that first which lacks least of the constraints; of what is the same the first."""
        return self.aim.nearest(point for point in self._all if point.repeats is None)

    @property
    def _all(self) -> Sequence[Point]:
        return (self.original, *self.trials)

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __getitem__(self, index: int) -> Point:
        return self.points[index]

    def lacks(self, point: Point) -> list[str]:
        """Say which constraints a point does not meet, and by how much."""
        original = self.original.figures
        return [bound.said(point.figures, original) for bound in self.aim.lacks(point.figures)]

    def best(self, name: str | None = None, **bounds: float | str) -> Point:
        """Return the best point by one figure, the objective by default, among all that meet these bounds.

        Args:
            name: `latency`, `memory`, `size`, `throughput`, `training_step`, `error` or `metric`, which is the error
                where there was no `evaluate`.
            bounds: further constraints, as `search` takes them: `front.best("latency", metric=">= 0.98")`.

        Raises:
            UsageError: no trial meets the bounds; the message says what the nearest lacks.
        """
        if name is None:
            name = self.aim.objective
        if name == "metric":
            name = self.aim.lost
        if name not in self.original.figures:
            raise UsageError(f"best({name!r}): there are {', '.join(self.original.figures)}")
        training = "training_step" in self.original.figures
        further = parse_bounds(bounds, training=training, minimize=self.aim.minimize, has_metric=self.aim.has_metric)
        aim = Aim(self.aim.objective, (*self.aim.bounds, *further), self.original.figures, self.aim.has_metric,
                  self.aim.minimize)  # fmt: skip
        known = aim.nearest(self._all)
        fit = [point for point in known if not aim.lacks(point.figures)]
        if not fit:
            said = "; ".join(bound.said(known[0].figures, aim.original) for bound in aim.lacks(known[0].figures))
            raise UsageError(f"no trial meets the bounds; the nearest, {_named(known[0])}: {said}")
        higher = QUANTITIES[name].higher and not (name == "metric" and self.aim.minimize)
        return min(fit, key=lambda each: -each.figures[name] if higher else each.figures[name])

    def model(self, point: Point | int = 0) -> nn.Module:
        """Return the model of a point, built from its plan: what was measured.

        Args:
            point: a point, or the position of one in the front.

        Raises:
            UsageError: there is no such point, it failed, or the front was loaded without its model.
        """
        if isinstance(point, int):
            points = self.points
            if not -len(points) <= point < len(points):
                raise UsageError(f"the front has {counted(len(points), 'point')}, and none at {point}")
            point = points[point]
        if self._model is None:
            raise UsageError("the front was loaded without its model; give it: Front.load(path, model=...)")
        if point.plan is None and point.reason:
            raise UsageError(f"{_named(point)} failed: {point.reason}")
        fresh = copied(self._model)
        training = "training_step" in self.original.figures
        if fresh.training != training:
            fresh.train(training)
        if point.finetuned:
            if point.number not in self._states:
                raise UsageError(f"the trained weights of {_named(point)} are not here; load the front from its folder")
            fresh.load_state_dict(self._states[point.number])
        if point.plan is None:
            return fresh
        fast = api.optimize(fresh, plan=point.plan, example_inputs=list(self._calls), verify=False)
        earlier, record = record_of(fresh), needed_record(fast)
        plan = point.plan if earlier is None else earlier.plan.extended(point.plan)
        remember(fast, record.changed(plan))  # with what was refused and undone, which is not repeated
        return fast

    def plot(self) -> Figure:
        """Return a matplotlib figure: every point by objective and by what is lost, those of the front joined.

        Raises `UsageError` if matplotlib is not installed (`pip install "fxopt[plots]"`).
        """
        lost = self.aim.lost

        def place(point: Point) -> tuple[float, float]:
            return point.figures[self.aim.objective], point.figures[lost]

        known = [point for point in self.trials if point.is_known]
        return front_figure(
            self.aim.objective, lost, list(map(place, known)), list(map(place, self.points)), place(self.original),
            QUANTITIES[self.aim.objective].written,
        )  # fmt: skip

    def why(self, point: Point | int = 0) -> list[str]:
        """Say what holds a point back: calls that no graph fits, then the layers that take most of a call, with what
        was refused or undone there, then all else that was left alone.

        The model is built as by `Front.model`, and each of its nodes is timed.
        """
        fast, chosen = self.model(point), self.points[point] if isinstance(point, int) else point
        return [] if record_of(fast) is None else self._lines(chosen, api.report(fast, list(self._calls)))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the points as a page; what is shown in it is opened by a click: what holds it back, and its report.

        The reports are pages in a folder beside it, whose name is that of the page with `-points`. For each point its
        model is built, and each of its nodes is timed.
        """
        target = as_path(path)
        folder = target.with_name(f"{target.stem}-points")
        shown: list[tuple[str, list[str], str]] = []
        for number, point in enumerate(self._shown):
            which = "" if point.number < 0 else f" (trial {point.number})"
            summary, lines, link = f"{number}: {point.pipeline or 'as it was'}{which}", list(point.left), ""
            if point.plan is not None and self._model is not None:
                folder.mkdir(exist_ok=True)
                report = api.report(self.model(point), list(self._calls))
                lines, link = self._lines(point, report), f"{folder.name}/{number}.html"
                report.to_html(target.parent / link)
            shown.append((summary, [*self.lacks(point), *lines], link))
        versions = f"fxopt {VERSION}, PyTorch {torch.__version__}"
        left = points_html("", *others(self._findings, [point.number for point in self._shown]), ())
        table = points_html("", *self.table(), self.remarks())
        write_atomically(target, points_page(self.headline(), table, shown, left, versions))

    @staticmethod
    def _lines(point: Point, report: Report) -> list[str]:
        """Return what holds a point back: calls that no graph fits, then slow layers, then all else that was left."""
        missed = [line for line in point.left if line.startswith("missed ")]  # a `Bench` puts these first
        return [*missed, *held_back(report), *point.left[len(missed) :]]

    def to_json(self) -> dict[str, Any]:
        """Return everything but models and weights as plain JSON values."""
        return self._findings.to_json()

    @property
    def _findings(self) -> Findings:
        return Findings(self.aim, self.original, self.trials, self.notes)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything but the model into a folder: `front.json`, and weights that were trained; no pickle."""
        target = as_folder(folder)
        target.mkdir(parents=True, exist_ok=True)
        for number, state in self._states.items():
            save_state(target, number, state)
        self._findings.write(target)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], *, model: nn.Module | None = None, example_inputs: object = None
    ) -> Front:
        """Read what `save` wrote.

        Args:
            folder: where it is.
            model: the model that was searched, for `Front.model`; it is copied.
            example_inputs: those of the search, for `Front.model`.

        Raises:
            InputError: the folder holds no front, or a damaged one.
        """
        where = as_path(folder, "folder")
        saved = Findings.read(where)
        if model is not None:
            expect(model, nn.Module, "model", "the torch.nn.Module that was searched, or leave it out")
        states = {point.number: load_state(where, point.number) for point in saved.trials if point.finetuned}
        calls = normalize_inputs(example_inputs, model)
        return cls(
            saved.aim, saved.original, saved.trials, notes=saved.notes, states=states, model=model, calls=calls
        )  # fmt: skip

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return titles and rows: the original, the points of the front or, where there are none, the nearest."""
        names = [name for name in _SHOWN if name in self.original.figures]
        places = {point.number: str(place) for place, point in enumerate(self.points)}
        rows = [[places.get(self.original.number, ""), "as it was", *(_cell(name, self.original) for name in names)]]
        for point in self._shown:
            if point is not self.original:
                label = places.get(point.number, "-")
                rows.append([label, point.pipeline or "as it was", *(_cell(name, point) for name in names)])
        return ["", "pipeline", *names], rows

    @property
    def _shown(self) -> list[Point]:
        return self.points or self.nearest[:_NEAREST]

    def headline(self) -> str:
        """Say in a line what was found."""
        same = sum(point.repeats is not None for point in self.trials)
        measured = sum(point.is_known for point in self.trials) - same
        counts = {"measured": measured, "the same as another": same, "not measured": len(self.trials) - measured - same}
        parts = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        tried = f"{counted(len(self.trials), 'trial')}" + (f" ({parts})" if parts else "")
        if self.points:
            return f"{counted(len(self.points), 'point')} that no other trial beats; {tried}"
        return f"no trial meets the constraints; {tried}; the nearest:"

    def remarks(self) -> list[str]:
        """Return what the nearest points lack, where there is no front, and the notes."""
        near = [] if self.points else self.nearest[:_NEAREST]
        return [*(f"{_named(point)}: {'; '.join(self.lacks(point))}" for point in near), *self.notes]

    def __str__(self) -> str:
        return plain_text(self, width=10_000)

    def __repr__(self) -> str:
        return f"<Front: {self.headline()}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.headline(), style="bold")
        titles, rows = self.table()
        table = Table(box=box.SIMPLE_HEAD if options.is_terminal else box.MARKDOWN)
        for title in titles:
            table.add_column(title, overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        yield table
        yield from (Text(printable(line)) for line in self.remarks())

    def _repr_html_(self) -> str:
        titles, rows = self.table()
        return points_html(self.headline(), titles, rows, self.remarks())


def _named(point: Point) -> str:
    return f"{point.pipeline!r}" if point.pipeline else "the model as it was"


def _cell(name: str, point: Point) -> str:
    if name not in point.figures:
        return "-"
    written = QUANTITIES[name].written
    if name in ("latency", "training_step") and point.interval is not None:
        return f"{written(point.figures[name])} ({written(point.interval[0])} to {written(point.interval[1])})"
    return written(point.figures[name])
