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
from itertools import combinations
from pathlib import Path
from typing import Any

import networkx as nx
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
    """Return seconds for all triangles, listed and counted, by fxopt and by networkx (whose counts are by node)."""
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
            rows.append({**row, "over_enumeration": listing / ours, "over_counts": counting / alone})
            print(json.dumps(rows[-1]), flush=True)
    return rows


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
