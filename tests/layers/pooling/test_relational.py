"""Pooling over all triples of nodes: what it computes, compared with going through all triples by hand."""

from __future__ import annotations

import importlib
from itertools import combinations, combinations_with_replacement
from pathlib import Path
from types import ModuleType
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor

import fxopt
from fxopt.layers import RO3Pooling

STRUCTURES = ("adjacency", "distance", "codegree")
each_structure = pytest.mark.parametrize("structure", STRUCTURES)


def edges_of(graph: Any) -> Tensor:
    edges = torch.tensor(list(graph.edges), dtype=torch.int64).reshape(-1, 2).t()
    return torch.cat([edges, edges.flip(0)], 1)


def type_by_hand(graph: Any, nodes: tuple[int, ...], structure: str) -> int:
    pairs = list(combinations(nodes, 2))
    edges = sum(graph.has_edge(*pair) for pair in pairs)
    if structure == "adjacency":
        return edges
    if structure == "distance":
        lengths = dict(nx.all_pairs_shortest_path_length(graph))
        colors, cap = [min(lengths[u].get(v, 99), 4) - 1 for u, v in pairs], 3
    else:
        colors, cap = [min(len(set(graph[u]) & set(graph[v])), 2) for u, v in pairs], 2
    number = list(combinations_with_replacement(range(cap + 1), 3)).index(tuple(sorted(colors)))
    if structure == "distance":
        return number
    shared = len(set.intersection(*(set(graph[node]) for node in nodes)))
    return (number * 4 + edges) * (cap + 1) + min(shared, cap)


def pooled_by_hand(pool: RO3Pooling, graph: Any, x: Tensor) -> Tensor:
    """Return what the layer should give without weights."""
    sums, counts = x.new_zeros(pool.num_types, x.shape[1]), x.new_zeros(pool.num_types, 1)
    for nodes in combinations(range(len(graph)), 3):
        kind = type_by_hand(graph, nodes, pool.structure)
        sums[kind] += x[list(nodes)].prod(0)
        counts[kind] += 1
    means = sums / counts.clamp(min=1)
    means = means / (means**2 + 1e-3).pow(1 / 3)
    return torch.cat([means.flatten(), counts.flatten() / counts.sum().clamp(min=1)])


def some_graphs() -> list[Any]:
    path = nx.path_graph(8)
    path.add_edge(0, 2)
    return [
        nx.gnp_random_graph(11, 0.4, seed=1),
        nx.empty_graph(2),
        path,
        nx.empty_graph(0),
        nx.complete_graph(5),
        nx.empty_graph(1),
        nx.disjoint_union(nx.cycle_graph(4), nx.empty_graph(2)),
    ]


