"""Triads are disjoint, as many as fit, the best ones; the coarse graph is what contraction makes of the graph."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch_geometric.data import Batch, Data

import fxopt
from fxopt.layers import RO3TriadPooling

KINDS = ("closed", "all")


def random_graph(seed, nodes=12, edges=40, tied=False):
    torch.manual_seed(seed)
    x = torch.randint(0, 2, (nodes, 3)).double() if tied else torch.randn(nodes, 3, dtype=torch.double)
    return x, torch.randint(0, max(nodes, 1), (2, edges if nodes else 0))


def pooling(triads="closed", ratio=0.0, **options):
    torch.manual_seed(0)
    return RO3TriadPooling(3, ratio, triads, dtype=torch.double, **options)


def all_triads(edge_index, nodes, kind):
    edges = {frozenset(pair) for pair in edge_index.t().tolist() if pair[0] != pair[1]}
    joined = {
        triad: sum(frozenset(pair) in edges for pair in itertools.combinations(triad, 2))
        for triad in itertools.combinations(range(nodes), 3)
    }
    is_closed = kind == "closed" and 3 in joined.values()
    return [triad for triad, count in joined.items() if count == 3 or (count == 2 and not is_closed)]


def clusters(pool, x, edge_index, batch=None):
    """Return the triads that were contracted, and their gates."""
    batch = torch.zeros(len(x), dtype=torch.long) if batch is None else batch
    chosen = pool.select(x, edge_index, batch)
    of_each = {}
    for node, cluster in enumerate(chosen.cluster_index.tolist()):
        of_each.setdefault(cluster, []).append(node)
    assert sorted(of_each) == list(range(chosen.num_clusters))
    assert {len(members) for members in of_each.values()} <= {1, 3}
    return {tuple(m): chosen.weight[m[0]].item() for m in of_each.values() if len(m) == 3}


def score_of(pool, x, triad):
    weight = pool.select.weight
    return ((x * weight).sum(-1) / weight.norm())[list(triad)].mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_first_disjoint_until_none_is_left(kind):
    for seed in range(40):
        x, edges = random_graph(seed, nodes=seed % 14)
        pool, used, expected = pooling(kind), set(), set()
        ranked = sorted(all_triads(edges, len(x), kind), key=lambda triad: -score_of(pool, x, triad))
        for triad in ranked:
            if not used & set(triad):
                used |= set(triad)
                expected.add(triad)
        found = clusters(pool, x, edges)
        assert set(found) == expected
        assert all(abs(torch.tensor(score_of(pool, x, t)).tanh().item() - gate) < 1e-6 for t, gate in found.items())


@pytest.mark.parametrize("kind", KINDS)
def test_tied_scores_give_disjoint_triads_and_as_many_as_fit(kind):
    for seed in range(30):
        x, edges = random_graph(seed, tied=True)
        found = clusters(pooling(kind), torch.ones_like(x) if seed % 2 else x, edges)
        used = [node for triad in found for node in triad]
        assert len(used) == len(set(used))
        triads = list(all_triads(edges, len(x), kind))
        assert set(found) <= set(triads)
        assert all(set(triad) & set(used) for triad in triads)
        assert found == clusters(pooling(kind), torch.ones_like(x) if seed % 2 else x, edges)


@pytest.mark.parametrize("kind", KINDS)
def test_no_order_of_nodes_or_edges_matters(kind):
    x, edges = random_graph(3, 30, 120)
    pool, order = pooling(kind), torch.randperm(30)
    place = torch.empty_like(order)
    place[order] = torch.arange(30)
    moved = clusters(pool, x[order], place[edges][:, torch.randperm(120)].flip(0))
    assert {tuple(sorted(order[list(triad)].tolist())) for triad in moved} == set(clusters(pool, x, edges))
    one, other = pool(x, edges)[0], pool(x[order], place[edges])[0]
    torch.testing.assert_close(one.sort(0).values, other.sort(0).values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.0, 0.5, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_batch_is_its_graphs(kind, ratio, tied):
    pool = pooling(kind, ratio)
    graphs = [
        random_graph(seed, n, e, tied) for seed, (n, e) in enumerate([(12, 40), (1, 0), (9, 30), (5, 0), (30, 99)])
    ]
    batch = Batch.from_data_list(
        [Data(x=x, edge_index=edges, edge_attr=torch.ones(edges.shape[1])) for x, edges in graphs]
    )
    x, edge_index, edge_attr, owner, perm, score = pool(batch.x, batch.edge_index, batch.edge_attr, batch.batch)
    assert torch.equal(batch.batch[perm], owner)
    for number, (features, edges) in enumerate(graphs):
        single = pool(features, edges, torch.ones(edges.shape[1]))
        of_it, first = owner == number, int((owner < number).sum())
        torch.testing.assert_close(x[of_it], single[0])
        torch.testing.assert_close(score[of_it], single[5])
        inside = of_it[edge_index[0]]
        assert torch.equal(edge_index[:, inside] - first, single[1])
        assert torch.equal(edge_attr[inside], single[2])
        assert torch.equal(perm[of_it] - int(batch.ptr[number]), single[4])


def test_the_ratio_limits_what_is_taken_in_each_graph_to_the_best():
    x, edges = random_graph(5, 30, 200)
    everything = clusters(pooling("all"), x, edges)
    half = clusters(pooling("all", 0.5), x, edges)
    assert len(half) == (30 - 15) // 2
    assert set(half) == set(sorted(everything, key=everything.get)[-len(half) :])
    assert len(pooling("all", 28)(x, edges)[0]) == 28
    assert len(pooling("all", 1.0)(x, edges)[0]) == len(pooling("all", 99)(x, edges)[0]) == 30
    assert all(gate > 0.3 for gate in clusters(pooling("all", min_score=0.3), x, edges).values())


def test_what_a_contraction_makes():
    x = torch.arange(15.0, dtype=torch.double).view(5, 3)
    edges = torch.tensor(
        [[0, 1, 2, 2, 3, 2, 4, 2], [1, 2, 0, 3, 2, 3, 4, 2]]
    )  # a triangle, a node on it by two edges, loops
    weights = torch.arange(1.0, 9.0, dtype=torch.double)
    pool = pooling()
    new, edge_index, edge_attr, batch, perm, score = pool(x, edges, weights)
    gate = torch.tensor(score_of(pool, x, (0, 1, 2))).tanh()
    torch.testing.assert_close(new[0], x[:3].sum(0) * gate, check_dtype=False)
    assert torch.equal(new[1:], x[3:])
    assert edge_index.tolist() == [[0, 1], [1, 0]]
    assert edge_attr.tolist() == [4 + 6, 5]
    assert (perm.tolist(), batch.tolist(), score[1:].tolist()) == ([0, 3, 4], [0, 0, 0], [1, 1])


def test_gradients_reach_the_features_and_the_scorer():
    x, edges = random_graph(2)
    attributes, pool = torch.randn(40, 2, dtype=torch.double), pooling("all", multiplier=2.0, aggr="mean")

    def pooled(x, attributes, weight):
        outputs = torch.func.functional_call(pool, {"select.weight": weight}, (x, edges, attributes))
        return outputs[0], outputs[2], outputs[5]

    inputs = (x, attributes, pool.select.weight.detach().clone())
    assert torch.autograd.gradcheck(pooled, tuple(tensor.requires_grad_() for tensor in inputs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (1, 0), (1, 3), (2, 5), (6, 0)])
def test_graphs_without_triads_stay(kind, nodes, edges):
    x = torch.randn(nodes, 3, dtype=torch.double)
    index = torch.randint(0, max(nodes, 1), (2, edges))
    new, edge_index, _, batch, perm, score = pooling(kind)(x, index)
    assert torch.equal(new, x)
    assert torch.equal(perm, torch.arange(nodes))
    assert len(batch) == nodes
    assert score.tolist() == [1] * nodes
    assert not (edge_index[0] == edge_index[1]).any()


def test_gradients_of_a_graph_without_triads_are_zero_and_no_error():
    pool = pooling()
    pool(torch.randn(4, 3, dtype=torch.double), torch.zeros(2, 0, dtype=torch.long))[5].sum().backward()
    assert pool.select.weight.grad is None or not pool.select.weight.grad.any()


@pytest.mark.parametrize("training", [False, True])
def test_a_model_with_it_is_captured(training):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pool, self.head = pooling("all"), torch.nn.Linear(3, 2, dtype=torch.double)

        def forward(self, x, edge_index, batch):
            x, edge_index, _, batch, _, _ = self.pool(x, edge_index, None, batch)
            return self.head(x).relu(), edge_index, batch

    model = Model().train(training)
    calls = [(*random_graph(size, size, 3 * size), torch.zeros(size, dtype=torch.long)) for size in (9, 20, 1)]
    program = fxopt.capture(model, calls[0])
    assert not program.opaque
    for call in calls:
        torch.testing.assert_close(program.model(*call), model(*call))
    assert not program.coverage().missed


def test_its_text_and_its_state():
    pool = RO3TriadPooling(8, ratio=0.8, triads="all")
    assert "8, ratio=0.8, triads='all'" in repr(pool)
    assert "min_score=0.1" in repr(RO3TriadPooling(8, min_score=0.1))
    assert list(pool.state_dict()) == ["select.weight"]
    before = pool.select.weight.detach().clone()
    pool.reset_parameters()
    assert not torch.equal(before, pool.select.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"triads": "open"}, "triads is 'open'; give 'closed' or 'all'"),
        ({"ratio": 1.5}, "ratio is 1.5; give a part"),
        ({"ratio": 0}, "ratio is 0; give a part"),
        ({"ratio": -0.1}, "ratio is -0.1; give a part"),
        ({"ratio": "a"}, "ratio is 'a'; give a part"),
        ({"ratio": True}, "ratio is True; give a part"),
        ({"min_score": "a"}, "min_score is of type str; give a number"),
        ({"in_channels": 0}, "in_channels is 0; give a whole number, at least 1"),
        ({"in_channels": "3"}, "in_channels is of type str; give a whole number, at least 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(fxopt.UsageError, match=message):
        RO3TriadPooling(**{"in_channels": 3, **options})


def test_wrong_graphs():
    x, edges = random_graph(1)
    pool = pooling()
    for call, message in (
        ((x, edges + 5), "12 nodes"),
        ((x, edges, None, torch.zeros(3, dtype=torch.long)), "each of the 12 nodes"),
        ((x, edges, None, None, x[:4]), "attn has 4 rows"),
    ):
        with pytest.raises(fxopt.UsageError, match=message):
            pool(*call)


def test_edges_may_lie_in_memory_in_any_way():
    x, edges = torch.randn(5, 4), torch.tensor([[0, 1], [1, 2], [2, 0], [2, 3], [3, 4]]).t()
    layer = RO3TriadPooling(4)
    for one, other in zip(layer(x, edges), layer(x, edges.contiguous()), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_what_does_not_fit_is_refused_in_one_line():
    x, edges, layer = torch.randn(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]]), RO3TriadPooling(3)
    calls = [
        (lambda: layer(x, edges, torch.ones(2)), r"edge_attr is \[2\]; give a row for each of 3 edges"),
        (lambda: layer(x, edges, None, torch.tensor([0, 0, 0, -1])), "batch names graph -1"),
        (
            lambda: layer(x, edges, None, torch.tensor([0, 0, 1, 1])),
            "edge 1 of edge_index joins nodes 1 and 2 of two graphs",
        ),
        (lambda: layer(x, edges.int()), r"give \[2, number of edges\] torch.int64"),
    ]
    for call, message in calls:
        with pytest.raises(fxopt.UsageError, match=message):
            call()


def test_graphs_without_triangles_are_pooled_by_wedges_each_by_itself():
    path = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
    triangle = torch.tensor([[0, 1, 2, 2, 3, 4], [1, 2, 0, 3, 4, 5]])
    x, pool = torch.randn(6, 3, dtype=torch.double), pooling()
    assert clusters(pool, x, path)
    assert set(clusters(pool, x, triangle)) == {(0, 1, 2)}
    batch = torch.arange(2).repeat_interleave(6)
    both = clusters(pool, torch.cat([x, x]), torch.cat([path, triangle + 6], 1), batch)
    assert {tuple(node - 6 for node in triad) for triad in both if triad[0] > 5} == {(0, 1, 2)}
    assert {triad for triad in both if triad[0] < 6} == set(clusters(pool, x, path))
