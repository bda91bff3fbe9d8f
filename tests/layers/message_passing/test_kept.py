"""What is computed from graphs that are made in inference mode is kept, and compared with what they hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric import nn as pyg

from fxopt.layers.message_passing import compressed, convolutions
from fxopt.layers.message_passing.kept import KeptGraphs, Sights

NODES, EDGES, WIDTH = 40, 90, 6


@pytest.fixture
def made(monkeypatch):
    """Return a list that grows with each graph whose rows are made."""
    calls, own = [], convolutions.rows_of
    monkeypatch.setattr(convolutions, "rows_of", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    return calls


def graph():
    with torch.inference_mode():
        return torch.randn(NODES, WIDTH), torch.randint(0, NODES, (2, EDGES))


LAYERS = {
    "gcn": lambda: pyg.GCNConv(WIDTH, 4),
    "gcn plain": lambda: pyg.GCNConv(WIDTH, 4, normalize=False),
    "gcn cached": lambda: pyg.GCNConv(WIDTH, 4, cached=True),
    "sage": lambda: pyg.SAGEConv(WIDTH, 4),
    "gat": lambda: pyg.GATConv(WIDTH, 4, edge_dim=1),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("first_in", [True, False])
def test_rows_of_a_graph_of_inference_mode_are_made_once(name, first_in, made):
    layer = LAYERS[name]().eval()
    fast, (x, edges) = compressed(layer, nn.Module(), trains=False), graph()
    for inside in (first_in, not first_in, True):
        with torch.inference_mode(inside), torch.no_grad():
            torch.testing.assert_close(fast(x, edges), layer(x, edges))
    assert len(made) == 1


@pytest.mark.parametrize("name", ["gcn", "gcn plain", "gat"])
@pytest.mark.parametrize("written", ["edge", "weight"])
def test_each_write_in_inference_mode_is_seen(name, written):
    layer = LAYERS[name]().eval()
    fast, (x, edges) = compressed(layer, nn.Module(), trains=False), graph()
    with torch.inference_mode():
        weights = torch.rand(EDGES, *((1,) if name == "gat" else ()))
        for place in range(0, EDGES, 7):  # one number of many: no sample of a few would tell
            if written == "edge":
                edges[0, place] = (edges[0, place] + 1) % NODES
            else:
                weights[place] += 1
            torch.testing.assert_close(fast(x, edges, weights), layer(x, edges, weights))


def test_a_result_is_dropped_with_its_tensor():
    kept = KeptGraphs()
    _, edges = graph()
    kept.of(torch.sum, edges, key="sum")
    assert len(kept._kept) == 1
    del edges
    assert not kept._kept


def test_what_was_kept_in_inference_mode_serves_training():
    layer = pyg.GCNConv(WIDTH, 4)
    fast, (x, edges) = compressed(layer, nn.Module(), trains=True), graph()
    with torch.inference_mode():
        fast(x, edges)
    gradients = [torch.autograd.grad(each(x.clone(), edges).square().sum(), each.lin.weight) for each in (layer, fast)]
    torch.testing.assert_close(*gradients)


def test_graphs_that_come_again_are_counted_in_inference_mode():
    seen, (_, edges) = Sights(wanted=4), graph()
    assert [seen.wants(edges) for _ in range(5)] == [False, False, False, True, True]


def test_a_buffer_that_holds_another_graph_each_time_goes_over_rows_seldom(made):
    layer = pyg.SAGEConv(WIDTH, 4).eval()
    fast, (x, edges) = compressed(layer, nn.Module(), trains=False), graph()
    with torch.inference_mode():
        for _ in range(200):
            edges.random_(NODES)
            torch.testing.assert_close(fast(x, edges), layer(x, edges))
    assert len(made) < 50
