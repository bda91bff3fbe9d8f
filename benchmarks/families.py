"""The preset inference on 98 small models, with engines and without them: speed, what is kept, and what is undone.

    python benchmarks/families.py --json benchmarks/results/families.json
    python benchmarks/families.py --only levit swin --budget inf
    python benchmarks/families.py --show --json benchmarks/results/families.json
    python benchmarks/families.py --table --json benchmarks/results/families.json

The models are those that `capture.py` has built: families of `transformers`, models on graphs, and those known by name.
Each is optimized and timed in a process of its own, on one thread: the model, what is optimized with `engine=auto`, and
with `engine=none` take turns in 30 rounds and in processor time. Models come in an order drawn by a seed until
`--budget` seconds of processor time are used; the rest is listed as omitted. A folder FXOPT_CACHE of their own keeps
decisions of earlier runs away. Everything undone means: something was rewritten, and nothing was kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from machine import described, forked

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

BUILT = Path(__file__).parent / "results" / "capture_inference.json"
"""Names the models that can be built."""

ENGINES = ("auto", "none")
SEED = 20261128
FLOOR = 0.95
BEFOREHAND = ("transformers", "torch_geometric", "onnx", "onnxruntime", "openvino")
"""Imported once. Not fxopt: engines do not run in forks of a process that has it."""

Row = dict[str, Any]


def drawn() -> list[tuple[str, str]]:
    """Return kind and name of all models in the order in which they are measured."""
    rows = json.loads(BUILT.read_text(encoding="utf-8"))["models"]
    found = [(row["kind"], row["name"]) for row in rows if "unbuilt" not in row]
    random.Random(SEED).shuffle(found)
    return found


def examine(kind: str, name: str, pairs: int) -> Row:
    """Optimize a model in each way, and let all take turns."""
    from ordinary_models.racing import in_turns

    try:
        built = _subject(kind, name).make()
        ways = {engine: _optimized(built, engine) for engine in ENGINES}
        models = {"eager": built.model, **{engine: fast for engine, (_, fast) in ways.items()}}
        with torch.no_grad():
            timings = in_turns({key: lambda m=model: m(**built.inputs) for key, model in models.items()}, pairs)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]}
    row: Row = {"eager_ms": round(timings["processor"].seconds("eager") * 1e3, 4)}
    for engine, (found, _) in ways.items():
        ratio = timings["processor"].ratio("eager", engine)
        row[engine] = {"speed": [round(value, 3) for value in (ratio.low, ratio.mid, ratio.high)], **found}
    return row


def _subject(kind: str, name: str) -> Any:
    from support.model_zoo.subjects import candidates, graph_subjects, named_subjects

    listed = {"named": named_subjects, "graph": graph_subjects}.get(kind, lambda: candidates(kind))
    return next(each for each in listed() if each.name == name)


def _optimized(built: Any, engine: str) -> tuple[Row, Any]:
    """Return what optimizing took and decided, and the model."""
    from support.model_zoo.examination import unlike_in_evaluation

    import fxopt

    start, start_of_process = time.perf_counter(), time.process_time()
    fast = fxopt.optimize(built.model, f"inference{{engine={engine}}}", example_inputs=built.inputs)
    found: Row = {
        "seconds": round(time.perf_counter() - start, 2),
        "processor_seconds": round(time.process_time() - start_of_process, 2),
    }
    decisions = fxopt.plan(fast).decisions
    for status in ("applied", "undone", "skipped"):
        found[status] = dict(Counter(each.pass_name for each in decisions if each.status == status))
    reasons = Counter(f"{each.pass_name}: {each.reason}" for each in decisions if each.status == "undone")
    found["reasons"] = [reason for reason, _ in reasons.most_common(4)]
    found["different"] = unlike_in_evaluation(built.model, fast, built)
    return found, fast


def sweep(of: argparse.Namespace, rows: dict[str, Row]) -> None:
    """Measure models until the time is up, and write the file behind each."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FXOPT_CACHE"] = folder
        for kind, name in drawn():
            wanted = not of.only or name in of.only or kind in of.only
            if not wanted or _processor_seconds() > of.budget or (of.missing and name in rows):
                continue
            rows[name] = {"kind": kind, **forked(lambda kind=kind, name=name: examine(kind, name, of.pairs), of.limit)}
            print(line(name, rows[name]), flush=True)
            write(of.json, rows)


def _processor_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def line(name: str, row: Row) -> str:
    """Return a row as text."""
    head = f"{row['kind']:16} {name:28}"
    if "error" in row:
        return f"{head} FAILED: {row['error']}"
    parts = (f"{engine} {_way(row[engine])}" for engine in ENGINES)
    return f"{head} {row['eager_ms']:8.3g} ms  {'  |  '.join(parts)}"


