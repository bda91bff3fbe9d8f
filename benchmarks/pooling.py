"""Measure pooling over triples of nodes: what it tells apart, how exact it is, what it costs.

    python benchmarks/pooling.py [--only PART ...] [--json FILE]

Graphs are made here, from seeds. Seconds are processor time of one thread, networkx and fxopt one after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from machine import described
from torch import Tensor, nn
from torch_geometric.nn import GINConv, global_mean_pool

from fxopt.cuda_ops.triples import OrientedGraph, simple_edges
from fxopt.layers import RO3Pooling, triangles

SKIPS = (2, 3, 4, 5, 6, 9, 11, 12, 13, 16)
"""Circular skip links of 41 nodes, one class each (Murphy et al., 2019)."""

STRUCTURES = ("adjacency", "distance", "codegree")
FOLDS, COPIES, EPOCHS, BATCH = 5, 15, 12, 10


class Network(nn.Module):
    """A GIN of three layers, a pooling, and a linear layer over standardized values."""

    def __init__(self, pooling: str, classes: int) -> None:
        super().__init__()
        widths = ((1, 8), (8, 8), (8, 8))
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(*width), nn.ReLU(), nn.Linear(8, 8))) for width in widths
        )
        self.pooling = None if pooling == "mean" else RO3Pooling(structure="distance")
        width = 8 if self.pooling is None else self.pooling.width(8)
        self.head = nn.Sequential(nn.BatchNorm1d(width, eps=1e-8), nn.Linear(width, classes))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        pooled = global_mean_pool(x, batch) if self.pooling is None else self.pooling(x, edge_index, batch=batch)
        return self.head(pooled)


def edges_of(graph: Any) -> Tensor:
    """Return the edges of a graph in both directions."""
    edges = torch.tensor(list(graph.edges), dtype=torch.int64).reshape(-1, 2).t()
    return torch.cat([edges, edges.flip(0)], 1)


def batched(graphs: list[Tensor], nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, edges and batch of graphs of so many nodes each."""
    edges = torch.cat([edges + nodes * number for number, edges in enumerate(graphs)], 1)
    return torch.ones(nodes * len(graphs), 1), edges, torch.arange(len(graphs)).repeat_interleave(nodes)


def skip_links() -> dict[str, Any]:
    """Return the accuracy in percent on circular skip links, over five folds."""
    torch.manual_seed(0)
    graphs = [torch.randperm(41)[edges_of(nx.circulant_graph(41, [1, skip]))] for skip in SKIPS for _ in range(COPIES)]
    labels = torch.arange(len(SKIPS)).repeat_interleave(COPIES)
    fold = torch.arange(len(graphs)) % FOLDS
    result: dict[str, Any] = {"graphs": len(graphs), "classes": len(SKIPS), "folds": FOLDS}
    for pooling in ("mean", "distance"):
        found = [_accuracy(pooling, graphs, labels, fold == number) for number in range(FOLDS)]
        result[pooling] = {"accuracy": sum(found) / FOLDS, "by_fold": found}
    return result


