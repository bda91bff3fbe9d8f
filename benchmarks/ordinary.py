"""Ordinary models of real size beside eager: fxopt, torch.compile, onnxruntime and OpenVINO, in one thread and in two.

    python benchmarks/ordinary.py --json benchmarks/results/ordinary.json
    python benchmarks/ordinary.py --parts races --threads 1 --missing --json benchmarks/results/ordinary.json
    python benchmarks/ordinary.py --models resnet-18 "mlp, batch 1" --columns exact openvino --threads 1 --seconds 1
    python benchmarks/ordinary.py --show --json benchmarks/results/ordinary.json
    python benchmarks/ordinary.py --table --json benchmarks/results/ordinary.json

Weights and inputs are random, from a committed seed; batch norms have the statistics of the input. There are three
parts, and each of their measurements is a process of its own:

- *cells*: one column of a row. Calls of eager and of the column take turns; a ratio is eager's time over the column's,
  with its interval of 95%. Preparation is everything up to the end of the first call, without imports, by the clock and
  in processor time. Columns of fxopt start with an empty folder FXOPT_CACHE, and a second process prepares them from
  what the first has left there. Errors are relative to the largest value of the result in float64 (of a training step:
  of the gradients). Memory is what the process holds beyond the model, and at most while preparing.
- *races*: all columns of a row in one precision, in turns, at least 30 rounds: how many times as fast as each of the
  others fxopt is, by the processor's time and by the clock on the wall. Behind a row stands whether fxopt has 0.97 of
  the speed of the fastest other that errs no more than fxopt may (1e-4, in bfloat16 2e-2), judged by processor time in
  one thread, and by the clock in two.
- *memory*: what a process holds for a model, for what is optimized of it without the model, and this with `release`.

Gradients behind a ReLU jump where it falls on its other side, in eager as well: training rows also say what eager's own
gradients are off by, and how far they move where weights are off by rounding (32 units in the last place; for bfloat16,
half a unit of it). An error of up to twice that is not held against a column; in float64, gradients of exact passes
must be those of eager. Page faults make eager slower in some processes: glibc gives large blocks back to the system at
each call until a process has freed a few of them. What fails, or takes too long, is a cell with its reason. The file is
written after each measurement: an interrupted run keeps what it has, and `--missing` goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import described
from ordinary_models import (
    CASES,
    COLUMNS,
    IN_TRAINING,
    MEANS,
    OPTIMIZED,
    RACES,
    SEED,
    judged,
    lost,
    measured,
    memory_table,
    memory_used,
    prepared_again,
    race_table,
    race_verdict,
    raced,
    ratio_of,
    reached,
    tables,
)  # fmt: skip

PARTS = ("cells", "races", "memory")
Cell = dict[str, Any]
Job = dict[str, Any]

WORK: Mapping[str, Callable[..., Cell]] = {
    "cell": measured,
    "again": prepared_again,
    "race": raced,
    "memory": memory_used,
}
"""What the process of a job calls, with the arguments that the job has."""


def cell_of(model: str, column: str, threads: int, seconds: float, limit: float) -> Cell:
    """Measure a column of a row; one of fxopt is prepared once more, with what the first process has left."""
    if CASES[model].labels and column not in IN_TRAINING:
        return {"failed": "does not train"}
    named = {"name": model, "column": column, "threads": threads}
    with tempfile.TemporaryDirectory() as folder:
        cell = alone({"work": "cell", **named, "seconds": seconds}, threads, limit, Path(folder))
        if column in OPTIMIZED and not CASES[model].labels and "failed" not in cell:
            cell["from_cache"] = _again(named, threads, limit, Path(folder))
    return cell


def _again(named: Job, threads: int, limit: float, folder: Path) -> Cell:
    if not any(each.is_file() for each in _decisions(folder).rglob("*")):
        return {"failed": "nothing was left in FXOPT_CACHE"}
    return alone({"work": "again", **named}, threads, limit, folder)


def race_of(model: str, precision: str, columns: Sequence[str], threads: int, pairs: int, limit: float) -> Cell:
    """Let the columns of a row take turns."""
    job = {"work": "race", "name": model, "precision": precision, "columns": columns, "threads": threads}
    with tempfile.TemporaryDirectory() as folder:
        return alone({**job, "pairs": pairs}, threads, limit, Path(folder))


def memory_of(model: str, limit: float) -> Cell:
    """Return the bytes that processes hold for a row: before, after, and after with `release`."""
    found: list[Cell] = []
    for release in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            found.append(alone({"work": "memory", "name": model, "release": release}, 1, limit, Path(folder)))
    plain, released = found
    failed = [each["failed"] for each in found if "failed" in each]
    return {"failed": failed[0]} if failed else {**plain, "released": released["after"]}


def alone(job: Job, threads: int, limit: float, folder: Path) -> Cell:
    """Do a job in a process of its own, which keeps what it caches in a folder, or say why it gave nothing."""
    found = folder / "found.json"
    found.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--job", json.dumps(job), str(threads), str(found)]
    ended = _ended(command, _environment(folder, threads), limit)
    return json.loads(found.read_text(encoding="utf-8")) if found.exists() else {"failed": ended}


def _environment(folder: Path, threads: int) -> dict[str, str]:
    """Return variables for a process that takes nothing from the caches of others."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "FXOPT_CACHE": str(_decisions(folder))}
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **caches}


