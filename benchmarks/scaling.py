"""How the time of an optimization grows: with the nodes of one graph, and with the number of equal blocks.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

Nodes: capture, cleaning and verification beside `torch.fx.symbolic_trace` and `recompile` of the same model in the same
run, per node. Blocks: `optimize(model, "inference")`, checked and timed, for 1 to 96 equal blocks, and for blocks that
differ in an attribute, so that each is decided by itself.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxopt

SEED = 20261121
CLEANING = "eliminate_common_subexpressions,fold_constants,eliminate_dead_code"
NODES = (100, 1_000, 10_000, 50_000)
BLOCKS = (1, 4, 12, 24, 48, 96)
APART = (1, 4, 12)
"""Numbers of blocks that are decided one by one, which takes long."""

FLAT = 2.0
"""Per node, 50,000 may cost this multiple of 1,000; per block, 96 equal ones must cost less than one."""


# -- one graph with many nodes -------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Element-wise operations and a linear now and then, nothing to clean."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.steps = nodes // 4
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(max(1, self.steps // 25)))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for step in range(self.steps):
            y = torch.tanh(y) + x
            y = y * 0.5
            y = self.linears[step // 25 % len(self.linears)](y) if step % 25 == 0 else torch.relu(y)
        return y


class Redundant(nn.Module):
    """Repeated, constant and dead computations everywhere."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.steps = nodes // 10

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for step in range(self.steps):
            a, b = torch.relu(y), torch.relu(y)
            torch.tanh(a)
            y = (a + b) * 0.5 + torch.full((8,), float(step)) * 0.001
            y = y.view(x.shape[0], -1)
        return y


class Norms(nn.Module):
    """Convolutions and batch norms as children of one module."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(nodes // 2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(nodes // 2))

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x))
        return x


GRAPHS: Mapping[str, tuple[Callable[[int], nn.Module], tuple[int, ...], str, int]] = {
    "chain": (Chain, (4, 8), CLEANING, 50_000),
    "redundant": (Redundant, (4, 8), CLEANING, 10_000),
    "norms": (Norms, (2, 2, 4, 4), "fold_batchnorm", 2_000),
}
"""Name -> model of n nodes, the shape of its input, the passes, and the largest n: what is verified takes longer."""


def graph_cells(sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Time every step on every graph; one warm-up run of each comes first."""
    if not sizes:
        return
    for name, (make, shape, passes, largest) in GRAPHS.items():
        graph_cell(make(sizes[0]).eval(), torch.randn(shape), passes)
        for nodes in sorted({min(size, largest) for size in sizes}):
            torch.manual_seed(SEED)
            model = make(nodes).eval()
            seconds = graph_cell(model, torch.randn(shape), passes)
            yield {"model": name, "nodes": nodes, "passes": passes, "seconds": seconds}


def graph_cell(model: nn.Module, x: Tensor, passes: str) -> dict[str, float]:
    """Return the seconds of each step on one model; fx is timed before and after, and the lesser counts."""
    seconds = {"fx": timed(lambda: fx.symbolic_trace(model).recompile())[0]}
    seconds["capture"] = timed(lambda: fxopt.capture(copy.deepcopy(model), (x,)))[0]
    options: dict[str, Any] = {"passes": passes, "example_inputs": (x,), "measure": False}
    seconds["rewritten"] = timed(lambda: fxopt.optimize(model, verify=False, **options))[0]
    seconds["verified"], fast = timed(lambda: fxopt.optimize(model, **options))
    seconds["report"] = timed(lambda: (str(fxopt.report(fast).table()), str(fxopt.report(fast).diff())))[0]
    seconds["replayed"] = timed(lambda: fxopt.optimize(model, plan=fxopt.plan(fast), **options))[0]
    seconds["restored"] = timed(lambda: fxopt.restore(fast))[0]
    seconds["fx"] = min(seconds["fx"], timed(lambda: fx.symbolic_trace(model).recompile())[0])
    return seconds


# -- equal blocks --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        weights = torch.softmax(query @ key.transpose(-1, -2) / shape[-1] ** 0.5, -1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.attention, self.last_norm = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.last_norm(x))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))


