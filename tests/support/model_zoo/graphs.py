"""Models of PyTorch Geometric on random graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import models

__all__ = ["MODELS", "GraphModel", "random_graph"]

WIDTH = 16
NODES = 24


@dataclass(frozen=True)
class GraphModel:
    """One model, and what makes inputs for it from a number of nodes."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]


class GraphClassifier(nn.Module):
    """Classify whole graphs: two convolutions with norms, pooled; it takes a `Data` or a `Batch`."""

    def __init__(self, pool: Callable[..., Tensor] = pyg.global_mean_pool) -> None:
        super().__init__()
        self.first, self.second = pyg.GCNConv(WIDTH, 32), pyg.GCNConv(32, 32)
        self.norm = pyg.BatchNorm(32)
        self.head = nn.Linear(32, 4)
        self.pool = pool

    def forward(self, data: Data) -> Tensor:
        x = self.norm(self.first(data.x, data.edge_index)).relu()
        x = self.second(x, data.edge_index).relu()
        return self.head(self.pool(x, data.batch))


class EdgeModel(nn.Module):
    """Update the features of edges, for `MetaLayer`."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH + 8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, source: Tensor, target: Tensor, edge_attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        return self.mlp(torch.cat([source, target, edge_attr], dim=1))


class NodeModel(nn.Module):
    """Update the features of nodes from those of their edges, for `MetaLayer`."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(WIDTH + 8, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        gathered = torch.zeros(x.shape[0], 8).index_add(0, edge_index[1], edge_attr)
        return self.mlp(torch.cat([x, gathered], dim=1))


class AllPairs(nn.Module):
    """Connect every atom with every other: what `SchNet` takes in the place of a compiled neighbour search."""

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        n = pos.shape[0]
        row, column = torch.arange(n).repeat_interleave(n - 1), torch.arange(n * (n - 1)) % (n - 1)
        column = column + (column >= row)
        return torch.stack([row, column]), (pos[row] - pos[column]).norm(dim=-1)


def random_graph(nodes: int, degree: int = 3) -> tuple[Tensor, Tensor]:
    """Return features (nodes, WIDTH) and edges (2, degree * nodes) of a random graph."""
    edges = torch.stack([torch.arange(nodes).repeat(degree), torch.randint(0, nodes, (degree * nodes,))])
    return torch.randn(nodes, WIDTH), edges


def _graph(nodes: int) -> dict[str, Any]:
    x, edges = random_graph(nodes)
    return {"x": x, "edge_index": edges}


def _batch_vector(nodes: int) -> Tensor:
    return torch.arange(nodes) * 3 // nodes


def _with_batch(nodes: int) -> dict[str, Any]:
    return {**_graph(nodes), "batch": _batch_vector(nodes)}


def _with_edge_features(nodes: int) -> dict[str, Any]:
    given = _with_batch(nodes)
    return {**given, "edge_attr": torch.randn(given["edge_index"].shape[1], 8)}


def _atoms(nodes: int) -> dict[str, Any]:
    return {"z": torch.randint(1, 9, (nodes,)), "pos": torch.randn(nodes, 3), "batch": torch.zeros(nodes).long()}


def _data(nodes: int) -> dict[str, Any]:
    x, edges = random_graph(nodes)
    return {"data": Data(x=x, edge_index=edges)}


def _data_batch(nodes: int) -> dict[str, Any]:
    pairs = [random_graph(size) for size in (nodes // 2, nodes, nodes // 3)]
    return {"data": Batch.from_data_list([Data(x=x, edge_index=edges) for x, edges in pairs])}


def _signed(nodes: int) -> dict[str, Any]:
    x, edges = random_graph(nodes)
    return {"x": x, "pos_edge_index": edges, "neg_edge_index": edges.flip(0)}


def _meta(nodes: int) -> dict[str, Any]:
    return {**_with_edge_features(nodes), "u": None}


def _basic(kind: Any, **options: Any) -> GraphModel:
    return GraphModel(lambda: kind(WIDTH, 32, 2, 8, dropout=0.1, **options), _graph)


MODELS: dict[str, GraphModel] = {
    "GCN": _basic(models.GCN),
    "GCN with jumping knowledge": _basic(models.GCN, jk="cat"),
    "GraphSAGE": _basic(models.GraphSAGE, norm="batch_norm"),
    "GIN": _basic(models.GIN, norm="layer_norm"),
    "GAT": _basic(models.GAT, heads=2),
    "GATv2": _basic(models.GAT, heads=2, v2=True),
    "PNA": _basic(
        models.PNA,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity", "amplification"],
        deg=torch.tensor([0, 4, 8, 4]),
    ),
    "EdgeCNN": _basic(models.EdgeCNN),
    "MLP": GraphModel(lambda: models.MLP([WIDTH, 32, 8], dropout=0.1), lambda n: {"x": torch.randn(n, WIDTH)}),
    "GraphUNet": GraphModel(lambda: models.GraphUNet(WIDTH, 32, 8, depth=2), _graph),
    "AttentiveFP": GraphModel(lambda: models.AttentiveFP(WIDTH, 32, 8, 8, 2, 2), _with_edge_features),
    "NeuralFingerprint": GraphModel(lambda: models.NeuralFingerprint(WIDTH, 32, 8, 2), _with_batch),
    "PMLP": GraphModel(lambda: models.PMLP(WIDTH, 32, 8, 2), _graph),
    "LINKX": GraphModel(lambda: models.LINKX(NODES, WIDTH, 32, 8, 2), lambda nodes: _graph(NODES)),
    "LightGCN": GraphModel(
        lambda: models.LightGCN(NODES, 32, 2), lambda nodes: {"edge_index": random_graph(NODES, nodes // 8)[1]}
    ),
    "RECT_L": GraphModel(lambda: models.RECT_L(WIDTH, 32), _graph),
    "SGFormer": GraphModel(lambda: models.SGFormer(WIDTH, 32, 8), _with_batch),
    "Polynormer": GraphModel(lambda: models.Polynormer(WIDTH, 32, 8, local_layers=2), _with_batch),
    "SignedGCN": GraphModel(lambda: models.SignedGCN(WIDTH, 32, 2), _signed),
    "SchNet": GraphModel(lambda: models.SchNet(32, 32, 2, 16, interaction_graph=AllPairs()), _atoms),
    "MetaLayer": GraphModel(lambda: pyg.MetaLayer(EdgeModel(), NodeModel()), _meta),
    "GraphClassifier on Data": GraphModel(GraphClassifier, _data),
    "GraphClassifier on Batch": GraphModel(lambda: GraphClassifier(pyg.global_add_pool), _data_batch),
}
"""Name -> model; those that need compiled extras (neighbour search) or a data set are left out."""
