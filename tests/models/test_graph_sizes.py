"""Models of PyTorch Geometric: no number of nodes, edges or graphs stays in a graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric import nn as pyg
from torch_geometric.utils import to_dense_adj, to_dense_batch

import fxopt

pytestmark = pytest.mark.filterwarnings("ignore")

IN, WIDTH = 8, 16
SIZES = ((20, 60, 3), (40, 90, 3), (30, 40, 5), (7, 9, 1), (10, 0, 2), (1, 1, 1))
"""Nodes, edges and graphs; the first is the example."""
META = (["user", "item"], [("user", "buys", "item"), ("item", "pleases", "user"), ("user", "knows", "user")])


def graph(nodes, edges, graphs):
    index = torch.randint(0, nodes, (2, edges))
    return {"x": torch.randn(nodes, IN), "edge_index": index, "batch": torch.arange(nodes) * graphs // nodes}


def mlp(inputs):
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class Classifier(nn.Module):
    """Two convolutions, what stands between them, a readout."""

    def __init__(self, conv, between=None, readout=pyg.global_mean_pool):
        super().__init__()
        self.first, self.second, self.head = conv(IN), conv(WIDTH), nn.Linear(WIDTH, 3)
        self.between, self.readout = between, readout

    def forward(self, x, edge_index, batch):
        x = F.relu(self.first(x, edge_index))
        if isinstance(self.between, (pyg.TopKPooling, pyg.SAGPooling)):
            x, edge_index, _, batch, _, _ = self.between(x, edge_index, None, batch)
        elif isinstance(self.between, pyg.ASAPooling):
            x, edge_index, _, batch, _ = self.between(x, edge_index, batch=batch)
        elif isinstance(self.between, pyg.EdgePooling):
            x, edge_index, batch, _ = self.between(x, edge_index, batch)
        elif self.between is not None:
            x = self.between(x, batch)
        return self.head(self.readout(F.relu(self.second(x, edge_index)), batch))


class Jumping(nn.Module):
    """Two convolutions, joined."""

    def __init__(self, mode):
        super().__init__()
        self.first, self.second = pyg.SAGEConv(IN, WIDTH), pyg.SAGEConv(WIDTH, WIDTH)
        self.jump, self.head = pyg.JumpingKnowledge(mode, WIDTH, 2), nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index, batch):
        first = self.first(x, edge_index).relu()
        joined = self.jump([first, self.second(first, edge_index).relu()])
        return self.head(pyg.global_max_pool(joined, batch))


class Dense(nn.Module):
    """Dense layers with differentiable pooling, over a padded batch."""

    def __init__(self):
        super().__init__()
        self.assign, self.embed = pyg.DenseSAGEConv(IN, 4), pyg.DenseSAGEConv(IN, WIDTH)

    def forward(self, x, edge_index, batch):
        x, mask = to_dense_batch(x, batch)
        edges = to_dense_adj(edge_index, batch, max_num_nodes=x.size(1))
        return pyg.dense_diff_pool(self.embed(x, edges, mask), edges, self.assign(x, edges, mask), mask)[0].mean(1)


def gcn(inputs):
    return pyg.GCNConv(inputs, WIDTH)


def pna(inputs):
    degrees = torch.tensor([0, 4, 8, 4])
    return pyg.PNAConv(inputs, WIDTH, ["mean", "max", "std"], ["identity", "amplification"], degrees)


MODELS = {
    "GCN": lambda: Classifier(gcn),
    "GIN": lambda: Classifier(lambda i: pyg.GINConv(mlp(i), train_eps=True), readout=pyg.global_add_pool),
    "GAT": lambda: Classifier(lambda i: pyg.GATConv(i, WIDTH // 2, heads=2), readout=pyg.global_max_pool),
    "GATv2": lambda: Classifier(lambda i: pyg.GATv2Conv(i, WIDTH // 2, heads=2)),
    "SAGE": lambda: Classifier(lambda i: pyg.SAGEConv(i, WIDTH, aggr=["mean", "max"])),
    "PNA": lambda: Classifier(pna),
    "EdgeConv": lambda: Classifier(lambda i: pyg.EdgeConv(mlp(2 * i))),
    "aggregation": lambda: Classifier(gcn, readout=pyg.SoftmaxAggregation(learn=True)),
    "graph norm": lambda: Classifier(gcn, pyg.GraphNorm(WIDTH)),
    "layer norm": lambda: Classifier(gcn, pyg.LayerNorm(WIDTH)),
    "top k": lambda: Classifier(gcn, pyg.TopKPooling(WIDTH)),
    "SAG": lambda: Classifier(gcn, pyg.SAGPooling(WIDTH)),
    "ASA": lambda: Classifier(gcn, pyg.ASAPooling(WIDTH)),
    "edges contracted": lambda: Classifier(gcn, pyg.EdgePooling(WIDTH)),
    "jumping, max": lambda: Jumping("max"),
    "jumping, LSTM": lambda: Jumping("lstm"),
    "dense": Dense,
}
OPAQUE = {"edges contracted": {"between": "its control flow depends on the data in a tensor"}}


def outcome(model, args, kwargs):
    model.zero_grad()
    torch.manual_seed(1)
    output = model(*args, **kwargs)
    outputs = [output] if isinstance(output, torch.Tensor) else list(output.values())
    sum(value.square().sum() for value in outputs).backward()
    return outputs, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal_everywhere(model, program, calls):
    for training in (False, True):
        for args, kwargs in calls:
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            expected = outcome(model.train(training), args, kwargs)
            program.model.load_state_dict(state)
            given = outcome(program.model.train(training), args, kwargs)
            torch.testing.assert_close(given, expected, equal_nan=True)
    assert [miss for miss in program.coverage().missed if "training" not in miss.guard] == []


@pytest.mark.parametrize("name", MODELS)
def test_other_numbers_of_nodes_edges_and_graphs_run_from_the_same_graphs(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    program = fxopt.capture(model, graph(*SIZES[0]))
    assert {o.name: o.reason for o in program.opaque.values()} == OPAQUE.get(name, {})
    assert_equal_everywhere(model, program, [((), graph(*size)) for size in SIZES])


def test_a_call_without_a_batch_vector_runs_the_original_forward_and_says_so():
    model = Classifier(gcn).eval()
    program = fxopt.capture(model, graph(*SIZES[0]))
    single = {**graph(9, 20, 1), "batch": None}
    torch.testing.assert_close(program.model(**single), model(**single))
    assert "batch is given" in str(program.coverage().missed[0])
    both = fxopt.capture(model, [graph(*SIZES[0]), single])
    torch.testing.assert_close(both.model(**single), model(**single))
    assert not both.coverage().missed


# -- several kinds of nodes and edges ---------------------------------------------------------------------------------


class Hetero(nn.Module):
    """A convolution for each kind of edges, and a head for one kind of nodes."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.HeteroConv({kind: pyg.SAGEConv((IN, IN), WIDTH) for kind in META[1]})
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index):
        return self.head(self.conv(x, edge_index)["user"].relu())


