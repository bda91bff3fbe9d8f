"""What the passes for several processes cost, beside the same model made parallel by hand.

    python benchmarks/parallel.py --json benchmarks/results/parallel.json

The processes of a way build both versions and step them in turns, on one thread each: a round is a step of each, one
right after the other, and the ratio is the median over rounds with its 95% interval. Peak memory is that of processes
that step only one version, after both were built, stepped once and let go, so that modules and kernels are loaded: what
the resident set of Linux grows to in the steps after the first ones, over what it was before that version was built.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import described, forget_peak, memory
from torch import distributed, nn
from ways import Step, all_ways

import fxopt
from fxopt.passes.timing import Timings

BUILDS = ("by_hand", "by_pass")
WARM_UP = 3
TARGET = 1.05


def stepped(step: Step) -> float:
    """Return the seconds of one step, from when all processes are there."""
    distributed.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def run_process(name: str, builds: list[str], rounds: int, rank: int, folder: Path) -> None:
    """Build and step the versions as one process of several; write down what it took."""
    way = all_ways()[name]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=way.processes)
    fxopt.optimize(nn.Linear(1, 1), "training", example_inputs=torch.ones(1, 1))  # imports
    for build in BUILDS:  # what a process needs once: modules, kernels, buffers of gloo
        getattr(way, build)()()
    forget_peak()
    before = memory("VmRSS")
    steps = {build: getattr(way, build)() for build in builds}
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    forget_peak()
    rows: list[dict[str, float]] = []
    for number in range(rounds):
        turn = builds if number % 2 else builds[::-1]
        rows.append({build: stepped(steps[build]) for build in turn})
    result = {"rows": rows, "peak": memory("VmHWM") - before}
    (folder / f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    distributed.destroy_process_group()


def run(name: str, builds: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return what each process of a way wrote down."""
    size = all_ways()[name].processes
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable, __file__, "--process", name, *builds, "--rounds", str(rounds), "--folder", folder]
        processes = [subprocess.Popen([*start, "--rank", str(rank)]) for rank in range(size)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{name}: a process failed")
        return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return step times and peak memory of both versions, and their ratios."""
    rows = run(name, list(BUILDS), rounds)[0]["rows"]
    timings = Timings(rows)
    ratio = timings.ratio("by_pass", "by_hand")
    peaks = {build: max(each["peak"] for each in run(name, [build], 3)) for build in BUILDS}
    return {
        "step_ms": {build: round(timings.seconds(build) * 1e3, 2) for build in BUILDS},
        "step_ratio": [round(value, 3) for value in (ratio.low, ratio.mid, ratio.high)],
        "peak_mb": {build: round(peak / 2**20, 1) for build, peak in peaks.items()},
        "peak_ratio": round(peaks["by_pass"] / peaks["by_hand"], 3),
        "rounds": rounds,
    }


def row(name: str, figures: dict[str, Any]) -> str:
    low, mid, high = figures["step_ratio"]
    steps, peaks = figures["step_ms"], figures["peak_mb"]
    step = (
        f"step {steps['by_hand']:7.1f} ms by hand {steps['by_pass']:7.1f} by pass {mid:5.2f}x ({low:.2f} to {high:.2f})"
    )
    peak = f"peak {peaks['by_hand']:7.1f} MB by hand {peaks['by_pass']:7.1f} by pass {figures['peak_ratio']:5.2f}x"
    return f"{name:20} {step}  {peak}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", help="by default all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    for hidden, kind in (("--rank", int), ("--folder", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--process", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        name, *builds = arguments.process
        return run_process(name, builds, arguments.rounds, arguments.rank, arguments.folder)
    results: dict[str, Any] = {}
    for name in arguments.ways or all_ways():
        results[name] = measure(name, arguments.rounds)
        print(row(name, results[name]), flush=True)
    report = {"schema_version": 1, "machine": described(), "target": TARGET, "ways": results}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