def batched(graphs: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, edges and batch of all graphs together."""
    sizes = torch.tensor([len(graph) for graph in graphs])
    starts = sizes.cumsum(0) - sizes
    edges = torch.cat([edges_of(graph) + start for graph, start in zip(graphs, starts, strict=True)], 1)
    return (
        torch.randn(int(sizes.sum()), 3, dtype=torch.float64),
        edges,
        torch.arange(len(sizes)).repeat_interleave(sizes),
    )


@each_structure
@pytest.mark.parametrize("memory_limit", [1000, 2**26])
def test_a_batch_is_pooled_as_by_hand(structure: Any, memory_limit: int):
    pool, graphs = RO3Pooling(structure=structure, memory_limit=memory_limit), some_graphs()
    x, edges, batch = batched(graphs)
    result = pool(x, edges, batch=batch)
    assert result.shape == (len(graphs), pool.width(3))
    expected = [pooled_by_hand(pool, graph, x[batch == number]) for number, graph in enumerate(graphs)]
    torch.testing.assert_close(result, torch.stack(expected), rtol=1e-10, atol=1e-11)
    assert result[[1, 3, 5]].count_nonzero() == 0


@each_structure
def test_loops_repeated_edges_and_directions_change_nothing(structure: Any):
    pool, graph = RO3Pooling(structure=structure), some_graphs()[0]
    edges = torch.tensor(list(graph.edges)).t()
    x, loops = torch.randn(len(graph), 2), torch.arange(len(graph)).expand(2, -1)
    expected = pool(x, edges_of(graph))
    torch.testing.assert_close(pool(x, edges), expected)
    torch.testing.assert_close(pool(x, torch.cat([edges.flip(0), loops, edges, edges], 1)), expected)


@each_structure
def test_the_order_of_nodes_edges_and_batch_does_not_matter(structure: Any):
    pool = RO3Pooling(structure=structure)
    x, edges, batch = batched(some_graphs())
    expected = pool(x, edges, batch=batch)
    for _ in range(10):
        order, shuffled = torch.randperm(len(x)), torch.randperm(edges.shape[1])
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(x)))
        result = pool(x[order], place[edges[:, shuffled]], batch=batch[order])
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(result[:, -pool.num_types :], expected[:, -pool.num_types :])


def weighted_by_hand(graph: Any, x: Tensor, weight: Tensor) -> Tensor:
    sums = x.new_zeros(4, x.shape[1])
    for i, j, k in combinations(range(len(graph)), 3):
        product = x[i] * x[j] * x[k]
        shares = [x.new_ones(()), x.new_zeros(()), x.new_zeros(()), x.new_zeros(())]
        for w in (weight[i, j], weight[i, k], weight[j, k]):
            shares = [
                (1 - w) * s + w * before for s, before in zip(shares, [x.new_zeros(()), *shares[:3]], strict=True)
            ]
        sums = sums + torch.stack([share * product for share in shares])
    return sums


def test_weights_are_shares_of_edges_and_repeated_ones_are_averaged():
    graph = some_graphs()[0]
    x, edges = torch.randn(len(graph), 2, dtype=torch.float64), torch.tensor(list(graph.edges)).t()
    given = torch.rand(2, edges.shape[1], dtype=torch.float64)
    matrix = torch.zeros(len(graph), len(graph), dtype=torch.float64)
    matrix[edges[0], edges[1]] = matrix[edges[1], edges[0]] = given.mean(0)
    result = RO3Pooling()(x, torch.cat([edges, edges.flip(0)], 1), given.reshape(-1, 1))
    sums = weighted_by_hand(graph, torch.cat([x, torch.ones(len(x), 1)], 1), matrix)
    means = sums[:, :2] / sums[:, 2:].clamp(min=1)
    shares = sums[:, 2] / sums[:, 2].sum()
    expected = torch.cat([(means / (means**2 + 1e-3).pow(1 / 3)).flatten(), shares])
    torch.testing.assert_close(result[0], expected)


@each_structure
def test_gradients_are_right(structure: Any):
    x, edges, batch = batched(some_graphs()[1:3] + some_graphs()[4:5])
    pool = RO3Pooling(structure=structure)
    mix = torch.randn(pool.width(3), 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: pool(x, edges, batch=batch) @ mix, x.requires_grad_())


def test_gradients_of_weights_and_gradients_of_gradients_are_right():
    graph = nx.wheel_graph(5)
    edges = edges_of(graph)
    given = [torch.rand(size, dtype=torch.float64, requires_grad=True) for size in ((5, 1), (edges.shape[1],))]
    pool = RO3Pooling()
    assert torch.autograd.gradcheck(lambda x, weight: pool(x, edges, weight), given)
    assert torch.autograd.gradgradcheck(lambda x, weight: pool(x, edges, weight), given)


@each_structure
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_taken_in_more_bits(structure: Any, dtype: torch.dtype):
    graph = nx.gnp_random_graph(40, 0.2, seed=3)
    x, pool = torch.randn(40, 2).to(dtype), RO3Pooling(structure=structure)
    result = pool(x, edges_of(graph))
    assert result.dtype == dtype
    assert torch.equal(result, pool(x.double(), edges_of(graph)).to(dtype))


def test_learned_pooling_has_its_width_and_learns():
    pool = RO3Pooling(8, "adjacency", in_channels=3, edge_channels=2)
    x, edges, batch = batched(some_graphs())
    result = pool(x.float(), edges, torch.randn(edges.shape[1], 2), batch, batch_size=9)
    assert result.shape == (9, 8)
    assert result[[1, 3, 5, 7, 8]].count_nonzero() == 0
    result.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in pool.parameters())
    before = [parameter.clone() for parameter in pool.parameters()]
    pool.reset_parameters()
    assert not any(torch.equal(old, new) for old, new in zip(before, pool.parameters(), strict=True))
    assert repr(pool).startswith("RO3Pooling(\n  3, 8, structure='adjacency', edge_channels=2")
    assert repr(RO3Pooling(structure="distance", cap=2)) == "RO3Pooling(structure='distance', cap=2)"


def test_graphs_without_nodes_give_no_row_or_zeros():
    x, edges = torch.empty(0, 2), torch.empty(2, 0, dtype=torch.int64)
    pool = RO3Pooling(structure="distance")
    assert pool(x, edges).count_nonzero() == 0
    assert pool(x, edges, batch=edges[0]).shape == (0, pool.width(2))
    assert pool(x, edges, batch=edges[0], batch_size=3).shape == (3, pool.width(2))


@pytest.fixture(scope="module")
def benchmark(checkout: Path) -> ModuleType:
    """Return `benchmarks/pooling.py`, which holds the graphs."""
    pytest.importorskip("torch_geometric")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(checkout / "benchmarks")
        return importlib.import_module("pooling")


def test_only_common_neighbours_tell_rook_and_shrikhande_apart(benchmark: ModuleType):
    ones = torch.ones(16, 1)
    for structure, tells_apart in (("adjacency", False), ("distance", False), ("codegree", True)):
        pool = RO3Pooling(structure=structure)
        rook, shrikhande = (pool(ones, edges_of(graph)) for graph in benchmark.rook_and_shrikhande())
        assert torch.equal(rook, shrikhande) != tells_apart


def test_distances_tell_circular_skip_links_apart():
    graphs = [nx.circulant_graph(41, [1, skip]) for skip in (2, 3, 4, 5, 6, 9, 11, 12, 13, 16)]
    _, edges, batch = batched(graphs)
    result = RO3Pooling(structure="distance")(torch.ones(len(batch), 1), edges, batch=batch)
    assert len(result.unique(dim=0)) == 10


X, EDGES = torch.ones(4, 2), torch.tensor([[0, 1], [1, 2]])
BATCH = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool(X, EDGES + 2), "names node 4, but there are 4 nodes"),
        (lambda pool: pool(X, EDGES.float()), "edge_index is"),
        (lambda pool: pool(X[0], EDGES), r"x is \[2\]"),
        (lambda pool: pool(X.long(), EDGES), r"x is \[4, 2\] torch.int64"),
        (lambda pool: pool(X, EDGES, batch=BATCH[:3]), r"batch is \[3\] torch.int64; give one .* for each of the 4"),
        (lambda pool: pool(X, EDGES, batch=BATCH.float()), r"batch is \[4\] torch.float32"),
        (lambda pool: pool(X, EDGES, batch=BATCH), "edge 1 of edge_index joins nodes 1 and 2 of two graphs, 0 and 1"),
        (lambda pool: pool(X, EDGES[:, :1], batch=BATCH, batch_size=1), "names graph 1, but there are 1 graphs"),
        (lambda pool: pool(X, EDGES[:, :1], batch=BATCH - 1), "names graph -1"),
        (lambda pool: pool(X, EDGES, batch_size=2), "batch_size is 2, without batch"),
        (lambda pool: pool(X, EDGES, torch.ones(2, 3)), r"edge_attr is \[2, 3\]; give \[2, 1\].*edge_channels="),
        (lambda pool: pool(X, EDGES, torch.ones(3)), r"edge_attr is \[3\]; give \[2, 1\]"),
        (lambda _: RO3Pooling(structure="distance")(X, EDGES, torch.ones(2)), "reads no edge_attr"),
        (lambda _: RO3Pooling(structure="codegree", node_limit=3)(X, EDGES), "has 4 nodes.*node_limit=4"),
        (lambda _: RO3Pooling(3)(X, EDGES), "x has 2 features, in_channels is 3"),
        (lambda _: RO3Pooling(0), "channels is 0; give a whole number, at least 1"),
        (lambda _: RO3Pooling("distance"), "channels is of type str"),
        (lambda _: RO3Pooling(structure="edges"), "unknown structure 'edges'; give one of adjacency, distance"),
        (lambda _: RO3Pooling(cap=2), "reads no cap"),
        (
            lambda _: RO3Pooling(structure="distance", node_limit=1.5),
            "node_limit is of type float; give a whole number",
        ),
        (lambda _: RO3Pooling(memory_limit=0), "memory_limit is 0; give a whole number, at least 1"),
        (lambda _: RO3Pooling(in_channels=2), "give channels, too"),
        (lambda _: RO3Pooling(2, "distance", edge_channels=2), "leave edge_channels out"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(call: Any, message: str):
    with pytest.raises(fxopt.UsageError, match=message) as raised:
        call(RO3Pooling())
    assert "\n" not in str(raised.value)


def test_no_nodes_are_graphs_without_triples():
    x, edges = torch.randn(0, 2), torch.zeros(2, 0, dtype=torch.long)
    for structure in ("adjacency", "distance", "codegree"):
        assert not RO3Pooling(structure=structure)(x, edges).any()


def test_wrong_types_and_dtypes_are_refused_in_one_line():
    x, edges = torch.randn(3, 2), torch.tensor([[0, 1], [1, 2]])
    calls = [
        (lambda: RO3Pooling(4, in_channels=2)(x.double(), edges), r"x is torch.float64, and the parameters are"),
        (lambda: RO3Pooling()(x.to("meta"), edges.to("meta")), "edge_index is on the meta device"),
        (lambda: RO3Pooling()(x, edges.tolist()), "edge_index is of type list"),
        (lambda: RO3Pooling()(x, edges.int()), r"give \[2, number of edges\] torch.int64"),
        (lambda: RO3Pooling()(x, edges, None, torch.zeros(3).long(), 1.0), "batch_size is 1.0"),
        (lambda: RO3Pooling(structure="distance", cap=150), "cap is 150: .* give 100 at most"),
    ]
    for call, message in calls:
        with pytest.raises(fxopt.UsageError, match=message):
            call()


def test_a_batch_vector_in_the_place_of_edge_attr_is_named():
    edges = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])
    with pytest.raises(fxopt.UsageError, match="name the graph of each as batch="):
        RO3Pooling(8)(torch.randn(6, 8), edges, torch.tensor([0, 0, 0, 1, 1, 1]))


def sparse_graphs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return eight large sparse graphs, with none to seven triangles."""
    edges = []
    for count in range(8):
        graph = nx.path_graph(60)
        graph.add_edges_from((3 * place, 3 * place + 2) for place in range(count))
        edges.append(edges_of(graph) + 60 * count)
    return torch.ones(480, 3), torch.cat(edges, 1), torch.arange(8).repeat_interleave(60)


def test_learned_pooling_standardizes_what_it_counts():
    torch.manual_seed(0)
    x, edges, batch = sparse_graphs()
    pool, seen = RO3Pooling(8, in_channels=3), []
    pool.after.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    for _ in range(40):
        pool(x, edges, batch=batch)
    pool.eval()(x, edges, batch=batch)
    for found in (seen[0], seen[-1]):
        triangles = found[:, 4 * 8 + 3]
        assert abs(float(triangles.mean())) < 1e-3 and float(triangles[7] - triangles[0]) > 2.5


def test_a_batch_with_one_graph_is_compared_with_those_before_it():
    torch.manual_seed(0)
    x, edges, batch = sparse_graphs()
    together, alone = RO3Pooling(8, in_channels=3), RO3Pooling(8, in_channels=3)
    for _ in range(60):
        together(x, edges, batch=batch)
        for graph in range(8):
            inside = batch[edges[0]] == graph
            result = alone(x[:60], edges[:, inside] - 60 * graph)
    assert result.any()
    torch.testing.assert_close(alone.norm.mean[-1], together.norm.mean[-1], rtol=0.3, atol=0.1)
    torch.testing.assert_close(alone.norm.variance[-1], together.norm.variance[-1], rtol=0.5, atol=0.1)
    before = together.norm.mean.clone()
    together(x[:2], edges[:, :0], batch=batch[:2])
    assert torch.equal(together.norm.mean, before)  # a graph without triples does not count


def test_statistics_stay_wide_and_are_forgotten():
    pool = RO3Pooling(8, in_channels=3).half()
    assert pool.norm.variance.dtype == torch.float32 and pool.before.weight.dtype == torch.float16
    assert pool.double().norm.mean.dtype == torch.float64
    x, edges, batch = sparse_graphs()
    pool(x.double(), edges, batch=batch)
    assert pool.norm.batches == 1
    pool.reset_parameters()
    assert pool.norm.batches == 0 and not pool.norm.mean.any() and (pool.norm.variance == 1).all()


def test_features_that_all_graphs_share_are_in_evaluation_what_they_were_in_training():
    torch.manual_seed(0)
    x, batch = torch.ones(39, 1), torch.arange(3).repeat_interleave(13)
    nodes = torch.arange(13)
    circulant = [
        torch.stack([nodes, (nodes + step) % 13]) + 13 * graph for graph in range(3) for step in (1, graph + 2)
    ]
    edges, pool = torch.cat(circulant, 1), RO3Pooling(8, "distance", in_channels=1)
    optimizer = torch.optim.Adam(pool.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        pool(x, edges, batch=batch).sum().backward()
        optimizer.step()
    trained = pool(x, edges, batch=batch)
    torch.testing.assert_close(pool.eval()(x, edges, batch=batch), trained, rtol=1e-3, atol=1e-3)
