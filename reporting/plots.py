"""The report as a figure of matplotlib: speed, error, memory, what was removed, time."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..passes.pipeline import parse
from ..storage import allowed_bytes, byte_text
from .wording import clipped, duration, headline, phase_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..runtime.record import Decision, Record
    from .picture import NodeCost, Profile

__all__ = ["check_matplotlib", "figure_of", "front_figure", "has_matplotlib", "png_of"]

_NO_MATPLOTLIB = 'a plot needs matplotlib; install it with: pip install "fxopt[plots]"'
_MOST = 24
"""Rows of a panel: more are not read, and those that matter most are shown."""
_BEFORE, _AFTER, _LEFT = "#a9b4c0", "#2f7d4f", "#b06a5a"
_WIDE_RANGE = 4.0
"""Figures whose largest is so many times the smallest stand on a logarithmic axis."""
_PRUNE, _QUANTIZE, _REMOVED = "prune", "quantize", re.compile(r"(?P<gone>\d+) of (?P<all>\d+) ")


@dataclass(frozen=True)
class _Panel:
    """A part of the figure: how many rows it has, and who draws it."""

    rows: int
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class _Pair:
    """A figure before and after, and how it is written."""

    label: str
    before: float
    after: float


def has_matplotlib() -> bool:
    """Return whether there can be plots."""
    return find_spec("matplotlib") is not None


def check_matplotlib() -> None:
    """Raise `UsageError` where there can be no plots."""
    if not has_matplotlib():
        raise UsageError(_NO_MATPLOTLIB)


def figure_of(record: Record, profiles: tuple[Profile, Profile] | None = None) -> Figure:
    """Draw what a record and the costs of nodes hold; raise `UsageError` where matplotlib is missing."""
    check_matplotlib()
    found = (
        _speeds(record), _errors(record), _sensitivities(record), _memory(record), _removed(record), _times(profiles),
    )  # fmt: skip
    panels = [panel for panel in found if panel is not None] or [_operations(record)]
    heights = [0.9 + 0.24 * panel.rows for panel in panels]
    figure = _inline_figure()(figsize=(9.0, 0.5 + sum(heights)), layout="constrained")
    drawn = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)
    for panel, (axes,) in zip(panels, drawn, strict=True):
        panel.draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_plain(headline(record)), fontsize=10, fontweight="bold", x=0.01, ha="left")
    return figure


def front_figure(
    objective: str,
    lost: str,
    tried: Sequence[tuple[float, float]],
    front: Sequence[tuple[float, float]],
    original: tuple[float, float],
    written: Callable[[float], str],
) -> Figure:
    """Draw the points of a search by an objective and what is lost; raise `UsageError` where matplotlib is missing."""
    if not has_matplotlib():
        raise UsageError(_NO_MATPLOTLIB)
    figure = _inline_figure()(figsize=(6.5, 4.0), layout="constrained")
    axes = figure.subplots()
    for points, line, colour, label in ((tried, "o", _BEFORE, "tried"), (front, "o-", _AFTER, "that no other beats")):
        places = [x for x, _ in points], [y for _, y in points]
        axes.plot(*places, line, markersize=4, color=colour, label=label)
    axes.plot(*original, "D", markersize=6, color=_LEFT, label="as it was")
    axes.set_xlabel(objective, fontsize=9)
    axes.set_ylabel(lost, fontsize=9)
    axes.xaxis.set_major_formatter(lambda value, _: written(value) if value > 0 else "")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


@cache
def _inline_figure() -> type[Figure]:
    """Return a class of figures that notebooks show without pyplot."""
    from matplotlib.figure import Figure

    class InlineFigure(Figure):
        def _repr_png_(self) -> bytes:
            return png_of(self)

    return InlineFigure


def png_of(figure: Figure, dpi: int = 110) -> bytes:
    """Return a figure as a PNG, which fits into a notebook."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=dpi)
    return written.getvalue()


def _plain(text: str) -> str:
    """Return text with names of anybody's: no formula, and no letter that the font may lack."""
    return text.encode("ascii", "backslashreplace").decode().replace("$", r"\$")


def _label(name: str) -> str:
    return _plain(clipped(name))


def _place(decision: Decision) -> str:
    return _label(f"{decision.pass_name}: {decision.label or '(root)'}")


def _titled(axes: Axes, title: str, labels: Sequence[str], left_out: int = 0) -> None:
    """Write the title of a panel and the names of its rows, from the top."""
    rest = f"\n{left_out} more with less to show" if left_out else ""
    axes.set_title(title + rest, loc="left", fontsize=9)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _most(decisions: Iterable[Decision], weight: Callable[[Decision], float]) -> tuple[list[Decision], int]:
    """Return the decisions of the largest weights in their order, and how many there are besides."""
    given = list(decisions)
    kept = sorted(given, key=weight, reverse=True)[:_MOST]
    return [each for each in given if each in kept][:_MOST], max(len(given) - _MOST, 0)


