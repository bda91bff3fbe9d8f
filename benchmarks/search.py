"""Measure the area that the front of fxopt.search covers, beside presets, random search and an expert's pipeline.

    python benchmarks/search.py [--only TASK ...] [--trials 30] [--seeds 1] [--json FILE]

Tasks with a metric, trained here: digits by a CNN and a vision transformer, texts of two grammars by a transformer,
communities of a random graph by a GCN, and a noisy function by an ensemble. Points are compared by latency, as a share
of the original's, and by what is lost of the metric. The area is that between a front and the point (1, LOSS), of all
there is.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compression_accuracy as digits_of
import torch
from machine import described
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from fxopt.passes.sites import Goal, Phase
from fxopt.searching.bench import Bench
from fxopt.searching.points import Aim, Point
from fxopt.searching.search import Search
from fxopt.searching.sensitivity import sensitivities
from fxopt.searching.space import PRESET, Space
from fxopt.searching.trials import Sampler, Trials
from fxopt.tracing.examples import normalize_inputs

LOSS = 0.05
"""So much of the metric may be lost: what loses more covers nothing."""


@dataclass(frozen=True)
class Task:
    """A trained model, the inputs that it is timed on, what it is worth, how it is trained on.

    Attributes:
        expert: the pipeline that somebody who knows fxopt would write down for it, before any search.
    """

    model: nn.Module
    inputs: Any
    evaluate: Callable[[nn.Module], float]
    finetune: Callable[[nn.Module], object] | None
    expert: str


def of_digits(network: str) -> Task:
    torch.manual_seed(0)
    data = digits_of.digits(0)
    model = data.trained(digits_of.NETWORKS[network](), 20).eval()

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(data.test_images).argmax(1) == data.test_labels).float().mean())

    expert = "prune{method=structured,amount=0.3},quantize{scheme=int8_static},inference{dtype=bfloat16}"
    return Task(model, data.images[:64], evaluate, lambda pruned: data.trained(pruned, 3), expert)


class Reader(nn.Module):
    """Embeddings of letters, two encoder layers of torch, a linear over their mean."""

    def __init__(self, letters: int = 8, length: int = 32, width: int = 64) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(letters, width), nn.Parameter(torch.randn(length, width) / 50)
        layer = nn.TransformerEncoderLayer(width, 4, 256, 0.0, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 2)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.encoder(self.letters(text) + self.positions).mean(1))


def of_grammars() -> Task:
    """Say which of two regular grammars, each with its own chances of what follows a letter, a text was drawn from."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.softmax(0.6 * torch.randn(2, 8, 8, generator=generator), dim=2)
    y = torch.randint(2, (3000,), generator=generator)
    letters = [torch.randint(8, (3000,), generator=generator)]
    for _ in range(31):
        letters.append(torch.multinomial(chances[y, letters[-1]], 1, generator=generator).flatten())
    x = torch.stack(letters, dim=1)
    torch.manual_seed(0)
    model = _trained(Reader(), x[:2400], y[:2400], epochs=6)

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(x[2400:]).argmax(1) == y[2400:]).float().mean())

    def finetune(model: nn.Module) -> None:
        _trained(model, x[:2400], y[:2400], epochs=1)

    return Task(model, x[:32], evaluate, finetune, "quantize,inference{dtype=bfloat16}")


def _trained(model: nn.Module, x: Tensor, y: Tensor, *, epochs: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.train().parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


class Communities(nn.Module):
    """Two layers of GCN."""

    def __init__(self, features: int = 64, width: int = 128, classes: int = 6) -> None:
        super().__init__()
        self.first, self.second = GCNConv(features, width), GCNConv(width, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, edges)), edges)


def of_communities(nodes: int = 1500, classes: int = 6) -> Task:
    """Find the communities of a random graph: edges within are more likely, features say a little."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (nodes,), generator=generator)
    same = labels[:, None] == labels[None, :]
    edges = (torch.rand(nodes, nodes, generator=generator) < torch.where(same, 0.012, 0.002)).nonzero().T.contiguous()
    x = torch.randn(nodes, 64, generator=generator)
    x[torch.arange(nodes), labels] += 1.0
    training = torch.rand(nodes, generator=generator) < 0.3
    torch.manual_seed(0)

    def finetune(model: nn.Module, steps: int = 20) -> None:
        optimizer = torch.optim.Adam(model.train().parameters(), 1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x, edges)[training], labels[training]).backward()
            optimizer.step()

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(x, edges).argmax(1) == labels)[~training].float().mean())

    model = Communities()
    finetune(model, 60)
    return Task(model.eval(), (x, edges), evaluate, finetune, "inference")


class Ensemble(nn.Module):
    """Members that answer alike, and their mean."""

    def __init__(self, members: int = 32) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
            for _ in range(members)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


def of_ensemble() -> Task:
    """Fit a noisy function; the metric is the share of its variance that is explained."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 16, generator=generator)
    y = (torch.sin(x[:, :4].sum(1)) + x[:, 4] * x[:, 5] + 0.1 * torch.randn(2000, generator=generator))[:, None]
    torch.manual_seed(0)

    def finetune(model: nn.Module, steps: int = 60) -> None:
        optimizer = torch.optim.Adam(model.train().parameters(), 1e-3)
        for step in range(steps):
            rows = slice(step * 64 % 1536, step * 64 % 1536 + 64)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            return 1 - float((model(x[1600:]) - y[1600:]).var() / y[1600:].var())

    model = Ensemble()
    finetune(model, 1500)
    return Task(model.eval(), x[:32], evaluate, finetune, "inference")


