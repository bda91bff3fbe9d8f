"""`HGTConv` over compressed rows gives what PyTorch Geometric's own forward gives, and its gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric import nn as pyg

import fxopt
from fxopt.layers.message_passing import compressed, kept
from fxopt.testing import assert_equivalent

WIDTH = 6
KINDS = [("user", "rates", "item"), ("item", "rated", "user"), ("user", "knows", "user"), ("item", "in", "shop")]
SIZES = {"user": 12, "item": 9, "shop": 4}
METADATA = [*SIZES], KINDS


@pytest.fixture
def at_first_sight(monkeypatch):
    monkeypatch.setattr(kept, "_WORTH", 0)


def graph(seed=0, edges=40, dtype=torch.float64, kinds=KINDS):
    """Return features and edges by kind; some nodes have no edge."""
    generator = torch.Generator().manual_seed(seed)
    x = {kind: torch.randn(size, WIDTH, generator=generator, dtype=dtype) for kind, size in SIZES.items()}
    between = [(SIZES[source] - 1, SIZES[target] - 1) for source, _, target in kinds]
    ends = [[torch.randint(size, (edges,), generator=generator) for size in sizes] for sizes in between]
    return x, {kind: torch.stack(each) for kind, each in zip(kinds, ends, strict=True)}


def pair(heads=2, channels=WIDTH, **options):
    torch.manual_seed(1)
    own = pyg.HGTConv(options.pop("widths", WIDTH), channels, METADATA, heads, **options).double()
    return own, compressed(copy.deepcopy(own), own, trains=True)


def results(layer, x, edges):
    """Return outputs, with gradients and without, and first and second gradients of everything that has one."""
    given = {kind: each.clone().requires_grad_() for kind, each in x.items()}
    inputs = [*given.values(), *layer.parameters()]
    out = layer(given, edges)
    loss = sum((each.sin() * each.detach().cos()).sum() for each in out.values())
    first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
    total = sum((each**2).sum() for each in first if each is not None)
    second = torch.autograd.grad(total, inputs, allow_unused=True)
    with torch.no_grad():
        return [*out], [*out.values(), *layer(x, edges).values(), *first, *second]


def compare(own, fast, x, edges):
    (names, one), (others, other) = results(own, x, edges), results(fast, x, edges)
    assert names == others
    for left, right in zip(one, other, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(right, left, rtol=1e-9, atol=1e-10)


@pytest.fixture
def computed(monkeypatch):
    """Return a list that grows with each call of the layer's own forward."""
    calls, own = [], pyg.HGTConv.forward

    def counted(self, *args, **named):
        calls.append(self)
        return own(self, *args, **named)

    monkeypatch.setattr(pyg.HGTConv, "forward", counted)
    return calls


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("channels", [WIDTH, 12])
def test_outputs_and_gradients_are_those_of_the_layer(heads, channels, at_first_sight, computed):
    own, fast = pair(heads, channels)
    compare(own, fast, *graph())
    assert fast not in computed


@pytest.mark.parametrize("kinds", [KINDS[:2], [KINDS[1], KINDS[3]], KINDS[:1]])
def test_kinds_of_edges_that_are_not_there(kinds, at_first_sight, computed):
    own, fast = pair()
    x, edges = graph(kinds=kinds)
    compare(own, fast, x, edges)
    edges[kinds[0]] = edges[kinds[0]][:, :0]
    if len(kinds) > 1:
        compare(own, fast, x, edges)
    assert fast not in computed


def test_edges_that_are_written_to_or_exchanged_are_another_graph(at_first_sight, computed):
    own, fast = pair()
    x, edges = graph()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x, edges), own(x, edges))
            edges[KINDS[3]][0, 2] = 5
        for kind in KINDS:
            edges = {**edges, kind: edges[kind].flip(1)[:, 3:]}
            torch.testing.assert_close(fast(x, edges), own(x, edges))
    assert fast not in computed


def scores(layer, size):
    with torch.no_grad():
        layer.k_rel.weight.mul_(size)


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_scores_of_any_size(size, at_first_sight):
    own, fast = pair()
    scores(own, size)
    scores(fast, size)
    x, edges = graph()
    with torch.no_grad():
        torch.testing.assert_close(fast(x, edges), own(x, edges), rtol=1e-8, atol=1e-9)


def without_a_node(x, edges):
    edges[KINDS[2]][0, 0] = 12
    return x, edges


OWN = {
    "order of kinds": lambda x, edges: (x, dict(reversed(edges.items()))),
    "a node of another kind": without_a_node,
    "no edges": lambda x, edges: (x, {kind: each[:, :0] for kind, each in edges.items()}),
    "bfloat16": lambda x, edges: ({kind: each.bfloat16() for kind, each in x.items()}, edges),
}


@pytest.mark.parametrize("name", OWN)
def test_other_calls_run_the_layers_own_forward(name, at_first_sight, computed):
    own, fast = pair()
    x, edges = OWN[name](*graph())
    if name == "bfloat16":
        own, fast = own.bfloat16(), fast.bfloat16()
    with torch.no_grad():
        expected, found = own(x, edges), fast(x, edges)
    assert fast in computed
    for kind in expected:
        assert torch.equal(found[kind], expected[kind]) or name == "order of kinds"


def test_weights_of_relations_with_hooks_are_used_by_the_layer(at_first_sight, computed):
    _, fast = pair()
    x, edges = graph()
    fast(x, edges)
    assert not computed
    fast.v_rel.register_forward_hook(lambda *_: None)
    fast(x, edges)
    assert computed == [fast]


class Network(nn.Module):
    """Linear layers by kind, two of these layers, and one for each kind of edge between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.ModuleDict({kind: nn.Linear(WIDTH, WIDTH) for kind in SIZES})
        self.first, self.second = (pyg.HGTConv(WIDTH, WIDTH, METADATA, 2) for _ in range(2))
        self.between = pyg.HeteroConv({kind: pyg.SAGEConv((WIDTH, WIDTH), WIDTH) for kind in KINDS})

    def forward(self, x_dict, edge_index_dict):
        x = {kind: self.before[kind](each).relu() for kind, each in x_dict.items()}
        x = self.first(x_dict=x, edge_index_dict=edge_index_dict)
        return self.second(self.between(x, edge_index_dict), edge_index_dict)["shop"]


@pytest.mark.parametrize("training", [False, True])
def test_networks_are_rewritten_and_train_to_the_same_weights(training, at_first_sight, computed):
    model, inputs = Network().train(training), graph(dtype=torch.float32)
    fast = fxopt.optimize(model, "sparse_message_passing", example_inputs=inputs, measure=False, time_budget=60)
    assert [each.status for each in fxopt.plan(fast).decisions] == ["applied"] * 6
    assert isinstance(fast.first, pyg.HGTConv) and repr(fast) == repr(model)
    assert fast.state_dict().keys() == model.state_dict().keys()
    assert_equivalent(model, fast, inputs)
    computed.clear()
    fast(*inputs)
    assert not computed
    for network in (model, fast):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            network(*inputs).square().mean().backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(fast.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(fast).eval()(*inputs), model.eval()(*inputs), rtol=1e-4, atol=1e-5)


def test_compiled_it_is_the_layers_own_forward(at_first_sight, computed):
    own, fast = pair()
    x, edges = graph()
    with torch.no_grad():
        expected = own(x, edges)
        torch.testing.assert_close(torch.compile(fast, backend="eager")(x, edges), expected)
