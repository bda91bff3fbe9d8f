"""The figure of a report: what is drawn of which figures, and names that are anybody's."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.errors import UsageError
from fxopt.reporting.report import Report

X = torch.randn(16, 8)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def plotted(passes: str, phase: str = "eval", **options: Any) -> tuple[Report, Any]:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    shown = model().train(phase == "train")
    fast = fxopt.optimize(shown, passes, example_inputs=X, measure=False, **options)
    report = fxopt.report(fast)
    return report, report.plot()


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def rows(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_memory_stands_beside_its_budget():
    report, figure = plotted("checkpoint{budget=0.5}", "train")
    (memory,) = [axes for axes in figure.axes if "memory" in axes.get_title(loc="left")]
    held = report.to_json()["memory"]
    assert [bar.get_width() for bar in memory.patches] == [
        held[f"{kind}_{side}"] for kind in ("live", "peak") for side in ("before", "after")
    ]
    (budget,) = memory.lines
    assert list(budget.get_xdata()) == [0.5 * held["live_before"]] * 2
    assert "line: the budget of checkpoint" in memory.get_title(loc="left")


def test_a_budget_in_bytes_is_the_line():
    _, figure = plotted("checkpoint{budget=9KiB}", "train")
    (memory,) = [axes for axes in figure.axes if "memory" in axes.get_title(loc="left")]
    assert [line.get_xdata()[0] for line in memory.lines] == [9 * 1024]


def test_what_prune_removed_is_there_by_layer():
    report, figure = plotted("prune{method=structured,amount=0.5}")
    (removed,) = [axes for axes in figure.axes if "prune removed" in axes.get_title(loc="left")]
    applied = [d for d in fxopt.plan(report.model).decisions if d.status == "applied"]
    assert rows(removed) == [f"prune: {d.label}" for d in applied]
    shares = [float(d.detail.split()[1]) / float(d.detail.split()[3]) for d in applied]
    assert [bar.get_width() for bar in removed.patches] == pytest.approx([100 * share for share in shares])


def test_what_layers_mean_to_results_stands_beside_what_was_removed_of_their_criterion():
    for method in ("structured", "magnitude"):
        report, figure = plotted(f"prune{{method={method},amount=0.5}}")
        (alone,) = [axes for axes in figure.axes if "how sensitive each layer is" in axes.get_title(loc="left")]
        found = {
            f"prune: {d.label}": d.site["data"]["sensitivity"] for d in fxopt.plan(report.model).decisions if d.site
        }
        assert list(rows(alone)) == sorted(found, key=lambda name: -found[name]["moves_results"])
        drawn = {(int(line.get_ydata()[0]), line.get_marker()): line.get_xdata()[0] for line in alone.lines}
        for row, name in enumerate(rows(alone)):
            assert drawn[row, "o"] == found[name]["moves_results"] > 0
            assert 0 < drawn[row, "D"] == found[name]["criterion_gone"] < 0.5


def test_errors_of_a_lossy_pass_are_its_sensitivities():
    report, figure = plotted("quantize{scheme=int8_weight,aim=size}")
    (errors,) = figure.axes
    assert "how sensitive each layer is" in errors.get_title(loc="left")
    drawn = {int(line.get_ydata()[0]): line.get_xdata()[0] for line in errors.lines}
    decisions = [d for d in fxopt.plan(report.model).decisions if d.status == "applied"]
    assert drawn == {row: d.figures["precision_error"] for row, d in enumerate(decisions)}


def test_costs_are_drawn_by_layer():
    pytest.importorskip("matplotlib")
    fast = fxopt.optimize(model().eval(), "prune{amount=0.5}", example_inputs=X, measure=False)
    report = fxopt.report(fast, X)
    (times,) = [axes for axes in report.plot().axes if "time by layer" in axes.get_title(loc="left")]
    assert rows(times) == ["0", "1", "2", "3", "4"] and len(times.patches) == 10


def test_speeds_have_intervals_and_what_was_undone_is_hollow():
    from .test_report import FIGURES, decision, report

    pytest.importorskip("matplotlib")
    slow = {**FIGURES, "speedup": 0.9, "speedup_low": 0.8, "speedup_high": 1.1}
    evil = "heads.$x^2$<b>\n表"
    shown = report(
        decision(figures=FIGURES),
        decision("undone", evil, reason="no faster", figures=slow),
        timings={"before_ms": 4.2, "after_ms": 0.07, "speedup": 60.0},
    )
    speed, error = shown.plot().axes
    assert rows(speed)[:2] == ["whole model", "fuse_ensembles: heads"]
    points = [container.lines[0] for container in speed.containers]
    assert [point.get_xdata()[0] for point in points] == [60.0, 63.14, 0.9]
    assert [point.get_markerfacecolor() == "white" for point in points] == [False, False, True]
    assert "hollow: undone" in titles(shown.plot())[0] and "error" in error.get_title(loc="left")
    assert shown.plot()._repr_png_().startswith(b"\x89PNG")  # hostile names are drawn, without a warning


def test_a_pass_without_figures_shows_how_many_operations_are_left():
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) + torch.relu(x)

    pytest.importorskip("matplotlib")
    fast = fxopt.optimize(Twice(), "eliminate_common_subexpressions", example_inputs=X, measure=False)
    (operations,) = fxopt.report(fast).plot().axes
    assert [bar.get_width() for bar in operations.patches] == [3, 2]
    idle = fxopt.optimize(nn.Sequential(nn.ReLU()), "eliminate_dead_code", example_inputs=X, measure=False)
    assert titles(fxopt.report(idle).plot()) == ["no graph was rewritten"]


def test_a_panel_shows_what_matters_most_and_counts_the_rest():
    from .test_report import FIGURES, decision, report

    pytest.importorskip("matplotlib")
    many = [decision(label=f"layer.{i}", figures={**FIGURES, "before_us": 100.0 + i}) for i in range(40)]
    speed, _ = report(*many).plot().axes
    assert rows(speed) == [f"fuse_ensembles: layer.{i}" for i in range(16, 40)]
    assert speed.get_title(loc="left").endswith("\n16 more with less to show")


def test_a_notebook_shows_the_plot_where_there_is_matplotlib(monkeypatch: pytest.MonkeyPatch):
    report, _ = plotted("prune{amount=0.5}")
    assert "src='data:image/png;base64,iVBOR" in report._repr_html_()
    monkeypatch.setattr("fxopt.reporting.report.has_matplotlib", lambda: False)
    assert "<img" not in report._repr_html_() and "rewrites applied" in report._repr_html_()


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    report = fxopt.report(fxopt.optimize(model(), "eliminate_dead_code", example_inputs=X, measure=False))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("fxopt.reporting.plots.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'matplotlib; install it with: pip install "fxopt\[plots\]"$'):
        report.plot()
