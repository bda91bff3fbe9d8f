"""What other tools are given: all nodes and edges of both sides, in groups, and no name is ever anything but text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import networkx as nx
import pytest
import torch
from torch import fx, nn

import fxopt
from fxopt.reporting.exports import FORMATS, times_of_nodes
from fxopt.reporting.picture import picture_of_programs

EVIL = 'a"b\\N]#quot; <b>&amp;\n-->`end`/x#1\\'


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
        self.twice = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(x))
        return torch.stack([head(x) for head in self.heads]).sum(0)


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return torch.randn(2, 8)


@pytest.fixture(scope="module")
def captured(inputs: torch.Tensor) -> dict[str, Any]:
    return picture_of_programs(fxopt.capture(Model().eval(), inputs))


@pytest.fixture(scope="module")
def optimized(inputs: torch.Tensor) -> dict[str, Any]:
    fast = fxopt.optimize(Model().eval(), "fuse_ensembles", example_inputs=inputs, measure=False)
    return fxopt.report(fast, inputs).picture()


@pytest.fixture(scope="module")
def evil() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module(EVIL, nn.Sequential(nn.ReLU()))
    return picture_of_programs(fxopt.capture(model.eval(), torch.ones(1, 2)))


def collection(picture: dict[str, Any]) -> dict[str, nx.DiGraph]:
    """Return the graphs of a collection of Model Explorer by their ids."""
    found = {}
    for graph in json.loads(FORMATS["model-explorer"](picture))["graphs"]:
        drawn = nx.DiGraph()
        drawn.add_nodes_from((node["id"], node) for node in graph["nodes"])
        assert len(drawn) == len(graph["nodes"])
        for node in graph["nodes"]:
            drawn.add_edges_from((edge["sourceNodeId"], node["id"]) for edge in node["incomingEdges"])
        assert len(drawn) == len(graph["nodes"]), "each edge is from a node that is there"
        found[graph["id"]] = drawn
    return found


def test_one_model_is_one_graph_with_what_its_modules_do(captured: dict[str, Any]):
    ((name, graph),) = collection(captured).items()
    assert name == "model"
    assert nx.is_directed_acyclic_graph(graph) and nx.is_weakly_connected(graph)
    assert graph.nodes["heads.2/_0"]["namespace"] == "heads/2"
    assert graph.nodes["/heads_2"]["label"] == "heads.2: Sequential"
    assert set(graph.predecessors("heads.2/input_1")) == {"/heads_2"}
    assert set(graph.predecessors("/stack")) == {f"heads.{number}/output" for number in range(4)}


def test_a_module_that_is_called_twice_is_drawn_once(captured: dict[str, Any]):
    graph = collection(captured)["model"]
    assert list(graph.predecessors("/twice_1")) == ["twice/output"]
    assert set(graph.predecessors("/heads_0")) == {"/twice_1"}


def test_both_sides_are_there_with_times(optimized: dict[str, Any]):
    graphs = collection(optimized)
    assert list(graphs) == ["before", "after"]
    assert "heads.2/_0" in graphs["before"] and "heads.2/_0" not in graphs["after"]
    attributes = [{each["key"]: each["value"] for each in node["attrs"]} for _, node in graphs["after"].nodes.data()]
    assert any(each.get("made by") == "fuse_ensembles" for each in attributes)
    assert sum("microseconds" in each for each in attributes) > 3
    times = times_of_nodes(optimized)
    assert list(times) == ["before", "after"]
    assert set(times["before"]["results"]) <= set(graphs["before"])
    assert "heads.2/_0" in times["before"]["results"] and "/heads_2" not in times["before"]["results"]
    assert all(each["value"] > 0 for each in times["after"]["results"].values())


def test_without_costs_there_are_no_times(captured: dict[str, Any]):
    assert times_of_nodes(captured) == {}


STRING = r'"(?:[^"\\\n]|\\[\\"n])*"'
DOT = re.compile(
    rf"digraph {STRING} {{|}}|node \[.*\];|subgraph cluster_\w+ {{|label={STRING};|n\w+ -> n\w+;|"
    rf'(?P<node>n\w+) \[id={STRING}, label={STRING}, tooltip={STRING}(?:, style=filled, fillcolor="#\w+")?\];'
)
LABEL = r'"(?:[^"<>`]|<br/>)*"'
MERMAID = re.compile(
    rf"flowchart TD|end|subgraph g\w+\[{LABEL}\]|(?P<node>n\w+)\[{LABEL}\]|"
    r"n\w+ --> n\w+|classDef made [\w:#,]+|class [\w,]+ made"
)


@pytest.mark.parametrize(("form", "grammar", "arrow"), [("dot", DOT, " -> "), ("mermaid", MERMAID, " --> ")])
@pytest.mark.parametrize("name", ["captured", "optimized", "evil"])
def test_every_line_is_what_the_language_knows(
    form: str, grammar: re.Pattern[str], arrow: str, name: str, request: pytest.FixtureRequest
):
    picture = request.getfixturevalue(name)
    lines = [line.strip() for line in FORMATS[form](picture).splitlines()]
    found = [grammar.fullmatch(line) for line in lines]
    assert [line for line, match in zip(lines, found, strict=True) if match is None] == []
    graphs = collection(picture).values()
    assert sum(bool(match and match["node"]) for match in found) == sum(map(len, graphs))
    assert sum(arrow in line for line in lines) >= sum(graph.number_of_edges() for graph in graphs)
    assert ("fill" in lines[-1] or any("made" in line or "filled" in line for line in lines)) is (name == "optimized")


def test_names_are_text_and_nothing_else(evil: dict[str, Any]):
    assert 'a\\"b\\\\N]#quot; <b>&amp;amp;\\n-->`end`/x#1\\\\: Sequential' in FORMATS["dot"](evil)
    assert "a#34;b#92;N]#35;quot#59; #60;b#62;#38;amp#59;<br/>--#62;#96;end#96;/x#35;1#92;" in FORMATS["mermaid"](evil)
    (graph,) = collection(evil).values()
    (inner,) = (node for _, node in graph.nodes.data() if node["label"] == "0: ReLU")
    assert inner["namespace"] == EVIL.replace("/", "_")


@pytest.mark.skipif(shutil.which("dot") is None, reason="no graphviz")
@pytest.mark.parametrize("name", ["optimized", "evil"])
def test_graphviz_draws_it(name: str, request: pytest.FixtureRequest):
    text = FORMATS["dot"](request.getfixturevalue(name))
    done = subprocess.run(["dot", "-Tsvg"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_json_is_the_picture(optimized: dict[str, Any]):
    found = json.loads(FORMATS["json"](optimized))
    assert set(found) == set(optimized)
    assert found["graphs"] == optimized["graphs"]


def test_what_is_in_modules_without_a_graph_is_drawn():
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while x.abs().max() > 1:
                x = self.inner(x) / 2
            return self.inner(x)

    picture = picture_of_programs(fxopt.capture(nn.Sequential(Opaque(), nn.Tanh()).eval(), torch.ones(1, 2)))
    graph = collection(picture)["model"]
    assert graph.nodes["0.inner/_0"]["namespace"] == "0/inner"
    assert "/_1" in graph


def test_graphs_of_networkx_have_what_is_known_of_nodes(inputs: torch.Tensor):
    graphs = fxopt.capture(Model().eval(), inputs).graphs
    graph = fxopt.to_networkx(graphs[""])
    assert list(graph) == [node.name for node in graphs[""].nodes]
    assert list(graph.successors("twice_1")) == [f"heads_{number}" for number in range(4)]
    found = graph.nodes["heads_1"]
    assert (found["op"], found["module"], found["shape"], found["dtype"]) == (
        "call_module",
        "heads.1",
        (2, 8),
        "float32",
    )
    assert re.fullmatch(r"test_exports\.py:\d+", found["source"])
    assert graph.nodes["output"]["shape"] is None


def test_graphs_that_fxopt_did_not_make_have_what_they_hold():
    graph = fxopt.to_networkx(fx.symbolic_trace(Model()).graph)
    assert graph.nodes["twice_2"]["module"] == "twice.0" and graph.nodes["stack"]["shape"] is None
    exported = torch.export.export(nn.Linear(2, 3), (torch.ones(1, 2),)).graph
    assert [found["shape"] for _, found in fxopt.to_networkx(exported).nodes.data()][-2:] == [(1, 3), None]
    with pytest.raises(fxopt.UsageError, match=r"torch\.fx\.Graph"):
        fxopt.to_networkx(nn.Linear(1, 1))  # type: ignore[arg-type]
