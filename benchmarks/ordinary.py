"""Ordinary models of real size beside eager: fxopt, torch.compile, onnxruntime and OpenVINO, in one thread and in two.

    python benchmarks/ordinary.py --json benchmarks/results/ordinary.json
    python benchmarks/ordinary.py --models resnet-18 "mlp, batch 1" --columns exact compile --threads 1 --seconds 1
    python benchmarks/ordinary.py --show --json benchmarks/results/ordinary.json
    python benchmarks/ordinary.py --table --json benchmarks/results/ordinary.json

Weights and inputs are random, from a committed seed. Each cell is measured in a process of its own, in which calls of
eager and of the column take turns; a ratio is eager's time over the column's, with its interval of 95%. Preparation is
everything up to the end of the first call, without imports. Errors are relative to the largest value of the result in
float64 (of a training step: of the gradients). Gradients behind a ReLU jump where it falls on its other side, in eager
as well: training rows also say what eager's own gradients are off by, and how far they move where weights are off by
rounding (32 units in the last place; for bfloat16, half a unit of it). An error of up to twice that is not held against
a column; in float64, gradients of exact passes must be those of eager. Memory is what the process holds beyond the
model, and at most while preparing. Page faults make eager slower in some processes: glibc gives large blocks back to
the system at each call until a process has freed a few of them. What fails, or takes too long, is a cell with its
reason. The file is written after each cell: an interrupted run keeps what it has, and `--missing` goes on with the
rest.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import described
from ordinary_models import CASES, COLUMNS, IN_TRAINING, SEED, measured, tables

FLOOR = 0.95
MEANS = {"exact": 1.3, "bf16": 2.0}
"""What the geometric mean over the models in evaluation is to reach."""

_RESPONSE = 2.0
"""Gradients may be off by twice what those of eager move."""

_SAME = 1e-9
"""In float64, gradients that are off by more are others."""

Cell = dict[str, Any]


def alone(model: str, column: str, threads: int, seconds: float, limit: float) -> Cell:
    """Measure a cell in a process of its own, or say in one line why there is none."""
    if CASES[model].labels and column not in IN_TRAINING:
        return {"failed": "does not train"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "cell.json"
        command = [sys.executable, __file__, "--cell", model, column, str(threads), str(seconds), str(found)]
        ended = _ended(command, _environment(folder, threads), limit)
        if found.exists():
            return json.loads(found.read_text(encoding="utf-8"))
    return {"failed": ended}


def _environment(folder: str, threads: int) -> dict[str, str]:
    """Return variables for a process that takes nothing from a cache."""
    count = str(threads)
    return {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TORCHINDUCTOR_CACHE_DIR": folder}


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


def measure_here(model: str, column: str, threads: int, seconds: float, found: Path) -> None:
    """Measure a cell in this process, and write it to a file."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    load = os.getloadavg()[0]
    try:
        cell = measured(model, column, threads, seconds)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        cell = {"failed": f"{type(error).__name__}: {message}"[:300]}
    cell["load_average"] = [round(load, 1), round(os.getloadavg()[0], 1)]
    found.write_text(json.dumps(cell), encoding="utf-8")


