"""Measure the area that the front of fxopt.search covers, beside presets, random choice and an expert's pipeline.

    python benchmarks/search.py [--only ROW ...] [--trials 20] [--seconds 60] [--json FILE]

Tasks with a metric, trained here: digits by a CNN and a vision transformer, texts of two grammars by a transformer,
communities of a random graph by a GCN, and a noisy function by an ensemble. Points are compared by latency, as a share
of the original's, and by what is lost of the metric. The area is that between a front and the point (1, LOSS), of all
there is. Random choice measures as many points as the search did.

Large models with random weights, where the error of the results is what is lost: ResNet-50 and BERT-base are to be
twice as fast at an error of at most 1%. The row says when a point was first there, and what the process held at most.

Each row is a process of its own. With --json, rows that the file has and that are not asked for stay.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import compression_accuracy as digits_of
import torch
from machine import described
from ordinary_models import CASES
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import fxopt
from fxopt.passes.sites import Goal, Phase
from fxopt.searching.bench import Bench
from fxopt.searching.course import Search
from fxopt.searching.points import Aim, Point
from fxopt.searching.sensitivity import sensitivities
from fxopt.searching.space import PRESET, Space, can_be, pipeline_of
from fxopt.searching.trials import Trials
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


@dataclass
class Tried:
    """What one way of choosing has found: its points, the original's first, and the seconds that it took."""

    aim: Aim
    points: list[Point]
    seconds: float

    @property
    def made(self) -> int:
        """Return how many points were measured; those that rewrite the same as another count once."""
        return sum(point.number >= 0 and point.seconds > 0 and point.repeats is None for point in self.points)

    @property
    def area(self) -> float:
        return area(self.aim, self.points)


def prepared(task: Task, seed: int) -> tuple[Bench, Aim, Space]:
    calls = normalize_inputs(task.inputs, task.model)
    bench = Bench(task.model, calls, training=False, evaluate=task.evaluate, finetune=task.finetune, seed=seed)
    aim = Aim("latency", (), bench.original.figures, has_metric=True, minimize=False)
    return bench, aim, Space(Phase.EVAL, {Goal.SPEED}, sensitivities(bench.base, calls), trains=True)


def by_search(task: Task, trials: int, seconds: float, seed: int) -> Tried:
    """Search for so many trials or seconds, whatever ends first."""
    torch.manual_seed(seed)
    bench, aim, space = prepared(task, seed)
    start = time.perf_counter()
    made = Trials(space, aim, of="", folder=None, seed=seed)
    front = Search(bench, space, aim, made, folder=None, deadline=start + seconds, most=trials).run()
    return Tried(aim, [front.original, *front.trials], time.perf_counter() - start)


def by_chance(task: Task, trials: int, seed: int) -> Tried:
    """Measure so many pipelines that are drawn from all that can be."""
    torch.manual_seed(seed)
    bench, aim, space = prepared(task, seed)
    start, choices = time.perf_counter(), list(space.all())
    random.Random(seed).shuffle(choices)
    tried = Tried(aim, [bench.original], 0.0)
    for number, choice in enumerate(filter(can_be, choices)):
        if tried.made >= trials:
            break
        tried.points.append(bench.point(number, pipeline_of(choice), choice))
    tried.seconds = time.perf_counter() - start
    return tried


def measure(name: str, trials: int, seconds: float, seeds: int) -> dict[str, Any]:
    task = TASKS[name]()
    found = [by_search(task, trials, seconds, seed) for seed in range(seeds)]
    chance = [by_chance(task, each.made, seed) for seed, each in enumerate(found)]
    bench, aim, space = prepared(task, 0)
    presets = [bench.point(number, text, {}) for number, text in enumerate(space.groups[PRESET].texts)]
    singles = {point.pipeline: area(aim, [point]) for point in presets}
    expert = bench.point(-2, task.expert, {})
    shown = found[0]
    row = {
        "task": name, "original": shown.aim.original,
        "areas": {"search": [each.area for each in found], "random": [each.area for each in chance]},
        "seconds": {"search": [each.seconds for each in found], "random": [each.seconds for each in chance]},
        "made": [each.made for each in found], "presets": singles,
        "fastest": [fastest(each) for each in found],
        "expert": {"area": area(aim, [expert]), **expert.to_json(), "plan": None},
        "front": [[point.pipeline, point.figures] for point in shown.aim.unbeaten(shown.points)],
        "points": [[point.pipeline, point.figures, point.reason] for point in shown.points],
    }  # fmt: skip
    means = ", ".join(f"{way} {statistics.fmean(each):.3f}" for way, each in row["areas"].items())
    print(f"{name}: {means}, best preset {max(singles.values()):.3f}, expert {row['expert']['area']:.3f}", flush=True)
    return row