def _colours(decisions: Iterable[Decision]) -> dict[str, str]:
    """Return a colour for each pass."""
    return {name: f"C{number % 10}" for number, name in enumerate(dict.fromkeys(d.pass_name for d in decisions))}


def _speeds(record: Record) -> _Panel | None:
    """Show how much faster the model is, and each place that was timed by itself, with intervals of 95%."""
    timings = record.timings or {}
    whole: dict[str, Mapping[str, Any]] = {"whole model": timings} if "speedup" in timings else {}
    for kind in ("calls", "sizes"):
        whole |= {f"whole model, {label}": each for label, each in timings.get(kind, {}).items()}
    timed = [d for d in record.plan.decisions if d.figures.get("speedup") is not None]
    shown, more = _most(timed, lambda d: abs(d.measured.saved_us or 0.0))
    if not whole and not shown:
        return None
    colours = _colours(shown)

    def draw(axes: Axes) -> None:
        for row, figures in enumerate(whole.values()):
            _interval(axes, row, figures, "black", filled=True)
        for row, each in enumerate(shown, len(whole)):
            _interval(axes, row, each.figures, colours[each.pass_name], filled=each.status == "applied")
        axes.axvline(1.0, color="black", linewidth=0.8)
        _ratios(axes, [float(figures["speedup"]) for figures in (*whole.values(), *(d.figures for d in shown))])
        hollow = "; hollow: undone" if any(d.status != "applied" for d in shown) else ""
        title = f"speed in {phase_of(record)}, times that of before{hollow}"
        _titled(axes, title, [*map(_label, whole), *map(_place, shown)], more)

    return _Panel(len(whole) + len(shown), draw)


def _interval(axes: Axes, row: int, figures: Mapping[str, Any], colour: str, *, filled: bool) -> None:
    mid = float(figures["speedup"])
    low, high = (float(figures.get(f"speedup_{end}") or mid) for end in ("low", "high"))
    spread = [[max(mid - low, 0.0)], [max(high - mid, 0.0)]]
    axes.errorbar(
        mid, row, xerr=spread, fmt="o", markersize=5, capsize=3, color=colour, mfc=colour if filled else "white"
    )


def _ratios(axes: Axes, values: Sequence[float]) -> None:
    """Label an axis of ratios, in powers of two where they are far apart."""
    if max(*values, 1.0) > _WIDE_RANGE * min(*values, 1.0):
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}x")


def _errors(record: Record) -> _Panel | None:
    """Show the errors of rewrites; those of lossy passes say how sensitive each layer is."""
    known = [d for d in record.plan.decisions if d.status in ("applied", "undone") and any(_two_errors(d))]
    shown, more = _most(known, lambda d: max(_two_errors(d)))
    if not shown:
        return None
    colours, lossy = _colours(shown), any(d.numerics == "approximate" for d in shown)

    def draw(axes: Axes) -> None:
        for row, each in enumerate(shown):
            for error, marker in zip(_two_errors(each), "Do", strict=True):
                if error > 0.0:
                    colour = colours[each.pass_name]
                    axes.plot(error, row, marker, markersize=5, color=colour, mfc="white" if marker == "D" else colour)
        _scientific(axes, [error for each in shown for error in _two_errors(each) if error > 0.0])
        sensitive = ": how sensitive each layer is" if lossy else ""
        _titled(axes, f"error by place{sensitive} (diamond: in float64, dot: as it runs)", [*map(_place, shown)], more)

    return _Panel(len(shown), draw)


def _scientific(axes: Axes, values: Sequence[float]) -> None:
    """Label an axis of errors, by their magnitude where they are far apart."""
    if max(values) > 2 * _WIDE_RANGE * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    else:
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _two_errors(decision: Decision) -> list[float]:
    """Return the errors in float64 and in the model's own type; 0 where there is none, or it is exact."""
    found = [float(decision.figures.get(name) or 0.0) for name in ("meaning_error", "precision_error")]
    return [each if math.isfinite(each) else 0.0 for each in found]


def _memory(record: Record) -> _Panel | None:
    """Show the activations of a training step before and after, and what a budget allows."""
    memory = record.memory
    if not memory:
        return None
    kinds = {"live": "activations after a forward", "peak": "most in a step"}
    pairs = [_Pair(text, memory[f"{kind}_before"], memory[f"{kind}_after"]) for kind, text in kinds.items()]
    limit = _limit(record.plan.pipeline, memory["live_before"])

    def draw(axes: Axes) -> None:
        _bars(axes, pairs, byte_text)
        budget = ""
        if limit is not None:
            axes.plot([limit, limit], [-0.45, 0.45], color=_LEFT, linewidth=2)
            budget = f"; line: the budget of checkpoint, {byte_text(limit)}"
        _titled(axes, f"memory before (grey) and after (green){budget}", [pair.label for pair in pairs])

    return _Panel(2 * len(pairs), draw)


