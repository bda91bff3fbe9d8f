"""`fxopt.layers.MixtureOfExperts` beside a loop over modules, a loop over stacked parameters, and `transformers`.

    python benchmarks/moe.py --cells 108 --json benchmarks/results/moe.json

Every cell is a mixture, a number of tokens, a phase and a dtype; all 108 are shuffled by a committed seed, the two with
targets of their own first, and the first `--cells` are measured. Columns are whole blocks with equal weights, router
included: SwiGLU experts, softmax over the chosen. They are timed in one run, interleaved, on one thread, in at least 30
rounds. A floor fails only where the 95% interval of the ratio lies wholly below it.

Outputs must be equal, but for rounding. Tokens that get other experts, as fxopt's router computes in float32, are left
out; they may be one and 5% of all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import described
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.mixtral import modeling_mixtral as mixtral

import fxopt
from fxopt.layers import MixtureOfExperts
from fxopt.passes.timing import Interval, Timings, time_candidates

SEED = 20261122
EXPERTS, TOP_K, TOKENS = (8, 16, 64), (2, 4, 8), (1, 32, 512)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WIDTH, HIDDEN = 256, 64
FLOOR = 0.95
TARGETS = {False: 3.0, True: 1.8}
"""Times as fast as the loop over modules in float32, 64 experts, 8 of them for each of 32 tokens; by training."""
ROUNDS = 30
OTHER_EXPERTS = 0.05
LARGEST_ERROR = 0.02
"""Of a token's output, relative to it."""
LARGEST_COPY = 2**28
"""Bytes of weights that `batched_mm` of transformers may copy."""


@dataclass(frozen=True)
class Cell:
    """One mixture, number of tokens, phase and dtype."""

    experts: int
    top_k: int
    tokens: int
    training: bool
    dtype: str

    def __str__(self) -> str:
        phase = "train" if self.training else "eval"
        return f"{self.experts} experts, {self.top_k} each, {self.tokens} tokens, {phase}, {self.dtype}"

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    @property
    def has_floor(self) -> bool:
        """Tell whether fxopt must not be slower than the best: in training only where pairs can reach every expert."""
        return not self.training or self.pairs >= self.experts


def cells(seed: int = SEED) -> list[Cell]:
    """Return all cells: those with targets, then the others as the seed shuffles them."""
    every = [Cell(*values) for values in itertools.product(EXPERTS, TOP_K, TOKENS, (False, True), DTYPES)]
    named = [Cell(64, 8, 32, training, "float32") for training in TARGETS]
    others = [cell for cell in every if cell not in named]
    random.Random(seed).shuffle(others)
    return [*named, *others]