def _decisions(folder: Path) -> Path:
    return folder / "decisions"


def _ended(command: Sequence[str], environment: Mapping[str, str], limit: float) -> str:
    """Run a process and what it starts, and say how it ended."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        lines = process.communicate(timeout=limit)[1].strip().splitlines()
    except BaseException as error:  # it has a session of its own: nothing else ends it
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"not done after {limit:.0f} s"
    return f"the process ended with {process.returncode}: {lines[-1] if lines else 'no message'}"


def do_here(job: Job, threads: int, found: Path) -> None:
    """Do a job in this process, and write what it gives to a file."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    load = os.getloadavg()[0]
    try:
        cell = WORK[job.pop("work")](**job)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        cell = {"failed": f"{type(error).__name__}: {message}"[:300]}
    cell["load_average"] = [round(load, 1), round(os.getloadavg()[0], 1)]
    found.write_text(json.dumps(cell), encoding="utf-8")


class Report:
    """All measurements, kept in a file where one is named.

    Attributes:
        cells: model -> threads -> column -> cell.
        races: model -> threads -> precision -> race.
        memory: model -> bytes.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        kept = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
        self.cells: dict[str, dict[str, dict[str, Cell]]] = kept.get("cells", {})
        self.races: dict[str, dict[str, dict[str, Cell]]] = kept.get("races", {})
        self.memory: dict[str, Cell] = kept.get("memory", {})

    def row(self, model: str, threads: int) -> dict[str, Cell]:
        """Return the cells of one model at a number of threads."""
        return self.cells.setdefault(model, {}).setdefault(str(threads), {})

    def raced(self, model: str, threads: int) -> dict[str, Cell]:
        """Return the races of one model at a number of threads."""
        return self.races.setdefault(model, {}).setdefault(str(threads), {})

    def write(self) -> None:
        """Write the file anew: all of it, or none."""
        if self.path is None:
            return
        machine = {**described(), "threads": "by cell"}
        figures = {"cells": self.cells, "races": self.races, "lost": lost(self.races), "memory": self.memory}
        report = {"schema_version": 2, "machine": machine, "seed": SEED, **figures}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)


def line(model: str, threads: int, column: str, cell: Cell) -> str:
    """Return a cell as text."""
    head = f"{model:22} {threads} {column:15}"
    if "failed" in cell:
        return f"{head} {cell['failed']}"
    low, mid, high = cell["ratio"]
    figures = (
        f"{mid:6.2f}x [{low:.2f}, {high:.2f}] {cell['ms']:9.4g} ms",
        f"prepared in {cell['preparation_s']:6.1f} s{_from_cache(cell)}",
        f"error {cell['error']:.0e}{_beside(cell)}",
        f"{cell['held_bytes'] / 2**20:+6.0f} MiB",
        "page faults {column} (eager {eager})".format(**cell["page_faults"]) if "page_faults" in cell else "",
        "in one thread: more stall" if cell.get("in_one_thread") else "",
        _said(cell["notes"]),
    )
    return f"{head} " + "  ".join(filter(None, figures))


def _beside(cell: Cell) -> str:
    """Say what errors of eager's gradients an error of a training step is to be seen beside."""
    named = {"eager": "eager_error", "eager moved": "eager_moves", "in float64": "error_in_float64"}
    said = [f"{name} {cell[key]:.0e}" for name, key in named.items() if key in cell]
    return f" ({', '.join(said)})" if said else ""


def _said(notes: Mapping[str, Any]) -> str:
    """Say what was rewritten; where nothing was, why the last one was not."""
    if not notes:
        return ""
    if notes["applied"]:
        return ", ".join(f"{count} {name}" for name, count in notes["applied"].items())
    return f"nothing applied: {notes['reasons'][-1] if notes['reasons'] else 'no sites'}"