class HeadsBlock(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([torch.tanh(head(x)) for head in self.heads]).mean(0)


STACKS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (TransformerBlock, (2, 8, 32)),
    "residual": (ResidualBlock, (2, 8, 16, 16)),
    "heads": (HeadsBlock, (2, 16)),
}


def block_cells(counts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Time `optimize` on stacks of equal blocks, and on stacks of blocks that are decided one by one."""
    for name, (make, shape) in STACKS.items():
        x = torch.randn(shape)
        optimized(stack(make, 1, equal=True), x)
        for count in counts:
            for equal in (True, False) if count in APART else (True,):
                yield {"blocks": name, "count": count, "equal": equal, **block_cell(stack(make, count, equal=equal), x)}


def block_cell(model: nn.Module, x: Tensor) -> dict[str, float]:
    seconds, fast = timed(lambda: optimized(model, x))
    decisions = fxopt.plan(fast).decisions
    followed = sum("as" in decision.figures for decision in decisions)
    return {"seconds": seconds, "decisions": len(decisions), "followed": followed}


def stack(make: Callable[[], nn.Module], count: int, *, equal: bool) -> nn.Module:
    torch.manual_seed(SEED)
    model = nn.Sequential(*(make() for _ in range(count))).eval()
    for number, block in enumerate(model):
        for module in block.modules():
            module.number = 0 if equal else number
    return model


def optimized(model: nn.Module, x: Tensor) -> nn.Module:
    return fxopt.optimize(model, passes="inference", example_inputs=(x,))


# -- running and showing -------------------------------------------------------------------------------------------


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds that `action` took, whatever else the machine does meanwhile, and its result."""
    gc.collect()
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def graph_line(cell: Mapping[str, Any]) -> str:
    seconds, nodes = cell["seconds"], cell["nodes"]
    per_node = "  ".join(f"{name} {took / nodes * 1e6:.0f}" for name, took in seconds.items())
    ratio = seconds["rewritten"] / seconds["fx"]
    return f"{cell['model']:<10}{nodes:>7} nodes, us a node: {per_node}  (rewritten / fx: {ratio:.1f})"


def block_line(cell: Mapping[str, Any]) -> str:
    kind = "equal" if cell["equal"] else "apart"
    return (
        f"{cell['blocks']:<12}{cell['count']:>3} {kind}: {cell['seconds']:.2f} s, "
        f"{cell['seconds'] / cell['count'] * 1e3:.0f} ms a block, {cell['followed']} of {cell['decisions']} followed"
    )


def misses(graphs: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> list[str]:
    """Return what grows faster than it should, relative to fx, which the same disturbance slows alike."""
    faults: list[str] = []
    for name in GRAPHS:
        cells = [cell for cell in graphs if cell["model"] == name and cell["nodes"] >= NODES[1]]
        for step in ("capture", "rewritten", "verified"):
            ratios = [cell["seconds"][step] / cell["seconds"]["fx"] for cell in cells]
            if ratios and ratios[-1] > FLAT * ratios[0]:
                faults.append(f"{name}: {step} over fx grows from {ratios[0]:.1f} to {ratios[-1]:.1f}")
    for name in STACKS:
        costs = [cell["seconds"] / cell["count"] for cell in blocks if cell["blocks"] == name and cell["equal"]]
        if len(costs) > 1 and costs[-1] > costs[0]:
            faults.append(f"{name}: a block of many costs {costs[-1]:.2f} s, a single one {costs[0]:.2f} s")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=NODES[-1], help="the largest graph; 0 for none")
    parser.add_argument("--blocks", type=int, default=BLOCKS[-1], help="the largest number of blocks; 0 for none")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    graphs, blocks = list[dict[str, Any]](), list[dict[str, Any]]()
    for cell in graph_cells(tuple(size for size in NODES if size <= options.nodes)):
        graphs.append(cell)
        print(graph_line(cell), flush=True)
    for cell in block_cells(tuple(count for count in BLOCKS if count <= options.blocks)):
        blocks.append(cell)
        print(block_line(cell), flush=True)
    faults = misses(graphs, blocks)
    print("\n".join(faults) or "nothing grows faster than its model")
    if options.json is not None:
        about = {"torch": torch.__version__, "python": platform.python_version(), "load": os.getloadavg()[0]}
        options.json.write_text(json.dumps({"about": about, "graphs": graphs, "blocks": blocks}, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
