"""A graph network that classifies nodes: trained and used without a message for each edge.

Run it: python examples/graphs.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

import fxopt

NODES, COMMUNITIES = 300, 3


class Network(nn.Module):
    """Two convolutions over a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(8, 16), GCNConv(16, COMMUNITIES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return [nodes, communities] for nodes [nodes, 8] and edges [2, edges]."""
        return self.second(self.first(x, edges).relu(), edges)


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes that say little about their community, edges that mostly stay in one, and the communities."""
    labels = torch.arange(NODES) % COMMUNITIES
    edges = torch.randint(NODES, (2, 6000))
    inside = labels[edges[0]] == labels[edges[1]]
    edges = edges[:, inside | (torch.rand(6000) < 0.2)]
    x = torch.randn(NODES, 8)
    x[:, :COMMUNITIES] += 0.5 * F.one_hot(labels)
    return x, edges, labels


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, edges: Tensor, labels: Tensor) -> float:
    """Return the share of nodes that are put into their community."""
    return (model(x, edges).argmax(-1) == labels).float().mean().item()


def main(steps: int = 40) -> tuple[float, float]:
    """Train on a few nodes, print and return the accuracy before and after."""
    torch.manual_seed(0)
    x, edges, labels = graph()
    model = fxopt.optimize(Network(), "sparse_message_passing", example_inputs=(x, edges), phase="train")
    print(fxopt.report(model))
    before = accuracy(model, x, edges, labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    known = torch.arange(30)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges)[known], labels[known]).backward()
        optimizer.step()
    after = accuracy(model, x, edges, labels)
    print(f"accuracy: {before:.0%} before, {after:.0%} after, trained on {len(known)} of {NODES} nodes")
    return before, after


if __name__ == "__main__":
    main()