def _from_cache(cell: Cell) -> str:
    again = cell.get("from_cache", {"failed": ""})
    return "" if "failed" in again else f", from the cache in {again['preparation_s']:.1f} s"


def summary(report: Report, models: Sequence[str], threads: int) -> Iterator[str]:
    """Say which aims are reached, with figures."""
    rows = {model: report.row(model, threads) for model in models}
    for model, row in rows.items():
        for column, cell in row.items():
            yield from (f"{model:22} {column:6} {each}" for each in judged(model, column, cell))
    for column, aim in MEANS.items():
        found = [
            ratio for model, row in rows.items() if not CASES[model].labels and (ratio := ratio_of(row.get(column)))
        ]
        if found:
            mean, over = math.exp(math.fsum(map(math.log, found)) / len(found)), f"over {len(found)} models"
            yield f"{'geometric mean':22} {column:6} {reached(mean >= aim)}: {mean:.2f}x of {aim}x, {over}"


def measure_cells(report: Report, of: argparse.Namespace) -> None:
    for model in of.models:
        for threads in of.threads:
            for column in of.columns:
                cell = report.row(model, threads).get(column)
                if not (of.show or (of.missing and ratio_of(cell))):
                    cell = report.row(model, threads)[column] = cell_of(model, column, threads, of.seconds, of.limit)
                    report.write()
                if cell is not None:
                    print(line(model, threads, column, cell), flush=True)


def measure_races(report: Report, of: argparse.Namespace) -> None:
    for model in (each for each in of.models if not CASES[each].labels):
        for threads in of.threads:
            for precision, columns in RACES.items():
                race = report.raced(model, threads).get(precision)
                is_found = race is not None and "failed" not in race
                if columns[0] in of.columns and not (of.show or (of.missing and is_found)):
                    race = race_of(model, precision, of.columns, threads, of.pairs, of.limit)
                    report.raced(model, threads)[precision] = race
                    report.write()
                if race is not None:
                    print(f"{model:22} {threads} {precision:15} {race_verdict(race, threads)[1]}", flush=True)


def measure_memory(report: Report, of: argparse.Namespace) -> None:
    for model in (each for each in of.models if not CASES[each].labels):
        if not (of.show or (of.missing and "failed" not in report.memory.get(model, {"failed": ""}))):
            report.memory[model] = memory_of(model, of.limit)
            report.write()
        if found := report.memory.get(model):
            kept = {name: f"{size / 2**20:.0f} MiB" for name, size in found.items() if isinstance(size, int)}
            print(f"{model:22} {found.get('failed') or kept}", flush=True)


def print_tables(report: Report, of: argparse.Namespace) -> None:
    for threads in of.threads:
        if "cells" in of.parts:
            rows = {model: row for model in of.models if (row := report.row(model, threads))}
            print(*tables(rows, of.columns), "", sep="\n")
        if "races" in of.parts:
            races = {model: row for model in of.models if (row := report.raced(model, threads))}
            print(*race_table(races, threads), sep="\n")
    if "memory" in of.parts:
        print(*memory_table({model: report.memory[model] for model in of.models if model in report.memory}), sep="\n")


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        job, threads, found = sys.argv[2:]
        do_here(json.loads(job), int(threads), Path(found))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES), metavar="MODEL")
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS), metavar="COLUMN")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of sampling in each cell")
    parser.add_argument("--pairs", type=int, default=30, help="rounds of a race")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a process may take")
    parser.add_argument("--missing", action="store_true", help="leave out what the file has figures of")
    parser.add_argument("--show", action="store_true", help="measure nothing: print what the file has")
    parser.add_argument("--table", action="store_true", help="measure nothing: print what the file has, in Markdown")
    parser.add_argument("--json", type=Path, help="file to add measurements to")
    of = parser.parse_args()
    report = Report(of.json)
    if of.table:
        print_tables(report, of)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    measure = {"cells": measure_cells, "races": measure_races, "memory": measure_memory}
    for part in of.parts:
        measure[part](report, of)
    for threads in of.threads if "cells" in of.parts else ():
        print(f"\naims in {threads} thread{'s' * (threads > 1)}", *summary(report, of.models, threads), sep="\n")
    if "races" in of.parts:
        print("\nbehind another column:", *(lost(report.races) or ["none"]), sep="\n")


if __name__ == "__main__":
    main()
