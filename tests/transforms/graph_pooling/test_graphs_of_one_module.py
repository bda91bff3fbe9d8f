"""graph_pooling where a module has several graphs, or moves its nodes about."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric import nn as pyg
from torch_geometric.utils import dropout_edge

import fxopt

WIDTH = 8


def graphs(count=3, size=7):
    """Return features, edges and the batch vector of random graphs of one size."""
    torch.manual_seed(0)
    nodes = count * size
    batch = torch.arange(nodes) // size
    source = torch.randint(0, nodes, (4 * nodes,))
    target = batch[source] * size + torch.randint(0, size, (4 * nodes,))
    return torch.randn(nodes, WIDTH), torch.stack([source, target]), batch


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = pyg.GCNConv(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index, batch=None):
        return self.head(pyg.global_mean_pool(self.conv(x, edge_index).relu(), batch))


class DropsEdges(Classifier):
    def forward(self, x, edge_index, batch=None):
        edges, _ = dropout_edge(edge_index, p=0.5, training=self.training)
        return self.head(pyg.global_mean_pool(self.conv(x, edges).relu(), batch))


class Flips(Classifier):
    def forward(self, x, edge_index, batch):
        x = self.conv(x, edge_index).relu()
        return self.head(pyg.global_mean_pool(x.flip(0), batch.flip(0)))


class Sorts(Classifier):
    def forward(self, x, edge_index, batch):
        x = self.conv(x, edge_index).relu()
        order = x[:, 0].argsort()
        return self.head(pyg.global_mean_pool(x[order], batch[order]))


class Permutes(Classifier):
    def forward(self, x, edge_index, batch):
        x = self.conv(x, edge_index).relu()
        return self.head(pyg.global_mean_pool(torch.linalg.inv(x @ x.t() + torch.eye(len(x))) @ x, batch))


class Block(nn.Module):
    """What goes row by row, in a module of its own."""

    def __init__(self, mixes=False):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.cell, self.mixes = nn.GRUCell(WIDTH, WIDTH), mixes

    def forward(self, x):
        h = self.cell(self.inner(x), x).view(x.size(0), 2, -1).flatten(1)
        h = torch.stack([x, h, x + h.mean(1, keepdim=True)], -1).max(-1).values
        return h.roll(1, 0) if self.mixes else torch.cat([h[:, :3], h[:, 3:]], dim=-1)


class InBlocks(Classifier):
    def __init__(self, mixes=False):
        super().__init__()
        self.block, self.norm = Block(mixes), pyg.GraphNorm(WIDTH)

    def forward(self, x, edge_index, batch):
        x = self.block(self.norm(self.conv(x, edge_index), batch))
        return self.head(pyg.global_mean_pool(x, batch))


class Over(nn.Module):
    """Message passing over edges of another name."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.GCNConv(WIDTH, WIDTH)

    def forward(self, x, adjacency):
        return self.conv(x, adjacency).relu()


class OtherEdges(Classifier):
    def __init__(self):
        super().__init__()
        self.over = Over()

    def forward(self, x, edge_index, batch):
        x = self.over(self.conv(x, edge_index).relu(), edge_index.flip(0)[:, ::2])
        return self.head(pyg.global_mean_pool(x, batch))


def swapped(model, inputs):
    return fxopt.optimize(model, "graph_pooling", example_inputs=inputs, measure=False)


def test_training_and_evaluation_have_one_readout():
    fast = swapped(DropsEdges().train(), graphs())
    assert [d.status for d in fxopt.plan(fast).decisions].count("applied") >= 1
    assert [name for name, _ in fast.named_children() if "ro3" in name] == ["ro3_pooling"]
    for mode in (True, False):
        fast.train(mode).zero_grad()
        fast(*graphs()).sum().backward()
        assert next(fast.ro3_pooling.parameters()).grad is not None


def test_examples_with_and_without_a_batch_have_one_readout():
    fast = swapped(Classifier().eval(), [graphs(), graphs()[:2]])
    assert [name for name, _ in fast.named_children() if "ro3" in name] == ["ro3_pooling"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Flips(), "'flip' may pick or reorder its nodes: whether flip keeps those"),
        (Sorts(), "picks or reorders its nodes"),
        (Permutes(), "whether linalg_inv keeps those"),
        (InBlocks(mixes=True), "'block' may pick or reorder its nodes: whether Block keeps those"),
    ],
)
def test_nodes_that_may_be_in_another_order_are_refused(model, reason):
    (decision,) = fxopt.plan(swapped(model.eval(), graphs())).decisions
    assert decision.status == "refused" and reason in decision.reason


def test_what_goes_row_by_row_may_stand_between():
    fast = swapped(InBlocks().eval(), graphs())
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"]


def test_edges_of_another_name_between_are_refused():
    (decision,) = fxopt.plan(swapped(OtherEdges().eval(), graphs())).decisions
    assert decision.status == "refused" and "does not take as 'edge_index'" in decision.reason