def _limit(pipeline: Sequence[str], saved: int) -> float | None:
    """Return the bytes that the budget of `checkpoint` allows of what the plain model saves; None without the pass."""
    text = next((text for text in pipeline if text.partition("{")[0] == "checkpoint"), None)
    return None if text is None else allowed_bytes(getattr(parse(text)[0], "budget", None), saved)


def _removed(record: Record) -> _Panel | None:
    """Show which share of each layer `prune` removed."""
    found = [
        (d, int(match["gone"]) / max(int(match["all"]), 1))
        for d in record.plan.decisions
        if d.pass_name == _PRUNE and d.status == "applied" and (match := _REMOVED.search(f"{d.detail} "))
    ]
    shown, more = found[:_MOST], max(len(found) - _MOST, 0)
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        axes.barh(range(len(shown)), [100.0 * share for _, share in shown], color=_AFTER, height=0.6)
        axes.set_xlim(0.0, 100.0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
        _titled(axes, "what prune removed, by layer", [_place(d) for d, _ in shown], more)

    return _Panel(len(shown), draw)


def _sensitivities(record: Record) -> _Panel | None:
    """Show how much the results move by what `prune` or `quantize` does to each layer alone, and what share of its
    criterion `prune` takes.
    """
    known = [pair for d in record.plan.decisions if d.status in ("applied", "undone") for pair in _alone(d)]
    shown = sorted(known, key=lambda pair: -pair[1].get("moves_results", 0.0))[:_MOST]
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for row, (_, figures) in enumerate(shown):
            for name, marker, face in (("criterion_gone", "D", "white"), ("moves_results", "o", "C0")):
                if name in figures:
                    axes.plot(float(figures[name]), row, marker, markersize=5, color="C0", mfc=face)
        axes.set_xlim(left=0.0)
        share = "; diamond: share of its criterion that goes" if any("criterion_gone" in f for _, f in shown) else ""
        title = f"how sensitive each layer is (dot: it alone moves results by that much of their scale{share})"
        _titled(axes, title, [name for name, _ in shown], len(known) - len(shown))

    return _Panel(len(shown), draw)


def _alone(decision: Decision) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the layers of a decision with what is known of each alone."""
    data: Mapping[str, Any] = (decision.site or {}).get("data", {})
    if decision.pass_name == _PRUNE and data.get("sensitivity"):
        yield _place(decision), data["sensitivity"]
    for layer in data.get("layers", ()) if decision.pass_name == _QUANTIZE else ():
        if "moves_results" in layer:
            yield _label(f"{_QUANTIZE}: {layer['name']}"), layer


def _times(profiles: tuple[Profile, Profile] | None) -> _Panel | None:
    """Show the time of the innermost modules that are called before and after, those that took most."""
    if profiles is None:
        return None
    before, after = (profile.modules for profile in profiles)
    common = [name for name in before if name in after]
    inner = [name for name in common if name and not any(other.startswith(f"{name}.") for other in common)]
    most = sorted(inner or common, key=lambda name: -before[name].seconds)[: _MOST // 2]
    pairs = [_Pair(_label(name or "(root)"), *_seconds(name, before, after)) for name in common if name in most]
    if not pairs:
        return None

    def draw(axes: Axes) -> None:
        _bars(axes, pairs, duration)
        title = "time by layer before (grey) and after (green), each run by itself"
        _titled(axes, title, [pair.label for pair in pairs], max(len(inner) - len(most), 0))

    return _Panel(2 * len(pairs), draw)


def _seconds(name: str, *sides: Mapping[str, NodeCost]) -> list[float]:
    return [side[name].seconds for side in sides]


def _operations(record: Record) -> _Panel:
    """Show how many operations the rewritten graphs have; what there is of every pass that rewrites."""
    after = record.graphs_after
    graphs = [name for name in record.graphs_before if name in after][:_MOST]
    pairs = [
        _Pair(_label(name or "(root)"), *(sum(node.op.startswith("call_") for node in view.nodes) for view in views))
        for name, views in ((name, (record.graphs_before[name], after[name])) for name in graphs)
    ]

    def draw(axes: Axes) -> None:
        _bars(axes, pairs, lambda count: f"{count:.0f}")
        title = "operations of the rewritten graphs before (grey) and after (green)"
        _titled(axes, title if pairs else "no graph was rewritten", [pair.label for pair in pairs])

    return _Panel(max(2 * len(pairs), 1), draw)


def _bars(axes: Axes, pairs: Sequence[_Pair], written: Callable[[float], str]) -> None:
    """Draw two bars for each pair with their values."""
    for row, pair in enumerate(pairs):
        for value, offset, colour in ((pair.before, -0.2, _BEFORE), (pair.after, 0.2, _AFTER)):
            axes.barh(row + offset, value, height=0.36, color=colour)
            axes.annotate(
                written(value), (value, row + offset), xytext=(4, 0), textcoords="offset points", va="center",
                fontsize=7,
            )  # fmt: skip
    axes.margins(x=0.12)
    axes.set_xlim(left=0.0)
    axes.xaxis.set_major_formatter(lambda value, _: written(value) if value else "0")
