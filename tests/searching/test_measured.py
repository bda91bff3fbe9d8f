"""The figures of docs/search.md are those of the file of results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def over_seeds(found: Sequence[float]) -> str:
    return f"{statistics.fmean(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def rows(results: dict[str, Any]) -> Iterator[str]:
    for row in results["tasks"]:
        searched, drawn = (over_seeds(row["areas"][way]) for way in ("search", "random"))
        alone = f"{max(row['presets'].values()):.2f}"
        expert, fastest = f"{row['expert']['area']:.2f}", f"{statistics.fmean(row['fastest']):.1f}x"
        yield f"| {' | '.join([row['task'], searched, drawn, alone, expert, fastest])} |"
    for row in results["large"]:
        there = "never" if row["first_seconds"] is None else f"{row['first_seconds']:.0f} s"
        memory = [f"{row[name] / 2**30:.1f} GiB" for name in ("bytes_before", "peak_bytes")]
        cells = [row["task"], f"{row['speedup']:.1f}x", f"{row['error']:.1g}", there, str(row["trials"]), *memory]
        yield f"| {' | '.join(cells)} |"


def test_the_figures_are_those_of_the_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "search.json").read_text(encoding="utf-8"))
    lines = (ROOT / "docs" / "search.md").read_text(encoding="utf-8").splitlines()
    wanted = list(rows(results))
    assert len(wanted) >= 7
    assert [row for row in wanted if row not in lines] == []
