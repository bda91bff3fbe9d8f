from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest
import torch
from rich.console import Console
from torch import nn

import fxopt
from fxopt.errors import UsageError
from fxopt.reporting.html import PAGE_MARK
from fxopt.reporting.report import Report
from fxopt.reporting.wording import clipped, duration, printable
from fxopt.runtime.record import Decision, GraphView, NodeView, PassTrace, Plan, Record

IMAGE = torch.ones(2, 3, 2, 2)
SLOW = fxopt.Cause.NO_FASTER


class Heads(nn.Module):
    """Four heads over images."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([head(x) for head in self.heads])


FIGURES = {
    "checked": "float64",
    "meaning_error": 2.1e-16,
    "precision_error": 3.4e-7,
    "speedup": 63.14,
    "speedup_low": 58.0,
    "speedup_high": 69.23,
    "before_us": 4103.0,
    "after_us": 65.0,
    "lowerings": {"bmm": 72.0, "wide": 65.0, "vmap": 810.0},
}


def decision(status: str = "applied", label: str = "heads", **more: Any) -> Decision:
    return Decision(0, more.pop("pass_name", "fuse_ensembles"), f"(root):{label}", status, label, **more)


APPLIED = decision(choice="wide", detail="128 members, 4 parameters each", figures=FIGURES)


def view(*lines: str) -> GraphView:
    return GraphView(tuple(NodeView(line.partition(" ")[0], "call_module", "", (), line, "", "") for line in lines))


def report(*decisions: Decision, **more: Any) -> Report:
    plan = Plan(("fuse_ensembles",), "eval", decisions, fxopt="0.1.0", torch="2.13.0")
    options = {"checked": "float64", **more}
    before = {"": [(0, view(*(f"heads_{i} = self.heads.{i}(x)" for i in range(128))))]}
    after = {"": view("fused = self.fused(x)")}
    return Report(Record(plan, cast(Any, None), before, after, "130 of 130 modules", 512, 4, **options))


def on_terminal(shown: Report, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system="truecolor").print(shown.table())
    return file.getvalue()


def test_everything_is_in_the_plain_table():
    text = str(report(APPLIED, timings={"before_ms": 4.2, "after_ms": 0.07, "speedup": 60.0}))
    assert "1 rewrite applied for inference; checked: float64" in text
    assert "whole model       4.2 ms -> 70 us, 60x in inference\n" in text
    assert "speed in inference" in text
    assert "parameter tensors 512 -> 4" in text
    assert "captured          130 of 130 modules" in text
    row = next(line for line in text.splitlines() if line.startswith("| fuse_ensembles"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "fuse_ensembles",
        "heads: 128 members, 4 parameters each",
        "wide",
        "2.1e-16 / 3.4e-07",
        "63.1x (58 to 69.2)",
        "4.1 ms -> 65 us",
    ]
    assert "wide 65 us, bmm 72 us, vmap 810 us" in text
    assert text.isascii()


def test_where_not_the_fastest_was_taken_it_says_why():
    close = {**FIGURES, "lowerings": {"openvino": 960.0, "onnxruntime": 862.0}}
    text = str(report(dataclasses.replace(APPLIED, choice="openvino", figures=close)))
    said = (
        "onnxruntime 862 us, openvino 960 us; noise does not tell them apart, so openvino was taken, which comes first"
    )
    assert said in text
    assert "noise" not in str(report(dataclasses.replace(APPLIED, choice="onnxruntime", figures=close)))


def test_what_was_left_alone_says_why():
    known = report(
        decision("refused", "towers", reason="members share the parameter 'w'"),
        *(decision("undone", f"layer.{i}", reason="no faster: 0.9x") for i in range(12)),
        opaque=(("encoder.mask", "model.py:12", "the branch depends on a tensor's value"),),
    )
    text = str(Report(known.record, notes=("eval only: fold_batchnorm",)))
    assert "0 rewrites applied for inference, 12 undone, 1 refused\n" in text
    assert "refused      fuse_ensembles at towers: members share the parameter 'w'" in text
    assert "undone       fuse_ensembles at layer.0 and 11 more: no faster: 0.9x" in text
    assert "not captured encoder.mask (model.py:12): the branch depends on a tensor's value" in text
    assert text.endswith("eval only: fold_batchnorm\n")


def test_what_was_not_captured_is_told_once_and_without_an_empty_location():
    opaque = (("trim", "", "the example inputs never call it"),)
    coverage = "3 of 4 modules captured\n  opaque: trim: the example inputs never call it"
    text = str(Report(dataclasses.replace(report(opaque=opaque).record, coverage=coverage)))
    assert "captured          3 of 4 modules captured\n" in text
    assert "not captured trim: the example inputs never call it\n" in text
    assert text.count("never call it") == 1


def test_a_model_in_which_nothing_was_rewritten_is_as_it_was():
    assert "whole model       as it was\n" in str(report(decision("undone", reason="no faster: 0.9x")))


def test_what_was_not_measured_or_checked_says_so():
    text = str(report(decision(figures={"checked": "unverified: no example inputs"}), checked="not at all"))
    assert "unverified: no example inputs" in text
    assert "not timed" in text
    assert "whole model       not timed" in text


def test_figures_of_a_plan_that_is_repeated_say_so():
    said = "whole model       not timed now; speeds and times below are those of the plan\n"
    assert said in str(report(APPLIED, checked="when the plan was made"))
    assert "of the plan" not in str(report(decision(choice="wide"), checked="when the plan was made"))
    assert "of the plan" not in str(report(APPLIED))


def test_what_was_timed_in_one_thread_says_so():
    timings = {"before_ms": 2.0, "after_ms": 1.0, "speedup": 2.0, "threads": 1}
    text = str(report(decision(figures={**FIGURES, "threads": 1}), timings=timings))
    assert text.count("timed in one thread") == 2
    assert "in one thread" not in str(report(APPLIED))


def test_a_size_that_loses_is_named_beside_the_whole_model():
    def sizes(**speeds: float) -> dict[str, Any]:
        bounds = {"speedup": 1.0, "speedup_low": 0.97, "speedup_high": 1.02}
        found = {label: {name: s * bound for name, bound in bounds.items()} for label, s in speeds.items()}
        return {"before_ms": 2.0, "after_ms": 1.0, "speedup": 2.0, "sizes": found, "untimed_sizes": {"64 x 64": "why"}}

    text = str(report(APPLIED, timings=sizes(small=1.2, large=0.82, near=0.99)))
    assert "2x in inference, not faster for all sizes\n" in text
    assert "other sizes       small: 1.2x; large: 0.82x (slower); near: 0.99x; 64 x 64: not timed (why)\n" in text
    assert "2x in inference, faster for this size only\n" in str(report(APPLIED, timings=sizes(large=0.82)))
    assert "2x in inference\n" in str(report(APPLIED, timings=sizes(large=1.1)))


def test_the_speed_of_a_prompt_and_of_a_step_is_shown():
    timings = {"before_ms": 4.0, "after_ms": 2.0, "speedup": 2.0}
    kinds = {"prompt": timings, "step": timings | {"speedup": 1.125}}
    shown = report(APPLIED, timings=timings | {"calls": kinds})
    assert "2x in inference (prompt 2x, step 1.12x)" in str(shown)
    assert shown.to_json()["timings"]["calls"]["step"]["speedup"] == 1.125


@pytest.mark.parametrize("width", [30, 60, 99])
def test_a_narrow_terminal_gets_lines_that_fit(width: int):
    lines = report(APPLIED).table().plain(width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line.startswith("|") for line in lines)
    assert any(line.startswith("  lowering  wide") for line in lines)


def test_a_wide_terminal_gets_a_table_in_colour():
    text = on_terminal(report(APPLIED), 140)
    assert "\x1b[" in text
    assert "─" in text
    assert "\x1b[" not in str(report(APPLIED))


def test_hostile_names_cannot_move_the_cursor_or_change_colours():
    evil = "[red]x[/red]\x1b[2J\n" + "y" * 10_000
    shown = report(decision(label=evil, reason=evil, detail=evil), decision("refused", evil, reason="no"))
    for text in (str(shown), on_terminal(shown, 140)):
        assert "\x1b[2J" not in text
        assert "\\x1b" in text
        assert "[red]" in text


def test_json_is_json_and_has_a_version():
    shown = report(APPLIED, decision("undone", figures={"speedup": float("nan")}), timings={"before_ms": 1.0})
    data = json.loads(json.dumps(shown.to_json(), allow_nan=False))
    assert data["schema_version"] == 2
    assert data["pipeline"] == ["fuse_ensembles"]
    assert data["decisions"][0]["figures"]["speedup"] == 63.14
    assert data["decisions"][1]["figures"]["speedup"] is None
    assert data["parameter_tensors"] == {"before": 512, "after": 4}
    assert data["timings"] == {"before_ms": 1.0}


def test_passes_that_took_a_visible_part_of_the_time_are_named():
    took = {"fuse_ensembles": 1.234, "pack": 0.09, "fold_constants": 0.002, "quantize": 0.06}
    shown = report(traces=tuple(PassTrace(name, seconds, 3, 2) for name, seconds in took.items()))
    assert "passes took       fuse_ensembles 1.23 s, pack 90 ms\n" in str(shown)
    repeated = report(traces=tuple(PassTrace(name, 0.003, 3, 2) for name in took))
    assert "passes took" not in str(repeated)
    assert shown.to_json()["passes"][0] == {"name": "fuse_ensembles", "seconds": 1.234, "decided": 3, "applied": 2}


def test_the_diff_is_that_of_the_graphs():
    assert "... 126 more lines like these ..." in report().diff()


def test_repr_is_short():
    shown = report(APPLIED, timings={"before_ms": 4.2, "after_ms": 0.07, "speedup": 60.0})
    assert repr(shown) == (
        "<Report: 1 rewrite applied for inference; checked: float64; whole model 4.2 ms -> 70 us, 60x in inference>"
    )


def rows_of(shown: Report) -> list[list[str]]:
    lines = [line for line in str(shown).splitlines() if line.startswith("| fuse_ensembles")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_equal_sites_are_one_row_with_their_number():
    followers = [
        decision(label=f"layer.{i}", choice="wide", figures={**FIGURES, "as": "layer.0"}) for i in range(1, 12)
    ]
    worst = {**FIGURES, "as": "layer.0", "precision_error": 9e-7}
    shown = report(
        decision(label="layer.0", choice="wide", figures=FIGURES),
        *followers,
        decision(label="layer.12", choice="wide", figures=worst),
        decision(label="head", choice="wide", figures=FIGURES),
    )
    assert "14 rewrites applied" in str(shown)
    (layers, head) = rows_of(shown)
    assert layers[1:] == ["layer.0 and 12 more", "wide", "2.1e-16 / 9.0e-07", "63.1x (58 to 69.2)", "4.1 ms -> 65 us"]
    assert head[1] == "head"


def test_like_sites_with_figures_of_their_own_are_one_row_with_their_range():
    slower = {**FIGURES, "speedup": 50.0, "before_us": 4000.0, "after_us": 80.0}
    shown = report(decision(label="layer.0", figures=FIGURES), decision(label="layer.1", figures=slower))
    ((*_, speed, time),) = rows_of(shown)
    assert (speed, time) == ("50x to 63.1x", "4.1 ms -> 65 us (the first)")


def test_of_sites_that_are_a_part_of_the_model_it_says_which_part():
    timings = {"before_ms": 16.412, "after_ms": 8.0, "speedup": 2.05}
    (row,) = rows_of(report(*(decision(label=f"layer.{i}", figures=FIGURES) for i in range(2)), timings=timings))
    assert row[-1] == "4.1 ms -> 65 us, of 50% of the model"
    (row,) = rows_of(report(decision(figures=FIGURES), timings={**timings, "before_ms": 4.2}))
    assert row[-1] == "4.1 ms -> 65 us"


def test_both_graphs_of_a_module_are_one_row_and_one_rewrite():
    both = [
        Decision(0, "fuse_ensembles", key, "applied", "attention", figures=FIGURES)
        for key in ("attention:add..mul(2)", "attention#1:add..mul(2)")
    ]
    refusals = [Decision(0, "fuse_ensembles", "pool", "refused", "pool", reason="no") for _ in range(2)]
    shown = report(*both, *refusals)
    assert [row[1] for row in rows_of(shown)] == ["attention"]
    assert "1 rewrite applied for inference, 1 refused" in str(shown)
    assert "refused      fuse_ensembles at pool: no\n" in str(shown)


def test_equal_reasons_with_other_figures_are_told_once():
    slow = [decision("undone", f"layer.{i}", reason=f"no faster: 0.9{i}x as wide", cause=SLOW) for i in range(3)]
    text = str(report(*slow, decision("undone", "head", reason="no faster: 0.5x as wide", cause=SLOW)))
    assert "undone       fuse_ensembles at layer.0 and 2 more: no faster: 0.90x as wide (the first)\n" in text
    assert "undone       fuse_ensembles at head: no faster: 0.5x as wide\n" in text


def test_projections_beside_each_other_are_one_line():
    figures = ["0.91x (0.8 to 1.1)", "1x (0.9 to 1.1)", "0.97x (0.95 to 0.99)"]
    same = [
        decision("undone", f"layers.{i}.attention.{name}", reason=f"no faster: {figure}", cause=SLOW)
        for i in range(2)
        for name, figure in zip("qkv", figures, strict=True)
    ]
    other = decision("undone", "head", reason="no faster: 0.5x (0.4 to 0.6)", cause=SLOW)
    lines = [line for line in str(report(*same, other)).splitlines() if line.startswith("undone")]
    assert lines == [
        "undone       fuse_ensembles at layers.0.attention.q and 5 more: no faster: 0.91x (0.8 to 1.1) (the first)",
        "undone       fuse_ensembles at head: no faster: 0.5x (0.4 to 0.6)",
    ]


def test_what_a_lossy_pass_gives_up_is_one_error_within_its_budget():
    """`0.0e+00 / 1.4e-02` would read as exact."""
    lossy = decision(
        pass_name="quantize",
        figures={"checked": "float32", "meaning_error": 0.0, "precision_error": 0.014},
        numerics="approximate",
    )
    assert "| 1.4e-02, within its budget |" in str(report(lossy))
    whole = decision(pass_name="quantize", figures={"checked": "with the whole model", "precision_error": 0.005})
    assert "| 5.0e-03 in its own type (with the whole model) |" in str(report(whole))
    lossy = dataclasses.replace(whole, numerics="approximate")
    assert "| 5.0e-03, within its budget (with the whole model) |" in str(report(lossy))


def test_rows_of_earlier_calls_say_so():
    rows = [line for line in str(two_calls()).splitlines() if line.startswith("| f")]
    assert [row.split("|")[1].strip() for row in rows] == ["fold_batchnorm (earlier call)", "fuse_ensembles"]


def two_calls() -> Report:
    norms = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten()).eval()
    first = fxopt.optimize(nn.Sequential(norms, Heads()).eval(), "fold_batchnorm", example_inputs=IMAGE, measure=False)
    return fxopt.report(fxopt.optimize(first, "fuse_ensembles{lowering=bmm}", example_inputs=IMAGE, measure=False))


def test_what_is_not_for_speed_says_why_it_is_not_timed():
    pruned = decision(pass_name="prune", figures={"checked": "float64", "meaning_error": 1e-16}, goal="size")
    assert "whole model       not timed: prune is not for speed\n" in str(report(pruned))
    assert "whole model       not timed\n" in str(report(pruned, dataclasses.replace(APPLIED, step=1)))


def test_the_options_of_a_pass_say_what_it_is_for():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval(), torch.randn(4, 32)
    small = fxopt.optimize(model, "quantize{scheme=int8_weight,aim=size}", example_inputs=x, measure=False)
    assert "whole model       not timed: quantize is not for speed\n" in str(fxopt.report(small))
    fast = fxopt.optimize(model, "quantize", example_inputs=x, measure=False)
    assert "whole model       not timed\n" in str(fxopt.report(fast))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_options_of_a_pass_say_what_it_promises(dtype: str):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval(), torch.randn(4, 32)
    fast = fxopt.optimize(model, f"pack{{dtype={dtype}}}", example_inputs=x, measure=False)
    plan = fxopt.plan(fast)
    if plan.decisions[0].status == "refused":
        pytest.skip(plan.decisions[0].reason)
    assert ("within its budget" in str(fxopt.report(fast))) is (dtype == "bfloat16")
    assert {each.numerics for each in plan.decisions} == {"approximate" if dtype == "bfloat16" else "reassociated"}
    assert Plan.from_json(plan.to_json()) == plan


def test_what_is_left_to_the_whole_model_is_not_said_to_be_judged_where_nothing_is_timed():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval(), torch.randn(4, 32)
    rows = [line for line in str(report_of(model, x)).splitlines() if line.startswith("| pack")]
    assert rows and all("not timed" in line and "judged" not in line for line in rows)


def report_of(model: nn.Module, x: torch.Tensor) -> Report:
    return fxopt.report(fxopt.optimize(model, "pack", example_inputs=x, measure=False))


def test_what_is_not_verified_is_no_check():
    figures = {"checked": "unverified: no example inputs"}
    text = str(report(decision(figures=figures), checked="unverified: no example inputs"))
    assert "1 rewrite applied for inference; NOT VERIFIED: no example inputs\n" in text
    mixed = str(report(APPLIED, decision(figures=figures), checked="float64, unverified: never called"))
    assert "checked: float64, but also NOT VERIFIED: never called\n" in mixed
    nothing = str(report(decision("refused", reason="no"), checked="nothing was rewritten"))
    assert nothing.startswith("0 rewrites applied for inference, 1 refused\n")
    finished = str(report(APPLIED, checked="nothing was rewritten", finishing={APPLIED.pass_name: "as before"}))
    assert finished.startswith("1 rewrite applied for inference\n")


def test_reasons_of_several_lines_become_one():
    text = str(report(decision("refused", reason="first\n  second\r\nthird")))
    assert "first second third" in text and "\\n" not in text


def test_notes_stand_in_the_table_and_in_the_json():
    shown = Report(report(APPLIED).record, notes=("first", "second"))
    assert str(shown).endswith("first\nsecond\n")
    assert shown.to_json()["messages"] == ["first", "second"]


def test_html_is_escaped_and_says_the_same():
    evil = "<script>alert(1)</script>\x1b[2J"
    shown = report(APPLIED, decision(label=evil, detail=evil), decision("undone", evil, reason=evil))
    html = Report(shown.record, notes=(evil,))._repr_html_()
    assert "<script>" not in html and "\x1b" not in html
    assert html.count("&lt;script&gt;") >= 4
    assert "2 rewrites applied for inference, 1 undone; checked: float64" in html
    for text in ("speed in inference", "63.1x (58 to 69.2)", "heads: 128 members, 4 parameters each", "bmm 72 us"):
        assert text in html
    ET.fromstring(html)  # every element is closed


def test_the_page_holds_everything_and_needs_nothing_else(tmp_path: Path):
    evil = "<script>alert(1)</script>\x1b[2J"
    shown = report(
        APPLIED, decision("undone", evil, reason=evil), timings={"before_ms": 4.2, "after_ms": 0.07, "speedup": 60.0}
    )
    shown = Report(shown.record, notes=(evil,))
    shown.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    ET.fromstring(page)  # every element is closed
    assert page.startswith("<!DOCTYPE html>") and PAGE_MARK in page[:1000]
    assert "<script" not in page and "\x1b" not in page and "http" not in page.replace("http-equiv", "")
    for text in ("60x in inference", "63.1x (58 to 69.2)", "What was left as it was", "fxopt 0.1.0, PyTorch 2.13.0"):
        assert text in page
    assert "<span class='added'>+    fused = self.fused(x)</span>" in page
    assert "<span class='removed'>-    heads_0 = self.heads.0(x)</span>" in page


def test_the_page_names_the_model_and_the_day_and_keeps_figures_on_one_line(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    fast = fxopt.optimize(model, "flatten_calls", example_inputs=torch.randn(2, 4), measure=False)
    fxopt.report(fast).to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>Sequential: 1 rewrite applied" in page and "<title>fxopt: Sequential: 1 rewrite" in page
    assert re.search(r", written \d{4}-\d\d-\d\d \d\d:\d\d [+-]\d{4}<", page)
    long = report(APPLIED, decision("undone", reason="why " * 20))
    cells = re.findall(r"<td style='([^']*)'>([^<]*)</td>", long._repr_html_())
    assert {"nowrap" in style for style, text in cells if text == "63.1x (58 to 69.2)"} == {True}
    assert {"nowrap" in style for style, text in cells if "why why" in text} == {False}


def test_the_page_leaves_out_what_is_empty(tmp_path: Path):
    shown = report()
    Report(dataclasses.replace(shown.record, graphs_after=shown.record.graphs_before)).to_html(str(tmp_path / "r.html"))
    assert "<h2>" not in (tmp_path / "r.html").read_text()


def test_a_page_goes_where_it_can_be_written(tmp_path: Path):
    with pytest.raises(UsageError, match="path is of type int"):
        report().to_html(cast(Any, 3))
    with pytest.raises(IsADirectoryError):
        report().to_html(tmp_path)


def test_a_pass_that_runs_twice_is_named_once():
    runs = [PassTrace("prune", 1.0, 1, 1), PassTrace("quantize", 0.5, 1, 1), PassTrace("prune", 2.0, 1, 1)]
    assert "passes took       prune 3 s in 2 runs, quantize 500 ms\n" in str(report(APPLIED, traces=tuple(runs)))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (1.0, "1 s"), (0.0123456, "12.3 ms"), (0.00107, "1.07 ms"), (6.5e-5, "65 us"), (2e-9, "0.002 us")],
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


def test_names_are_clipped_in_the_middle_and_made_printable():
    assert clipped("encoder.0") == "encoder.0"
    assert clipped("a" * 100 + "z" * 100) == "a" * 28 + "..." + "z" * 28
    assert printable("grün\t\x1b") == "grün\\t\\x1b"