class Report:
    """All cells, by model, number of threads and column; kept in a file where one is named."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.cells: dict[str, dict[str, dict[str, Cell]]] = {}
        if path is not None and path.exists():
            self.cells = json.loads(path.read_text(encoding="utf-8"))["cells"]

    def row(self, model: str, threads: int) -> dict[str, Cell]:
        """Return the cells of one model at a number of threads."""
        return self.cells.setdefault(model, {}).setdefault(str(threads), {})

    def keep(self, model: str, threads: int, column: str, cell: Cell) -> None:
        """Take a cell in, and write the file anew: all of it, or none."""
        self.row(model, threads)[column] = cell
        if self.path is None:
            return
        machine = {**described(), "threads": "by cell", "capability": torch.backends.cpu.get_cpu_capability()}
        report = {"schema_version": 1, "machine": machine, "seed": SEED, "cells": self.cells}
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
        f"prepared in {cell['preparation_s']:6.1f} s",
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


def ratio_of(cell: Cell | None) -> float | None:
    """Return the ratio of a cell, if there is one."""
    return None if cell is None or "failed" in cell else float(cell["ratio"][1])


def summary(report: Report, models: Sequence[str], threads: int) -> Iterator[str]:
    """Say which aims are reached, with figures."""
    rows = {model: report.row(model, threads) for model in models}
    for model, row in rows.items():
        for column, cell in row.items():
            yield from (f"{model:22} {column:6} {each}" for each in _judged(model, column, cell))
    for column, aim in MEANS.items():
        found = [
            ratio for model, row in rows.items() if not CASES[model].labels and (ratio := ratio_of(row.get(column)))
        ]
        if found:
            mean, over = math.exp(math.fsum(map(math.log, found)) / len(found)), f"over {len(found)} models"
            yield f"{'geometric mean':22} {column:6} {_reached(mean >= aim)}: {mean:.2f}x of {aim}x, {over}"


def _judged(model: str, column: str, cell: Cell) -> Iterator[str]:
    case, ratio = CASES[model], ratio_of(cell)
    aim, budget = case.aims.get(column), case.budget(column)
    if budget is None:
        return
    if ratio is None:
        yield f"{'not reached' if aim else 'no figure'}: {cell['failed']}"
        return
    if aim is not None:
        yield f"{_reached(ratio >= aim)}: {ratio:.2f}x of {aim}x"
    if ratio < FLOOR:
        yield f"not reached: {ratio:.2f}x, below {FLOOR}"
    allowed = max(budget, _RESPONSE * cell.get("eager_moves", 0.0))
    if cell["error"] > allowed:
        yield f"not reached: error {cell['error']:.0e} of {allowed:.0e}"
    if cell.get("error_in_float64", 0.0) > _SAME:
        yield f"not reached: error {cell['error_in_float64']:.0e} in float64"
    if column == "exact" and case.preparation:
        taken = cell["preparation_s"]
        yield f"{_reached(taken <= case.preparation)}: {taken:.1f} s of {case.preparation:.0f} s to prepare"


def _reached(is_so: bool) -> str:
    return "reached" if is_so else "not reached"


def main() -> None:
    if sys.argv[1:2] == ["--cell"]:
        model, column, threads, seconds, found = sys.argv[2:]
        measure_here(model, column, int(threads), float(seconds), Path(found))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES), metavar="MODEL")
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS), metavar="COLUMN")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=3.0, help="of sampling in each cell")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that the process of a cell may take")
    parser.add_argument("--missing", action="store_true", help="leave out cells that the file has figures of")
    parser.add_argument("--show", action="store_true", help="measure nothing: print what the file has")
    parser.add_argument("--table", action="store_true", help="measure nothing: print what the file has, in Markdown")
    parser.add_argument("--json", type=Path, help="file to add cells to")
    arguments = parser.parse_args()
    report = Report(arguments.json)
    if arguments.table:
        for threads in arguments.threads:
            rows = {model: report.row(model, threads) for model in arguments.models}
            print(*tables({model: row for model, row in rows.items() if row}, arguments.columns), sep="\n")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    for model in arguments.models:
        for threads in arguments.threads:
            for column in arguments.columns:
                cell = report.row(model, threads).get(column)
                if not (arguments.show or (arguments.missing and ratio_of(cell))):
                    cell = alone(model, column, threads, arguments.seconds, arguments.limit)
                    report.keep(model, threads, column, cell)
                if cell is not None:
                    print(line(model, threads, column, cell), flush=True)
    for threads in arguments.threads:
        print(f"\naims in {threads} thread{'s' * (threads > 1)}", *summary(report, arguments.models, threads), sep="\n")


if __name__ == "__main__":
    main()
