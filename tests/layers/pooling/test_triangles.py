"""All triangles of a graph, each once, in a fixed order, whatever the limit on memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fxopt
from fxopt.cuda_ops import triples
from fxopt.layers.pooling import triangles


def edges_of(graph: Any) -> Tensor:
    return torch.tensor(list(graph.edges), dtype=torch.int64).reshape(-1, 2).t()


def by_hand(graph: Any) -> Tensor:
    found = [
        nodes
        for nodes in combinations(sorted(graph.nodes), 3)
        if all(graph.has_edge(*pair) for pair in combinations(nodes, 2))
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 3).t()


GRAPHS: dict[str, Callable[[], Any]] = {
    "random": lambda: nx.gnp_random_graph(40, 0.2, seed=1),
    "scale-free": lambda: nx.barabasi_albert_graph(60, 4, seed=1),
    "geometric": lambda: nx.random_geometric_graph(60, 0.25, seed=1),
    "complete": lambda: nx.complete_graph(12),
    "star": lambda: nx.star_graph(20),
    "wheel": lambda: nx.wheel_graph(9),
    "without triangles": lambda: nx.complete_bipartite_graph(4, 5),
    "without edges": lambda: nx.empty_graph(5),
    "without nodes": lambda: nx.empty_graph(0),
    "of one node": lambda: nx.empty_graph(1),
    "disjoint": lambda: nx.disjoint_union(nx.complete_graph(4), nx.cycle_graph(3)),
}


@pytest.mark.parametrize("memory_limit", [1, 500, 2**26])
@pytest.mark.parametrize("name", GRAPHS)
def test_triangles_are_those_of_all_triples_in_order(name: str, memory_limit: int):
    graph = GRAPHS[name]()
    found = triangles(edges_of(graph), len(graph), memory_limit=memory_limit)
    assert found.dtype == torch.int64
    assert torch.equal(found, by_hand(graph))


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40), st.integers(1, 400))
def test_loops_repeated_and_directed_edges_count_as_one(num_nodes: int, pairs: list[tuple[int, int]], limit: int):
    edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t() % num_nodes
    graph = nx.empty_graph(num_nodes)
    graph.add_edges_from(edges.t().tolist())
    assert torch.equal(triangles(edges, num_nodes, memory_limit=limit), by_hand(graph))


def test_many_nodes_do_not_overflow():
    nodes = torch.tensor([7, 2**21 + 5, 3, 2**21 + 9])
    edges = nodes[torch.combinations(torch.arange(4)).t()]
    expected = torch.tensor(sorted(sorted(triple) for triple in combinations(nodes.tolist(), 3))).t()
    assert torch.equal(triangles(edges, 2**21 + 10), expected)


def test_a_lower_limit_takes_less_memory():
    edges, peaks = edges_of(nx.complete_graph(60)), []
    for limit in (2**26, 2**14):
        watch = LargestTensor()
        with watch:
            list(triples.OrientedGraph(edges, 60).triangles(limit))
        peaks.append(watch.wedges)
    assert peaks[0] == 60 * 59 * 58 // 6
    assert peaks[1] <= 2**14 // 64


class LargestTensor(torch.overrides.TorchFunctionMode):
    """Notes how many wedges are looked at together, at most: what `repeat_interleave` returns."""

    wedges = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.repeat_interleave:
            self.wedges = max(self.wedges, len(result))
        return result


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (torch.tensor([[0], [4]]), "names node 4, but there are 4 nodes"),
        (torch.tensor([[0], [-1]]), "names node -1"),
        (torch.tensor([[0.0], [1.0]]), r"is \[2, 1\] torch.float32; give \[2, number of edges\] torch.int64"),
        (torch.tensor([0, 1]), r"edge_index is \[2\]"),
        (torch.zeros(3, 2, dtype=torch.int64), r"edge_index is \[3, 2\]"),
    ],
)
def test_what_are_no_edges_of_the_graph_is_refused(edges: Tensor, message: str):
    with pytest.raises(fxopt.UsageError, match=message):
        triangles(edges, 4)


@pytest.mark.gpu
def test_triangles_are_the_same_on_a_device():
    edges = edges_of(nx.gnp_random_graph(200, 0.1, seed=2))
    assert torch.equal(triangles(edges.cuda(), 200).cpu(), triangles(edges, 200))


@pytest.mark.parametrize("number", [3.5, -1, True, None])
def test_a_wrong_number_of_nodes_is_refused(number):
    with pytest.raises(fxopt.UsageError, match=r"num_nodes is .*; give a whole number, at least 0"):
        triangles(torch.tensor([[0, 1], [1, 2]]), number)