def fastest(tried: Tried) -> float:
    """Return how many times as fast the fastest point is that loses at most 0.001."""
    good = [each for each in tried.points if each.is_known and tried.aim.loss(each.figures) <= 0.001]
    return tried.aim.cost(tried.aim.original) / min(tried.aim.cost(each.figures) for each in good)


ERROR = 0.01
"""Of results, relative to their scale: large models may err by so much."""
_OF_SEEDS = ("seconds", "first_seconds", "trials", "speedup", "error", "pipeline", "peak_bytes")
LARGE = {"ResNet-50, 224 x 224": "resnet-50", "BERT-base, 64 tokens": "bert-base, 64 tokens"}


def measure_large(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Search a large model for half the time of a call at an error of at most 1%."""
    model, inputs = CASES[LARGE[name]].built()
    before, start = peak(), time.perf_counter()
    front = fxopt.search(
        model, example_inputs=inputs, constraints={"error": ERROR, "latency": "-50%"}, time_budget=seconds, seed=seed
    )
    took = time.perf_counter() - start
    spent, first = took - sum(point.seconds for point in front.trials), None
    for point in front.trials:
        spent += point.seconds
        if first is None and point.is_known and not front.lacks(point):
            first = spent
    exact = [point for point in front.nearest if point.figures["error"] <= ERROR]
    best = min(exact, key=lambda point: point.figures["latency"])
    row = {
        "task": name, "seconds": took, "first_seconds": first, "trials": sum(each.is_known for each in front.trials),
        "speedup": front.original.figures["latency"] / best.figures["latency"], "error": best.figures["error"],
        "pipeline": best.pipeline, "model_bytes": front.original.figures["size"], "bytes_before": before,
        "peak_bytes": peak(),
        "points": [[each.pipeline, each.figures, each.reason, each.seconds] for each in front.trials],
    }  # fmt: skip
    said = "not there" if first is None else f"first there after {first:.0f} s"
    print(
        f"{name}: {row['speedup']:.2f}x at {row['error']:.2g}, {said}, {row['peak_bytes'] / 2**30:.1f} GiB", flush=True
    )
    return row


def peak() -> int:
    """Return the bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a job gives in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_one_thread) as pool:
        return pool.submit(job).result()


def _one_thread() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    rows = [*TASKS, *LARGE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=rows, default=rows)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a search")
    parser.add_argument("--large-seconds", type=float, default=300.0, help="of a search for a large model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--large-seeds", type=int, default=1, help="searches of each large model")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    file: Path | None = given.json
    known = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else {}
    found = {kind: {row["task"]: row for row in known.get(kind, [])} for kind in ("tasks", "large")}
    for name in given.only:
        if name in LARGE:
            runs = [alone(partial(measure_large, name, given.large_seconds, seed)) for seed in range(given.large_seeds)]
            found["large"][name] = {**runs[0], "seeds": [{key: run[key] for key in _OF_SEEDS} for run in runs]}
        else:
            found["tasks"][name] = alone(partial(measure, name, given.trials, given.seconds, given.seeds))
        if file is not None:
            kinds = {kind: [each[row] for row in rows if row in each] for kind, each in found.items()}
            asked = {"trials": given.trials, "search_seconds": given.seconds, "large_seconds": given.large_seconds}
            cpu = {"cpu": torch.backends.cpu.get_cpu_capability()}
            report = {"schema_version": 2, **described(), **cpu, **asked, **kinds}
            file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
