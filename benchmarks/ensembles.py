"""Fused ensembles beside the loop, `torch.func.vmap`, each fixed lowering and, on request, torch.compile.

    python benchmarks/ensembles.py --cells 24 --json benchmarks/results/ensembles.json

Every cell is one model, batch size and phase, drawn from a committed seed; its columns are timed in one run,
interleaved, on one thread. A floor fails only where the 95% interval of the ratio lies wholly below it. `cold` is what
`measure="cold"` chose, beside the loop, both with caches emptied before each call, as other work between calls does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import described
from torch import Tensor, nn

import fxopt
from fxopt.passes.timing import Timings, time_candidates

SEED = 20261121
LOWERINGS = ("wide", "wide_input_first", "bmm", "grouped_conv", "vmap")
BATCHES = (1, 32, 256)
MEMBERS = (2, 4, 8, 16, 32, 64, 128)
WIDTHS = (8, 16, 32, 64, 128, 256)
DEPTHS = (1, 2, 3)
FLOOR = 0.95
NEAR_BEST = 0.90


@dataclass(frozen=True)
class Cell:
    """One model (members of equal layers, sharing their input), batch size and phase."""

    members: int
    inside: int
    hidden: int
    outside: int
    depth: int
    batch: int
    training: bool

    def __str__(self) -> str:
        layers = "-".join(map(str, [self.inside, *[self.hidden] * (self.depth - 1), self.outside]))
        return f"{self.members}x[{layers}] b{self.batch} {'train' if self.training else 'eval'}"


class Ensemble(nn.Module):
    """Concatenate the outputs of equal multi-layer perceptrons."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.heads = nn.ModuleList(member(cell) for _ in range(cell.members))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


def member(cell: Cell) -> nn.Sequential:
    sizes = [cell.inside, *[cell.hidden] * (cell.depth - 1), cell.outside]
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def draw(count: int, seed: int = SEED) -> list[Cell]:
    """Return the cells that the issue names, then cells drawn from the seed."""
    named = [Cell(128, 16, 32, 4, 2, batch, training) for batch in BATCHES for training in (False, True)]
    named += [Cell(8, 256, 512, 64, 2, 256, training) for training in (False, True)]
    generator = random.Random(seed)
    while len(named) < count:
        cell = Cell(
            members=generator.choice(MEMBERS),
            inside=generator.choice(WIDTHS),
            hidden=generator.choice(WIDTHS),
            outside=generator.choice(WIDTHS[:4]),
            depth=generator.choice(DEPTHS),
            batch=generator.choice(BATCHES),
            training=generator.random() < 0.5,
        )
        if cell not in named:
            named.append(cell)
    return named[:count]


def vmapped(model: Ensemble) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """Return the ensemble as a user would write it with `torch.func`, and its stacked parameters."""
    parameters, buffers = torch.func.stack_module_state(list(model.heads))
    skeleton = model.heads[0]

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(skeleton, (parameters, buffers), (x,))

    def run(x: Tensor) -> Tensor:
        return torch.func.vmap(one, (0, 0, None))(parameters, buffers, x).movedim(0, -2).flatten(-2)

    return run, list(parameters.values())


def runner(
    function: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, training: bool
) -> Callable[[], object]:
    """Return one step: forward without gradients, or forward and backward to the parameters.

    The gradient that comes from above is an ordinary dense tensor, as losses give it; that of `sum()` is one number
    expanded, which some kernels take a shortcut for.
    """
    if not training:

        def infer() -> object:
            with torch.no_grad():
                return function(x)

        return infer

    upstream = torch.randn_like(function(x))

    def step() -> object:
        return torch.autograd.grad(function(x), parameters, upstream)

    return step


