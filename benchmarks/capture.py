"""Capture real models: families of `transformers` drawn by a seed, models on graphs, and those known by name.

    python benchmarks/capture.py --json benchmarks/results/capture.json
    python benchmarks/capture.py --parts inference --missing --json benchmarks/results/capture_inference.json

Each model is looked at in a process of its own and in bounded time; one that fails is a row with its error. For each:
graphs, opaque modules with their reasons, where the parameters are called from, equality in evaluation and training at
two sizes (outputs, gradients, buffers), calls that fell back, the time of capturing, the speed of the captured model
beside the eager one, and what `optimize(model, "inference")` makes of it: its speed, equality, checkpoints, what
`generate` gives, and what `restore` gives back. The file is written after each model: an interrupted run keeps what it
has, and `--missing` goes on with the rest. Ordinary models of real size are those of `ordinary.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import transformers
from machine import described, forked

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.model_zoo.examination import captured_row, inference_row, overhead_row
from support.model_zoo.families import KINDS, SEED
from support.model_zoo.subjects import Built, Subject, candidates, graph_subjects, named_subjects
from support.model_zoo.tracing_times import tracing_times

import fxopt

PARTS = ("capture", "inference")
FLOOR = 0.95
MEAN = 1.3
"""What the geometric mean of the speeds in inference is to reach."""

KEPT = ("class_kept", "untouched", "loads_old", "writes_old", "restored_class", "generates")


def examine(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return one row; it has only an `unbuilt` where the model cannot be made."""
    row: dict[str, Any] = {"name": subject.name, "kind": subject.kind}
    try:
        built = subject.make()
    except Exception as error:
        return {**row, "unbuilt": str(error)}
    row |= built.details
    try:
        if "capture" in arguments.parts:
            _captured(row, built, arguments.seconds)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    try:
        if "inference" in arguments.parts:
            row["inference"], fast = inference_row(built, measure=bool(arguments.seconds))
            if arguments.seconds:
                row["inference"] |= overhead_row(built, fast, arguments.seconds)
    except Exception as error:
        row["inference"] = {"error": f"{type(error).__name__}: {error}"}
    return row


def _captured(row: dict[str, Any], built: Built, seconds: float) -> None:
    row["capture"], program = captured_row(built)
    row["capture"] |= tracing_times(built)
    if seconds:
        row["overhead"] = overhead_row(built, program.model, seconds)


