"""What `optimize` takes: of families of `transformers`, models on graphs, detectors, segmenters and video models.

    python benchmarks/preparation.py --json benchmarks/results/preparation.json
    python benchmarks/preparation.py --only detr bert --presets inference

Each model is optimized with each preset, in a process of its own, in one thread, engines on and then off. A row has the
time by the clock and processor time, what the report says of the time spent (from the capture on) and of the budget,
each stage, and how many rewrites stand. The aim: no more than the time budget besides the capture on 95% of the models,
and never more than twice that. The file is written after each model: `--missing` goes on with the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import described
from preparation_models import MODELS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.model_zoo.families import KINDS, SEED
from support.model_zoo.subjects import candidates, graph_subjects, named_subjects

import fxopt

PRESETS = ("inference", "training")
PART, MOST = 0.95, 2.0
"""This part of the models is to take no more than the budget, and none more than so many times that."""

Row = dict[str, Any]


def subjects() -> Iterator[tuple[str, str, Callable[[], tuple[torch.nn.Module, dict[str, Any]]]]]:
    """Yield kind, name and maker of each model; of the drawn families as many as `capture.py` takes."""
    for name, make in MODELS.items():
        yield "vision tasks", name, make
    drawn = ((kind, each) for kind, quota in KINDS.items() for each in itertools.islice(candidates(kind), quota))
    named = ((each.kind, each) for each in (*named_subjects(), *graph_subjects()))
    for kind, subject in (*named, *drawn):
        yield kind, subject.name, lambda subject=subject: ((built := subject.make()).model, built.inputs)


def prepared(make: Callable[[], Any], preset: str, pipe: Connection) -> None:
    """Send what optimizing one model took, or why it failed."""
    warnings.simplefilter("ignore")
    try:
        torch.manual_seed(0)
        model, inputs = make()
    except Exception as error:
        pipe.send({"unbuilt": str(error).partition("\n")[0][:200]})
        return
    try:
        model.train(preset == "training")
        start = time.perf_counter(), time.process_time()
        fast = fxopt.optimize(model, preset, example_inputs=inputs)
        taken = time.perf_counter() - start[0], time.process_time() - start[1]
        report = fxopt.report(fast).to_json()
        statuses = [decision["status"] for decision in report["decisions"]]
        counts = {status: statuses.count(status) for status in ("applied", "undone", "skipped")}
        spent = report["spent"] or {}
        pipe.send({"wall_s": round(taken[0], 3), "processor_s": round(taken[1], 3), "spent": spent, **counts})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"})


def row_of(make: Callable[[], Any], preset: str, limit: float) -> Row:
    """Return the row of a model that is optimized in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=prepared, args=(make, preset, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(limit) else {"error": f"not done in {limit} s"}
    except EOFError:
        return {"error": "the process died"}
    finally:
        process.kill()
        process.join()


def times_budget(row: Row) -> float:
    return row["spent"]["seconds"] / row["spent"]["budget_s"]


def summary(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Return the distribution of what was spent, over the budget and in seconds, and the models beyond the aim."""
    done = {name: row for name, row in rows.items() if row.get("spent")}
    if not done:
        return {"models": 0}
    ratios = {name: round(times_budget(row), 3) for name, row in done.items()}
    stages = [row["spent"]["stages"] for row in done.values()]
    names = dict.fromkeys(stage for each in stages for stage in each)
    within = sum(ratio <= 1.0 for ratio in ratios.values()) / len(ratios)
    return {
        "models": len(done),
        "left_out": [name for name, row in rows.items() if "unbuilt" in row],
        "failed": {name: row["error"] for name, row in rows.items() if "error" in row},
        "times_budget": _distribution(list(ratios.values())),
        "spent_s": _distribution([row["spent"]["seconds"] for row in done.values()]),
        "forwards": _distribution(
            [1e3 * row["spent"]["seconds"] / row["spent"]["forward_ms"] for row in done.values()]
        ),
        "capture_s": _distribution([row["spent"]["capture_s"] for row in done.values()]),
        "processor_s": _distribution([row["processor_s"] for row in done.values()]),
        "wall_s": _distribution([row["wall_s"] for row in done.values()]),
        "mean_of_stages_s": {
            name: round(statistics.fmean(each.get(name, 0.0) for each in stages), 3) for name in names
        },
        "within_budget": round(within, 3),
        "beyond_budget": {name: ratio for name, ratio in ratios.items() if ratio > 1.0},
        "beyond_most": [name for name, ratio in ratios.items() if ratio > MOST],
        "compared_otherwise": [name for name, row in done.items() if row["spent"].get("otherwise")],
        "reached": within >= PART and max(ratios.values()) <= MOST,
    }


def _distribution(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at_95 = ordered[min(len(ordered) - 1, int(PART * len(ordered)))]
    return {"median": round(statistics.median(ordered), 3), "at_95": round(at_95, 3), "worst": round(ordered[-1], 3)}


def line(name: str, row: Row) -> str:
    if "unbuilt" in row:
        return f"{name:45s} left out: {row['unbuilt'][:80]}"
    if "error" in row:
        return f"{name:45s} FAILED: {row['error']}"
    spent = row["spent"]
    if not spent:
        return f"{name:45s} nothing was spent"
    stages = sorted(spent["stages"].items(), key=lambda each: -each[1])[:3]
    return (
        f"{name:45s} {row['wall_s']:6.2f} s, processor {row['processor_s']:6.2f}, capture {spent['capture_s']:5.2f}, "
        f"spent {spent['seconds']:6.2f} of {spent['budget_s']:6.2f} ({times_budget(row):.2f}x), "
        f"{row['applied']:3d} applied; " + ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages)
    )


def sweep(arguments: argparse.Namespace, keep: Callable[[dict[str, Row]], None]) -> dict[str, Row]:
    """Return all rows by preset, engines and name; `keep` takes those so far."""
    rows = _known(arguments)
    for engines in arguments.engines:
        os.environ["FXOPT_ENGINES"] = "1" if engines == "on" else "0"
        for kind, name, make in subjects():
            if arguments.only and not {kind, name} & set(arguments.only):
                continue
            for preset in arguments.presets:
                key = f"{preset}, engines {engines}: {name}"
                if key not in rows:
                    rows[key] = row_of(make, preset, arguments.limit)
                    print(line(key, rows[key]), flush=True)
                    keep(rows)
    return rows


def _known(arguments: argparse.Namespace) -> dict[str, Row]:
    if not arguments.missing or arguments.json is None or not arguments.json.exists():
        return {}
    return json.loads(arguments.json.read_text(encoding="utf-8"))["models"]


def report(rows: Mapping[str, Row]) -> dict[str, Any]:
    heads = dict.fromkeys(key.partition(": ")[0] for key in rows)
    parts = {head: {key: row for key, row in rows.items() if key.startswith(f"{head}: ")} for head in heads}
    return {head: summary(part) for head, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names or kinds: take these only")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--engines", nargs="+", choices=("on", "off"), default=("on", "off"))
    parser.add_argument("--missing", action="store_true", help="leave out what the file has")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one model")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warm, inputs = torch.nn.Sequential(torch.nn.Linear(2, 2)).eval(), (torch.randn(2, 2),)
    fxopt.optimize(warm, "inference", example_inputs=inputs)  # what is imported on first use costs no model anything
    named_subjects()[-1].make()

    def keep(rows: dict[str, Row]) -> None:
        if arguments.json is not None:
            machine = {**described(), "transformers": transformers.__version__}
            whole = {"schema_version": 1, "seed": SEED, "machine": machine, "summary": report(rows), "models": rows}
            new = arguments.json.with_suffix(".new")
            new.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            new.replace(arguments.json)

    print(json.dumps(report(sweep(arguments, keep)), indent=2))


if __name__ == "__main__":
    main()
