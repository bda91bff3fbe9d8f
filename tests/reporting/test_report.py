from __future__ import annotations

import dataclasses
import io
import json
from typing import Any, cast

import pytest
from rich.console import Console

from fxopt.passes.driver import PassTrace, Record
from fxopt.passes.pipeline import Decision, Plan
from fxopt.reporting.report import Report
from fxopt.reporting.wording import clipped, duration, printable

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


def report(*decisions: Decision, **more: Any) -> Report:
    plan = Plan(("fuse_ensembles",), "eval", decisions, fxopt="0.1.0", torch="2.13.0")
    options = {"checked": "float64", **more}
    before = {"": "\n".join(f"heads_{i} = self.heads.{i}(x)" for i in range(128))}
    return Report(
        Record(plan, cast(Any, None), before, {"": "fused = self.fused(x)"}, "130 of 130 modules", 512, 4, **options)
    )


def on_terminal(shown: Report, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system="truecolor").print(shown.table())
    return file.getvalue()


def test_everything_is_in_the_plain_table():
    text = str(report(APPLIED, timings={"before_ms": 4.2, "after_ms": 0.07, "speedup": 60.0}))
    assert "1 rewrite applied; checked: float64" in text
    assert "whole model       4.2 ms -> 70 us, 60x" in text
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


def test_what_was_left_alone_says_why():
    text = str(
        report(
            decision("refused", "towers", reason="members share the parameter 'w'"),
            *(decision("undone", f"layer.{i}", reason="no faster: 0.9x") for i in range(12)),
            opaque=(("encoder.mask", "model.py:12", "the branch depends on a tensor's value"),),
            messages=("eval only: fold_batchnorm",),
        )
    )
    assert "0 rewrites applied, 12 undone, 1 refused" in text
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


def test_what_was_not_measured_or_checked_says_so():
    text = str(report(decision(figures={"checked": "unverified: no example inputs"}), checked="not at all"))
    assert "unverified: no example inputs" in text
    assert "not timed" in text
    assert "whole model       not timed" in text


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


def test_what_each_pass_took():
    shown = report(traces=(PassTrace("fuse_ensembles", 1.234, 3, 2), PassTrace("fold_constants", 0.002, 0, 0)))
    assert "passes took       fuse_ensembles 1.23 s, fold_constants 2 ms" in str(shown)
    assert shown.to_json()["passes"][0] == {"name": "fuse_ensembles", "seconds": 1.234, "decided": 3, "applied": 2}


def test_the_diff_is_that_of_the_graphs():
    assert "... 126 more lines like these ..." in report().diff()


def test_repr_is_short():
    assert repr(report(APPLIED)) == "<Report of 1 decisions>"


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