TASKS: Mapping[str, Callable[[], Task]] = {
    "digits, CNN": lambda: of_digits("cnn"),
    "digits, transformer": lambda: of_digits("vit"),
    "grammars, transformer": of_grammars,
    "communities, GCN": of_communities,
    "noisy function, ensemble": of_ensemble,
}


def area(aim: Aim, points: Sequence[Point]) -> float:
    """Return which part of what could be covered some points cover, by latency and by what is lost."""
    known = [
        (aim.cost(point.figures) / aim.cost(aim.original), max(0.0, aim.loss(point.figures)))
        for point in points if point.is_known
    ]  # fmt: skip
    covered, best = 0.0, LOSS
    for cost, loss in sorted(known):
        if cost < 1.0 and loss < best:
            covered += (1.0 - cost) * (best - loss)
            best = loss
    return covered / LOSS


def searched(
    bench: Bench, aim: Aim, space: Space, trials: int, seed: int, sampler: Sampler, *, guided: bool
) -> tuple[list[Point], float]:
    """Return the points of a search, with the original, and its seconds."""
    start = time.perf_counter()
    made = Trials(space, aim, of="", folder=None, seed=seed, sampler=sampler)
    front = Search(bench, space, aim, made, folder=None, deadline=math.inf, most=trials, guided=guided).run()
    return [front.original, *front.trials], time.perf_counter() - start


def measure(name: str, trials: int, seeds: int) -> dict[str, Any]:
    task = TASKS[name]()
    calls = normalize_inputs(task.inputs, task.model)
    bench = Bench(task.model, calls, training=False, evaluate=task.evaluate, finetune=task.finetune, seed=0)
    aim = Aim("latency", (), bench.original.figures, has_metric=True, minimize=False)
    space = Space(Phase.EVAL, {Goal.SPEED}, sensitivities(bench.base, calls))
    found: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    shown: list[Point] = []
    for seed in range(seeds):
        for way, sampler, guided in WAYS:
            points, took = searched(bench, aim, space, trials, seed, sampler, guided=guided)
            found.setdefault(way, []).append(area(aim, points))
            seconds.setdefault(way, []).append(took)
            if guided and not shown:
                shown = points
    presets = [
        point for point in shown
        if point.number >= 0 and {**point.choice, PRESET: space.start[PRESET]} == dict(space.start)
    ]  # fmt: skip
    singles = {point.pipeline: area(aim, [point]) for point in presets}
    expert = bench.point(-2, task.expert, {})
    front = aim.unbeaten(shown)
    places = [(aim.cost(point.figures), aim.loss(point.figures)) for point in front]
    at_least = all(any(x <= aim.cost(p.figures) and y <= aim.loss(p.figures) for x, y in places) for p in presets)
    row = {
        "task": name, "original": bench.original.figures, "areas": found, "seconds": seconds, "presets": singles,
        "expert": {"area": area(aim, [expert]), **expert.to_json(), "plan": None},
        "front": [[point.pipeline, point.figures] for point in front], "has_each_preset": at_least,
        "points": [[point.pipeline, point.figures, point.reason] for point in shown],
    }  # fmt: skip
    said = ", ".join(f"{way} {sum(each) / len(each):.3f}" for way, each in found.items())
    print(f"{name}: {said}, best preset {max(singles.values()):.3f}, expert {row['expert']['area']:.3f}", flush=True)
    return row


WAYS: Sequence[tuple[str, Sampler, bool]] = (
    ("search", "tpe", True), ("search, nsga2", "nsga2", True), ("random", "random", False),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [measure(name, arguments.trials, arguments.seeds) for name in arguments.only]
    if arguments.json:
        report = {"schema_version": 1, **described(), "trials": arguments.trials, "tasks": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
