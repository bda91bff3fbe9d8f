"""What fxopt itself costs, beside `torch.fx.symbolic_trace` and `recompile` of the same model.

    python benchmarks/overhead.py --json benchmarks/results/overhead.json

One round times every column once, one right after the other, on one thread; ratios are medians over rounds with 95%
intervals. What counts is processor time: these calls wait for nothing, and waiting for a busy machine is not their
cost. Each call starts with Python's garbage collected, so that nobody pays for what another left behind. Where objects
happen to lie in memory makes a few percent, the same in all rounds of a process: there are several processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import described
from torch import nn

import fxopt
from fxopt.demo import MultiHead, example_inputs
from fxopt.passes.timing import Timings

BASE = "torch.fx"
TARGET = 3.0
"""How many times the base `optimize` may take with verification and timing off."""

PROCESSES = 6

Columns = dict[str, Callable[[], object]]
Round = dict[str, float]


def columns(model: nn.Module) -> tuple[Columns, Columns]:
    """Return what is timed in every round, and what takes so long that a few rounds must do."""
    inputs = example_inputs()
    off = {"example_inputs": inputs, "verify": False, "measure": False}
    fast: Columns = {
        BASE: lambda: torch.fx.symbolic_trace(model).recompile(),
        "capture": lambda: fxopt.capture(model, inputs),
        "fuse_ensembles": lambda: fxopt.optimize(model, "fuse_ensembles", **off),
        "inference": lambda: fxopt.optimize(model, "inference", **off),
    }
    slow: Columns = {
        BASE: fast[BASE],
        "inference, verified and timed": lambda: fxopt.optimize(model, "inference", example_inputs=inputs),
    }
    return fast, slow


def timed(call: Callable[[], object]) -> float:
    """Return the processor seconds of one call."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def timed_rounds(heads: int, slow: bool, rounds: int) -> list[Round]:
    """Return the seconds of every column, first of its first call, then round by round."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    calls = columns(MultiHead(heads).eval())[slow]
    return [{name: timed(call) for name, call in calls.items()} for _ in range(1 + rounds)]


def measure(heads: int, slow: bool, rounds: int, processes: int) -> dict[str, Any]:
    """Return for each column its first call, its median and how many times the base it takes."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as one_by_one:
        runs = one_by_one.starmap(timed_rounds, [(heads, slow, rounds)] * processes, chunksize=1)
    timings = Timings([row for run in runs for row in run[1:]])
    result: dict[str, Any] = {}
    for name in runs[0][0]:
        ratio = timings.ratio(name, BASE)
        result[name] = {
            "first_ms": round(runs[0][0][name] * 1e3, 1),
            "ms": round(timings.seconds(name) * 1e3, 1),
            "times_base": [round(value, 2) for value in (ratio.low, ratio.mid, ratio.high)],
            "processes": processes,
            "rounds": processes * rounds,
        }
    return result


def row(heads: int, name: str, figures: dict[str, Any]) -> str:
    low, mid, high = figures["times_base"]
    return f"{heads:5} heads  {name:30} {figures['ms']:8.1f} ms  {mid:6.2f}x ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=12, help="of 128 heads in each process; larger models take fewer")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for heads in arguments.heads:
        rounds = max(2, arguments.rounds * 128 // max(heads, 128))
        figures = measure(heads, False, rounds, arguments.processes)
        if heads <= 128:
            figures = measure(heads, True, 2, arguments.processes) | figures
        results[str(heads)] = figures
        print(*(row(heads, name, value) for name, value in figures.items()), sep="\n", flush=True)
    report = {"schema_version": 1, "machine": described(), "target": TARGET, "heads": results}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
