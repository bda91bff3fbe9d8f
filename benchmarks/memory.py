"""What training takes in memory and time: checkpoint, beside blocks checkpointed by hand and torch.compile's budget.

    python benchmarks/memory.py --json benchmarks/results/memory.json

GPT-2 of 24 blocks, ResNet-50 and 18, DenseNet-121, a vision transformer and a U-Net, on one thread. Bytes come from
torch's profiler, which sees every allocation, and are exact: what is alive after the forward (but for its result), and
the most at once in a step, gradients included; those of parameters are there already. Steps are timed in turn, in
processor time; ratios to the plain model are medians over rounds. `by hand` checkpoints as many of the first blocks as
the share that is not kept. `torch.compile` has its backend `aot_eager`: its partitioner decides what is computed again,
and no kernels are generated.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import described
from training_memory import BUDGETS, MODELS, Column, Subject, columns, step, used

from fxopt.passes.timing import Timings

PLAIN = "plain 1.0"
NO_MORE = 1.02
"""Of the memory and the time of another way: so much counts as no more, since timings are noisy."""


def name_of(column: Column) -> str:
    return f"{column.kind} {column.budget}"


def measured(subject: Subject, rounds: int, compiled_for: Sequence[float]) -> list[dict[str, Any]]:
    """Return the figures of every column for one model."""
    torch.manual_seed(0)
    model, example = subject.make().train(), subject.example()
    made = list(columns(subject, model, example, compiled_for))
    rows = [{"kind": c.kind, "budget": c.budget, "refused": c.why} for c in made]
    for row, column in zip(rows, made, strict=True):
        if not column.why:
            use = used(column.call, column.model, example)
            row.update(live=use.live, peak=use.peak)
    possible = [column for column in made if not column.why]
    timings = Timings([timed(possible, example) for _ in range(rounds)])
    for row, column in zip(rows, made, strict=True):
        if not column.why and column.kind != "plain":
            ratio = timings.ratio(name_of(column), PLAIN)
            row.update(time=ratio.mid, time_low=ratio.low, time_high=ratio.high)
    rows[0].update(time=1.0, time_low=1.0, time_high=1.0)
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return rows


def timed(made: Sequence[Column], example: torch.Tensor) -> dict[str, float]:
    """Return the seconds of a step of every column, one after another."""
    found: dict[str, float] = {}
    for column in made:
        gc.collect()
        start = time.process_time()
        step(column.call, example)
        found[name_of(column)] = time.process_time() - start
    return found


def beaten(rows: Sequence[dict[str, Any]], kind: str, memory: str) -> dict[str, float | None]:
    """Return for each budget of another way the time of the fastest fxopt that takes no more memory, over its own."""
    ours = [row for row in rows if row["kind"] in ("fxopt", "plain") and not row["refused"]]
    found: dict[str, float | None] = {}
    for row in (row for row in rows if row["kind"] == kind):
        fits = [mine["time"] for mine in ours if mine[memory] <= NO_MORE * row[memory]]
        found[str(row["budget"])] = min(fits) / row["time"] if fits else None
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="a part of the name of a model")
    parser.add_argument("--compiled-for", type=float, nargs="*", default=BUDGETS, help="budgets of torch.compile")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": described(), "rounds": options.rounds, "models": {}}
    for name, subject in MODELS.items():
        if options.only and options.only not in name:
            continue
        rows = measured(subject, options.rounds, options.compiled_for)
        pairs = [(kind, memory) for kind in ("by hand", "torch.compile") for memory in ("peak", "live")]
        front = {f"{kind}, {memory}": beaten(rows, kind, memory) for kind, memory in pairs}
        print(name, json.dumps(front), flush=True)
        results["models"][name] = {"rows": rows, "time over that of": front}
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
