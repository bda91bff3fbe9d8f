"""Convolutions over compressed rows give what PyTorch Geometric's own forward gives, and its gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from support.concurrency import run_in_threads
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg

from fxopt.layers.message_passing import compressed, convolutions, kept
from fxopt.layers.message_passing.kept import KeptGraphs

WIDTH, NODES = 6, 40


@pytest.fixture(autouse=True)
def always_over_rows(monkeypatch):
    """Let small graphs go over rows at their first sight."""
    monkeypatch.setattr(kept, "_WORTH", 0)


@pytest.fixture
def computed(monkeypatch):
    """Return a list that grows with each call of a layer's own message passing."""
    calls = []
    for cls in CLASSES:
        own = cls.forward

        def counted(self, *args, own=own, **kwargs):
            calls.append(type(self))
            return own(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", counted)
    return calls


CLASSES = (pyg.GCNConv, pyg.SAGEConv, pyg.GINConv, pyg.GATConv, pyg.GATv2Conv)
WITHOUT_WEIGHTS = {
    "sage": lambda: pyg.SAGEConv(WIDTH, 4),
    "sage sum": lambda: pyg.SAGEConv(WIDTH, 4, aggr="sum", root_weight=False, bias=False),
    "sage project": lambda: pyg.SAGEConv(WIDTH, 4, project=True, normalize=True),
    "gin": lambda: pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 4)), train_eps=True),
    "gin mean": lambda: pyg.GINConv(nn.Linear(WIDTH, 4), eps=0.5, aggr="mean", flow="target_to_source"),
    "gat": lambda: pyg.GATConv(WIDTH, 4),
    "gat heads": lambda: pyg.GATConv(WIDTH, 4, heads=3, residual=True),
    "gat mean": lambda: pyg.GATConv(WIDTH, 4, heads=3, concat=False, add_self_loops=False, bias=False),
    "gat back": lambda: pyg.GATConv(WIDTH, 4, heads=2, flow="target_to_source", negative_slope=0.4),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 4, heads=2),
    "gatv2 shared": lambda: pyg.GATv2Conv(WIDTH, 4, heads=3, concat=False, share_weights=True, residual=True),
}
WITH_WEIGHTS = {
    "gcn": lambda: pyg.GCNConv(WIDTH, 4),
    "gcn wider": lambda: pyg.GCNConv(WIDTH, 12),
    "gcn improved": lambda: pyg.GCNConv(WIDTH, 4, improved=True, bias=False),
    "gcn no loops": lambda: pyg.GCNConv(WIDTH, 4, add_self_loops=False),
    "gcn back": lambda: pyg.GCNConv(WIDTH, 4, flow="target_to_source"),
    "gcn plain": lambda: pyg.GCNConv(WIDTH, 4, normalize=False),
    "gcn cached": lambda: pyg.GCNConv(WIDTH, 4, cached=True),
}
WITH_FEATURES = {
    "gat": lambda: pyg.GATConv(WIDTH, 4, heads=2, edge_dim=3),
    "gat filled": lambda: pyg.GATConv(WIDTH, 4, edge_dim=3, fill_value=0.5),
    "gat ignoring": lambda: pyg.GATConv(WIDTH, 4, heads=2),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 4, heads=2, edge_dim=3),
    "gatv2 no loops": lambda: pyg.GATv2Conv(WIDTH, 4, heads=2, edge_dim=3, add_self_loops=False),
}
ALL = {**WITHOUT_WEIGHTS, **WITH_WEIGHTS}