def apart(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a model that is looked at in a process of its own."""
    found = forked(lambda: examine(subject, arguments), arguments.limit)
    return {"name": subject.name, "kind": subject.kind, **found}


def known_rows(arguments: argparse.Namespace) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows that need not be found again, by kind and name: those of the file in which nothing failed."""
    if not arguments.missing or arguments.json is None or not arguments.json.exists():
        return {}
    rows = json.loads(arguments.json.read_text(encoding="utf-8"))["models"]
    found = (row for row in rows if "unbuilt" in row or all(_is_found(row, part) for part in arguments.parts))
    return {(row["kind"], row["name"]): row for row in found}


def _is_found(row: dict[str, Any], part: str) -> bool:
    return "error" not in row and "error" not in row.get(part, {"error": ""})


def sweep(arguments: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Return the rows of all models; the draw goes on past families that cannot be built.

    Args:
        arguments: of the command line.
        keep: takes all rows so far.
    """
    rows: list[dict[str, Any]] = []
    known = known_rows(arguments)

    def add(subject: Subject) -> dict[str, Any]:
        rows.append(known.pop((subject.kind, subject.name), None) or apart(subject, arguments))
        print(line(rows[-1]), flush=True)
        keep([*rows, *known.values()])
        return rows[-1]

    for subject in [*named_subjects(), *graph_subjects()]:
        if _wanted(subject, arguments):
            add(subject)
    for kind, quota in KINDS.items():
        built = 0
        for subject in candidates(kind):
            if built >= quota:
                break
            if _wanted(subject, arguments):
                built += "unbuilt" not in add(subject)
    return rows


def warm_up() -> None:
    """Import what is imported on first use, so that no model pays for it."""
    model, inputs = torch.nn.Sequential(torch.nn.Linear(2, 2)), (torch.randn(2, 2),)
    torch.fx.symbolic_trace(model)
    fxopt.optimize(model, "inference", example_inputs=inputs)
    named_subjects()[-1].make()


def _wanted(subject: Subject, arguments: argparse.Namespace) -> bool:
    return not arguments.only or subject.name in arguments.only or subject.kind in arguments.only


def line(row: dict[str, Any]) -> str:
    head = f"{row['kind']:16s} {row['name']:28s}"
    if "unbuilt" in row:
        return f"{head} left out: {row['unbuilt'][:120]}"
    if "error" in row:
        return f"{head} FAILED: {row['error'][:200]}"
    parts = _capture_line(row) if "capture" in row else []
    inference = row.get("inference", {})
    if "error" in inference:
        parts.append(f"inference FAILED: {inference['error'][:150]}")
    elif inference:
        parts.append(f"inference {inference['seconds']:5.1f} s {verdict(inference)}")
        if "speed" in inference:
            parts.append(f"{inference['speed'][1]:.2f}x")
        parts.append(", ".join(f"{count} {name}" for name, count in inference["applied"].items()))
    return f"{head} {'  '.join(parts)}"


def _capture_line(row: dict[str, Any]) -> list[str]:
    found = row["capture"]
    counts = found["parameters"]
    parts = [
        f"{found['graphs']:4d} graphs {len(found['opaque']):3d} opaque {_share(counts):5.0%} of parameters",
        f"{sum(found['fallbacks'].values()):3d} fallbacks {found['seconds']:6.2f} s",
    ]
    if "overhead" in row:
        parts.append(f"speed {row['overhead']['speed'][1]:5.2f}")
    if found["different"]:
        parts.append(f"DIFFERENT {found['different'][0]}")
    return parts


def verdict(inference: dict[str, Any]) -> str:
    wrong = [key for key in KEPT if not inference[key]]
    wrong += [key for key in ("different", "restored_different") if inference[key]]
    return f"NOT {', '.join(wrong)}" if wrong else "ok"


def _share(counts: dict[str, int]) -> float:
    called = counts["graphs"] + counts["opaque"]
    return counts["graphs"] / called if called else 1.0


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that are promised, over the families and over the graph models."""
    built = [row for row in rows if "unbuilt" not in row]
    found: dict[str, Any] = {
        "models": len(built),
        "left_out": [row["name"] for row in rows if "unbuilt" in row],
        "failed": [row["name"] for row in built if "error" in row],
    }
    parts = {
        "transformers": [row for row in built if row["kind"] in KINDS],
        "graphs": [row for row in built if row["kind"] == "graph"],
        "all": built,
    }
    for name, part in parts.items():
        captured = [row for row in part if "capture" in row]
        figures = {**(_figures(captured) if captured else {}), **_inference_figures(part)}
        found |= {name: figures} if figures else {}
    reasons = Counter(opaque["reason"] for row in built if "capture" in row for opaque in row["capture"]["opaque"])
    found["reasons"] = dict(reasons.most_common())
    return found


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    captures = [row["capture"] for row in rows]
    counts = {key: sum(c["parameters"][key] for c in captures) for key in captures[0]["parameters"]}
    traced = {row["name"]: row["capture"]["over_symbolic_trace"] for row in rows}
    traced = {name: round(ratio, 2) for name, ratio in traced.items() if ratio is not None}
    return {
        "count": len(rows),
        "whole": sum(not c["opaque"] for c in captures),
        "not_whole": [row["name"] for row in rows if row["capture"]["opaque"]],
        "parameters_from_graphs": round(_share(counts), 4),
        "parameters": counts,
        "different": [row["name"] for row in rows if row["capture"]["different"]],
        "with_fallbacks": [row["name"] for row in rows if row["capture"]["fallbacks"]],
        "median_seconds": round(median(c["seconds"] for c in captures), 3),
        "over_symbolic_trace": round(median(traced.values()), 2) if traced else None,
        "over_symbolic_trace_each": traced,
        "costs_something": [row["name"] for row in rows if _costs(row.get("overhead"))],
    }


def _inference_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for row in rows if "inference" in row]
    if not rows:
        return {}
    done = [row for row in rows if "error" not in row["inference"]]
    speeds = {row["name"]: row["inference"]["speed"] for row in done if "speed" in row["inference"]}
    mean = math.exp(fmean(math.log(mid) for _, mid, _ in speeds.values())) if speeds else None
    return {
        "inference_failed": [row["name"] for row in rows if row not in done],
        "inference_wrong": [row["name"] for row in done if verdict(row["inference"]) != "ok"],
        "inference_below": {name: mid for name, (_, mid, _) in speeds.items() if mid < FLOOR},
        "inference_slower": [name for name, (_, _, high) in speeds.items() if high < FLOOR],
        "inference_speed": round(median(mid for _, mid, _ in speeds.values()), 3) if speeds else None,
        "inference_mean": mean and round(mean, 3),
        "inference_mean_reached": mean and mean >= MEAN,
    }


def _costs(overhead: dict[str, Any] | None) -> bool:
    """Tell whether a captured model is slower than promised, by the whole 95% interval."""
    if overhead is None:
        return False
    if overhead["eager_us"] > 200:
        return overhead["speed"][2] < 0.97
    least = overhead["eager_us"] / overhead["speed"][2] - overhead["eager_us"]
    return least > 2 + 0.3 * overhead["modules"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names or kinds: look at these only")
    parser.add_argument("--seconds", type=float, default=0.5, help="timing budget of a model; 0 times nothing")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is looked at")
    parser.add_argument("--missing", action="store_true", help="leave out models that the file has, save what failed")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one model")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warm_up()
    start = time.perf_counter()

    def keep(rows: list[dict[str, Any]]) -> None:
        write(rows, arguments.json, round(time.perf_counter() - start))

    print(json.dumps(summary(sweep(arguments, keep)), indent=2))


def write(rows: list[dict[str, Any]], path: Path | None, seconds: int) -> None:
    """Write the file anew, all of it, or none."""
    if path is None:
        return
    machine = {**described(), "transformers": transformers.__version__, "seconds": seconds}
    report = {"schema_version": 1, "seed": SEED, "machine": machine, "summary": summary(rows), "models": rows}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    main()