def _way(found: Row) -> str:
    low, middle, high = found["speed"]
    kept, undone = (sum(found[status].values()) for status in ("applied", "undone"))
    wrong = f" NOT EQUAL: {', '.join(found['different'])}" if found["different"] else ""
    seconds = f"{found['processor_seconds']:.1f} s"
    return f"{middle:.2f}x [{low:.2f}, {high:.2f}] {kept} applied, {undone} undone, {seconds}{wrong}"


def summary(rows: dict[str, Row]) -> Row:
    """Return what is promised of all models, by engine, and which were omitted."""
    done = {name: row for name, row in rows.items() if "error" not in row}
    return {
        "measured": len(rows),
        "omitted": [name for _, name in drawn() if name not in rows],
        "failed": [name for name in rows if name not in done],
        **{engine: _figures({name: row[engine] for name, row in done.items()}) for engine in ENGINES if done},
    }


def _figures(ways: dict[str, Row]) -> Row:
    speeds = {name: way["speed"] for name, way in ways.items()}
    undone = {name: way for name, way in ways.items() if way["undone"] and not way["applied"]}
    return {
        "geometric_mean": round(math.exp(fmean(math.log(middle) for _, middle, _ in speeds.values())), 3),
        "below": {name: speed for name, speed in speeds.items() if speed[1] < FLOOR},
        "surely_below": [name for name, (_, _, high) in speeds.items() if high < FLOOR],
        "everything_undone": {name: way["undone"] for name, way in undone.items()},
        "different": [name for name, way in ways.items() if way["different"]],
        "applied": _sum(way["applied"] for way in ways.values()),
        "undone": _sum(way["undone"] for way in ways.values()),
        "median_processor_seconds": median(way["processor_seconds"] for way in ways.values()),
        "most_processor_seconds": max(way["processor_seconds"] for way in ways.values()),
    }


def table(rows: dict[str, Row]) -> Iterator[str]:
    """Yield the lines of the summary as a table in Markdown."""
    found = summary(rows)
    heads = (f"{len(rows)} models, {len(found['omitted'])} omitted", *(f"engine={each}" for each in ENGINES))
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for key, what in _WORDS.items():
        yield f"| {what} | {' | '.join(_shown(found[engine][key]) for engine in ENGINES)} |"


_WORDS = {
    "geometric_mean": "geometric mean over eager",
    "below": f"below {FLOOR}",
    "surely_below": f"below {FLOOR} with the whole interval",
    "everything_undone": "everything undone, and how much",
    "different": "not equal",
    "applied": "kept",
    "undone": "undone",
    "median_processor_seconds": "seconds of processor time to optimize, median",
    "most_processor_seconds": "the same, most",
}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure(each)}" for name, each in value.items()) or "none"
    return ", ".join(value) or "none" if isinstance(value, list) else f"{value:g}"


def _figure(value: Any) -> str:
    """Return a count, an interval, or the sum of counts."""
    if isinstance(value, list):
        return f"{value[1]:.2f} [{value[0]:.2f}, {value[2]:.2f}]"
    return f"{sum(value.values()) if isinstance(value, dict) else value:,}"


def _sum(counts: Iterator[dict[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(total)


def write(path: Path | None, rows: dict[str, Row]) -> None:
    """Write the file anew, all of it, or none."""
    if path is None:
        return
    machine = {**described(), "load_average": [round(each, 1) for each in os.getloadavg()]}
    report = {"schema_version": 1, "seed": SEED, "machine": machine, "summary": summary(rows), "models": rows}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names or kinds: measure these only")
    parser.add_argument("--budget", type=float, default=720, help="seconds of processor time for all models")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one model")
    parser.add_argument("--pairs", type=int, default=30, help="rounds")
    parser.add_argument("--missing", action="store_true", help="leave out models that the file has")
    parser.add_argument("--show", action="store_true", help="measure nothing: print what the file has")
    parser.add_argument("--table", action="store_true", help="measure nothing: print the summary in Markdown")
    parser.add_argument("--json", type=Path)
    of = parser.parse_args()
    rows: dict[str, Row] = {}
    if of.json is not None and of.json.exists() and (of.missing or of.show or of.table):
        rows = json.loads(of.json.read_text(encoding="utf-8"))["models"]
    if of.table:
        print(*table(rows), sep="\n")
        return
    if of.show:
        print(*(line(name, row) for name, row in rows.items()), sep="\n")
    else:
        torch.set_num_threads(1)
        for module in BEFOREHAND:
            importlib.import_module(module)
        sweep(of, rows)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
