"""Fused ensembles of convolutions, deep members with norms, attention, and unequal members, beside loop and lowerings.

    python benchmarks/ensembles_kinds.py --json benchmarks/results/ensembles_kinds.json

Cells are drawn from a committed seed, the kinds in turn. Columns of a cell are timed in one run, interleaved, on one
thread, in 30 rounds at the least. A floor fails only where the 95% interval of the ratio lies wholly below it.
Columns that cannot be had, and cells that no time was left for, are listed as omitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ensembles import SEED, cold_column, columns, runner, summary
from machine import described
from torch import Tensor, nn

import fxopt
from fxopt.passes.timing import time_candidates

LOWERINGS = ("wide", "bmm", "grouped_conv", "vmap")
ROUNDS = 30


@dataclass(frozen=True)
class Cell:
    """One model of members that share their input, batch size and phase."""

    kind: str
    members: int
    width: int
    depth: int
    batch: int
    training: bool

    def __str__(self) -> str:
        size = f"{self.members}x{self.width} depth {self.depth}"
        return f"{self.kind} {size} b{self.batch} {'train' if self.training else 'eval'}"


class Attention(nn.Module):
    """Self-attention with two heads in a residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Ensemble(nn.Module):
    """Concatenate what the members give."""

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members], dim=-1)


def convolutional(cell: Cell, _: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise([3, *[cell.width] * cell.depth]):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cell.width, 4))


def deep(cell: Cell, _: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(16, cell.width)]
    for _depth in range(cell.depth):
        layers += [nn.LayerNorm(cell.width), nn.GELU(), nn.Linear(cell.width, cell.width)]
    return nn.Sequential(*layers, nn.Linear(cell.width, 4))


def attending(cell: Cell, _: int) -> nn.Module:
    return nn.Sequential(*(Attention(cell.width) for _depth in range(cell.depth)), nn.Linear(cell.width, 4))


def unequal(cell: Cell, number: int) -> nn.Module:
    """Return members of three shapes in turn."""
    outside = (2, 3, 4)[number % 3]
    inner = [layer for _ in range(cell.depth) for layer in (nn.Linear(cell.width, cell.width), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, cell.width), nn.Tanh(), *inner, nn.Linear(cell.width, outside))


KINDS: dict[str, tuple[Callable[[Cell, int], nn.Module], tuple[int, ...]]] = {
    "cnn": (convolutional, (3, 12, 12)),
    "deep": (deep, (16,)),
    "attention": (attending, ()),
    "unequal": (unequal, (16,)),
}


def draw(count: int, seed: int = SEED) -> list[Cell]:
    """Return cells drawn from the seed, the kinds in turn."""
    generator, cells = random.Random(seed), list[Cell]()
    kinds = itertools.cycle(KINDS)
    while len(cells) < count:
        members, width = generator.choice((3, 8, 24)), generator.choice((8, 16, 32, 64))
        depth, batch = generator.choice((1, 2, 4)), generator.choice((1, 16, 64))
        cells.append(Cell(next(kinds), members, width, depth, batch, generator.random() < 0.5))
    return cells


def measure(cell: Cell, seconds: float) -> dict[str, Any]:
    """Return one row: each column's speed-up over the loop with its interval, and what fxopt chose."""
    torch.manual_seed(0)
    make, shape = KINDS[cell.kind]
    model = Ensemble([make(cell, number) for number in range(cell.members)]).train(cell.training)
    x = torch.randn(cell.batch, *(shape or (12, cell.width)))
    start = time.perf_counter()
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=(x,))
    spent = time.perf_counter() - start
    models, omitted = {"loop": model, "fxopt": fast}, dict[str, str]()
    for lowering in LOWERINGS:
        fixed = fxopt.optimize(model, f"fuse_ensembles{{lowering={lowering}}}", example_inputs=(x,), measure=False)
        reasons = [decision.reason for decision in fxopt.plan(fixed).decisions if decision.status != "applied"]
        if reasons:
            omitted[lowering] = "; ".join(dict.fromkeys(reasons))
        else:
            models[lowering] = fixed
    runs = {name: runner(each, list(each.parameters()), x, cell.training) for name, each in models.items()}
    timings = time_candidates(runs, seconds=seconds, least_rounds=ROUNDS)
    choices = [decision.choice or decision.status for decision in fxopt.plan(fast).decisions]
    return {
        "cell": asdict(cell), "name": str(cell), "choice": "; ".join(dict.fromkeys(choices)), "optimize_s": spent,
        "omitted": omitted, **columns(timings, list(runs)), "cold": cold_column(model, x, cell.training, seconds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0, help="timing budget of a cell")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no cell is begun")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, results, omitted = time.perf_counter(), list[dict[str, Any]](), list[str]()
    load = os.getloadavg()[0]
    for cell in draw(arguments.cells):
        if time.perf_counter() - start > arguments.limit:
            omitted.append(str(cell))
            continue
        results.append(measure(cell, arguments.seconds))
        row = results[-1]
        print(
            row["name"],
            row["choice"],
            row["speedup"]["fxopt"],
            row["best"],
            row["fxopt_over_best"],
            row["cold"],
            flush=True,
        )
    machine = {**described(), "load_average": [round(load, 1), round(os.getloadavg()[0], 1)]}
    report = {
        "schema_version": 1, "seed": SEED, "machine": machine, "summary": summary(results), "omitted": omitted,
        "cells": results,
    }  # fmt: skip
    print(json.dumps(report["summary"], indent=2), omitted)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