def _accuracy(pooling: str, graphs: list[Tensor], labels: Tensor, held_out: Tensor) -> float:
    torch.manual_seed(1)
    model = Network(pooling, len(SKIPS))
    groups = [{"params": model.convs.parameters(), "lr": 1e-3}, {"params": model.head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.Adam(groups)
    train, test = (~held_out).nonzero().view(-1), held_out.nonzero().view(-1)
    for _ in range(EPOCHS):
        for rows in train[torch.randperm(len(train))].split(BATCH):
            optimizer.zero_grad()
            logits = model(*batched([graphs[row] for row in rows.tolist()], 41))
            nn.functional.cross_entropy(logits, labels[rows]).backward()
            optimizer.step()
    norm = model.head[0]
    norm.reset_running_stats()
    norm.momentum = None  # statistics of the trained network, not of what it was on the way
    with torch.no_grad():
        model(*batched([graphs[row] for row in train.tolist()], 41))
        right = model.eval()(*batched([graphs[row] for row in test.tolist()], 41)).argmax(1) == labels[test]
    return 100 * float(right.float().mean())


COUNTED = {"sparse": (40, 60, 0.03, 0.1), "of one size": (20, 20, 0.1, 0.5), "of many sizes": (8, 32, 0.1, 0.5)}
"""Random graphs whose triangles are counted: nodes from and to, chance of an edge from and to."""


class Counting(nn.Module):
    """Tell the number of triangles: learned pooling and a linear layer, or a perceptron on standardized values."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read, width = read, 16
        self.pooling = RO3Pooling(16, in_channels=2) if read == "learned" else RO3Pooling()
        self.head: nn.Module = nn.Linear(width, 1)
        if read != "learned":
            self.head = nn.Sequential(nn.BatchNorm1d(4, eps=1e-12), nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        pooled = self.pooling(x, edge_index, batch=batch)
        if self.read == "learned":
            return self.head(pooled).squeeze(1)
        shares, nodes = pooled[:, -4:], batch.bincount().unsqueeze(1)
        triples = nodes * (nodes - 1) * (nodes - 2) / 6
        return self.head(shares if self.read == "shares" else shares * triples).squeeze(1)


def _counted_graphs(kind: str, number: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return random graphs, batched by 32, with the number of triangles in each."""
    least, most, low, high = COUNTED[kind]
    generator, made = torch.Generator().manual_seed(seed), list[tuple[Tensor, Tensor]]()
    for _ in range(number // 32):
        edges, batch, counts = [], [], []
        for graph in range(32):
            nodes = int(torch.randint(least, most + 1, (), generator=generator))
            chance = low + (high - low) * float(torch.rand((), generator=generator))
            joined = (torch.rand(nodes, nodes, generator=generator) < chance).triu(1)
            around = (joined | joined.t()).double()
            counts.append(float((around @ around * around).sum()) / 6)
            edges.append(around.nonzero().t() + len(batch))
            batch += [graph] * nodes
        whole, of_graph = torch.cat(edges, 1), torch.tensor(batch)
        degrees = whole[0].bincount(minlength=len(batch))
        x = torch.stack([torch.ones(len(batch)), degrees / 10], 1)
        made.append(((x, whole, of_graph), torch.tensor(counts)))
    return made


def counting() -> dict[str, Any]:
    """Return the mean error of the number of triangles over its deviation, by seed; and seconds over `adjacency`."""
    return {kind: {read: _counting_errors(kind, read) for read in ("learned", "shares", "counts")} for kind in COUNTED}


def _counting_errors(kind: str, read: str) -> list[float]:
    errors: list[float] = []
    for seed in range(3):
        train, test = _counted_graphs(kind, 800, 2 * seed + 1), _counted_graphs(kind, 320, 2 * seed + 2)
        targets = torch.cat([counts for _, counts in train])
        torch.manual_seed(seed)
        model, epochs = Counting(read), 30
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train))
        for number in torch.cat([torch.randperm(len(train)) for _ in range(epochs)]).tolist():
            optimizer.zero_grad()
            wanted = (train[number][1] - targets.mean()) / targets.std()
            nn.functional.mse_loss(model(*train[number][0]), wanted).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            found = torch.cat([model(*graphs) for graphs, _ in test])
        wanted = (torch.cat([counts for _, counts in test]) - targets.mean()) / targets.std()
        errors.append(float((found - wanted).abs().mean()))
    return errors


def learned_cost() -> list[dict[str, Any]]:
    """Return seconds of learned pooling over those without anything learned, forward alone and with backward."""
    rows: list[dict[str, Any]] = []
    for graphs, nodes, degree, channels in ((32, 20, 5, 16), (128, 40, 6, 64), (1, 10_000, 10, 16)):
        generator = torch.Generator().manual_seed(1)
        shape = (2, nodes * degree // 2)
        edges = [torch.randint(0, nodes, shape, generator=generator) + nodes * graph for graph in range(graphs)]
        batch, whole = torch.arange(graphs).repeat_interleave(nodes), torch.cat(edges, 1)
        x = torch.randn(len(batch), channels, requires_grad=True)
        pools, taken = (RO3Pooling(), RO3Pooling(channels)), ([], [])
        for trains in (False, True):
            for pool, seconds in [each for _ in range(9) for each in zip(pools, taken, strict=True)]:
                seconds.append(_seconds(partial(_pooled, pool, (x, whole, batch, graphs), trains=trains))[1])
            plain, learned = (sorted(seconds[-9:])[4] for seconds in taken)
            row = {"graphs": graphs, "nodes": nodes, "channels": channels, "trains": trains}
            rows.append({**row, "plain": plain, "learned": learned, "over_plain": learned / plain})
    return rows


def structures() -> list[dict[str, Any]]:
    """Return seconds of learned pooling by each structure over those of `adjacency`: of ten circular skip links, and of
    32 random graphs in which nearly all nodes are near each other.
    """
    generator = torch.Generator().manual_seed(1)
    dense = [(torch.rand(20, 20, generator=generator) < 0.3).triu(1).nonzero().t() for _ in range(32)]
    links = [edges_of(nx.circulant_graph(41, [1, skip])) for skip in SKIPS]
    rows: list[dict[str, Any]] = []
    for kind, graphs, nodes in (("circular skip links", links, 41), ("random", dense, 20)):
        _, edges, batch = batched(graphs, nodes)
        x = torch.randn(len(batch), 16, requires_grad=True)
        pools = [RO3Pooling(16, structure) for structure in STRUCTURES]
        for trains in (False, True):
            rounds = [
                [_seconds(partial(_pooled, pool, (x, edges, batch, len(graphs)), trains=trains))[1] for pool in pools]
                for _ in range(25)
            ]
            middle = torch.tensor(rounds, dtype=torch.float64).median(0).values
            row = {"graphs": kind, "trains": trains, "milliseconds": 1000 * float(middle[0])}
            over = zip(STRUCTURES[1:], (middle / middle[0])[1:].tolist(), strict=True)
            rows.append({**row, **{f"{name}_over_adjacency": value for name, value in over}})
    return rows


def _pooled(pool: nn.Module, given: tuple[Any, ...], *, trains: bool) -> None:
    x, edges, batch, graphs = given
    with torch.set_grad_enabled(trains):
        found = pool.train(trains)(x, edges, batch=batch, batch_size=graphs)
    if trains:
        found.sum().backward()


def rook_and_shrikhande() -> tuple[Any, Any]:
    """Return the 4 x 4 rook's graph and the Shrikhande graph: strongly regular, with equal parameters."""
    nodes = [(a, b) for a in range(4) for b in range(4)]
    steps = {(0, 1), (1, 0), (1, 1), (0, 3), (3, 0), (3, 3)}
    rook, shrikhande = nx.Graph(), nx.Graph()
    for (i, (a, b)), (j, (c, d)) in combinations(enumerate(nodes), 2):
        if (a == c) != (b == d):
            rook.add_edge(i, j)
        if ((c - a) % 4, (d - b) % 4) in steps:
            shrikhande.add_edge(i, j)
    return rook, shrikhande


def strongly_regular() -> dict[str, bool]:
    """Return what tells the 4 x 4 rook's graph and the Shrikhande graph apart."""
    torch.manual_seed(0)
    batch = torch.zeros(16, dtype=torch.int64)
    pairs = [(torch.ones(16, 1), edges_of(graph), batch) for graph in rook_and_shrikhande()]
    models = {"gin_mean": Network("mean", 8).eval()} | {name: RO3Pooling(structure=name) for name in STRUCTURES}
    return {name: _differ(model, *pairs) for name, model in models.items()}


def _differ(model: nn.Module, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    with torch.no_grad():
        results = [model(x, edge_index=edges, batch=batch) for x, edges, batch in (first, second)]
    return not torch.allclose(*results, rtol=1e-4, atol=1e-6)


def invariance() -> dict[str, Any]:
    """Return the largest difference over 1,000 random orders of nodes and edges, relative to the largest value."""
    torch.manual_seed(0)
    edges, x = edges_of(nx.gnp_random_graph(24, 0.25, seed=0)), torch.randn(24, 4, dtype=torch.float64)
    result: dict[str, Any] = {"relabellings": 1000}
    for structure in STRUCTURES:
        for dtype in (torch.float32, torch.float64):
            pool, features = RO3Pooling(structure=structure), x.to(dtype)
            expected, worst, shares_equal = pool(features, edges), 0.0, True
            for _ in range(1000):
                order = torch.randperm(24)
                place = torch.empty_like(order).scatter_(0, order, torch.arange(24))
                found = pool(features[order], place[edges[:, torch.randperm(edges.shape[1])]])
                worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
                shares_equal &= torch.equal(found[:, -pool.num_types :], expected[:, -pool.num_types :])
            row = {"largest_relative_difference": worst, "shares_bitwise_equal": shares_equal}
            result[f"{structure}, {str(dtype)[6:]}"] = row
    return result


def random_edges(edges: int) -> tuple[Tensor, int]:
    """Return a random graph of about so many edges."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, edges // 10, (2, edges), generator=generator), edges // 10


def scale_free_edges(edges: int) -> tuple[Tensor, int]:
    """Return a graph grown by preferential attachment."""
    return torch.tensor(list(nx.barabasi_albert_graph(edges // 10, 10, seed=1).edges)).t(), edges // 10


def geometric_edges(edges: int) -> tuple[Tensor, int]:
    """Return points of the unit square that are near each other, found by cells of the size of the radius."""
    nodes, pairs = edges // 10, []
    points = torch.rand(nodes, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    radius = math.sqrt(edges / (nodes * (nodes - 1) / 2) / math.pi)
    cells = int(1 / radius)
    cell = (points * cells).long().clamp(max=cells - 1)
    key, order = (cell[:, 0] * cells + cell[:, 1]).sort()
    for step in torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2)):
        near = cell + step
        wanted = torch.where(((near >= 0) & (near < cells)).all(1), near[:, 0] * cells + near[:, 1], -1)
        first, last = torch.searchsorted(key, wanted), torch.searchsorted(key, wanted, right=True)
        count = last - first
        one = torch.arange(nodes).repeat_interleave(count)
        other = order[torch.arange(len(one)) - (count.cumsum(0) - count - first)[one]]
        kept = (one < other) & ((points[one] - points[other]).square().sum(1) <= radius**2)
        pairs.append(torch.stack([one[kept], other[kept]]))
    return torch.cat(pairs, 1), nodes


KINDS: Mapping[str, Callable[[int], tuple[Tensor, int]]] = {
    "random": random_edges,
    "scale-free": scale_free_edges,
    "geometric": geometric_edges,
}


def _seconds(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def against_networkx() -> list[dict[str, Any]]:
    """Return seconds for all triangles by fxopt, networkx (whose counts are by node) and a product of scipy."""
    rows: list[dict[str, Any]] = []
    for size in (100_000, 1_000_000):
        for kind, make in KINDS.items():
            edges, nodes = make(size)
            graph = nx.empty_graph(nodes)
            graph.add_edges_from(edges.t()[edges[0] != edges[1]].tolist())
            runs = [_seconds(lambda edges=edges, nodes=nodes: triangles(edges, nodes)) for _ in range(3)]
            ours, found = min(run[1] for run in runs), runs[0][0].shape[1]
            alone = min(_seconds(lambda edges=edges, nodes=nodes: _counted(edges, nodes))[1] for _ in range(3))
            listed, listing = _seconds(lambda graph=graph: sum(1 for _ in nx.all_triangles(graph)))
            counted, counting = _seconds(lambda graph=graph: sum(nx.triangles(graph).values()) // 3)
            row = {"kind": kind, "nodes": nodes, "edges": graph.number_of_edges(), "triangles": found}
            row |= {"equal": found == listed == counted, "seconds": ours, "seconds_counting": alone}
            row |= {"networkx_all_triangles": listing, "networkx_triangles": counting}
            by_scipy = [_seconds(lambda edges=edges, nodes=nodes: _counted_by_scipy(edges, nodes)) for _ in range(3)]
            product = min(run[1] for run in by_scipy)
            row |= {"scipy_product": product, "equal_scipy": by_scipy[0][0] == found, "over_scipy": product / alone}
            rows.append({**row, "over_enumeration": listing / ours, "over_counts": counting / alone})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _counted_by_scipy(edges: Tensor, nodes: int) -> int:
    """Count by a sparse product of the lower triangle L of the adjacency matrix: the sum of (L L) * L."""
    from scipy import sparse  # the graphs are read without it, too

    low, high = edges.min(0).values.numpy(), edges.max(0).values.numpy()
    kept = low != high
    lower = sparse.csr_array((np.ones(kept.sum(), dtype=np.int64), (high[kept], low[kept])), shape=(nodes, nodes))
    lower.data[:] = 1  # repeated edges were added
    return int((lower @ lower).multiply(lower).sum())


def _counted(edges: Tensor, nodes: int) -> int:
    return sum(found.shape[1] for found in OrientedGraph(simple_edges(edges, nodes), nodes).triangles())


LIMITS = (1, 16, 64, 256)
"""MiB, ascending: the peak of a process only grows."""


def memory() -> list[dict[str, Any]]:
    """Return how much the peak of a process grows, limit after limit, over that with the least."""
    rows: list[dict[str, Any]] = []
    for what in ("triangles", "pooling"):
        command = [sys.executable, __file__, "--peaks-of", what]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        peaks = [float(line) for line in done.stdout.split()]
        rows += [
            {"what": what, "limit_mib": limit, "peak_mib": peak, "over_least_mib": peak - peaks[0]}
            for limit, peak in zip(LIMITS, peaks, strict=True)
        ]
    return rows


def print_peaks(what: str) -> None:
    """Go through the triangles of a graph, or pool one, within each limit; print the peak of this process in MiB."""
    edges, nodes = random_edges(400_000) if what == "triangles" else (torch.combinations(torch.arange(150)).t(), 150)
    x, graph = torch.randn(nodes, 16).requires_grad_(), OrientedGraph(simple_edges(edges, nodes), nodes)
    for limit in LIMITS:
        if what == "triangles":
            sum(found.shape[1] for found in graph.triangles(limit * 2**20))
        else:
            RO3Pooling(memory_limit=limit * 2**20)(x, edges).sum().backward()
        status = Path("/proc/self/status").read_text(encoding="ascii")  # ru_maxrss would count the parent, too
        print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def growth() -> dict[str, Any]:
    """Return seconds of pooling by `adjacency` on complete graphs and random ones of degree 20, and the exponents."""
    result: dict[str, Any] = {}
    for kind in ("complete", "random"):
        rows: list[dict[str, float]] = []
        for size in (20_000, 40_000, 80_000, 160_000):
            nodes = int(math.sqrt(2 * size))
            edges, nodes = (
                (torch.combinations(torch.arange(nodes)).t(), nodes) if kind == "complete" else random_edges(size)
            )
            x, pool = torch.randn(nodes, 4), RO3Pooling()
            seconds = min(_seconds(lambda x=x, edges=edges, pool=pool: pool(x, edges))[1] for _ in range(2))
            rows.append({"edges": edges.shape[1], "seconds": seconds})
        first, last = rows[0], rows[-1]
        exponent = math.log(last["seconds"] / first["seconds"]) / math.log(last["edges"] / first["edges"])
        result[kind] = {"rows": rows, "exponent": exponent}
    return result


PARTS: Mapping[str, Callable[[], Any]] = {
    "strongly_regular": strongly_regular,
    "growth": growth,
    "memory": memory,
    "invariance": invariance,
    "triangles": against_networkx,
    "counting": counting,
    "learned_cost": learned_cost,
    "structures": structures,
    "skip_links": skip_links,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), help="by default all parts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peaks-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peaks_of:
        print_peaks(arguments.peaks_of)
        return
    report: dict[str, Any] = {"schema_version": 1, **described(), "load": [os.getloadavg()[0]]}
    for name in arguments.only or PARTS:
        report[name] = PARTS[name]()
        report["load"].append(os.getloadavg()[0])
        print(name, json.dumps(report[name], indent=1), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
