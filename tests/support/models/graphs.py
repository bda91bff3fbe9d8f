"""Mixtures of experts, and networks over graphs: what a call computes depends on where its data goes."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import mixtures
import torch
from support.samples import Arguments, Sample, rows
from torch import Tensor, nn

WIDTH = 6


def experts(random: Random) -> Sample:
    spelling = random.choice([*mixtures.SPELLINGS])
    kind = mixtures.SPELLINGS[spelling]
    own = spelling != "stacked"
    expert = random.choice([mixtures.Gated, mixtures.Plain]) if own else None
    k = random.choice([1, 2, 3])
    build = partial(kind, expert, k) if expert else partial(kind)
    lowering = random.choice(["", "{lowering=grouped}"])
    name = f"{spelling}, {expert.__name__ if expert else ''}, {k}"
    make = rows(mixtures.WIDTH, 3)
    return Sample(f"fuse_experts{lowering}", name, build, make, training=random.random() < 0.5, gate="gate.weight")


def edges(size: int, seed: int) -> Tensor:
    """Return edges among some nodes, some of them repeated, in a random order."""
    generator = torch.Generator().manual_seed(seed + 17)
    return torch.randint(max(size, 1), (2, 3 * size), generator=generator)


def nodes(size: int, seed: int) -> Arguments:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed)), edges(size, seed)


def batched(size: int, seed: int) -> Arguments:
    """Return nodes, edges inside graphs of five nodes, and the graph of each node."""
    batch = torch.arange(size) // 5
    inside = edges(size, seed)
    last = torch.full_like(inside[0], size - 1)
    target = torch.minimum(inside[0] // 5 * 5 + inside[1] % 5, last)
    return nodes(size, seed)[0], torch.stack([inside[0], target]), batch


class Convolutions(nn.Module):
    """Two graph convolutions."""

    def __init__(self, first: str, second: str, aggr: str) -> None:
        super().__init__()
        self.first, self.second = convolution(first, aggr), convolution(second, aggr)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).tanh(), edge_index)


class Related(nn.Module):
    """A convolution over edges with relations."""

    def __init__(self, aggr: str) -> None:
        super().__init__()
        from torch_geometric import nn as pyg

        self.conv = pyg.RGCNConv(WIDTH, WIDTH, 3, num_bases=2, aggr=aggr)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_index.sum(0) % 3)


class TwoKinds(nn.Module):
    """Nodes of two kinds, with the same edges there and back: one layer for all, or one for each kind of edge."""

    def __init__(self, aggr: str) -> None:
        super().__init__()
        from torch_geometric import nn as pyg

        self.kinds = [("a", "to", "b"), ("b", "to", "a")]
        layers = {kind: pyg.SAGEConv((WIDTH, WIDTH), WIDTH, aggr=aggr) for kind in self.kinds}
        self.conv = pyg.HGTConv(WIDTH, WIDTH, (["a", "b"], self.kinds), 2) if not aggr else pyg.HeteroConv(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = self.conv({"a": x, "b": x.flip(-1)}, dict.fromkeys(self.kinds, edge_index))
        return found["a"] - found["b"]


def convolution(kind: str, aggr: str) -> nn.Module:
    from torch_geometric import nn as pyg

    made: dict[str, Any] = {
        "gcn": partial(pyg.GCNConv, WIDTH, WIDTH),
        "improved": partial(pyg.GCNConv, WIDTH, WIDTH, improved=True, bias=False),
        "sage": partial(pyg.SAGEConv, WIDTH, WIDTH, aggr=aggr),
        "gin": lambda: pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))),
        "gat": partial(pyg.GATConv, WIDTH, WIDTH // 2, heads=2),
        "gatv2": partial(pyg.GATv2Conv, WIDTH, WIDTH, heads=2, concat=False),
        "rgcn": partial(Related, aggr),
        "hetero": partial(TwoKinds, aggr),
        "hgt": partial(TwoKinds, ""),
    }
    return made[kind]()


KINDS = ("gcn", "improved", "sage", "gin", "gat", "gatv2", "rgcn", "hetero", "hgt")


def message_passing(random: Random) -> Sample:
    first, second, aggr = random.choice(KINDS), random.choice(KINDS), random.choice(["mean", "sum"])
    build = partial(Convolutions, first, second, aggr)
    training = random.random() < 0.5
    name = f"{first}, {second}, {aggr}"
    return Sample("sparse_message_passing", name, build, nodes, size=9, training=training, extra={"graph": True})


class Classifier(nn.Module):
    """A convolution, pooling of some kind, a readout and a head."""

    def __init__(self, readout: str, pool: str) -> None:
        super().__init__()
        from torch_geometric import nn as pyg

        self.conv, self.head = pyg.GCNConv(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        modules = {
            "mean module": pyg.MeanAggregation,
            "max module": pyg.MaxAggregation,
            "sum module": pyg.SumAggregation,
        }
        self.readout = modules[readout]() if readout in modules else getattr(pyg, f"global_{readout}_pool")
        self.pool = {"top": pyg.TopKPooling, "sag": pyg.SAGPooling}[pool](WIDTH, ratio=0.6) if pool else None

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.conv(x, edge_index).relu()
        if self.pool is not None:
            x, edge_index, _, batch, _, _ = self.pool(x, edge_index, None, batch)
        return self.head(self.readout(x, batch))


def pooling(random: Random) -> Sample:
    readout = random.choice(["mean", "add", "max", "mean module", "max module", "sum module"])
    pool = random.choice(["", "", "top", "sag"])
    build = partial(Classifier, readout, pool)
    return Sample(
        "graph_pooling", f"{readout}, {pool}", build, batched, size=15, form=True, adds=True,
        training=random.random() < 0.5, extra={"graph": True},
    )  # fmt: skip
