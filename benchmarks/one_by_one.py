"""Calls of a fused ensemble that no graph fits: its members run one by one, beside the same call of the eager model.

    python benchmarks/one_by_one.py --json benchmarks/results/one_by_one.json

Each round calls every column, interleaved, on one thread; ratios are eager processor time over that of the fused model.
Eager is there as it was made and as `copy.deepcopy` gives it: `optimize` works on such a copy, unless it is told
`inplace=True`, and where objects happen to lie in memory makes several percent.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import described
from torch import Tensor, nn

import fxopt
from fxopt.passes.timing import Timings

PHASES = ("inference", "forward with gradients", "training step")
RATIOS = (("copied", "fused"), ("made", "fused"), ("made", "fused in place"))
CALLS = 3


class Heads(nn.Module):
    """128 small members, and a flag that the examples do not show."""

    def __init__(self) -> None:
        super().__init__()
        members = (nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)) for _ in range(128))
        self.heads = nn.ModuleList(members)

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        x = -x if flag else x
        return torch.stack([head(x) for head in self.heads], 1)


def fused(model: nn.Module, inplace: bool) -> nn.Module:
    """Return the model with one graph, for calls without the flag."""
    examples = (torch.randn(8, 16),)
    options: dict[str, Any] = {"example_inputs": examples, "measure": False, "inplace": inplace}
    return fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", **options)


def runner(model: nn.Module, x: Tensor, phase: str) -> Callable[[], None]:
    """Return a few calls with the flag."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 1e-4)

    def call() -> None:
        with torch.set_grad_enabled(phase != "inference"):
            for _ in range(CALLS):
                output = model(x, True)
                if phase == "training step":
                    optimizer.zero_grad()
                    output.square().mean().backward()
                    optimizer.step()

    return call


def processor_seconds(call: Callable[[], None]) -> float:
    start = time.process_time()
    call()
    return (time.process_time() - start) / CALLS


def measure(models: dict[str, nn.Module], batch: int, phase: str, rounds: int) -> dict[str, Any]:
    """Return the ratios of one cell, each with its 95% interval."""
    x = torch.randn(batch, 16)
    runs = {name: runner(model.train(phase == "training step"), x, phase) for name, model in models.items()}
    rows = list[dict[str, float]]()
    gc.collect()
    for number in range(rounds + 3):
        names = list(runs)[number % len(runs) :] + list(runs)[: number % len(runs)]
        rows.append({name: processor_seconds(runs[name]) for name in names})
    timings = Timings(rows[3:])
    ratios = {f"{eager} / {fast}": timings.ratio(eager, fast) for eager, fast in RATIOS}
    return {
        "batch": batch, "phase": phase, "us": {name: round(timings.seconds(name) * 1e6) for name in runs},
        "ratios": {name: [round(value, 3) for value in (r.low, r.mid, r.high)] for name, r in ratios.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", fxopt.GuardWarning)
    load, made = os.getloadavg()[0], Heads()
    models = {"made": made, "copied": copy.deepcopy(made)}
    models |= {"fused": fused(made, inplace=False), "fused in place": fused(Heads(), inplace=True)}
    cells = [measure(models, batch, phase, arguments.rounds) for phase in PHASES for batch in (1, 32)]
    print(*(f"{cell['phase']:22} batch {cell['batch']:2}  {cell['ratios']}" for cell in cells), sep="\n")
    machine = {**described(), "load_average": [round(load, 1), round(os.getloadavg()[0], 1)]}
    report = {"schema_version": 1, "machine": machine, "rounds": arguments.rounds, "cells": cells}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