class Expert(nn.Module):
    """One expert as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Loop(nn.Module):
    """A mixture as a loop over the experts in use; `expert` gives the output of one."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.experts_in_all, self.top_k = cell.experts, cell.top_k
        self.router = nn.Linear(WIDTH, cell.experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.router(x).float().softmax(-1).topk(self.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        output = torch.zeros_like(x)
        for number in indices.unique().tolist():
            rows, slots = torch.where(indices == number)
            output.index_add_(0, rows, self.expert(number, x[rows]) * weights[rows, slots, None])
        return output

    def expert(self, number: int, x: Tensor) -> Tensor:
        raise NotImplementedError


class ModuleLoop(Loop):
    """Separate modules in a `ModuleList`."""

    def __init__(self, cell: Cell, layer: MixtureOfExperts) -> None:
        super().__init__(cell)
        self.experts = nn.ModuleList(Expert() for _ in range(cell.experts))
        self.to(layer.down_proj.dtype)
        self.router.weight.data.copy_(layer.router.weight)
        for number, expert in enumerate(self.experts):
            gate, up = layer.gate_up_proj[number].chunk(2)
            for linear, weight in zip(expert.children(), (gate, up, layer.down_proj[number]), strict=True):
                linear.weight.data.copy_(weight)

    def expert(self, number: int, x: Tensor) -> Tensor:
        return self.experts[number](x)


class StackedLoop(Loop):
    """Stacked parameters, indexed in the loop."""

    def __init__(self, cell: Cell, layer: MixtureOfExperts) -> None:
        super().__init__(cell)
        self.to(layer.down_proj.dtype)
        self.router.weight.data.copy_(layer.router.weight)
        self.gate_up_proj = nn.Parameter(layer.gate_up_proj.detach().clone())
        self.down_proj = nn.Parameter(layer.down_proj.detach().clone())

    def expert(self, number: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj[number]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj[number])


def theirs(cell: Cell, layer: MixtureOfExperts, implementation: str) -> nn.Module:
    """Return Mixtral's block; it takes three dimensions."""
    config = mixtral.MixtralConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=cell.experts, num_experts_per_tok=cell.top_k
    )
    config._experts_implementation = implementation
    block = mixtral.MixtralSparseMoeBlock(config).to(layer.down_proj.dtype)
    block.gate.weight.data.copy_(layer.router.weight)
    block.experts.gate_up_proj.data.copy_(layer.gate_up_proj)
    block.experts.down_proj.data.copy_(layer.down_proj)
    return block


def columns(cell: Cell, x: Tensor) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the models by column, and the columns that cannot be had, with the reason."""
    layer = MixtureOfExperts(WIDTH, HIDDEN, cell.experts, cell.top_k, dtype=DTYPES[cell.dtype])
    models = {"module_loop": ModuleLoop(cell, layer), "fxopt": layer, "stacked_loop": StackedLoop(cell, layer)}
    models |= {f"transformers_{name}": theirs(cell, layer, name) for name in ("eager", "grouped_mm", "batched_mm")}
    omitted: dict[str, str] = {}
    copied = cell.pairs * 3 * WIDTH * HIDDEN * layer.down_proj.itemsize
    if copied > LARGEST_COPY:
        del models["transformers_batched_mm"]
        omitted["transformers_batched_mm"] = f"it would copy {copied / 2**20:.0f} MiB of weights"
    for model in models.values():
        model.train(cell.training)
    if "fuse_experts" in fxopt.list_passes():
        models["fuse_experts"] = fxopt.optimize(models["module_loop"], "fuse_experts", example_inputs=(x,))
    else:
        omitted["fuse_experts"] = "there is no such pass"
    return models, omitted


def step(model: nn.Module, x: Tensor, upstream: Tensor, *, training: bool) -> Callable[[], Any]:
    """Return one forward without gradients, or one with those of all parameters; losses give a dense `upstream`."""
    x = x[None] if isinstance(model, mixtral.MixtralSparseMoeBlock) else x

    def infer() -> Tensor:
        with torch.no_grad():
            return model(x).view_as(upstream)

    def train() -> Tensor:
        output = model(x).view_as(upstream)
        torch.autograd.grad(output, list(model.parameters()), upstream, allow_unused=True)
        return output

    return train if training else infer


def measure(cell: Cell, *, seconds: float) -> dict[str, Any]:
    """Return one row: each column's speed-up over the loop over modules with its interval, and fxopt over the best."""
    torch.manual_seed(0)
    x = torch.randn(cell.tokens, WIDTH, dtype=DTYPES[cell.dtype])
    models, omitted = columns(cell, x)
    upstream = torch.randn_like(x)
    steps = {name: step(model, x, upstream, training=cell.training) for name, model in models.items()}
    check(steps, agreeing(models, x))
    timings = time_candidates(steps, seconds=seconds, least_rounds=ROUNDS)
    return {"cell": asdict(cell), "name": str(cell), "omitted": omitted, **compared(timings, list(steps))}


def agreeing(models: dict[str, nn.Module], x: Tensor) -> Tensor:
    """Tell which tokens get the same experts from fxopt's router, in float32, as from one in their dtype [tokens]."""
    ours = models["fxopt"].router(x)[1]
    loop = models["module_loop"]
    others = loop.router(x).float().softmax(-1).topk(loop.top_k).indices
    agree = (ours.sort(-1).values == others.sort(-1).values).all(1)
    apart = int((~agree).sum())
    assert apart <= 1 + OTHER_EXPERTS * len(x), f"{apart} of {len(x)} tokens get other experts"
    return agree


def check(steps: dict[str, Callable[[], Tensor]], agree: Tensor) -> None:
    """Make sure that all columns compute the same for every token, but for rounding; fxopt where experts `agree`."""
    outputs = {name: run().detach().float() for name, run in steps.items()}
    expected = outputs["module_loop"]
    for name, output in outputs.items():
        errors = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
        error = float((errors[agree] if name == "fxopt" else errors).amax()) if agree.any() else 0.0
        assert error < LARGEST_ERROR, f"{name} is off by {error:.3f}"


def compared(timings: Timings, names: list[str]) -> dict[str, Any]:
    rivals = [name for name in names if name not in ("fxopt", "fuse_experts")]
    best = timings.quickest(rivals)
    over_best = {name: timings.ratio(best, name) for name in names if name not in rivals}
    speedups = {name: timings.ratio("module_loop", name) for name in names if name != "module_loop"}
    return {
        "rounds": len(timings.rounds),
        "module_loop_us": timings.microseconds("module_loop"),
        "speedup": {name: interval(s) for name, s in speedups.items()},
        "best": best,
        "over_best": {name: interval(s) for name, s in over_best.items()},
    }


def interval(ratio: Interval) -> list[float | None]:
    """Return its lower end, middle and upper end; the ends of one that dropped out, far slower, are not known."""
    return [round(v, 3) if math.isfinite(ratio.high) or v == ratio.mid else None for v in astuple(ratio)]


def is_slow(result: dict[str, Any]) -> bool:
    """Tell whether fxopt is below the floor: by the upper end, or where that is not known, by the middle."""
    _, mid, high = result["over_best"]["fxopt"]
    return (mid if high is None else high) < FLOOR


def row(result: dict[str, Any]) -> str:
    shown = "  ".join(
        f"{name.removeprefix('transformers_')} {value[1]:.2f}x" for name, value in result["speedup"].items()
    )
    low, mid, high = result["over_best"]["fxopt"]
    ends = "no interval" if high is None else f"[{low:.2f}, {high:.2f}]"
    return f"{result['name']:52s} {mid:.2f} {ends:12s} of {result['best']:24s} {shown}"


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    slow = [result for result in results if is_slow(result)]
    reached = {
        str(Cell(64, 8, 32, training, "float32")): {"target": target, "reached": result["speedup"]["fxopt"]}
        for training, target in TARGETS.items()
        for result in results
        if result["name"] == str(Cell(64, 8, 32, training, "float32"))
    }
    return {
        "cells": len(results),
        "below_floor_of_best": [r["name"] for r in slow if Cell(**r["cell"]).has_floor],
        "training_with_fewer_pairs_than_experts": {
            r["name"]: r["over_best"]["fxopt"][1] for r in results if not Cell(**r["cell"]).has_floor
        },
        "targets_over_module_loop": reached,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=2.0, help="timing budget of a cell")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before, every, results = os.getloadavg()[0], cells(), list[dict[str, Any]]()
    for cell in every[: arguments.cells]:
        results.append(measure(cell, seconds=arguments.seconds))
        print(row(results[-1]), flush=True)
    report = {
        "schema_version": 1,
        "seed": SEED,
        "machine": {**described(), "load_average": [round(before, 1), round(os.getloadavg()[0], 1)]},
        "summary": summary(results),
        "omitted": [str(cell) for cell in every[arguments.cells :]],
        "cells": results,
    }
    print(json.dumps(report["summary"], indent=2))
    print(f"{len(report['omitted'])} of {len(every)} cells omitted")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