def graph(seed=0, edges=120):
    """Return features and edges with repetitions and loops; the last nodes have no edge."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, NODES - 5, (2, edges), generator=generator)
    edge_index[:, -3:] = edge_index[:, :3]
    edge_index[1, 5:8] = edge_index[0, 5:8]
    return torch.randn(NODES, WIDTH, generator=generator, dtype=torch.float64), edge_index


def pair(make):
    """Return a layer in float64 and the same over compressed rows, with weights of its own."""
    torch.manual_seed(1)
    own = make().double()
    return own, compressed(copy.deepcopy(own), own, trains=True)


def compare(own, fast, x, edge_index, *edges):
    """Compare outputs, and gradients of everything that has one; second ones, too."""
    sides = []
    for layer in (own, fast):
        given = [each.detach().clone().requires_grad_() for each in (x, *edges)]
        inputs = [*given, *layer.parameters()]
        out = layer(given[0], edge_index, *given[1:])
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
        first = torch.autograd.grad((out.sin() * weights).sum(), inputs, create_graph=True, allow_unused=True)
        total = sum((each**2).sum() for each in first if each is not None)
        second = torch.autograd.grad(total, inputs, allow_unused=True)
        with torch.no_grad():
            sides.append((out, layer(x, edge_index, *edges), *first, *second))
    for one, other in zip(*sides, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ALL)
def test_outputs_and_gradients_are_those_of_the_layer(name, computed):
    own, fast = pair(ALL[name])
    x, edge_index = graph()
    compare(own, fast, x, edge_index)
    assert len(computed) == 2


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_weights_of_edges(name, computed):
    own, fast = pair(WITH_WEIGHTS[name])
    x, edge_index = graph()
    weights = torch.rand(edge_index.shape[1], dtype=x.dtype) + 0.1
    if own.cached:  # it keeps what was computed for the first call
        with torch.no_grad():
            torch.testing.assert_close(fast(x, edge_index, weights), own(x, edge_index, weights))
            torch.testing.assert_close(fast(x, edge_index.flip(1)), own(x, edge_index.flip(1)))
        return
    compare(own, fast, x, edge_index, weights)
    assert len(computed) == 2
    for _ in range(2):  # in place: the values that are kept are those of other weights
        weights.mul_(torch.rand_like(weights))
        with torch.no_grad():
            torch.testing.assert_close(fast(x, edge_index, edge_weight=weights), own(x, edge_index, weights))


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_features_of_edges(name, computed):
    own, fast = pair(WITH_FEATURES[name])
    x, edge_index = graph()
    features = torch.randn(edge_index.shape[1], 3, dtype=x.dtype)
    compare(own, fast, x, edge_index, features)
    assert len(computed) == 2
    features[3] += 1
    with torch.no_grad():
        torch.testing.assert_close(fast(x, edge_index, edge_attr=features), own(x, edge_index, features))


@pytest.mark.parametrize("name", ["gcn", "sage", "gat heads", "gatv2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(name, dtype, computed):
    own, fast = (layer.to(dtype) for layer in pair(ALL[name]))
    x, edge_index = graph()
    with torch.no_grad():
        found = fast(x.to(dtype), edge_index)
        assert not computed
        torch.testing.assert_close(
            found, own(x.to(dtype), edge_index), rtol=4e-2 if dtype == torch.bfloat16 else 1e-5, atol=4e-2
        )


@pytest.mark.parametrize("name", ALL)
def test_edges_written_to_are_other_edges(name):
    own, fast = pair(ALL[name])
    x, edge_index = graph()
    with torch.no_grad():
        fast(x, edge_index)
        own(x, edge_index)
        edge_index[0, 4] = 11
        torch.testing.assert_close(fast(x, edge_index), own(x, edge_index))
        edge_index[:, ::2].fill_(3)
        torch.testing.assert_close(fast(x, edge_index), own(x, edge_index))
        edge_index.data = graph(3)[1]
        torch.testing.assert_close(fast(x, edge_index), own(x, edge_index))
        edge_index.resize_(2, 30)
        torch.testing.assert_close(fast(x, edge_index), own(x, edge_index))


@pytest.mark.parametrize("name", ["gcn", "gat heads", "sage"])
def test_several_graphs_take_turns_and_new_ones_come(name, computed):
    own, fast = pair(ALL[name])
    graphs = [graph(seed, edges=50 + seed) for seed in range(3)]
    with torch.no_grad():
        expected = [own(*each) for each in graphs]
        computed.clear()
        for _ in range(3):
            for each, found in zip(graphs, expected, strict=True):
                torch.testing.assert_close(fast(*each), found)
        for seed in range(50):  # each gone before the next: the same place in memory, perhaps
            x, edge_index = graph(seed)
            torch.testing.assert_close(fast(x, edge_index), own(x, edge_index))
        more = torch.cat([graphs[0][0], graphs[1][0]])
        torch.testing.assert_close(fast(more, graphs[0][1]), own(more, graphs[0][1]))


def sparse(x, edges):
    """Return the same graph as a sparse matrix."""
    ones = torch.ones(edges.shape[1], dtype=x.dtype)
    return torch.sparse_coo_tensor(edges.flip(0), ones, (NODES, NODES), check_invariants=True).coalesce()


OWN = {
    "sparse": ("gcn", lambda x, edges: ((x, sparse(x, edges)), {})),
    "edge index": ("sage", lambda x, edges: ((x, EdgeIndex(edges, sparse_size=(NODES, NODES))), {})),
    "pair": ("gat", lambda x, edges: (((x, x), edges), {})),
    "size": ("gin", lambda x, edges: ((x, edges), {"size": (NODES, NODES)})),
    "attention": ("gat", lambda x, edges: ((x, edges), {"return_attention_weights": True})),
    "static": ("gcn", lambda x, edges: ((x.expand(2, -1, -1), edges), {})),
    "no edges": ("gatv2", lambda x, edges: ((x, edges[:, :0]), {})),
    "no nodes": ("sage", lambda x, edges: ((x[:0], edges[:, :0]), {})),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks", "ignore:Converting sparse tensor", "ignore:Sparse CSR tensor support"
)
@pytest.mark.parametrize("name", OWN)
def test_other_calls_run_the_layers_own_forward(name, computed):
    layer, make = OWN[name]
    own, fast = pair(ALL[layer])
    args, kwargs = make(*graph())
    with torch.no_grad():
        expected, found = own(*args, **kwargs), fast(*args, **kwargs)
    torch.testing.assert_close(found, expected)
    assert len(computed) == 2


def test_what_is_wrong_is_said_by_the_layer():
    own, fast = pair(WITHOUT_WEIGHTS["sage"])
    x, edge_index = graph()
    edge_index[0, 0] = NODES
    messages = []
    for layer in (own, fast):
        with pytest.raises((IndexError, RuntimeError)) as raised:
            layer(x, edge_index)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_hooks_dropout_and_autocast_run_the_layers_own_forward(computed):
    _, fast = pair(lambda: pyg.GATConv(WIDTH, 4, dropout=0.5))
    x, edge_index = graph()
    fast.train()(x, edge_index)
    assert len(computed) == 1
    fast.eval()(x, edge_index)
    assert len(computed) == 1
    with torch.autocast("cpu", torch.bfloat16):
        fast.float()(x.float(), edge_index)
    assert len(computed) == 2
    seen = []
    fast.register_message_forward_hook(lambda *_: seen.append(1))
    fast(x.float(), edge_index)
    assert len(computed) == 3 and seen


def test_compiled_and_exported_it_is_the_layers_own_forward(computed):
    own, fast = pair(WITH_WEIGHTS["gcn"])
    x, edge_index = graph()
    expected = own(x, edge_index)
    computed.clear()
    torch.testing.assert_close(torch.compile(fast, backend="eager", fullgraph=True)(x, edge_index), expected)
    exported = torch.export.export(fast, (x, edge_index))
    torch.testing.assert_close(exported.module()(x, edge_index), expected)
    assert "embedding_bag" not in str(exported.graph)


def test_scores_of_any_size_weigh_alike():
    for name in ("gat heads", "gatv2"):
        own, fast = (layer.float() for layer in pair(ALL[name]))
        x, edge_index = graph()
        for scale in (1e-3, 1.0, 30.0, 1e4):
            with torch.no_grad():
                found, expected = (layer(scale * x.float(), edge_index) for layer in (fast, own))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * scale)
            assert found.isfinite().all()


def test_many_edges_are_looked_at_in_parts(monkeypatch):
    monkeypatch.setattr("fxopt.layers.message_passing.rows._PART", 7)
    monkeypatch.setattr(convolutions, "_CHUNK", 40)
    for name in ("gat heads", "gatv2 shared"):
        own, fast = pair(ALL[name])
        with torch.no_grad():
            torch.testing.assert_close(fast(*graph()), own(*graph()))


def test_enough_edges_to_be_sorted_by_their_digits():
    own, fast = pair(ALL["sage"])
    for edges in (6_000, 40_000):
        inputs = graph(edges=edges)
        with torch.no_grad():
            torch.testing.assert_close(fast(*inputs), own(*inputs))


def test_inference_mode_then_training():
    own, fast = pair(ALL["gat heads"])
    x, edge_index = graph()
    with torch.inference_mode():
        torch.testing.assert_close(fast(x, edge_index), own(x, edge_index))
        made_here = edge_index.clone()
        for number in range(2):
            made_here[0, 0] = number
            torch.testing.assert_close(fast(x, made_here), own(x, made_here))
    compare(own, fast, x, edge_index)


def test_copies_and_pickles_compute_the_same_and_keep_nothing_of_the_graphs():
    own, fast = pair(WITH_WEIGHTS["gcn"])
    x, edge_index = graph()
    expected = fast(x, edge_index)
    again = pickle.loads(pickle.dumps(fast))
    assert len(pickle.dumps(fast)) < len(pickle.dumps(own)) + 2000
    for other in (copy.deepcopy(fast), again):
        assert isinstance(other, pyg.GCNConv)
        torch.testing.assert_close(other(x, edge_index), expected)
        other.lin.weight.data.mul_(2)
        assert not torch.allclose(other(x, edge_index), expected)
    assert fast.state_dict().keys() == own.state_dict().keys()


def test_threads_with_graphs_of_their_own():
    own, fast = pair(ALL["gat heads"])
    graphs = [graph(seed) for seed in range(4)]
    with torch.no_grad():
        expected = [own(*each) for each in graphs]
    wrong = []

    def work(start):
        with torch.no_grad():
            for number in range(start, start + 60):
                found = fast(*graphs[number % 4])
                if not torch.allclose(found, expected[number % 4]):
                    wrong.append(number)

    run_in_threads(work, range(4))
    assert not wrong


def test_layers_share_the_rows_of_a_graph(monkeypatch):
    model = nn.ModuleList(pyg.SAGEConv(WIDTH, WIDTH) for _ in range(3)).double()
    for number in range(3):
        model[number] = compressed(model[number], model, trains=True)
    made, own = [], convolutions.rows_of
    monkeypatch.setattr(convolutions, "rows_of", lambda *args, **kwargs: made.append(1) or own(*args, **kwargs))
    x, edge_index = graph(7)
    for layers in (model, copy.deepcopy(model)):
        made.clear()
        for _ in range(2):
            for layer in layers:
                layer(x, edge_index)
        assert len(made) == 1


@pytest.mark.parametrize("conv", [lambda: pyg.GCNConv(WIDTH, 4), lambda: pyg.GATConv(WIDTH, 4, edge_dim=1)])
@pytest.mark.parametrize("trained", [True, False])
def test_weights_of_edges_that_are_parameters_are_never_out_of_date(conv, trained):
    torch.manual_seed(0)
    layer = conv().eval()
    fast = compressed(layer, nn.Module(), trains=True)
    x, edges = torch.randn(NODES, WIDTH), torch.randint(0, NODES, (2, 90))
    weights = nn.Parameter(torch.rand(90, 1) if isinstance(layer, pyg.GATConv) else torch.rand(90), trained)
    with torch.no_grad():
        fast(x, edges, weights)
    if trained:
        optimizer = torch.optim.Adam([weights], lr=0.5, fused=True)
        fast(x, edges, weights).square().sum().backward()
        optimizer.step()  # raises no version
    else:
        weights.data.mul_(2)  # neither does this
        fast.train().eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(x, edges, weights), layer(x, edges, weights))


def test_other_memory_is_seen_where_it_lies_in_the_place_of_the_first():
    kept = KeptGraphs()
    for _ in range(50):
        edges = torch.randint(0, NODES, (2, 90))
        assert torch.equal(kept.of(torch.sum, edges, key="sum"), edges.sum())
        edges.data = torch.empty(2, 91, dtype=torch.long)
        edges.data = torch.randint(0, NODES, (2, 90))
        assert torch.equal(kept.of(torch.sum, edges, key="sum"), edges.sum())


def test_edges_that_are_written_past_torch_are_seen():
    kept, edges = KeptGraphs(), torch.randint(1, NODES, (2, 90))
    for _ in range(2):
        assert torch.equal(kept.of(torch.sum, edges, key="sum"), edges.sum())
        edges.numpy().__imul__(2)