class Homogeneous(nn.Module):
    """Two convolutions, for `to_hetero`."""

    def __init__(self, conv):
        super().__init__()
        self.first, self.second = conv(IN, WIDTH), conv(WIDTH, 3)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


HETERO = {
    "HeteroConv": Hetero,
    "to_hetero, SAGE": lambda: pyg.to_hetero(Homogeneous(lambda i, o: pyg.SAGEConv((i, i), o)), META),
    "to_hetero, GAT": lambda: pyg.to_hetero(
        Homogeneous(lambda i, o: pyg.GATConv((i, i), o, add_self_loops=False)), META
    ),
}


def hetero(users, items, edges):
    sizes = {"user": users, "item": items}
    kinds = {kind: torch.stack([torch.randint(0, sizes[kind[end]], (edges,)) for end in (0, 2)]) for kind in META[1]}
    return {name: torch.randn(size, IN) for name, size in sizes.items()}, kinds


@pytest.mark.parametrize("name", HETERO)
def test_models_on_several_kinds_of_edges_are_captured_whole(name):
    torch.manual_seed(0)
    model = HETERO[name]().eval()
    program = fxopt.capture(model, hetero(12, 9, 30))
    assert program.opaque == {}
    calls = [hetero(12, 9, 30), hetero(30, 14, 70), hetero(5, 4, 0)]
    assert_equal_everywhere(model, program, [(call, {}) for call in calls])


def test_other_kinds_of_edges_run_the_original_forward():
    model = Hetero().eval()
    program = fxopt.capture(model, hetero(12, 9, 30))
    x, edges = hetero(6, 5, 8)
    fewer = {kind: index for kind, index in edges.items() if kind != META[1][2]}
    torch.testing.assert_close(program.model(x, fewer), model(x, fewer))
    assert any("edge_index is a dict of 3" in str(miss) for miss in program.coverage().missed)
