"""`sparse_message_passing` beside PyTorch Geometric: layers on one graph, and on a new graph at each call.

    python benchmarks/message_passing.py [--nodes N] [--rounds N] [--json FILE]

Two layers of 64 channels, random graphs with ten edges a node; of two kinds there are half as many nodes each, and four
kinds of edges. Figures are processor time of PyTorch Geometric over
that of fxopt, one call of each after the other, on one thread: the median, and the 2.5th and 97.5th percentile of the
rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from machine import described
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_geometric import nn as pyg

import fxopt
from fxopt.layers.message_passing import CONVOLUTIONS, compressed

WIDTH, DEGREE = 64, 10
KINDS = [(one, "to", other) for one in "ab" for other in "ab"]
LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "GCN": lambda: pyg.GCNConv(WIDTH, WIDTH),
    "SAGE": lambda: pyg.SAGEConv(WIDTH, WIDTH),
    "GIN": lambda: pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))),
    "GAT, 1 head": lambda: pyg.GATConv(WIDTH, WIDTH),
    "GAT, 4 heads": lambda: pyg.GATConv(WIDTH, WIDTH // 4, heads=4),
    "GATv2, 4 heads": lambda: pyg.GATv2Conv(WIDTH, WIDTH // 4, heads=4),
    "RGCN, 4 relations": lambda: pyg.RGCNConv(WIDTH, WIDTH, 4),
    "RGCN, 16 relations": lambda: pyg.RGCNConv(WIDTH, WIDTH, 16),
    "HeteroConv of 4 SAGE": lambda: pyg.HeteroConv({kind: pyg.SAGEConv((WIDTH, WIDTH), WIDTH) for kind in KINDS}),
    "HGT, 4 heads": lambda: pyg.HGTConv(WIDTH, WIDTH, (["a", "b"], KINDS), heads=4),
}


class Network(nn.Module):
    """Two layers of a kind."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Any, *edges: Any) -> Any:
        hidden = self.first(x, *edges)
        is_one = isinstance(hidden, Tensor)
        return self.second(hidden.relu() if is_one else {kind: each.relu() for kind, each in hidden.items()}, *edges)


def inputs_of(layer: nn.Module, nodes: int) -> tuple[Any, ...]:
    """Return features and edges, and the relations of edges where a layer has them; by kind where it has kinds."""
    if not isinstance(layer, pyg.HeteroConv | pyg.HGTConv):
        edges = torch.randint(0, nodes, (2, nodes * DEGREE))
        relations = getattr(layer, "num_relations", 0)
        named = (torch.randint(0, relations, (nodes * DEGREE,)),) if relations else ()
        return torch.randn(nodes, WIDTH), edges, *named
    x = {kind: torch.randn(nodes // 2, WIDTH) for kind in "ab"}
    return x, {kind: torch.randint(0, nodes // 2, (2, nodes * DEGREE // len(KINDS))) for kind in KINDS}


def measured(make: Callable[[], nn.Module], nodes: int, rounds: int, *, training: bool) -> dict[str, Any]:
    """Return how much faster a network is over rows, on one graph and on new ones, and how much its results differ."""
    torch.manual_seed(0)
    eager = Network(make).train(training)
    x, *edges = inputs_of(eager.first, nodes)
    fast = over_rows(eager, training=training)
    with torch.no_grad():
        results = [pytree.tree_leaves(model(x, *edges)) for model in (eager, fast)]
    pairs = zip(*results, strict=True)
    row: dict[str, Any] = {"error": max(float((two - one).abs().max() / one.abs().max()) for one, two in pairs)}
    seconds: list[tuple[float, ...]] = []
    for _ in range(rounds):
        pairs = ((eager, edges), (fast, edges), (fast, pytree.tree_map(Tensor.clone, edges)))
        seconds.append(tuple(_seconds(model, (x, *given), training) for model, given in pairs))
    row["milliseconds"] = 1000 * _middle([own for own, _, _ in seconds])[0]
    row["same_graph"] = _middle([own / same for own, same, _ in seconds])
    row["new_graph"] = _middle([own / new for own, _, new in seconds])
    return row


def over_rows(model: nn.Module, *, training: bool) -> nn.Module:
    """Return a copy of a network all of whose layers go over rows, whether that pays or not."""
    fast = copy.deepcopy(model)
    for parent in [*fast.modules()]:
        for name, layer in parent.named_children():
            if f"{type(layer).__module__}.{type(layer).__qualname__}" in CONVOLUTIONS:
                parent.add_module(name, compressed(layer, fast, trains=training))
    return fast.train(training)


def optimized(nodes: int) -> dict[str, Any]:
    """Return what `optimize` decides and how long it takes, on networks of each kind."""
    result: dict[str, Any] = {}
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        model = Network(make).eval()
        inputs = inputs_of(model.first, nodes)
        start = time.process_time()
        fast = fxopt.optimize(model, "sparse_message_passing", example_inputs=inputs)
        decided = [decision.status for decision in fxopt.plan(fast).decisions]
        result[name] = {"seconds": time.process_time() - start, "decided": decided}
    return result


def _seconds(model: nn.Module, inputs: tuple[Any, ...], training: bool) -> float:
    start = time.process_time()
    if training:
        sum(each.sum() for each in pytree.tree_leaves(model(*inputs))).backward()
    else:
        with torch.no_grad():
            model(*inputs)
    return time.process_time() - start


def _middle(values: list[float]) -> list[float]:
    quantiles = torch.tensor([0.5, 0.025, 0.975], dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(quantiles).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "schema_version": 1,
        **described(),
        "nodes": arguments.nodes,
        "load": [os.getloadavg()[0]],
    }
    for training in (False, True):
        rows = report["training" if training else "evaluation"] = {}
        for name, make in LAYERS.items():
            rows[name] = measured(make, arguments.nodes, arguments.rounds, training=training)
            print("training" if training else "evaluation", name, json.dumps(rows[name]), flush=True)
    report["optimize"] = optimized(arguments.nodes)
    report["load"].append(os.getloadavg()[0])
    print(json.dumps(report["optimize"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