def measure(cell: Cell, *, compiled: bool, seconds: float) -> dict[str, Any]:
    """Return one row: each column's speed-up over the loop with its interval, and what fxopt chose."""
    torch.manual_seed(0)
    model = Ensemble(cell).train(cell.training)
    x = torch.randn(cell.batch, cell.inside)
    start = time.perf_counter()
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=(x,))
    spent = time.perf_counter() - start
    functions = {"loop": (model, list(model.parameters())), "fxopt": (fast, list(fast.parameters()))}
    for lowering in LOWERINGS:
        fixed = fxopt.optimize(model, f"fuse_ensembles{{lowering={lowering}}}", example_inputs=(x,), measure=False)
        functions[lowering] = (fixed, list(fixed.parameters()))
    functions["torch.func.vmap"] = vmapped(model)
    if compiled:
        functions["torch.compile"] = (torch.compile(model), list(model.parameters()))
    runs = {name: runner(f, parameters, x, cell.training) for name, (f, parameters) in functions.items()}
    timings = time_candidates(runs, seconds=seconds)
    return {
        "cell": asdict(cell),
        "name": str(cell),
        "choice": chosen(fast),
        "optimize_s": spent,
        **columns(timings, list(runs)),
        "cold": cold_column(model, x, cell.training, seconds),
    }


def cold_column(model: nn.Module, x: Tensor, training: bool, seconds: float) -> dict[str, Any]:
    """Return what fxopt chooses for calls between other work, and its speed-up over the loop in such calls."""
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=(x,), measure="cold")
    both = {"loop": model, "fxopt": fast}
    runs = {name: runner(each, list(each.parameters()), x, training) for name, each in both.items()}
    timings = time_candidates(runs, seconds=seconds, cold=True)
    ratio = timings.ratio("loop", "fxopt")
    return {
        "choice": chosen(fast),
        "loop_us": timings.microseconds("loop"),
        "speedup": [round(v, 3) for v in (ratio.low, ratio.mid, ratio.high)],
    }


def chosen(model: nn.Module) -> str:
    decisions = fxopt.plan(model).decisions
    return next((d.choice or "" for d in decisions if d.status == "applied"), "loop")


def columns(timings: Timings, names: list[str]) -> dict[str, Any]:
    speedups = {name: timings.ratio("loop", name) for name in names if name != "loop"}
    rivals = [name for name in names if name != "fxopt"]
    best = timings.fastest(prefer=rivals)
    near = timings.ratio(best, "fxopt")
    return {
        "loop_us": timings.microseconds("loop"),
        "speedup": {name: [round(v, 3) for v in (s.low, s.mid, s.high)] for name, s in speedups.items()},
        "best": best,
        "fxopt_over_best": [round(v, 3) for v in (near.low, near.mid, near.high)],
    }


def row(result: dict[str, Any]) -> str:
    speedups = result["speedup"]
    cells = "  ".join(f"{name} {value[1]:6.2f}x" for name, value in speedups.items())
    cold = f"cold {result['cold']['speedup'][1]:6.2f}x as {result['cold']['choice']}"
    verdict = f"{cold}  chose {result['choice']:12s} best {result['best']:12s} {result['optimize_s']:.2f} s"
    return f"{result['name']:34s} {cells}  {verdict}"


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    slow = [r["name"] for r in results if r["speedup"]["fxopt"][2] < FLOOR]
    far = [r["name"] for r in results if r["fxopt_over_best"][2] < NEAR_BEST]
    return {
        "cells": len(results),
        "below_floor_of_loop": slow,
        "over_10_percent_from_best": far,
        "share_within_10_percent": round(1 - len(far) / len(results), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=2.0, help="timing budget of a cell")
    parser.add_argument("--compile", action="store_true", help="add torch.compile (15 to 40 s a cell)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for cell in draw(arguments.cells):
        results.append(measure(cell, compiled=arguments.compile, seconds=arguments.seconds))
        print(row(results[-1]), flush=True)
    report = {"schema_version": 1, "seed": SEED, "machine": described(), "summary": summary(results), "cells": results}
    print(json.dumps(report["summary"], indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
